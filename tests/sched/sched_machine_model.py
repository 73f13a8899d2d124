"""What a machine over the scheduler knows of its requests, and what must hold of them."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from hypothesis.stateful import RuleBasedStateMachine
from sched_support import (
    ReplicaRunner,
    lonely_beams,
    lonely_run,
)

from octavo.config import PreemptionMode, PreemptionVictim, SchedulingPolicy
from octavo.errors import RequestCapacityError
from octavo.kv import KVCacheManager
from octavo.plan import StepPlan, StepResult
from octavo.request import FinishReason, Request
from octavo.sched import RequestStats, Scheduler, SeqUpdate


class Live:
    """What the machine knows of a sample, or of a rank of a beam search."""

    def __init__(self, request: Request, index: int, max_total: int) -> None:
        self.request = request
        self.max_total = max_total
        self.received: list[int] = []
        if request.beam is None:
            self.tokens, self.reason, self.stop_reason = lonely_run(request, index, max_total)
            self.scores: tuple[float | None, ...] = (None, None)
            return
        beam = lonely_beams(request)[index]
        self.tokens, self.reason, self.stop_reason = list(beam.token_ids), beam.finish_reason, None
        self.scores = (beam.cum_logprob, beam.score)


@dataclass
class Underway:
    """A plan whose result the scheduler does not know."""

    plan: StepPlan
    result: StepResult | None = None
    """None: it was not carried out."""


class MachineModel(RuleBasedStateMachine):
    """What a machine knows of its requests, and what must hold of them; without any rules."""

    def begin(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        extra_tokens: int,
        max_model_len: int,
        policy: SchedulingPolicy,
        watermark: float,
        plan_ahead: bool,
        is_late: bool,
        mode: PreemptionMode = "recompute",
        victim: PreemptionVictim = "last-come",
        prefix_caching: bool = False,
        is_tight: bool = False,
        is_quiet: bool = False,
    ) -> None:
        """A life starts, over an empty pool."""
        self.kv, self.max_num_seqs = kv, max_num_seqs
        num_blocks, block_size = kv.num_blocks, kv.block_size
        max_tokens = max_num_seqs + extra_tokens
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens,
            max_model_len=max_model_len,
            policy=policy,
            watermark=watermark,
            preemption_mode=mode,
            preemption_victim=victim,
            plan_ahead=plan_ahead,
        )
        self.plan_ahead = plan_ahead
        self.is_late = is_late
        """Plans are carried out when their results are asked for, as by a device that is slow."""
        self.policy = policy
        self.prefix_caching = prefix_caching
        self.max_model_len = max_model_len
        self.most = min(max_model_len, num_blocks * block_size)
        self.may_cut = False
        """Requests without max_tokens: the pool has shrunk, or a prefix was pinned."""
        self.is_tight = is_tight
        self.is_quiet = is_quiet
        """Nothing fails, and the pool stays as it is."""
        self.runner = self.make_runner(max_tokens)
        self.pins: list[int] = []
        self.prompts: list[tuple[list[int], str]] = []
        """The last of those that were computed and may be found."""
        self.under_way: deque[Underway] = deque()
        self.live: dict[tuple[str, int], Live] = {}
        """By request and sample index."""
        self.live_ids: dict[str, RequestStats] = {}
        self.prompt_logprobs: dict[str, list[int]] = {}
        self.num_computed: Counter[str] = Counter()
        self.now_s = 0.0

    def make_runner(self, max_tokens: int) -> ReplicaRunner:
        return ReplicaRunner(
            self.kv.num_blocks, self.kv.block_size, max_tokens=max_tokens,
            max_seqs=self.max_num_seqs,
        )  # fmt: skip

    def with_expectation(self, request: Request, max_total: int) -> Request:
        """The request, with what may be known of its length."""
        return request

    def check_refusal(self, request: Request, error: RequestCapacityError, total: int) -> None:
        """One of its sequences would fit."""
        raise AssertionError(f"refused although it fits: {error}")

    def blocks_of_beams(self, num_prompt: int, total: int, width: int) -> int:
        """They share the full blocks of the prompt."""
        size = self.kv.block_size
        return num_prompt // size + width * (-(-total // size) - num_prompt // size)

    def num_lost(self, request: Request) -> int:
        """Blocks that are pinned and not for a request."""
        num_own = 0
        if request.sampler.num_prompt_logprobs is None:
            num_own = self.kv.num_pinned_in(request.prompt_token_ids, request.cache_salt)
        return self.kv.num_pinned_blocks - num_own

    def most_for(self, request: Request) -> int:
        num_slots = (self.kv.num_blocks - self.num_lost(request)) * self.kv.block_size
        return min(self.max_model_len, num_slots)

    def note(self, request: Request, stats: RequestStats, max_total: int) -> None:
        name = request.request_id
        self.live_ids[name] = stats
        self.prompt_logprobs[name] = []
        for index in range(request.n):
            self.live[name, index] = Live(request, index, max_total)

    def carry_out(self) -> None:
        """All plans under way, in their order, as a device does."""
        for one in self.under_way:
            one.result = one.result or self.runner.execute(one.plan)

    # -- what must hold

    def receive(self, news: SeqUpdate) -> None:
        key = (news.request_id, news.sample_index)
        seq = self.live[key]
        if self.prefix_caching and not seq.received:
            prompt = (seq.request.prompt_token_ids, seq.request.cache_salt)
            self.prompts = [*self.prompts[-3:], prompt]
        if news.prompt_logprobs:
            found = self.prompt_logprobs[news.request_id]
            found += [entry.token_id for entry in news.prompt_logprobs]
        if seq.request.beam is None:
            assert [entry.token_id for entry in news.logprobs] == list(news.token_ids)
            assert self.scheduler.seq_ids(news.request_id)[news.sample_index :][:1] in (
                (news.seq_id,),
                (),
            )
        seq.received += news.token_ids
        is_cut_short = news.finish_reason is FinishReason.LENGTH and not news.token_ids
        if self.may_cut and seq.request.max_tokens is None and is_cut_short:
            assert seq.received, "it was promised a token"
            assert seq.received == seq.tokens[: len(seq.received)]
            self.drop(key, ended_before=True)  # it was to take all there is
            return
        assert seq.received == seq.tokens[: len(seq.received)], "not what it generates alone"
        if news.finish_reason is not None:
            assert (news.finish_reason, news.stop_reason) == (seq.reason, seq.stop_reason)
            assert (news.cum_logprob, news.score) == seq.scores
            assert seq.received == seq.tokens
            self.drop(key)
        else:
            assert len(seq.received) < len(seq.tokens)

    def drop(
        self, key: tuple[str, int], *, failed: bool = False, ended_before: bool = False
    ) -> None:
        self.live.pop(key)
        name = key[0]
        if all(other != name for other, _ in self.live):
            stats = self.live_ids.pop(name)
            del self.prompt_logprobs[name]
            assert ended_before or stats.metrics.finished_s == self.now_s
            assert failed or stats.num_computed_tokens == self.num_computed.pop(name, 0)
            assert self.scheduler.seq_ids(name) == ()

    def check_pending(self) -> None:
        """No token is sampled that cannot be wanted, and KV counts from when its token is known."""
        roster = self.scheduler.roster
        for seq in roster.sequences.values():
            assert seq.num_pending <= 1 + self.plan_ahead
            assert len(seq.token_ids) + seq.num_pending <= seq.group.max_total_tokens
        for seq in roster.running:
            num_known = min(seq.num_computed_tokens, len(seq.token_ids))
            assert self.kv.num_committed(seq.seq_id) == num_known

    def check_tables(self) -> None:
        """Tables rebuilt from plans alone are the manager's."""
        for seq_id, seq in self.runner.seqs.items():
            table = list(self.kv.block_table(seq_id)) if self.kv.has(seq_id) else []
            # One that was forked, or found all it needs, is told of its blocks when it grows.
            assert seq.block_ids in (table, []), f"sequence {seq_id}"
        assert self.scheduler.num_running == self.kv.num_sequences
        assert self.scheduler.num_running <= self.max_num_seqs
