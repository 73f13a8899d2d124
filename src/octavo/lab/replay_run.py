"""A recorded workload, served by a simulated engine with limits of its own."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from octavo.errors import CapacityError, OctavoError
from octavo.lab.costs import StepCosts
from octavo.lab.null_model import NullModel, own_token, shape_of
from octavo.lab.replay import Watcher, build
from octavo.lab.replay_meter import Meter
from octavo.lab.replay_workload import RecordedRequest, RecordedWorkload, TimedAbort, TimedCall
from octavo.plan import BeamCandidate, StepPlan, StepResult
from octavo.record import EngineLimits, Pinned, PrefixCacheReset, Resized, Unpinned
from octavo.request import FinishReason

Progress = Callable[[int, float], None]
"""Told now and then: steps, and seconds simulated."""
_PROGRESS_EVERY = 500
_MAX_NOTES = 5


class Run:
    """One simulated engine that serves a recorded workload."""

    def __init__(
        self,
        workload: RecordedWorkload,
        limits: EngineLimits,
        costs: StepCosts,
        *,
        resizes: bool = True,
        knows_lengths: bool = False,
        progress: Progress | None = None,
        watchers: tuple[Watcher, ...] = (),
    ) -> None:
        """resizes: whether the recorded resizes of the pool make sense. knows_lengths: whether the
        engine is told how much each request will generate."""
        self.kv, self.scheduler = build(limits)
        self._windows = limits.windows
        self.meter = Meter()
        self.notes: list[str] = []
        self.num_overtaken = 0
        """Requests that came while others ran, which had been over when it was recorded."""
        self.num_left_out = 0
        """Requests that were refused then, and are accepted here."""
        self._watchers = (self.meter, *watchers)
        for watcher in self._watchers:
            watcher.begun(self.kv, self.scheduler)
        self._workload, self._costs = workload, costs
        self._resizes, self._knows_lengths, self._progress = resizes, knows_lengths, progress
        self._model = NullModel(self._token_of)
        self._owners: dict[int, tuple[RecordedRequest, int]] = {}
        """By sequence: whose sample it is, and which."""
        self._searches: dict[str, tuple[deque[list[BeamCandidate]], RecordedRequest]] = {}
        """By request what its next steps yield."""
        self._ids: dict[RecordedRequest, str] = {}
        """Under what id they run here."""
        self._early: dict[RecordedRequest, list[TimedAbort]] = {}
        """What is to be aborted as soon as it comes."""
        self._ending: list[int] = []
        """Sequences that draw their last token."""
        self._pins: dict[int, int] = {}
        """Recorded ids of pins that are there -> ids here."""
        self._now_s = 0.0
        self._num_steps = self._num_added = 0

    def run(self) -> None:
        """All of it."""
        coming = sorted(self._workload.requests, key=lambda came: came.seen_s)[::-1]
        calls = self._workload.calls[::-1]
        self._now_s = _next_s(coming, calls)
        while coming or calls or self.scheduler.has_unfinished():
            while calls and calls[-1].time_s <= self._now_s:
                call = calls.pop()
                if isinstance(call, TimedAbort):
                    self._abort(call)
                else:
                    self._call(call)
            while coming and coming[-1].seen_s <= self._now_s:
                self._add(coming.pop())
            plan = self.scheduler.schedule(self._now_s)
            for watcher in self._watchers:
                watcher.scheduled(plan, self._now_s)
            if plan is not None:
                self._execute(plan)
                continue
            if self.scheduler.take_updates() or not (coming or calls):
                continue
            self._now_s = max(self._now_s, _next_s(coming, calls))

    def _call(self, timed: TimedCall) -> None:
        try:
            match timed.call:
                case Pinned(token_ids=token_ids, salt=salt, pin_id=pin_id):
                    assert pin_id is not None
                    self._pins[pin_id] = self.scheduler.pin(token_ids, salt).pin_id
                case Unpinned(pin_id=pin_id):
                    if pin_id in self._pins:
                        self.scheduler.unpin(self._pins.pop(pin_id))
                case PrefixCacheReset():
                    self.kv.reset_prefix_cache()
                case Resized(num_blocks=num_blocks) if self._resizes:
                    self.scheduler.resize(num_blocks, self._now_s)
                case Resized():
                    self._note("recorded resizes are left out of the changed pool")
        except CapacityError as error:
            self._note(f"a recorded call is refused: {error}")

    def _abort(self, timed: TimedAbort) -> None:
        request_id = self._ids.get(timed.came)
        if request_id is None:
            self._early.setdefault(timed.came, []).append(timed)
        elif timed.index is None:
            self.scheduler.abort(request_id)
        else:
            for seq_id in self.scheduler.seq_ids(request_id)[timed.index : timed.index + 1]:
                self.scheduler.finish(seq_id, FinishReason.ABORT)

    def _add(self, came: RecordedRequest) -> None:
        self.num_overtaken += came.to_idle and self.scheduler.num_running > 0
        request_id = str(self._num_added)  # the recorded one may have come twice
        self._num_added += 1
        expected = came.request.expected_output_tokens
        if self._knows_lengths and not came.cut:
            expected = came.num_output
        request = dataclasses.replace(
            came.request, request_id=request_id, expected_output_tokens=expected
        )
        try:
            if came.refused is not None and not isinstance(came.refused, CapacityError):
                raise came.refused  # for what no other limits change
            stats = self.scheduler.add(request)
        except OctavoError as error:
            if came.refused is None:
                self._note(f"a request is refused: {error}")
            for watcher in self._watchers:
                watcher.refused(request, error)
            return
        if came.refused is not None:
            self.scheduler.abort(request_id)
            self.num_left_out += 1
            return
        self._ids[came] = request_id
        for watcher in self._watchers:
            watcher.added(request, stats)
        if came.cut:
            self.meter.leave_out(request_id)
        for index, seq_id in enumerate(self.scheduler.seq_ids(request_id)):
            self._owners[seq_id] = (came, index)
        if request.beam is not None:
            self._searches[request_id] = deque(came.draws), came
            if not came.draws and not came.cut:
                self.scheduler.abort(request_id)
        for timed in self._early.pop(came, ()):
            self._abort(timed)

    def _execute(self, plan: StepPlan) -> None:
        shape = shape_of(plan, self._windows)
        copy_s = self._costs.copy_s(shape.num_host_blocks)
        step_s = self._costs.step_s(shape) if plan.seqs else copy_s
        self._now_s += step_s
        self._num_steps += 1
        if self._progress is not None and self._num_steps % _PROGRESS_EVERY == 0:
            self._progress(self._num_steps, self._now_s)
        compute_s = max(0.0, step_s - copy_s) if plan.seqs else 0.0
        result = self._model.answer(plan, copy_s=copy_s, compute_s=compute_s)
        over = self._put_recorded(plan, result)
        for watcher in self._watchers:
            watcher.updated(plan, result, self._now_s)
        updates = self.scheduler.update(result, self._now_s)
        for watcher in self._watchers:
            watcher.news(updates)
        while self._ending:
            self.scheduler.finish(self._ending.pop(), FinishReason.LENGTH)
        for request_id in over:
            self.scheduler.abort(request_id)

    def _token_of(self, seq_id: int, position: int) -> int:
        """See `NullModel`."""
        came, index = self._owners[seq_id]
        tokens, num_before = came.outputs[index], position - len(came.request.prompt_token_ids)
        if num_before + 1 >= len(tokens) and index not in came.cut:
            self._ending.append(seq_id)
        return tokens[num_before] if num_before < len(tokens) else own_token(seq_id)

    def _put_recorded(self, plan: StepPlan, result: StepResult) -> list[str]:
        """Put the recorded candidates of beam searches in place of the model's, which stay where
        there are none: the search was aborted before. The requests that have no more."""
        over = []
        for i, draw in enumerate(plan.beams):
            (request_id,) = self.scheduler.request_ids_of(draw.seq_ids[:1])
            left, came = self._searches[request_id]
            if left:
                result.beams[i] = left.popleft()
            if not left and not came.cut:
                over.append(request_id)
        return over

    def _note(self, text: str) -> None:
        if text not in self.notes and len(self.notes) < _MAX_NOTES:
            self.notes.append(text)


def _next_s(coming: list[RecordedRequest], calls: list[TimedCall | TimedAbort]) -> float:
    """When the next of either comes; both are in reverse order. 0 if there is none."""
    times = [*(c.seen_s for c in coming[-1:]), *(c.time_s for c in calls[-1:])]
    return min(times, default=0.0)
