"""A record as a workload: who came when, what each sequence generated, how long steps took.

What a sequence generates depends on its prompt and seed, not on the company it runs in or on where
its blocks lie. So the recorded tokens, and the recorded candidates of beam searches, are also what
an engine with other limits would have computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.errors import OctavoError
from octavo.kv.manager import KVCacheManager
from octavo.lab.costs import StepShape
from octavo.lab.null_model import shape_of
from octavo.lab.replay import Watcher
from octavo.lab.replay_meter import aborted_by
from octavo.plan import BeamCandidate, StepPlan, StepResult
from octavo.record import Call, Finished, Pinned, PrefixCacheReset, Resized, Unpinned
from octavo.request import Request
from octavo.sched import RequestStats, Scheduler, SeqUpdate


@dataclass(slots=True, kw_only=True, eq=False)
class RecordedRequest:
    """One request and all that came of it."""

    request: Request
    seen_s: float
    """When the scheduler could first see it, in the record's clock. Later than its arrival for
    those that came, together, to an engine that waited for all of them."""
    to_idle: bool = False
    """Whether that engine had nothing to do, or only what came at the same time."""
    outputs: list[list[int]]
    """By sample index the tokens; of a beam search, nothing."""
    draws: list[list[BeamCandidate]] = field(default_factory=list)
    """Of a beam search: the candidates of each of its steps."""
    cut: set[int] = field(default_factory=set)
    """Sample indexes (of a beam search, 0) of what was aborted: more would have come."""
    refused: OctavoError | None = None
    """Why it was not accepted: then nobody knows what it would have generated."""

    @property
    def num_output(self) -> int:
        """Tokens of its longest sequence, at least 1."""
        return max(1, len(self.draws), *map(len, self.outputs))


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A call from outside, of those that are not about a request."""

    time_s: float
    call: Call


@dataclass(frozen=True, slots=True)
class TimedAbort:
    """A request was aborted, or one of its samples."""

    time_s: float
    came: RecordedRequest
    index: int | None
    """None: all that was left of it."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step that was measured."""

    shape: StepShape
    seconds: float
    """From being planned to its tokens."""
    copy_s: float
    """Of them, for copies to and from host memory."""
    gap_s: float | None
    """From there until the next step was planned; None where the engine had nothing to do."""


class RecordedWorkload(Watcher):
    """Made by watching a replay."""

    def __init__(self) -> None:
        self.requests: list[RecordedRequest] = []
        self.calls: list[TimedCall | TimedAbort] = []
        """In the order of their times."""
        self.steps: list[TimedStep] = []
        self._live: dict[str, RecordedRequest] = {}
        self._unseen: list[RecordedRequest] = []
        """Came to an engine that had nothing to do."""
        self._planned_s = 0.0
        self._waiting: TimedStep | None = None
        """The last step, until it is known when the next was planned."""
        self._updated_s = 0.0

    def begun(self, kv: KVCacheManager, scheduler: Scheduler) -> None:
        """See `Watcher`."""
        self._kv, self._scheduler = kv, scheduler

    def added(self, request: Request, stats: RequestStats) -> None:
        """See `Watcher`."""
        came = RecordedRequest(
            request=request, seen_s=request.arrival_s, outputs=[[] for _ in range(request.n)]
        )
        is_alone = self._scheduler.num_running + self._scheduler.num_waiting == 1
        if is_alone or self._unseen:
            came.to_idle = True
            self._unseen.append(came)
        self._live[request.request_id] = came
        self.requests.append(came)

    def called(self, call: Call) -> None:
        """See `Watcher`."""
        if call.error is not None:
            return
        now_s = max(self._planned_s, self._updated_s)
        if isinstance(call, Pinned | Unpinned | PrefixCacheReset | Resized):
            self.calls.append(TimedCall(now_s, call))
        for request_id in aborted_by(call, self._scheduler):
            came = self._live[request_id]
            if came.request.beam is not None:
                came.cut.add(0)
                index = None
            elif isinstance(call, Finished):
                index = self._scheduler.seq_ids(request_id).index(call.seq_id)
                came.cut.add(index)
            else:
                index = None
                for i, seq_id in enumerate(self._scheduler.seq_ids(request_id)):
                    if self._scheduler.request_ids_of([seq_id]):
                        came.cut.add(i)
            self.calls.append(TimedAbort(now_s, came, index))

    def refused(self, request: Request, error: OctavoError) -> None:
        """See `Watcher`."""
        came = RecordedRequest(request=request, seen_s=request.arrival_s, outputs=[], refused=error)
        self.requests.append(came)

    def scheduled(self, plan: StepPlan | None, now_s: float) -> None:
        """See `Watcher`."""
        for came in self._unseen:
            came.seen_s = max(came.seen_s, now_s)
        self._unseen.clear()
        self._end_step(now_s)
        self._planned_s = now_s

    def updated(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """See `Watcher`."""
        for draw, candidates in zip(plan.beams, result.beams, strict=True):
            for request_id in self._scheduler.request_ids_of(draw.seq_ids[:1]):
                self._live[request_id].draws.append(candidates)
        if plan.seqs:
            seconds = now_s - self._planned_s
            self._waiting = TimedStep(
                shape_of(plan, self._kv.windows), seconds, result.copy_s, None
            )
        self._updated_s = now_s

    def news(self, updates: list[SeqUpdate]) -> None:
        """See `Watcher`."""
        for update in updates:
            came = self._live[update.request_id]
            if came.request.beam is None:
                came.outputs[update.sample_index].extend(update.token_ids)
        if not self._scheduler.has_unfinished():
            self._end_step(None)

    def _end_step(self, now_s: float | None) -> None:
        step, self._waiting = self._waiting, None
        if step is not None:
            gap_s = None if now_s is None else now_s - self._updated_s
            self.steps.append(TimedStep(step.shape, step.seconds, step.copy_s, gap_s))
