"""Blocks and records that were never given back: found, and mended, while no sequence is live."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.kv.manager import KVCacheManager


@dataclass(frozen=True, slots=True)
class Leak:
    """Something that should not be there while nobody runs."""

    why: str
    """Who holds what, in words."""
    request_id: str | None
    """Whose it was; None where nobody knows."""
    num_blocks: int = 0
    """Blocks of the pool that it keeps from others."""


def find_leaks(kv: KVCacheManager) -> list[Leak]:
    """What is held although no sequence is live; changes nothing."""
    return [*_of_tables(kv), *_of_accounts(kv), *_of_holds(kv), *_of_counts(kv), *_lost(kv)]


def repair(kv: KVCacheManager) -> list[Leak]:
    """Give back what `find_leaks` finds; returns it. To be called while no sequence is live, and
    none is preempted."""
    leaks = find_leaks(kv)
    for table in kv.tables():
        if kv.has(table.seq_id):
            kv.release(table.seq_id)
    for seq_id in list(kv._holds.nodes):
        kv.drop_hold(seq_id)
    for request_id in list(kv._accounts):
        kv.close_request(request_id)
    pool, pins = kv._pool, kv._pins.counts
    for block_id in range(pool.num_blocks):
        extra = pool.ref_count(block_id) - pins.get(block_id, 0)
        for _ in range(extra):
            pool.release((block_id,))
    for block_id in _not_listed(kv):
        pool.recover(block_id)
    return leaks


def _of_tables(kv: KVCacheManager) -> Iterator[Leak]:
    owners = {id(t): name for name, account in kv._accounts.items() for t in account.tables}
    for table in kv.tables():
        request_id = owners.get(id(table))
        num_blocks = len(table.held)
        yield Leak(
            f"sequence {table.seq_id} of request {request_id} still holds {num_blocks} blocks",
            request_id,
            num_blocks,
        )


def _of_accounts(kv: KVCacheManager) -> Iterator[Leak]:
    for request_id, account in kv._accounts.items():
        if not account.tables:
            yield Leak(f"the account of request {request_id} was not closed", request_id)


def _of_holds(kv: KVCacheManager) -> Iterator[Leak]:
    for seq_id, nodes in kv._holds.nodes.items():
        yield Leak(f"{len(nodes)} blocks are still held for the preempted sequence {seq_id}", None)


def _of_counts(kv: KVCacheManager) -> Iterator[Leak]:
    entries: dict[int, int] = dict(kv._pins.counts)
    for table in kv.tables():
        for block_id in table.held:
            entries[block_id] = entries.get(block_id, 0) + 1
    for block_id, count in enumerate(kv._pool.ref_counts):
        expected = entries.get(block_id, 0)
        if count > expected:
            yield Leak(
                f"block {block_id} counts {count} owners, and tables and pins name {expected}",
                None,
                1,
            )


def _lost(kv: KVCacheManager) -> Iterator[Leak]:
    for block_id in _not_listed(kv):
        yield Leak(f"block {block_id} has no owner and is not in the free list", None, 1)


def _not_listed(kv: KVCacheManager) -> list[int]:
    free = set(kv._pool.free_block_ids())
    counts = kv._pool.ref_counts
    return [i for i in range(kv.num_blocks) if not counts[i] and i not in free]
