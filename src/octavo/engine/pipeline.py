"""Plans that were launched and whose results are not here."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from operator import call
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
    """What it took of the time in which somebody drove the engine: see `Pipeline.wait`."""


class Underway:
    """A plan with its place in the queue: launched at most once, waited for at most once.

    Both are one call into C, so that an interrupt comes before or after, and never between what
    was done and its being noted.
    """

    __slots__ = ("_results", "_waits", "begun_s", "plan")

    def __init__(self, plan: StepPlan, begun_s: float) -> None:
        self.plan, self.begun_s = plan, begun_s
        self._waits: list[Wait] = []
        self._results: Iterator[StepResult] = map(call, self._waits)

    @property
    def is_launched(self) -> bool:
        """Whether the runner has taken it."""
        return bool(self._waits)

    def launch(self, launch: Launch) -> None:
        """Give it to the runner; raises what the runner raises."""
        self._waits.extend(map(launch, (self.plan,)))

    def wait(self) -> StepResult | None:
        """Its result; None if it was waited for before, or never launched."""
        return next(self._results, None) if self._waits else None


class Pipeline:
    """A queue of at most two plans with overlap, of one without."""

    def __init__(self, clock: Callable[[], float], *, overlap: bool) -> None:
        self._clock = clock
        self.overlap = overlap
        self._plans: deque[Underway] = deque()
        self._void: deque[Underway] = deque()
        """Given up, and perhaps not waited for yet."""
        self._last_s = -math.inf
        """When the last result came."""

    def __len__(self) -> int:
        """Plans under way whose results are wanted."""
        return len(self._plans)

    @property
    def has_room(self) -> bool:
        """Whether a plan may be launched now."""
        return len(self._plans) < (_DEPTH if self.overlap else 1)

    def reserve(self, plan: StepPlan, begun_s: float) -> Underway:
        """A place for a plan, which is launched next; planning it began at that time."""
        self._plans.append(Underway(plan, begun_s))
        return self._plans[-1]

    def withdraw(self) -> None:
        """The plan reserved last was not launched."""
        assert not self._plans.pop().is_launched

    def wait(self, since_s: float) -> StepEnd:
        """Wait for the oldest plan, to be followed by `pop`; by `drop` if that raises.

        A step takes from the result before it, or from its planning, but no time before `since_s`,
        when the caller came: what lies between two calls is the caller's own.
        """
        one = self._plans[0]
        result = one.wait()
        assert result is not None, f"step {one.plan.step_id} was waited for before"
        now_s = self._clock()
        seconds = max(0.0, now_s - max(one.begun_s, self._last_s, since_s))
        self._last_s = now_s
        return StepEnd(one.plan, result, seconds)

    def pop(self) -> None:
        """The result of the oldest plan is here, and is about to be taken in."""
        self._plans.popleft()

    def drop(self) -> list[StepPlan]:
        """All that are under way are void; `settle` waits for them."""
        plans = [one.plan for one in self._plans]
        self._void.extend(self._plans)
        self._plans.clear()
        return plans

    def settle(self) -> None:
        """Wait for void plans, whatever they end with, so that the device is quiet."""
        while self._void:
            with contextlib.suppress(Exception):
                self._void[0].wait()
            self._void.popleft()

    def discard(self) -> tuple[int, BaseException | None]:
        """Wait for all, as nobody wants their results. (How many are void, from the first that
        failed on; the interrupt that came meanwhile, which does not keep it from waiting.)"""
        num_void, interrupt = 0, None
        self.settle()
        while self._plans:
            try:
                self._plans[0].wait()
            except Exception:
                num_void = num_void or len(self._plans)
            except BaseException as error:
                num_void, interrupt = num_void or len(self._plans), interrupt or error
                continue  # it may have come before the wait
            self._plans.popleft()
        return num_void, interrupt
