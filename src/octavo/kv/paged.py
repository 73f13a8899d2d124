"""Paged allocation: a block when the last one is full, shared blocks by reference count."""

from __future__ import annotations

from octavo.errors import IntegrityError
from octavo.kv.policy import NO_GROWTH, Growth, SeqDemand
from octavo.kv.pool import BlockPool
from octavo.kv.table import BlockTable
from octavo.plan import BlockCopy
from octavo.util import cdiv


class PagedPolicy:
    """On-demand growth and copy-on-write (paper sections 4.2 to 4.4).

    Nothing is reserved beyond the last block of a sequence, every free block serves every
    sequence, and so internal waste is less than one block a sequence and external waste is none.
    """

    name = "paged"
    can_preempt = True
    num_external_blocks = 0

    _pool: BlockPool

    def attach(self, pool: BlockPool) -> None:
        """See `AllocationPolicy.attach`."""
        self._pool = pool

    @property
    def max_tokens_of_one_sequence(self) -> int:
        """The whole pool."""
        return self._pool.num_blocks * self._pool.block_size

    def can_admit(self, demand: SeqDemand, keep_free: int) -> bool:
        """Whether the known tokens fit into free blocks; future ones are not provided for."""
        num_needed = cdiv(demand.num_tokens, self._pool.block_size)
        return num_needed + keep_free <= self._pool.num_free

    def start(self, table: BlockTable) -> bool:
        """A sequence starts with nothing."""
        return True

    def grow(self, table: BlockTable, num_tokens: int, num_computed: int) -> Growth | None:
        """Append what is missing; copy the block of `num_computed` if others own it too."""
        block_size = self._pool.block_size
        num_missing = max(0, cdiv(num_tokens, block_size) - len(table.block_ids))
        first_written = num_computed // block_size
        shared_at = self._shared_entry(table, first_written)
        if num_missing + (shared_at is not None) > self._pool.num_free:
            return None
        copy = replaced = None
        if shared_at is not None:
            src = table.block_ids[shared_at]
            (dst,) = self._pool.allocate(1)
            copy = BlockCopy(src, dst)
            replaced = table.replace(shared_at, dst)
            self._pool.release((src,))
        if num_missing:
            table.append(self._pool.allocate(num_missing))
        table.exclusive_from = min(table.exclusive_from, first_written * block_size)
        new_block_ids = table.report()
        if not new_block_ids and copy is None:
            return NO_GROWTH
        return Growth(new_block_ids, replaced, copy)

    def fork(self, parent: BlockTable, child: BlockTable) -> tuple[BlockCopy, ...] | None:
        """Share the blocks that hold committed tokens; no copies, always room.

        Blocks that the parent took for tokens it has not computed hold nothing to share, so at
        most one block, the last and partial one, is ever written by two owners.
        """
        num_tokens = parent.num_committed
        shared = parent.block_ids[: cdiv(num_tokens, self._pool.block_size)]
        self._pool.share(shared)
        child.append(shared)
        child.num_committed = num_tokens
        parent.mark_shared(num_tokens)
        child.mark_shared(num_tokens)
        return ()

    def release(self, table: BlockTable) -> tuple[BlockTable, ...]:
        """Blocks that nobody else owns are free at once."""
        self._pool.release(table.block_ids)
        return (table,)

    def _shared_entry(self, table: BlockTable, first_written: int) -> int | None:
        """Index of the entry to copy: the one at or after `first_written` with other owners."""
        if not table.may_share:
            return None
        counts = self._pool.ref_counts
        end = min(len(table.block_ids), table.exclusive_from // table.block_size)
        shared = [i for i in range(first_written, end) if counts[table.block_ids[i]] > 1]
        if len(shared) > 1:
            raise IntegrityError(
                f"sequence {table.seq_id} would rewrite {len(shared)} shared blocks (entries "
                f"{shared}): only the last, partial block of a sequence is ever copied"
            )
        return shared[0] if shared else None
