"""The ledger: where every slot of the pool is (the paper's kinds of memory, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from octavo.errors import IntegrityError
from octavo.kv.pool import BlockPool
from octavo.kv.table import BlockTable
from octavo.util import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLedger:
    """The blocks of a request, in slots; a block that several of its sequences share counts once.

    Live values: an unfilled slot counts as reserved as long as an owner may still fill it, going
    by `SeqDemand.max_total_tokens`. What really was reserved is known when the request has ended.
    """

    tokens: int
    """Slots that hold the KV of a token."""
    reserved: int
    """Unfilled slots that an owner may still fill."""
    internal: int
    """Unfilled slots that no owner can ever fill (internal fragmentation)."""
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
    """The whole pool: tokens + reserved + internal + external + free = its slots (I7)."""

    external: int
    """Free slots that the policy cannot allocate (external fragmentation)."""
    free: int
    """Free slots that it can."""
    num_blocks: int
    """Blocks in the pool."""

    @property
    def num_slots(self) -> int:
        """Slots in the pool."""
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes in the pool."""
        return self.num_blocks * self.bytes_per_block

    def terms(self) -> dict[str, int]:
        """The five kinds of slots, which add up to the pool."""
        return {
            "tokens": self.tokens,
            "reserved": self.reserved,
            "internal": self.internal,
            "external": self.external,
            "free": self.free,
        }

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
        rows = [*self.terms().items(), ("saved by sharing", self.shared_saved)]
        for name, num in rows:
            lines.append(
                f"  {name:<16} {num:>12,} slots {self.blocks_of(num):>12,.1f} blocks "
                f"{human_bytes(self.bytes_of(num)):>12} {num / self.num_slots:>7.1%}"
            )
        return "\n".join(lines)


def pool_ledger(
    tables: Iterable[BlockTable], pool: BlockPool, bytes_per_block: int, num_external_blocks: int
) -> PoolLedger:
    """The ledger of a pool from all tables that hold blocks of it."""
    split = _split(tables, pool)
    return PoolLedger(
        tokens=split.tokens,
        reserved=split.reserved,
        internal=split.internal,
        external=num_external_blocks * pool.block_size,
        free=(pool.num_free - num_external_blocks) * pool.block_size,
        num_physical_blocks=split.num_physical_blocks,
        num_logical_blocks=split.num_logical_blocks,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        bytes_per_block=bytes_per_block,
    )


def request_ledger(
    tables: Iterable[BlockTable], pool: BlockPool, bytes_per_block: int
) -> RequestLedger:
    """The ledger of a request from its tables."""
    split = _split(tables, pool)
    return RequestLedger(
        tokens=split.tokens,
        reserved=split.reserved,
        internal=split.internal,
        num_physical_blocks=split.num_physical_blocks,
        num_logical_blocks=split.num_logical_blocks,
        block_size=pool.block_size,
        bytes_per_block=bytes_per_block,
    )


class _Split(NamedTuple):
    tokens: int
    reserved: int
    internal: int
    num_physical_blocks: int
    num_logical_blocks: int


def _split(tables: Iterable[BlockTable], pool: BlockPool) -> _Split:
    """Sum over tables as if nothing were shared, then take off what was counted twice."""
    tokens = fillable = num_logical = 0
    sharing: list[BlockTable] = []
    for table in tables:
        num_logical += len(table.block_ids)
        tokens += table.num_committed
        fillable += _fillable(table)
        if table.may_share:
            sharing.append(table)
    twice = _counted_twice(sharing, pool)
    tokens -= twice.tokens
    fillable -= twice.fillable
    num_physical = num_logical - twice.num_blocks
    internal = num_physical * pool.block_size - fillable
    return _Split(tokens, fillable - tokens, internal, num_physical, num_logical)


def _fillable(table: BlockTable) -> int:
    """Slots of a table that hold a token or still may."""
    return max(table.num_committed, min(table.max_total_tokens, table.capacity))


class _Twice(NamedTuple):
    tokens: int
    fillable: int
    num_blocks: int


def _counted_twice(tables: list[BlockTable], pool: BlockPool) -> _Twice:
    """What these tables count of shared blocks beyond the fullest owner's view of each."""
    block_size = pool.block_size
    counts = pool.ref_counts
    tokens = fillable = num_blocks = 0
    known: dict[int, tuple[int, int]] = {}
    for table in tables:
        num_full, num_tail = divmod(table.num_committed, block_size)
        end = _fillable(table)
        table.may_share = False
        for index, block_id in enumerate(table.block_ids):
            if counts[block_id] < 2:
                continue
            table.may_share = True
            if index < num_full:
                view = (block_size, block_size)
            else:
                filled = num_tail if index == num_full else 0
                view = (filled, max(0, min(end - index * block_size, block_size)))
            other = known.setdefault(block_id, view)
            if other is view:
                continue
            tokens += min(view[0], other[0])
            fillable += min(view[1], other[1])
            num_blocks += 1
            known[block_id] = (max(view[0], other[0]), max(view[1], other[1]))
    return _Twice(tokens, fillable, num_blocks)
