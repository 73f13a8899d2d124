"""The scheduler's machine with layers in groups: the last windows' blocks are what they need."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from sched_machine import SchedulerMachine, tight
from sched_support import ReplicaRunner, chain

from octavo.kv import KVCacheManager, PagedPolicy
from octavo.kv.needs import num_behind
from octavo.plan import SeqPlan, StepPlan
from octavo.request import Request


class GroupReplica(ReplicaRunner):
    """Keeps the tables of the further groups too, and reads through them what a window sees."""

    windows: tuple[int, ...] = ()

    def __init__(self, *args: int, **more: int) -> None:
        super().__init__(*args, **more)
        self.others: dict[int, list[list[int]]] = {}
        """By sequence, for each further group: its table. What was given back stays in it."""

    def _forget(self, plan: StepPlan) -> None:
        super()._forget(plan)
        for seq_id in (*plan.finished, *plan.preempted):
            self.others.pop(seq_id, None)
        if plan.moved:
            new_ids = dict(plan.moved)
            for tables in self.others.values():
                tables[:] = [[new_ids.get(i, i) for i in table] for table in tables]

    def _apply_tables(self, plan: StepPlan) -> None:
        super()._apply_tables(plan)
        for share in plan.seqs:
            tables = self.others.setdefault(share.seq_id, [[] for _ in self.windows[1:]])
            self._change(tables, share)
            assert {len(table) for table in tables} == {len(self.seqs[share.seq_id].block_ids)}

    def _change(self, tables: list[list[int]], share: SeqPlan) -> None:
        for group, index, block_id in share.group_replaced:
            tables[group - 1][index] = block_id
        for table, block_ids in zip(tables, share.group_block_ids, strict=False):
            table.extend(block_ids)

    def fail(self, plan: StepPlan, *, late: bool) -> None:
        super().fail(plan, late=late)
        for share in plan.seqs:
            tables = [
                list(t) for t in self.others.get(share.seq_id, [[] for _ in self.windows[1:]])
            ]
            if not late:
                self._change(tables, share)
            for table in tables:
                for block_id in table[share.start // self.block_size :]:
                    self.pool[block_id] = [None] * self.block_size

    def _compute(self, plan: StepPlan) -> dict[int, int]:
        size = self.block_size
        for share in plan.seqs:
            tokens = self.seqs[share.seq_id].token_ids
            for group, table in enumerate(self.others[share.seq_id], 1):
                for position in range(share.start, share.start + share.num_tokens):
                    held = group, chain(tokens[: position + 1])
                    self.pool[table[position // size]][position % size] = held  # type: ignore
        states = super()._compute(plan)
        for share in plan.seqs:
            tokens = self.seqs[share.seq_id].token_ids
            for group, table in enumerate(self.others[share.seq_id], 1):
                window = self.windows[group]
                first = max(0, share.start - window + 1) if window else 0
                for position in range(first, share.start + share.num_tokens):
                    right = group, chain(tokens[: position + 1])
                    assert table[position // size] >= 0, f"{position} of group {group} is gone"
                    found = self.pool[table[position // size]][position % size]
                    assert found == right, f"wrong KV at {position} of group {group} in {share}"
        return states


class GroupedMachine(SchedulerMachine):
    @initialize(
        is_tight=st.booleans(),
        num_blocks=st.integers(3, 200),
        block_size=st.sampled_from([1, 2, 4, 8]),
        windows=st.sampled_from([(0, 3), (0, 0, 9), (0, 9, 9), (0, 14, 14), (0, 0), (0, 1)]),
        max_num_seqs=st.integers(1, 3) | st.integers(4, 12),
        extra_tokens=st.sampled_from([0, 1, 5, 30]),
        max_model_len=st.integers(2, 80),
        policy=st.sampled_from(["fcfs", "priority"]),
        watermark=st.sampled_from([0.0, 0.0, 0.2]),
        prefix_caching=st.sampled_from([True, True, False]),
        num_host_blocks=st.sampled_from([0, 4, 60]),
        mode=st.sampled_from(["recompute", "swap", "swap", "auto"]),
        is_quiet=st.booleans(),
        plan_ahead=st.booleans(),
        is_late=st.booleans(),
    )
    def start(  # type: ignore[override]
        self,
        is_tight: bool,
        num_blocks: int,
        block_size: int,
        windows: tuple[int, ...],
        prefix_caching: bool,
        num_host_blocks: int,
        **limits: Any,
    ) -> None:
        if is_tight:
            num_blocks = len(windows) * (3 + num_blocks % 8)
            limits |= tight(**limits)
        kv = KVCacheManager(
            max(num_blocks, 2 * len(windows)),
            block_size,
            PagedPolicy(windows, limits["max_num_seqs"] + limits["extra_tokens"]),
            enable_prefix_caching=prefix_caching,
            num_host_blocks=num_host_blocks,
        )
        self.begin(kv, prefix_caching=prefix_caching, is_tight=is_tight, **limits)
        self.most = min(self.max_model_len, kv.max_tokens_of_one_sequence)

    def make_runner(self, max_tokens: int) -> ReplicaRunner:
        runner = GroupReplica(
            self.kv.num_blocks, self.kv.block_size, max_tokens=max_tokens,
            max_seqs=self.max_num_seqs,
        )  # fmt: skip
        runner.windows = self.kv.windows
        return runner

    def blocks_of_beams(self, num_prompt: int, total: int, width: int) -> int:
        shared, own = self.kv.num_needed_by_forks(num_prompt, total)
        return shared + width * own

    def most_for(self, request: Request) -> int:
        num_found = self.kv.num_pinned_blocks - self.num_lost(request)
        return min(self.max_model_len, self.kv.max_tokens_beside_pins(num_found))

    def check_tables(self) -> None:
        super().check_tables()
        for table in self.kv.tables():
            assert table.num_dropped <= num_behind(
                table.num_committed, table.window, self.kv.block_size
            )
            known = self.runner.others.get(table.seq_id)  # type: ignore[attr-defined]
            if table.group and known and known[table.group - 1]:
                pairs = zip(table.block_ids, known[table.group - 1], strict=True)
                assert all(own == theirs for own, theirs in pairs if own >= 0)


TestGroupedMachine = GroupedMachine.TestCase
TestGroupedMachine.settings = settings(max_examples=30, stateful_step_count=40)
