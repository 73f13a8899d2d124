"""Paged allocation: a block when the last one is full, shared blocks by reference count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from octavo.errors import IntegrityError
from octavo.kv.needs import BlockNeeds, is_plain
from octavo.kv.policy import NO_GROWTH, Growth, GrowthDemand, Promise, SeqDemand
from octavo.kv.pool import BlockPool
from octavo.kv.table import BlockTable
from octavo.plan import BlockCopy
from octavo.util import cdiv

_NONE_LEFT: Mapping[int, int] = MappingProxyType({})


class PagedPolicy:
    """On-demand growth and copy-on-write (paper sections 4.2 to 4.4).

    Nothing is reserved beyond the last block of a sequence, every free block serves every
    sequence, and so internal waste is less than one block a sequence and external waste is none.
    """

    name = "paged"
    can_preempt = True
    shares_blocks = True
    batches_requests = False
    num_external_blocks = 0
    external_runs: tuple[range, ...] = ()
    promises: tuple[Promise, ...] = ()
    promised_runs: tuple[tuple[int, range], ...] = ()
    windows: tuple[int, ...] = (0,)
    _max_chunk_tokens = 1

    _pool: BlockPool
    _needs: BlockNeeds

    def __init__(self, windows: tuple[int, ...] = (0,), max_chunk_tokens: int = 1) -> None:
        """`windows` by group of layers, 0 where blocks are kept; `max_chunk_tokens`: most tokens
        that a sequence computes in a step, of no matter where there is no window."""
        self.windows = windows
        self._max_chunk_tokens = max_chunk_tokens

    def attach(self, pool: BlockPool) -> None:
        """See `AllocationPolicy.attach`."""
        self._pool = pool
        self._needs = BlockNeeds(pool.block_size, self.windows, self._max_chunk_tokens)

    @property
    def needs(self) -> BlockNeeds | None:
        """See `AllocationPolicy`."""
        return None if is_plain(self.windows) else self._needs

    def max_tokens_in(self, num_blocks: int) -> int:
        """All of them are of use."""
        return self._needs.most_tokens(num_blocks)

    @property
    def max_tokens_of_one_sequence(self) -> int:
        """The whole pool."""
        return self.max_tokens_in(self._pool.num_blocks)

    def num_needed(self, num_tokens: int) -> int:
        """No more than its groups hold."""
        return self._needs.blocks(num_tokens)

    def num_needed_by_forks(self, num_shared: int, num_tokens: int) -> tuple[int, int]:
        """Full blocks are shared; a window leaves them behind."""
        return self._needs.forks(num_shared, num_tokens)

    def begin_step(self) -> None:
        """Nothing depends on it."""

    def fits_idle(self, demand: SeqDemand) -> bool:
        """Whether one sequence fits; where there are several, others may be preempted for it."""
        return demand.max_total_tokens <= self.max_tokens_of_one_sequence

    def why_never(self, demand: SeqDemand) -> str:
        """See `AllocationPolicy`."""
        return (
            f"{demand.max_total_tokens:,} tokens exceed the "
            f"{self.max_tokens_of_one_sequence:,} of the KV pool"
        )

    def why_no_room(self, demand: SeqDemand) -> None:
        """Blocks are all that it needs."""

    def most_blocks(self, num_tokens: int) -> int:
        """No more than they fill."""
        return cdiv(num_tokens, self._pool.block_size)

    def can_admit(self, demand: SeqDemand, keep_free: int, num_shared: int) -> bool:
        """Whether the known tokens fit into free blocks; future ones are not provided for.

        Cached blocks that are found count as needed: they are among the free ones.
        """
        num_needed = self._needs.blocks(demand.num_tokens) - num_shared
        return num_needed + keep_free <= self._pool.num_free

    def start(self, table: BlockTable) -> bool:
        """A sequence starts with nothing."""
        return True

    def grow(self, table: BlockTable, num_tokens: int, num_computed: int) -> Growth | None:
        """Append what is missing; copy the block of `num_computed` if it may not be written."""
        if table.others:
            return self._grow_all(table, num_tokens, num_computed)
        num_missing = max(0, cdiv(num_tokens, self._pool.block_size) - len(table.block_ids))
        if num_computed >= table.exclusive_from:  # nothing is to be copied: so it is in decodes
            if num_missing > self._pool.num_free:
                return None
            table.append(self._pool.allocate(num_missing))
            return Growth(table.report(), None) if num_missing else NO_GROWTH
        copied_at = self._entry_to_copy(table, num_computed)
        if num_missing + (copied_at is not None) > self._pool.num_free:
            return None
        new_block_ids, replaced = self._grow_one(table, num_missing, copied_at, num_computed)
        if not new_block_ids and replaced is None:
            return NO_GROWTH
        return Growth(new_block_ids, replaced)

    def _grow_all(self, table: BlockTable, num_tokens: int, num_computed: int) -> Growth | None:
        """The same for the tables of all groups, or for none."""
        parts = table.parts()
        num_missing = max(0, cdiv(num_tokens, self._pool.block_size) - len(table.block_ids))
        copied_at = [self._entry_to_copy(part, num_computed) for part in parts]
        num_copies = len(parts) - copied_at.count(None)
        if num_missing * len(parts) + num_copies > self._pool.num_free:
            return None
        grown = [
            self._grow_one(part, num_missing, at, num_computed)
            for part, at in zip(parts, copied_at, strict=True)
        ]
        table.align()
        if not any(new or replaced for new, replaced in grown):
            return NO_GROWTH
        (new_block_ids, replaced), others = grown[0], grown[1:]
        return Growth(
            new_block_ids,
            replaced,
            tuple(new for new, _ in others) if new_block_ids else (),
            tuple((group, *entry) for group, (_, entry) in enumerate(others, 1) if entry),
        )

    def _grow_one(
        self, table: BlockTable, num_missing: int, copied_at: int | None, num_computed: int
    ) -> tuple[tuple[int, ...], tuple[int, int] | None]:
        """(Blocks that the runner does not know, the entry that it knows and that was replaced)."""
        pool, block_size = self._pool, self._pool.block_size
        replaced = None
        if copied_at is not None:
            src = table.block_ids[copied_at]
            (dst,) = pool.allocate(1)
            pool.copies.append(BlockCopy(src, dst))
            replaced = table.replace(copied_at, dst)
            pool.release((src,))
        if num_missing:
            table.append(pool.allocate(num_missing))
        first_written = num_computed // block_size
        # From here on the table's blocks are its own now: `_entry_to_copy` has looked at all of
        # them up to the old `exclusive_from`. Positions before `num_computed` in the block that is
        # written are among them, down to where the tokens end that the prefix tree finds there.
        begin = first_written * block_size
        if begin < num_computed and (node := pool.nodes[table.block_ids[first_written]]):
            begin += node.num_tokens
        table.exclusive_from = min(table.exclusive_from, begin)
        return table.report(), replaced

    def expect_forks(self, table: BlockTable, num_forks: int) -> None:
        """Nothing is promised."""

    def can_grow_all(self, demands: Sequence[GrowthDemand]) -> bool:
        """Plays `grow` through: who copies a block leaves it to its other owners, and the last of
        them writes in place, unless the prefix tree knows what would be overwritten."""
        pool, block_size = self._pool, self._pool.block_size
        num_free = pool.num_free
        left: dict[int, int] = {}
        for table, num_tokens, num_computed in demands:
            parts = table.parts()
            num_needed = max(0, cdiv(num_tokens, block_size) - len(table.block_ids)) * len(parts)
            copied = [
                part.block_ids[at]
                for part in parts
                if (at := self._entry_to_copy(part, num_computed, left)) is not None
            ]
            if num_needed + len(copied) > num_free:
                return False
            num_free -= num_needed
            for block_id in copied:
                left[block_id] = left.get(block_id, pool.ref_counts[block_id]) - 1
                num_free -= left[block_id] > 0  # else its old block is allocatable now
        return True

    def fork(self, parent: BlockTable, child: BlockTable) -> bool:
        """Share the blocks that hold committed tokens; no copies, always room.

        Blocks that the parent took for tokens it has not computed hold nothing to share, so at
        most one block, the last and partial one, is ever written by two owners.
        """
        num_tokens = parent.num_committed
        num_blocks = cdiv(num_tokens, self._pool.block_size)
        for of_parent, of_child in zip(parent.parts(), child.parts(), strict=True):
            of_child.skip(of_parent.num_dropped)
            shared = of_parent.block_ids[of_parent.num_dropped : num_blocks]
            self._pool.share(shared)
            of_child.append(shared)
            of_child.num_committed = num_tokens
            of_parent.mark_shared(num_tokens)
            of_child.mark_shared(num_tokens)
        return True

    def release(self, table: BlockTable) -> tuple[BlockTable, ...]:
        """Blocks that nobody else owns are free at once."""
        for part in table.parts():
            self._pool.release(part.held)
        return (table,)

    def check_integrity(self, tables: Sequence[BlockTable]) -> None:
        """It keeps nothing."""

    def _entry_to_copy(
        self, table: BlockTable, num_computed: int, left: Mapping[int, int] = _NONE_LEFT
    ) -> int | None:
        """Index of the entry that may not be written from position `num_computed` on: its block
        has other owners, or the prefix tree finds tokens there that would be overwritten. `left`
        has the owners by block that remain of more."""
        counts, nodes = self._pool.ref_counts, self._pool.nodes
        block_size, block_ids = table.block_size, table.block_ids
        first_written, offset = divmod(num_computed, block_size)
        to_copy = []
        for index in range(
            first_written, min(len(block_ids), cdiv(table.exclusive_from, block_size))
        ):
            block_id = block_ids[index]
            node = nodes[block_id]
            if left.get(block_id, counts[block_id]) > 1 or (node and node.num_tokens > offset):
                to_copy.append(index)
            offset = 0
        if len(to_copy) > 1:
            raise IntegrityError(
                f"sequence {table.seq_id} would rewrite {len(to_copy)} shared blocks (entries "
                f"{to_copy}): only the last, partial block of a sequence is ever copied"
            )
        return to_copy[0] if to_copy else None
