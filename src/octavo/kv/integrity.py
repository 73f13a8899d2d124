"""Proof that tables, reference counts and the free list tell the same story (invariant I1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from octavo.errors import IntegrityError
from octavo.kv.pool import BlockPool
from octavo.kv.table import BlockTable


def check_integrity(tables: Iterable[BlockTable], pool: BlockPool, pins: Mapping[int, int]) -> None:
    """Raise `IntegrityError` naming the block, the sequences, what was expected and found.

    `pins` counts the pins by block.
    """
    owners: dict[int, list[int]] = {}
    for table in tables:
        _check_table(table, pool)
        for block_id in table.block_ids:
            owners.setdefault(block_id, []).append(table.seq_id)
    free = _check_free_list(pool)
    for block_id in range(pool.num_blocks):
        in_tables, num_pins = owners.get(block_id, []), pins.get(block_id, 0)
        _check_block(block_id, in_tables, num_pins, block_id in free, pool)
    for table in tables:
        _check_exclusive(table, owners, pool)


def _check_table(table: BlockTable, pool: BlockPool) -> None:
    who = f"sequence {table.seq_id}"
    seen: set[int] = set()
    for index, block_id in enumerate(table.block_ids):
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
    for index in range(table.exclusive_from // table.block_size, len(table.block_ids)):
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
