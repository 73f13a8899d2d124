"""The machine over the scheduler again, under policies that reserve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from sched_machine import SchedulerMachine
from sched_support import (
    lonely_run,
)

from octavo.config import KVPolicy
from octavo.errors import RequestCapacityError
from octavo.events import EventKind
from octavo.kv import KVCacheManager, SeqDemand, make_policy
from octavo.request import Request


class ReservingMachine(SchedulerMachine):
    """Nobody is ever preempted or cut short; samples and beams are copied."""

    kv_policy: KVPolicy = "orca-max"

    @initialize(
        num_blocks=st.integers(3, 200) | st.integers(20, 60),
        block_size=st.sampled_from([1, 2, 3, 4, 8, 16]),
        max_num_seqs=st.integers(1, 3) | st.integers(4, 12),
        extra_tokens=st.sampled_from([0, 1, 5, 30]),
        max_model_len=st.integers(2, 80),
        policy=st.sampled_from(["fcfs", "priority"]),
        watermark=st.sampled_from([0.0, 0.01, 0.6]),
        max_batch=st.sampled_from([None, 1, 4]),
        max_padded=st.sampled_from([None, 30]),
        plan_ahead=st.booleans(),
        is_late=st.booleans(),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_batch: int | None,
        max_padded: int | None,
        **limits: Any,
    ) -> None:
        of_batch = {"max_batch": max_batch, "max_padded_tokens": max_padded}
        if self.kv_policy != "contiguous":
            of_batch = {}
        kv_policy = make_policy(self.kv_policy, max_seq_tokens=max_model_len, **of_batch)
        kv = KVCacheManager(num_blocks, block_size, kv_policy)
        self.begin(kv, max_model_len=max_model_len, **limits)

    def with_expectation(self, request: Request, max_total: int) -> Request:
        """Half of them say how long they will be at most."""
        if max_total <= len(request.prompt_token_ids) or len(request.request_id) * max_total % 2:
            return request
        outputs = [lonely_run(request, i, max_total)[0] for i in range(request.n)]
        return replace(request, expected_output_tokens=max(map(len, outputs)))

    def most_for(self, request: Request) -> int:
        return min(self.max_model_len, self.kv.max_tokens_of_one_sequence)

    def check_refusal(self, request: Request, error: RequestCapacityError, total: int) -> None:
        """Its sequences that run at once have no room beside each other."""
        expected = request.expected_output_tokens
        num_prompt = len(request.prompt_token_ids)
        demand = SeqDemand(
            num_prompt,
            total,
            None if expected is None else num_prompt + expected,
            num_seqs=min(request.n, self.max_num_seqs),
        )
        assert not self.kv.fits_idle(demand)
        assert error.parameter == ("n" if request.beam is None else "beam_width")

    def schedule(self) -> None:
        super().schedule()
        assert self.scheduler.num_preemptions == 0
        assert all(e.kind is EventKind.WAITED for e in self.scheduler.events())

    def check_tables(self) -> None:
        """Each has its run from the beginning, and members of a batch may wait for their turn."""
        for seq_id, seq in self.runner.seqs.items():
            table = list(self.kv.block_table(seq_id)) if self.kv.has(seq_id) else []
            assert seq.block_ids in (table, [])
            assert table == list(range(table[0], table[0] + len(table))) if table else True
        assert self.scheduler.num_running == self.kv.num_sequences <= self.max_num_seqs


def machine(name: KVPolicy) -> type:
    """The test case for one policy."""
    of_policy = type(f"Machine_{name}", (ReservingMachine,), {"kv_policy": name})
    case = of_policy.TestCase
    case.settings = settings(max_examples=25, stateful_step_count=40)
    return case


TestContiguousSchedulerMachine = machine("contiguous")
TestOrcaMaxSchedulerMachine = machine("orca-max")
TestOrcaPow2SchedulerMachine = machine("orca-pow2")
TestOrcaOracleSchedulerMachine = machine("orca-oracle")
