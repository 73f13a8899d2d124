"""A hypothesis machine over the real scheduler and the real pool, against the runner's replica.

Random requests, samples, priorities, ends and aborts at any moment, up to three plans under way,
pools of 3 to 200 blocks. The replica rebuilds everything from plans, so that any inconsistency
shows; every sequence must generate exactly what it generates alone (I4); in the end all of them
have ended within bounded steps (I5) and the pool is empty (I3).
"""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from sched_support import ReplicaRunner, assert_drained, lonely_run, make_request

from octavo.errors import InvalidRequestError, RequestCapacityError
from octavo.kv import KVCacheManager
from octavo.plan import StepResult
from octavo.request import FinishReason, Request
from octavo.sched import RequestStats, Scheduler, SeqUpdate

MAX_UNDER_WAY = 3


class Live:
    """What the machine knows of a sequence."""

    def __init__(self, request: Request, sample_index: int, max_total: int) -> None:
        self.request = request
        self.max_total = max_total
        self.tokens, self.reason, self.stop_reason = lonely_run(request, sample_index, max_total)
        self.received: list[int] = []
        self.done = False


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        is_tight=st.booleans(),
        num_blocks=st.integers(3, 200),
        block_size=st.sampled_from([1, 2, 3, 4, 8, 16]),
        max_num_seqs=st.integers(1, 3) | st.integers(4, 12),
        extra_tokens=st.sampled_from([0, 1, 5, 30]),
        max_model_len=st.integers(2, 80),
        policy=st.sampled_from(["fcfs", "priority"]),
        watermark=st.sampled_from([0.0, 0.0, 0.01, 0.2, 0.6]),
    )
    def start(
        self,
        is_tight: bool,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_tokens: int,
        max_model_len: int,
        policy: str,
        watermark: float,
    ) -> None:
        if is_tight:  # many preemptions
            num_blocks = 3 + num_blocks % 8
            max_num_seqs, max_model_len, watermark = max_num_seqs + 3, 1000, 0.0
        self.kv = KVCacheManager(num_blocks, block_size)
        max_tokens = max_num_seqs + extra_tokens
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens,
            max_model_len=max_model_len,
            policy=policy,  # type: ignore[arg-type]
            watermark=watermark,
        )
        self.policy = policy
        self.most = min(max_model_len, num_blocks * block_size)
        self.runner = ReplicaRunner(
            num_blocks, block_size, max_tokens=max_tokens, max_seqs=max_num_seqs
        )
        self.under_way: deque[StepResult] = deque()
        self.live: dict[int, Live] = {}
        self.live_ids: dict[str, RequestStats] = {}
        self.num_computed: Counter[str] = Counter()
        self.now_s = 0.0

    # -- rules

    @rule(
        name=st.sampled_from("abcdefghij"),
        share=st.floats(0, 1.1) | st.floats(0, 0.2),  # of the longest possible
        max_tokens=st.none() | st.integers(1, 40),
        n=st.sampled_from([1, 1, 2, 5]),
        priority=st.integers(-2, 2),
        eos=st.frozensets(st.integers(0, 39), max_size=2),
        stop=st.frozensets(st.integers(0, 39), max_size=2),
        min_tokens=st.sampled_from([0, 0, 1, 5]),
    )
    def add(
        self,
        name: str,
        share: float,
        max_tokens: int | None,
        n: int,
        priority: int,
        eos: frozenset[int],
        stop: frozenset[int],
        min_tokens: int,
    ) -> None:
        num_prompt = 1 + round(share * self.most)
        request = make_request(
            name,
            num_prompt,
            max_tokens=max_tokens,
            n=n,
            priority=priority,
            eos_token_ids=eos,
            stop_token_ids=stop,
            min_tokens=min_tokens,
            arrival_s=self.now_s,
        )
        total = num_prompt + (max_tokens or 1)
        try:
            stats = self.scheduler.add(request)
        except RequestCapacityError as error:
            assert total > self.most
            assert error.parameter == ("prompt" if num_prompt >= self.most else "max_tokens")
            return
        except InvalidRequestError as error:
            assert name in self.live_ids and error.parameter == "request_id"
            return
        assert total <= self.most and name not in self.live_ids
        self.live_ids[name] = stats
        max_total = self.most if max_tokens is None else total
        for index, seq_id in enumerate(self.scheduler.seq_ids(name)):
            self.live[seq_id] = Live(request, index, max_total)

    @precondition(lambda self: len(self.under_way) < MAX_UNDER_WAY)
    @rule()
    def schedule(self) -> None:
        self.now_s += 1
        plan = self.scheduler.schedule(self.now_s)
        self.kv.check_integrity()
        if plan is None:
            assert self.scheduler.take_updates() == []
            assert self.under_way or not self.live, "nothing runs, but there is work"
            return
        assert plan.copies == []
        for share in plan.seqs:
            self.num_computed[self.live[share.seq_id].request.request_id] += share.num_tokens
        self.under_way.append(self.runner.execute(plan))
        self.check_tables()

    @precondition(lambda self: self.under_way)
    @rule()
    def update(self) -> None:
        self.now_s += 1
        for news in self.scheduler.update(self.under_way.popleft(), self.now_s):
            self.receive(news)
        self.kv.check_integrity()

    @precondition(lambda self: not self.under_way)
    @rule(num_steps=st.integers(1, 15))
    def steps(self, num_steps: int) -> None:
        """Whole steps, as without overlap."""
        for _ in range(num_steps):
            self.schedule()
            if self.under_way:
                self.update()

    @precondition(lambda self: self.live_ids)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live_ids)))
        assert self.scheduler.abort(name)
        assert not self.scheduler.abort(name)
        for seq_id in [i for i, seq in self.live.items() if seq.request.request_id == name]:
            self.drop(seq_id)
        self.kv.check_integrity()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.live)))
        assert self.scheduler.finish(seq_id, FinishReason.STOP, "END")
        assert not self.scheduler.finish(seq_id, FinishReason.STOP, "END")
        self.drop(seq_id)
        self.kv.check_integrity()

    # -- checks

    def receive(self, news: SeqUpdate) -> None:
        seq = self.live[news.seq_id]
        assert news.request_id == seq.request.request_id
        assert [entry.token_id for entry in news.logprobs] == list(news.token_ids)
        seq.received += news.token_ids
        assert seq.received == seq.tokens[: len(seq.received)], "not what it generates alone"
        if news.finish_reason is not None:
            assert (news.finish_reason, news.stop_reason) == (seq.reason, seq.stop_reason)
            assert seq.received == seq.tokens
            self.drop(news.seq_id)
        else:
            assert len(seq.received) < len(seq.tokens)

    def drop(self, seq_id: int) -> None:
        name = self.live.pop(seq_id).request.request_id
        if all(seq.request.request_id != name for seq in self.live.values()):
            stats = self.live_ids.pop(name)
            assert stats.metrics.finished_s == self.now_s
            assert stats.num_computed_tokens == self.num_computed.pop(name, 0)
            assert self.scheduler.seq_ids(name) == ()

    def check_tables(self) -> None:
        """Tables rebuilt from plans alone are the manager's."""
        for seq_id, seq in self.runner.seqs.items():
            table = list(self.kv.block_table(seq_id)) if self.kv.has(seq_id) else []
            assert seq.block_ids == table, f"sequence {seq_id}"
        assert self.scheduler.num_running == self.kv.num_sequences
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.under_way:
            self.update()
        total = sum(seq.max_total for seq in self.live.values())
        # The first in line advances in every step while it runs; under priority it may have to
        # wait, each time it changes, until those who run are done.
        bound = total if self.policy == "fcfs" else total * (len(self.live) + 1)
        num_steps = 0
        while self.live:
            self.steps(1)
            num_steps += 1
            assert num_steps <= bound, f"not done after {bound} steps"
        assert not self.scheduler.has_unfinished()
        assert self.scheduler.schedule(self.now_s) is None
        assert_drained(self.kv)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=40)
