"""Plans that were launched and whose results are not here."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from octavo.plan import StepPlan, StepResult

Wait = Callable[[], StepResult]
"""Waits for the result of a plan that was launched. To be called once, in the order of the plans;
raises what went wrong on the way."""
Launch = Callable[[StepPlan], Wait]
"""The runner's door."""
_DEPTH = 2
"""Plans under way with overlap: one runs, one is ready to run."""


class StepEnd(NamedTuple):
    """A plan that was carried out."""

    plan: StepPlan
    result: StepResult
    seconds: float
    """What it took: since the result before it, or since it was planned, whichever was later."""


class _Underway(NamedTuple):
    plan: StepPlan
    wait: Wait
    begun_s: float


class Pipeline:
    """A queue of at most two plans with overlap, of one without."""

    def __init__(self, clock: Callable[[], float], *, overlap: bool) -> None:
        self._clock = clock
        self.overlap = overlap
        self._plans: deque[_Underway] = deque()
        self._last_s = -math.inf
        """When the last result came."""

    def __len__(self) -> int:
        """Plans under way."""
        return len(self._plans)

    @property
    def has_room(self) -> bool:
        """Whether a plan may be launched now."""
        return len(self._plans) < (_DEPTH if self.overlap else 1)

    def put(self, plan: StepPlan, wait: Wait, begun_s: float) -> None:
        """A plan was launched; planning it began at that time."""
        self._plans.append(_Underway(plan, wait, begun_s))

    def wait(self) -> StepEnd:
        """Wait for the oldest plan, to be followed by `pop`; by `drop` if that raises."""
        plan, wait, begun_s = self._plans[0]
        result = wait()
        now_s = self._clock()
        seconds = max(0.0, now_s - max(begun_s, self._last_s))
        self._last_s = now_s
        if self.overlap and result.compute_s > seconds:  # it waited for the step before
            result = replace(result, compute_s=seconds)
        return StepEnd(plan, result, seconds)

    def pop(self) -> None:
        """The result of the oldest plan is about to be taken in."""
        self._plans.popleft()

    def rest(self) -> None:
        """Nobody waits for what is under way: the time until somebody does is no step's."""
        self._plans = deque(one._replace(begun_s=math.inf) for one in self._plans)

    def drop(self) -> tuple[list[StepPlan], list[Wait]]:
        """The oldest plan has failed, and all others with it; what is still to be waited for."""
        dropped = list(self._plans)
        self._plans.clear()
        return [one.plan for one in dropped], [one.wait for one in dropped[1:]]

    def discard(self) -> None:
        """Wait for all, whatever they end with: nobody wants their results."""
        while self._plans:
            wait_for([self._plans.popleft().wait])


def wait_for(waits: list[Wait]) -> None:
    """Wait for plans that have failed already, so that the device is quiet."""
    for wait in waits:
        with contextlib.suppress(Exception):
            wait()
