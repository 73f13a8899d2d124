"""Proof that tables, reference counts and the free list tell the same story (invariant I1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from octavo.errors import IntegrityError
from octavo.kv.pool import BlockPool
from octavo.kv.table import NO_BLOCK, BlockTable


def check_integrity(tables: Iterable[BlockTable], pool: BlockPool, pins: Mapping[int, int]) -> None:
    """Raise `IntegrityError` naming the block, the sequences, what was expected and found.

    `pins` counts the pins by block.
    """
    owners: dict[int, list[int]] = {}
    for table in tables:
        _check_table(table, pool)
        for block_id in table.held:
            owners.setdefault(block_id, []).append(table.seq_id)
    free = _check_free_list(pool)
    for block_id in range(pool.num_blocks):
        in_tables, num_pins = owners.get(block_id, []), pins.get(block_id, 0)
        _check_block(block_id, in_tables, num_pins, block_id in free, pool)
    for table in tables:
        _check_exclusive(table, owners, pool)


def _check_table(table: BlockTable, pool: BlockPool) -> None:
    who = f"sequence {table.seq_id}" + (f", group {table.group}," if table.group else "")
    seen: set[int] = set()
    _check_window(table, who)
    for index, block_id in enumerate(table.held, table.num_dropped):
        if not 0 <= block_id < pool.num_blocks:
            raise IntegrityError(
                f"{who} has block {block_id} at entry {index}: the pool has blocks 0 to "
                f"{pool.num_blocks - 1}"
            )
        if block_id in seen:
            raise IntegrityError(f"{who} has block {block_id} twice, again at entry {index}")
        seen.add(block_id)
    capacity = len(table.block_ids) * pool.block_size
    if table.capacity != capacity:
        raise IntegrityError(f"{who} claims {table.capacity} slots, expected {capacity}")
    if not 0 <= table.num_committed <= capacity:
        raise IntegrityError(f"{who} claims {table.num_committed} tokens in {capacity} slots")
    if not 0 <= table.num_reported <= len(table.block_ids):
        raise IntegrityError(
            f"{who} reported {table.num_reported} of {len(table.block_ids)} blocks"
        )


def _check_window(table: BlockTable, who: str) -> None:
    """What is behind the window is gone, all of it, and nothing else; and the tables of all groups
    go on together. (What has got behind it since the step began goes with the next one.)"""
    if set(table.block_ids[: table.num_dropped]) - {NO_BLOCK}:
        raise IntegrityError(f"{who} has given back {table.num_dropped} entries: {table!r}")
    num_behind = table.num_behind(table.num_committed)
    if table.num_dropped > num_behind:
        raise IntegrityError(
            f"{who} has given back {table.num_dropped} blocks, and with {table.num_committed} "
            f"tokens {num_behind} are behind its window of {table.window}"
        )
    for other in table.others:
        if (other.capacity, other.num_committed, other.num_reported) != (
            table.capacity, table.num_committed, table.num_reported
        ):  # fmt: skip
            raise IntegrityError(f"{who} and its group {other.group} differ: {table!r}, {other!r}")


def _check_free_list(pool: BlockPool) -> set[int]:
    listed = pool.free_block_ids()
    free = set(listed)
    if len(listed) != len(free):
        twice = next(block_id for block_id in listed if listed.count(block_id) > 1)
        raise IntegrityError(f"block {twice} is in the free list twice")
    if len(listed) != pool.num_free:
        raise IntegrityError(
            f"the free list counts {pool.num_free} blocks, found {len(listed)} in it"
        )
    return free


def _check_block(
    block_id: int, owners: list[int], num_pins: int, is_free: bool, pool: BlockPool
) -> None:
    count = pool.ref_count(block_id)
    expected = len(owners) + num_pins
    if count != expected:
        raise IntegrityError(
            f"block {block_id} has reference count {count}, expected {expected}: "
            + (f"it is in the tables of sequences {owners}" if owners else "it is in no table")
            + (f" and has {num_pins} pins" if num_pins else "")
        )
    if is_free and owners:
        raise IntegrityError(
            f"block {block_id} is in the free list and in the tables of sequences {owners}"
        )
    if not is_free and not expected:
        raise IntegrityError(f"block {block_id} leaked: neither free nor in any table")


def _check_exclusive(table: BlockTable, owners: dict[int, list[int]], pool: BlockPool) -> None:
    """A block that its owner would write without asking must have no other owner, and hold nothing
    there that others may find (I2)."""
    first_own = max(table.exclusive_from // table.block_size, table.num_dropped)
    for index in range(first_own, len(table.block_ids)):
        block_id = table.block_ids[index]
        node = pool.nodes[block_id]
        first = max(table.exclusive_from - index * table.block_size, 0)
        if node is not None and node.num_tokens > first:
            raise IntegrityError(
                f"block {block_id}, entry {index} of sequence {table.seq_id}, may be written from "
                f"slot {first} on but {node.num_tokens} tokens in it can be found"
            )
        if len(owners[block_id]) > 1:
            raise IntegrityError(
                f"block {block_id}, entry {index} of sequence {table.seq_id}, may be written "
                f"without a copy but belongs to sequences {owners[block_id]}"
            )
