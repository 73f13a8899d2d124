"""A second allocation policy, to prove that the protocol carries more than paging."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.kv import BlockPool, BlockTable, Growth, GrowthDemand, SeqDemand
from octavo.plan import BlockCopy
from octavo.util import cdiv


class ContiguousPolicy:
    """A run of consecutive blocks of the maximum length for each sequence, first fit.

    `batched`: nobody joins a batch that runs, and its blocks come back when all have ended.
    """

    name = "contiguous"
    can_preempt = False
    shares_blocks = False

    def __init__(self, max_tokens: int, *, batched: bool = False) -> None:
        self.max_tokens = max_tokens
        self.batched = batched
        self.running = False
        self.live: set[int] = set()
        self.ended: list[BlockTable] = []

    def attach(self, pool: BlockPool) -> None:
        self.pool = pool
        self.run_len = cdiv(self.max_tokens, pool.block_size)

    @property
    def max_tokens_of_one_sequence(self) -> int:
        return self.max_tokens if self.run_len <= self.pool.num_blocks else 0

    @property
    def num_external_blocks(self) -> int:
        return self.pool.num_free - len(self._free_runs()) * self.run_len

    def can_admit(self, demand: SeqDemand, keep_free: int, num_shared: int) -> bool:
        if self.batched and self.running:
            return False
        return demand.max_total_tokens <= self.max_tokens and bool(self._free_runs())

    def start(self, table: BlockTable) -> bool:
        runs = self._free_runs()
        if not runs:
            return False
        block_ids = range(runs[0], runs[0] + self.run_len)
        self.pool.take(block_ids)
        table.append(block_ids)
        self.live.add(table.seq_id)
        return True

    def grow(self, table: BlockTable, num_tokens: int, num_computed: int) -> Growth | None:
        assert num_tokens <= self.max_tokens, "the scheduler went beyond max_total_tokens"
        self.running = True
        table.exclusive_from = 0
        return Growth(table.report(), None)

    def can_grow_all(self, demands: Sequence[GrowthDemand]) -> bool:
        return True

    def fork(self, parent: BlockTable, child: BlockTable) -> bool:
        if not self.start(child):
            return False
        child.num_committed = parent.num_committed
        num_copied = cdiv(parent.num_committed, self.pool.block_size)
        pairs = zip(parent.block_ids[:num_copied], child.block_ids, strict=False)
        self.pool.copies += [BlockCopy(src, dst) for src, dst in pairs]
        return True

    def release(self, table: BlockTable) -> Sequence[BlockTable]:
        self.live.remove(table.seq_id)
        self.ended.append(table)
        if self.batched and self.live:
            return ()
        ended, self.ended, self.running = self.ended, [], False
        for done in ended:
            self.pool.release(done.block_ids)
        return ended

    def _free_runs(self) -> list[int]:
        """First blocks of the disjoint free runs."""
        runs, block_id = [], 0
        while block_id + self.run_len <= self.pool.num_blocks:
            run = range(block_id, block_id + self.run_len)
            taken = [b for b in run if not self.pool.is_free(b)]
            if not taken:
                runs.append(block_id)
            block_id = taken[-1] + 1 if taken else run.stop
        return runs
