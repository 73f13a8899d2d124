"""One simulated engine: the scheduler and the memory manager that serve, under a fake clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from octavo.errors import RequestCapacityError
from octavo.kv.manager import KVCacheManager
from octavo.kv.policies import make_policy
from octavo.lab.config import SimConfig
from octavo.lab.costs import StepCosts, StepShape
from octavo.lab.null_model import NullModel, own_token, shape_of
from octavo.lab.padded import PaddedBatch
from octavo.lab.prompts import PromptMaker
from octavo.lab.results import RequestTimes
from octavo.lab.sampling import PoolSampler
from octavo.lab.trace import TraceRequest
from octavo.plan import StepPlan
from octavo.request import BeamSearchParams, Request, SamplerParams
from octavo.sched import RequestStats, Scheduler, SeqUpdate
from octavo.sched.stride import QuietSteps, Stride

_SAMPLER = SamplerParams()
_MAX_REASONS = 5
_FLAGS = (
    "--kv-cache-memory-bytes (or --num-gpu-blocks-override)",
    "--num-blocks (or --gpu-memory)",
)
"""An engine's, and what they are called here."""


class _Live(NamedTuple):
    """A request that has not ended."""

    trace: TraceRequest
    stats: RequestStats


class Replica:
    """Decisions are real; a step only takes time, as the cost model says."""

    def __init__(
        self,
        config: SimConfig,
        costs: StepCosts,
        *,
        prompts: PromptMaker,
        model: NullModel | None = None,
        sampler: PoolSampler | None = None,
        times: RequestTimes | None = None,
        on_end: Callable[[TraceRequest, float], None] | None = None,
    ) -> None:
        """`times` may be shared by several replicas. `on_end` is told of each request that has
        ended, and when; one that is refused ends as it comes."""
        self.config, self.costs = config, costs
        self.kv, self.scheduler = _build(config)
        self.model = model or NullModel()
        self.sampler = sampler or PoolSampler()
        self.times = RequestTimes() if times is None else times
        self.now_s = 0.0
        self.busy_s = 0.0
        self.num_steps = self.num_seqs = self.num_tokens = 0
        self.num_strides = 0
        """Stretches of steps that were taken in one go."""
        self.num_refused = 0
        self.refusals: list[str] = []
        self.num_outstanding = 0
        """Tokens of requests that have not ended: prompts and outputs, computed or not."""
        self.num_cached = self.num_prompt = self.num_output = 0
        """Of requests that have ended: prompt tokens that were found, all, and outputs."""
        self._prompts, self._on_end = prompts, on_end
        self._live: dict[str, _Live] = {}
        self._backlog: deque[tuple[TraceRequest, float, int]] = deque()
        """Requests behind a long line: who stands there cannot matter before the line moves, and
        costs little memory here."""
        fcfs = config.scheduling_policy == "fcfs"
        self._max_line = 2 * config.max_num_seqs + 64 if fcfs else math.inf
        self._strides = config.stride and self.model.draws_own_tokens
        if any(config.layer_windows) and not self.kv.policy.batches_requests:
            self._strides = False  # what a stride reads is a sum of lengths
        self._can_stride = self._strides
        self._batch: PaddedBatch | None = None
        """Under `contiguous`: what runs."""
        self._unanswered: list[_Live] = []
        """Of it, requests that have ended before the batch has."""
        self.sampler.rest(0.0, self.kv)

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._backlog) or self.scheduler.has_unfinished()

    @property
    def num_waiting(self) -> int:
        """Sequences in line."""
        return self.scheduler.num_waiting + len(self._backlog)

    # -- requests come

    def add(self, trace: TraceRequest, arrival_s: float, index: int) -> None:
        """A request comes; `index` is its number in the workload."""
        if not self.has_work:
            self.now_s = max(self.now_s, arrival_s)
            self.sampler.wake(self.now_s)
        request = self._request(trace, arrival_s, index)
        try:
            if self._backlog or self.scheduler.num_waiting >= self._max_line:
                self.scheduler.admission.max_total_tokens(request)
                self._backlog.append((trace, arrival_s, index))
            else:
                self._line_up(trace, request)
        except RequestCapacityError as error:
            self.num_refused += 1
            if len(self.refusals) < _MAX_REASONS:
                self.refusals.append(str(error).replace(*_FLAGS))
            self._gone(trace, arrival_s)
        else:
            self.num_outstanding += _num_tokens(trace)

    def _line_up(self, trace: TraceRequest, request: Request) -> None:
        self._live[request.request_id] = _Live(trace, self.scheduler.add(request))

    def _request(self, trace: TraceRequest, arrival_s: float, index: int) -> Request:
        beam = None
        if trace.beam_width:
            beam = BeamSearchParams(beam_width=trace.beam_width, max_tokens=trace.num_output)
        return Request(
            request_id=str(index),
            prompt_token_ids=self._prompts.make(trace, index),
            sampler=_SAMPLER,
            n=trace.num_seqs,
            beam=beam,
            max_tokens=trace.num_output,
            expected_output_tokens=trace.num_output,
            priority=trace.priority,
            arrival_s=arrival_s,
            client_id=trace.client,
        )

    # -- time passes

    def advance(self, stop_s: float, arrival_s: float) -> None:
        """Take a step, or as many quiet ones as begin before `stop_s`, before a sample is due, and
        before `arrival_s` if whoever comes then might be admitted at once."""
        while self._backlog and self.scheduler.num_waiting < self._max_line:
            trace, came_s, index = self._backlog.popleft()
            self._line_up(trace, self._request(trace, came_s, index))
        if self._can_stride and self.now_s < self.sampler.next_s:
            quiet = self.scheduler.quiet_steps()
            if quiet is not None:
                stop_s = min(stop_s, self.sampler.next_s)
                self._stride(quiet, min(stop_s, arrival_s) if quiet.is_open else stop_s)
                return
        plan = self.scheduler.schedule(self.now_s)
        if plan is None:
            updates = self.scheduler.take_updates()
            assert updates or not self.scheduler.has_unfinished(), "nobody can run"
            self._take(updates)
            return
        if self.now_s >= self.sampler.next_s:
            self.sampler.look(self.now_s, self.kv, self.num_waiting)
        self._execute(plan)

    def _execute(self, plan: StepPlan) -> None:
        """A planned step."""
        copy_s = self.costs.copy_s(plan.num_host_copies)
        step_s = self._step_s(plan)
        self.now_s += step_s
        self.busy_s += step_s
        self.num_steps += 1
        self.num_seqs += len(plan.seqs)
        self.num_tokens += plan.num_tokens
        result = self.model.answer(plan, copy_s=copy_s, compute_s=step_s - copy_s)
        self._take(self.scheduler.update(result, self.now_s))

    def _step_s(self, plan: StepPlan) -> float:
        if not plan.seqs:
            return 0.0
        if not self.kv.policy.batches_requests:
            return self.costs.step_s(shape_of(plan, self.config.layer_windows))
        if self._batch is None:
            rows = []
            for live in self._live.values():
                if live.stats.metrics.first_scheduled_s is not None:
                    rows.append((live.trace.num_seqs, live.trace.num_input))
                elif self.config.scheduling_policy == "fcfs":
                    break
            self._batch = PaddedBatch(self.costs, rows, self.config.layer_windows)
            self._can_stride &= all(num == 1 for num, _ in rows)
        return self._batch.step_s(plan)

    def _stride(self, quiet: QuietSteps, stop_s: float) -> None:
        """Quiet steps, up to the first one that would not begin before `stop_s`."""
        most, num_seqs, context, _ = quiet
        step_s_of, batch = self.costs.step_s, self._batch
        copy_s = self.costs.copy_s(0)
        now_s, busy_s = self.now_s, self.busy_s
        times, compute_s = [], []
        while True:
            times.append(now_s)
            if batch is None:
                shape = (0, 0, num_seqs, context, num_seqs, 0, 0, 0)
                step_s = step_s_of(tuple.__new__(StepShape, shape))  # at half the time
            else:
                step_s = batch.quiet_s()
            now_s += step_s
            busy_s += step_s
            compute_s.append(step_s - copy_s)
            context += num_seqs
            if len(times) == most or now_s >= stop_s:
                break
        self.now_s, self.busy_s = now_s, busy_s
        self.num_steps += len(times)
        self.num_strides += 1
        self.num_seqs += num_seqs * len(times)
        self.num_tokens += num_seqs * len(times)
        stride = Stride(times, now_s, compute_s)
        self._take(self.scheduler.take_quiet_steps(stride, own_token))

    # -- requests end

    def _take(self, updates: list[SeqUpdate]) -> None:
        """News: who has ended."""
        ended = [update for update in updates if update.finish_reason]
        if self._batch is not None:
            for update in ended:
                self._batch.forget(update.seq_id)
        for request_id in dict.fromkeys([update.request_id for update in ended]):
            live = self._live[request_id]
            if live.stats.metrics.finished_s is None:
                continue  # others of its sequences go on
            del self._live[request_id]
            if self._batch is None:
                self._record(live)
            else:
                self._unanswered.append(live)
        if self._batch is not None and not self.kv.num_sequences:
            self._batch = None
            self._can_stride = self._strides
            for live in self._unanswered:
                live.stats.metrics.finished_s = live.stats.metrics.first_token_s = self.now_s
                self._record(live)
            self._unanswered = []

    def _record(self, live: _Live) -> None:
        trace, stats = live
        times, metrics = self.times, stats.metrics
        assert metrics.finished_s is not None
        times.arrival_s.append(metrics.arrival_s)
        first_s = metrics.finished_s if metrics.first_token_s is None else metrics.first_token_s
        assert metrics.arrival_s <= first_s <= metrics.finished_s, "answered before it came"
        times.first_token_s.append(first_s)
        times.finished_s.append(metrics.finished_s)
        times.num_input.append(trace.num_input)
        times.num_output.append(trace.num_output)
        times.num_cached.append(stats.kv.cached_tokens)
        self.num_cached += stats.kv.cached_tokens
        self.num_prompt += trace.num_input
        self.num_output += trace.num_output * trace.num_seqs
        self.num_outstanding -= _num_tokens(trace)
        self._gone(trace, self.now_s)

    def _gone(self, trace: TraceRequest, ended_s: float) -> None:
        if not self.has_work:
            self.sampler.rest(self.now_s, self.kv)
        if self._on_end is not None:
            self._on_end(trace, ended_s)


def _num_tokens(trace: TraceRequest) -> int:
    return trace.num_input + trace.num_output * trace.num_seqs


def _build(config: SimConfig) -> tuple[KVCacheManager, Scheduler]:
    policy = make_policy(
        config.kv_policy,
        max_seq_tokens=config.max_model_len,
        max_batch=config.max_batch,
        max_padded_tokens=config.max_padded_tokens,
        region_tokens=config.region_tokens,
        windows=config.pool_windows,
        max_chunk_tokens=config.max_num_batched_tokens,
    )
    kv = KVCacheManager(
        config.pool_blocks,
        config.block_size,
        policy,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_blocks=config.num_host_blocks,
    )
    scheduler = Scheduler(
        kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        policy=config.scheduling_policy,
        watermark=config.watermark,
        max_watermark=config.max_watermark,
        preemption_mode=config.preemption_mode,
        preemption_victim=config.preemption_victim,
    )
    return kv, scheduler
