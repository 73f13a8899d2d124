"""The ledger: where every slot of the pool is (the paper's kinds of memory, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.errors import IntegrityError
from octavo.kv.policy import Promise
from octavo.kv.pool import BlockPool
from octavo.kv.table import BlockTable
from octavo.util import human_bytes

TERMS = ("tokens", "reserved", "internal", "external", "cached", "free")
"""The kinds of slots, which add up to the pool: fields of `PoolLedger`, and of its samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLedger:
    """The blocks of a request, in slots; a block that several of its sequences share counts once.

    Live values: an unfilled slot counts as reserved as long as an owner may still fill it, going
    by `SeqDemand.max_total_tokens`: an upper bound. What really was reserved is known when the
    request has ended: see `kv/settled.py`.
    """

    tokens: int
    """Slots that hold the KV of a token, for the layers of a group."""
    reserved: int
    """Unfilled slots that an owner may still fill."""
    internal: int
    """Slots that were set aside and that no owner can ever fill (internal fragmentation); also
    those of an ended member of a batch, whose tokens nobody needs any more."""
    rounding: int = 0
    """Slots behind what was set aside on purpose: a run of blocks was rounded up to a size that the
    policy has. They count as external fragmentation."""
    num_physical_blocks: int
    """Blocks referenced."""
    num_logical_blocks: int
    """Table entries that reference them: the blocks it would take without sharing."""
    block_size: int
    bytes_per_block: int

    @property
    def num_allocated_slots(self) -> int:
        """Slots in the referenced blocks."""
        return self.num_physical_blocks * self.block_size

    @property
    def shared_saved_blocks(self) -> int:
        """Blocks saved by sharing: logical less physical."""
        return self.num_logical_blocks - self.num_physical_blocks

    @property
    def shared_saved(self) -> int:
        """The same in slots."""
        return self.shared_saved_blocks * self.block_size

    @property
    def shared_saved_ratio(self) -> float:
        """1 - physical / logical blocks (the paper's Fig. 15); 0 when there are none."""
        return self.shared_saved_blocks / max(1, self.num_logical_blocks)

    @property
    def used_ratio(self) -> float:
        """Share of the slots in referenced blocks that hold tokens; 1 when there are none."""
        slots = self.num_allocated_slots
        return self.tokens / slots if slots else 1.0

    def blocks_of(self, num_slots: int) -> float:
        """Slots in blocks."""
        return num_slots / self.block_size

    def bytes_of(self, num_slots: int) -> int:
        """Slots in bytes."""
        return num_slots * (self.bytes_per_block // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLedger(RequestLedger):
    """The whole pool: tokens + reserved + internal + external + cached + free = its slots (I7).

    Free blocks that are promised to forks count as what they will be, reserved for the most part.
    """

    external: int
    """Free slots that the policy cannot allocate, and `rounding` (external fragmentation)."""
    cached: int
    """Slots in blocks that no sequence references and the prefix cache keeps; those that are not
    pinned can be allocated."""
    free: int
    """Free slots that it can allocate."""
    num_blocks: int
    """Blocks in the pool."""
    pinned: int = 0
    """Slots in pinned blocks: no kind of their own, but among those that are cached or used."""

    @property
    def num_slots(self) -> int:
        """Slots in the pool."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes in the pool."""
        return self.num_blocks * self.bytes_per_block

    def terms(self) -> dict[str, int]:
        """The six kinds of slots, which add up to the pool."""
        return {name: getattr(self, name) for name in TERMS}

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the terms are sane and sum to the pool."""
        terms = self.terms()
        arithmetic = " + ".join(f"{name} {num}" for name, num in terms.items())
        if sum(terms.values()) != self.num_slots or min(terms.values()) < 0:
            raise IntegrityError(
                f"the ledger does not add up: {arithmetic} = {sum(terms.values())} slots, "
                f"expected {self.num_slots}"
            )

    def __str__(self) -> str:
        lines = [
            f"KV pool: {self.num_blocks:,} blocks x {self.block_size} tokens = "
            f"{self.num_slots:,} slots, {human_bytes(self.num_bytes)}"
        ]
        rows = list(self.terms().items())
        if self.rounding:
            rows.insert(4, ("of it rounding", self.rounding))
        if self.pinned:
            rows.append(("pinned, of these", self.pinned))
        rows.append(("saved by sharing", self.shared_saved))
        for name, num in rows:
            lines.append(
                f"  {name:<16} {num:>12,} slots {self.blocks_of(num):>12,.1f} blocks "
                f"{human_bytes(self.bytes_of(num)):>12} {num / self.num_slots:>7.1%}"
            )
        return "\n".join(lines)


class GroupHeld(NamedTuple):
    """What one group of layers holds."""

    window: int
    """0: it keeps all."""
    num_blocks: int
    """Blocks, each counted once."""
    num_tokens: int
    """Tokens whose KV it has, summed over sequences as if nothing were shared."""
    num_behind: int
    """Tokens that it has given back, summed likewise."""


def held_by_group(
    sequences: Sequence[Sequence[BlockTable]], windows: Sequence[int]
) -> list[GroupHeld]:
    """Of the tables of each sequence, by group."""
    found = []
    for group, window in enumerate(windows):
        tables = [parts[group] for parts in sequences]
        block_ids = {block_id for table in tables for block_id in table.held}
        behind = sum(table.num_dropped * table.block_size for table in tables)
        tokens = sum(table.num_committed for table in tables) - behind
        found.append(GroupHeld(window, len(block_ids), tokens, behind))
    return found


def pool_ledger(
    tables: Iterable[BlockTable],
    pool: BlockPool,
    bytes_per_block: int,
    num_external_blocks: int,
    promises: Iterable[Promise],
    pins: Mapping[int, int],
) -> PoolLedger:
    """The ledger of a pool from all tables that hold blocks of it, what is promised besides, and
    the pins by block."""
    counts = pool.ref_counts
    num_physical = pool.num_used - pool.num_only_pinned
    split = _split(
        tables, num_physical, lambda block_id: counts[block_id] - pins.get(block_id, 0), pool
    )
    num_free = pool.num_free - pool.num_cached - num_external_blocks
    reserved, internal, rounding = split.reserved, split.internal, split.rounding
    for promise in promises:
        num_free -= promise.num_blocks
        capacity = promise.run_len * pool.block_size
        asked = min(promise.num_asked, capacity)
        fillable = min(promise.max_total_tokens, asked)
        reserved += promise.num_runs * fillable
        internal += promise.num_runs * (asked - fillable)
        rounding += promise.num_runs * (capacity - asked)
    return PoolLedger(
        tokens=split.tokens,
        reserved=reserved,
        internal=internal,
        rounding=rounding,
        external=num_external_blocks * pool.block_size + rounding,
        cached=(pool.num_cached + pool.num_only_pinned) * pool.block_size,
        free=num_free * pool.block_size,
        num_physical_blocks=num_physical,
        num_logical_blocks=split.num_logical_blocks,
        num_blocks=pool.num_blocks,
        pinned=len(pins) * pool.block_size,
        block_size=pool.block_size,
        bytes_per_block=bytes_per_block,
    )


def request_ledger(
    tables: Iterable[BlockTable],
    num_physical: int,
    entries_of: Callable[[int], int],
    pool: BlockPool,
    bytes_per_block: int,
) -> RequestLedger:
    """The ledger of a request from its tables, the number of their blocks, and the number of their
    entries that point at a block."""
    split = _split(tables, num_physical, entries_of, pool)
    return RequestLedger(
        tokens=split.tokens,
        reserved=split.reserved,
        internal=split.internal,
        rounding=split.rounding,
        num_physical_blocks=num_physical,
        num_logical_blocks=split.num_logical_blocks,
        block_size=pool.block_size,
        bytes_per_block=bytes_per_block,
    )


class _Split(NamedTuple):
    tokens: int
    reserved: int
    internal: int
    rounding: int
    num_logical_blocks: int


def _split(
    tables: Iterable[BlockTable],
    num_physical: int,
    entries_of: Callable[[int], int],
    pool: BlockPool,
) -> _Split:
    """Sum over tables as if nothing were shared, then take off what was counted twice.

    Shared blocks are full, so that each counts whole for every owner; the exceptions are found
    among the blocks behind the full ones of tables that were forked.
    """
    tokens = fillable = rounding = num_logical = num_gone = 0
    sharing: list[BlockTable] = []
    for table in tables:
        num_logical += len(table.block_ids)
        committed, capacity = table.num_committed, table.capacity
        tokens += committed
        if table.num_dropped:
            num_logical -= table.num_dropped
            num_gone += table.num_dropped
        # `BlockTable.fillable`, written out: asked of every sequence in every step.
        end = table.num_asked
        if end < capacity:
            rounding += capacity - (end if end > committed else committed)
        else:
            end = capacity
        if table.max_total_tokens < end:
            end = table.max_total_tokens
        fillable += end if end > committed else committed
        if table.may_share:
            sharing.append(table)
    tokens -= num_gone * pool.block_size  # they were filled, and are nobody's now
    fillable -= num_gone * pool.block_size
    too_few = _not_full(sharing, entries_of)
    slots_twice = (num_logical - num_physical) * pool.block_size
    tokens -= slots_twice - too_few[0]
    fillable -= slots_twice - too_few[1]
    internal = num_physical * pool.block_size - fillable - rounding
    return _Split(tokens, fillable - tokens, internal, rounding, num_logical)


def _not_full(tables: list[BlockTable], entries_of: Callable[[int], int]) -> tuple[int, int]:
    """(tokens, fillable slots) that would be taken off too many if all shared blocks were full.

    Owners may see a block differently: it is as full as its fullest owner says.
    """
    views: dict[int, list[tuple[int, int]]] = {}
    for table in tables:
        num_full, num_tail = divmod(table.num_committed, table.block_size)
        end = table.fillable
        table.may_share = False
        for index in range(num_full, len(table.block_ids)):
            block_id = table.block_ids[index]
            if entries_of(block_id) < 2:
                continue
            table.may_share = True
            filled = num_tail if index == num_full else 0
            start = index * table.block_size
            fillable = max(0, min(end - start, table.block_size))
            views.setdefault(block_id, []).append((filled, fillable))
    tokens = fillable_slots = 0
    for block_id, seen in views.items():
        num_owners, size = entries_of(block_id), tables[0].block_size
        sees_full = num_owners > len(seen)
        for kind in (0, 1):
            most = size if sees_full else max(view[kind] for view in seen)
            # counted: whole by those that see it full; to be taken off: all but the most
            counted = (num_owners - len(seen)) * size + sum(view[kind] for view in seen)
            excess = (num_owners - 1) * size - (counted - most)
            if kind == 0:
                tokens += excess
            else:
                fillable_slots += excess
    return tokens, fillable_slots
