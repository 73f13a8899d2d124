"""What a run was like, whether it was recorded or simulated: the same figures, by watching."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.errors import OctavoError
from octavo.kv.ledger import TERMS
from octavo.kv.manager import KVCacheManager
from octavo.lab.replay import Watcher
from octavo.lab.summary import Latency
from octavo.outputs import RequestMetrics
from octavo.plan import StepPlan, StepResult
from octavo.record import Aborted, Call, Finished
from octavo.request import FinishReason, Request
from octavo.sched import RequestStats, Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Times in seconds. Latencies are those of requests that have ended with at least a token."""

    num_requests: int
    num_refused: int
    num_aborted: int
    """Requests of which a sequence was aborted: they are in no latency, nor in `requests_per_s`."""
    seconds: float
    """From the first arrival to the last result."""
    output_tokens: int
    """Of all sequences."""
    tokens_per_s: float
    requests_per_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    latency_mean_s: float
    latency_p99_s: float
    tpot_mean_s: float
    """Between two tokens of a sequence, over requests that have more than one."""
    normalized_s: float
    """Mean over requests of their latency for each token of one sequence."""
    num_steps: int
    mean_seqs: float
    """Sequences in a step."""
    peak_seqs: int
    computed_tokens: int
    num_preemptions: int
    num_evictions: int
    num_host_copies: int
    hit_rate: float
    """Share of the prompt tokens that was found in the prefix cache."""
    memory: dict[str, float]
    """Share of the pool's slots of each kind, mean over the run, settled in hindsight."""

    def as_dict(self) -> dict[str, object]:
        """For machines."""
        return dataclasses.asdict(self)


class Meter(Watcher):
    """Watches one run."""

    def __init__(self) -> None:
        self._stats: list[tuple[int, RequestMetrics]] = []
        """Sequences and times of each request."""
        self._indexes: dict[str, int] = {}
        """By id, of the last such request."""
        self._aborted: set[int] = set()
        """Of them, by index."""
        self._num_refused = 0
        self._num_steps = self._num_seqs = self._peak_seqs = 0
        self._num_tokens = self._num_host_copies = 0
        self._last_s = 0.0

    def begun(self, kv: KVCacheManager, scheduler: Scheduler) -> None:
        """See `Watcher`."""
        self._kv, self._scheduler = kv, scheduler
        self._history = kv.keep_history()

    def added(self, request: Request, stats: RequestStats) -> None:
        """See `Watcher`."""
        self._indexes[request.request_id] = len(self._stats)
        self._stats.append((request.n, stats.metrics))

    def refused(self, request: Request, error: OctavoError) -> None:
        """See `Watcher`."""
        self._num_refused += 1

    def called(self, call: Call) -> None:
        """See `Watcher`."""
        for request_id in aborted_by(call, self._scheduler):
            self.leave_out(request_id)

    def leave_out(self, request_id: str) -> None:
        """A request is, or will be, aborted: its latencies say nothing."""
        self._aborted.add(self._indexes[request_id])

    def scheduled(self, plan: StepPlan | None, now_s: float) -> None:
        """See `Watcher`."""
        if self._history.is_due(now_s):
            self._history.sample(now_s, self._scheduler.num_waiting)
        if plan is None:
            return
        if plan.seqs:
            self._num_steps += 1
            self._num_seqs += len(plan.seqs)
            self._peak_seqs = max(self._peak_seqs, len(plan.seqs))
            self._num_tokens += plan.num_tokens
        self._num_host_copies += plan.num_host_copies

    def updated(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """See `Watcher`."""
        self._last_s = now_s

    def figures(self) -> RunFigures:
        """Everything so far."""
        metrics = [metrics for _, metrics in self._stats]
        began_s = min((m.arrival_s for m in metrics), default=0.0)
        seconds = max(1e-12, self._last_s - began_s)
        kept = [one for i, one in enumerate(self._stats) if i not in self._aborted]
        answered = [m for _, m in kept if m.num_generation_tokens and m.finished_s is not None]
        ttft_mean_s, ttft_p99_s = _spread([m.ttft_s for m in answered if m.ttft_s is not None])
        latency_mean_s, latency_p99_s = _spread([m.e2e_s for m in answered if m.e2e_s is not None])
        output = sum(m.num_generation_tokens for m in metrics)
        cache = self._kv.cache_stats()
        return RunFigures(
            num_requests=len(metrics),
            num_refused=self._num_refused,
            num_aborted=len(self._aborted),
            seconds=seconds,
            output_tokens=output,
            tokens_per_s=output / seconds,
            requests_per_s=len(answered) / seconds,
            ttft_mean_s=ttft_mean_s,
            ttft_p99_s=ttft_p99_s,
            latency_mean_s=latency_mean_s,
            latency_p99_s=latency_p99_s,
            tpot_mean_s=_spread(_tpot(kept))[0],
            normalized_s=_spread(_normalized(kept))[0],
            num_steps=self._num_steps,
            mean_seqs=self._num_seqs / max(1, self._num_steps),
            peak_seqs=self._peak_seqs,
            computed_tokens=self._num_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_evictions=cache.evictions,
            num_host_copies=self._num_host_copies,
            hit_rate=cache.hit_rate,
            memory=self._memory(),
        )

    def _memory(self) -> dict[str, float]:
        mean = self._history.mean()
        slots = {} if mean is None else {name: getattr(mean, name) for name in TERMS}
        num_slots = sum(slots.values())
        return {name: num / num_slots for name, num in slots.items()}


def aborted_by(call: Call, scheduler: Scheduler) -> list[str]:
    """The live request, if any, that a call is about to abort, whole or one of its samples."""
    match call:
        case Aborted(request_id=request_id):
            return scheduler.request_ids_of(scheduler.seq_ids(request_id))
        case Finished(seq_id=seq_id, reason=FinishReason.ABORT, found=True):
            return scheduler.request_ids_of([seq_id])
    return []


def _tpot(requests: Sequence[tuple[int, RequestMetrics]]) -> list[float]:
    return [
        (m.last_token_s - m.first_token_s) / (m.num_generation_tokens / n - 1)
        for n, m in requests
        if m.first_token_s is not None
        and m.last_token_s is not None
        and m.num_generation_tokens > n
    ]


def _normalized(requests: Sequence[tuple[int, RequestMetrics]]) -> list[float]:
    return [
        m.e2e_s * n / m.num_generation_tokens
        for n, m in requests
        if m.e2e_s is not None and m.num_generation_tokens
    ]


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """(Mean, 99th percentile), 0 of nothing."""
    found = Latency.of(np.array(values, dtype=np.float64))
    return (0.0, 0.0) if found is None else (found.mean, found.p99)
