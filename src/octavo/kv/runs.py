"""Runs: sequences that compute one token each for many steps, taken in one go.

What `begin_step`, `grow`, `commit` and `take_copies` would have done step by step, in the same
order, without asking sequences for which nothing happens.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Sequence

from octavo.kv.cache import PrefixCache
from octavo.kv.policy import Growth
from octavo.kv.pool import BlockPool
from octavo.kv.table import BlockTable

Grow = Callable[[BlockTable, int, int], Growth | None]
"""Makes room in a table for so many tokens, of which so many are computed."""


def most_steps(tables: Sequence[BlockTable], pool: BlockPool, num_free: int) -> int:
    """How many steps can be taken in which each of these sequences computes one token more, with
    `num_free` new blocks; 0 where a block would have to be copied first. The last step for which
    there is room, not the end of any sequence, is what limits it."""
    size = pool.block_size
    growing = [0] * size
    num_growing = 0
    most = sys.maxsize
    for table in tables:
        num_tokens = table.num_committed
        if num_tokens < table.exclusive_from:
            return 0
        left = table.capacity - num_tokens
        if left < size:
            growing[left] += 1  # it takes a block in that step, and in every `size`th after it
            num_growing += 1
        elif left < most:
            most = left  # space was reserved: what comes behind it is not foreseen
    if not num_growing:
        return most
    num_cycles, num_free = divmod(num_free, num_growing)
    steps = num_cycles * size
    for num in growing:
        num_free -= num
        if num_free < 0:
            break
        steps += 1
    return min(most, steps)


def advance(
    tables: Sequence[BlockTable],
    times: Sequence[float],
    pool: BlockPool,
    cache: PrefixCache,
    grow: Grow,
    set_time: Callable[[float], None],
) -> None:
    """Each sequence computes one token in each of the steps that begin at these times.

    `tables` in the order in which sequences are served within a step; `most_steps` has said that
    there is room. The cache's counts of steps and plans are left as after the last step.
    """
    assert not pool.copies, f"{len(pool.copies)} copies are due before a run"
    num_steps, size, step = len(times), pool.block_size, cache.step
    if any(table.next_register <= table.num_committed + num_steps for table in tables):
        _one_by_one(tables, times, cache, grow, set_time)
    else:
        by_step: list[list[BlockTable]] = [[] for _ in range(size)]
        num_blocks = 0
        for table in tables:
            left = table.capacity - table.num_committed
            if left < num_steps:
                by_step[left % size].append(table)
                num_blocks += 1 + (num_steps - 1 - left) // size
        is_scarce = pool.num_free - pool.num_cached < num_blocks
        if num_blocks and pool.num_cached and (is_scarce or cache.host.num_blocks):
            _one_by_one(tables, times, cache, grow, set_time)
        elif num_blocks:
            _in_bulk(by_step, num_blocks, times, pool)
    for table in tables:
        table.num_committed += num_steps
    cache.step = step + num_steps
    cache.plan += num_steps
    set_time(times[-1])
    assert not pool.copies, f"{len(pool.copies)} copies came up in a run"


def _in_bulk(
    by_step: list[list[BlockTable]], num_blocks: int, times: Sequence[float], pool: BlockPool
) -> None:
    """Blocks that hold nothing, for sequences of which nothing is registered."""
    block_ids = iter(pool.allocate(num_blocks))
    size = pool.block_size
    for index, now_s in enumerate(times):
        for table in by_step[index % size]:
            block_id = next(block_ids)
            table.block_ids.append(block_id)
            table.account.add_own(block_id, now_s)
    for tables in by_step:
        for table in tables:
            table.num_reported = len(table.block_ids)
            table.capacity = table.num_reported * size


def _one_by_one(
    tables: Sequence[BlockTable],
    times: Sequence[float],
    cache: PrefixCache,
    grow: Grow,
    set_time: Callable[[float], None],
) -> None:
    """All that happens to a sequence, in the order in which it would. Leaves `num_committed` as it
    was."""
    num_steps, step = len(times), cache.step
    committed = [table.num_committed for table in tables]
    due = [
        (max(num, min(table.capacity, table.next_register - 1)) - num, index)
        for index, (table, num) in enumerate(zip(tables, committed, strict=True))
    ]
    heapq.heapify(due)
    while due[0][0] < num_steps:
        at, index = due[0]
        table = tables[index]
        num_tokens = committed[index] + at + 1
        cache.step = step + at + 1
        set_time(times[at])
        if num_tokens > table.capacity:
            growth = grow(table, num_tokens, num_tokens - 1)
            assert growth is not None and growth.replaced is None, "a run without room"
        table.num_committed = num_tokens
        if num_tokens >= table.next_register:
            cache.register(table)
        following = max(num_tokens, min(table.capacity, table.next_register - 1))
        heapq.heapreplace(due, (following - committed[index], index))
    for table, num in zip(tables, committed, strict=True):
        table.num_committed = num
