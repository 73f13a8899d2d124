"""Preemption storms: noticed, and answered by keeping more of the pool free when admitting."""

from __future__ import annotations

import sys
from collections import deque
from typing import NamedTuple

from octavo.errors import ConfigError

FIRST_RAISED = 1 / 32
"""The first raised watermark is at least this; each further one is twice the one before."""


class StormChange(NamedTuple):
    """The watermark was changed; shares of the pool."""

    old: float
    new: float
    why: str

    @property
    def is_raise(self) -> bool:
        """Whether more is kept free than before."""
        return self.new > self.old


class StormWatch:
    """Weighs preemptions against progress, and moves the admission watermark.

    The rule: sequences leave the running ones by ending or by being preempted. Of the last
    `window` that left, half or more were preempted: that is a storm, admission lets in what
    cannot stay, and the watermark goes up one level. One eighth or fewer, or no preemption in
    `calm_steps` steps: it is calm, and the watermark goes down one level. Every change begins a
    new window, so that its effect is seen before the next one.

    Why this one: the line is strictly in order, so who was preempted comes back only into room
    that others left by ending. Preemptions per end therefore say how often a sequence is admitted
    in vain, whatever the lengths, the speed of the steps, and the mode of preemption; tokens per
    step would say something else under swapping, for long prompts, or on another device.

    Why a cap of an eighth: what is kept free serves nobody. In simulated overload (outputs of
    equal, uniform and exponential lengths) the time until all have ended is least between 1/16
    and 1/8; at 1/4 the smaller batches cost more than the preemptions did.

    Raising cannot hold up anybody for ever: the watermark protects those who run, and an idle
    pool is given whole.
    """

    def __init__(
        self, watermark: float, *, cap: float = 0.125, window: int = 16, calm_steps: int = 256
    ) -> None:
        """`watermark` is the normal one; it is never raised above `cap` (nor above itself, if it
        is larger than that). Raises `ConfigError` for a `cap` that is no share of the pool."""
        if not 0 <= cap < 1:
            raise ConfigError(f"max_watermark must be at least 0 and below 1, got {cap}")
        assert 0 <= watermark < 1, f"watermark {watermark}"
        assert window >= 1 and calm_steps >= 1, f"window {window}, calm_steps {calm_steps}"
        self._levels = [watermark]
        while self._levels[-1] < cap:
            self._levels.append(min(max(2 * self._levels[-1], FIRST_RAISED), cap))
        self._level = 0
        self._calm_steps = calm_steps
        self._left: deque[bool] = deque(maxlen=window)
        """Of each of the last sequences that left the running ones: was it preempted?"""
        self._num_calm_steps = 0
        """Steps in a row without a preemption."""

    @property
    def watermark(self) -> float:
        """The share of the pool that admitting leaves free, as of now."""
        return self._levels[self._level]

    @property
    def max_watermark(self) -> float:
        """The highest that it can become."""
        return self._levels[-1]

    def step(self, num_preempted: int, num_ended: int) -> StormChange | None:
        """Count what left in one step: sequences preempted, sequences ended (aborts too).

        To be called once a step. A change takes effect from the next admission on.
        """
        left = self._left
        left.extend([True] * num_preempted)
        left.extend([False] * num_ended)
        self._num_calm_steps = 0 if num_preempted else self._num_calm_steps + 1
        if num_preempted:
            if len(left) == left.maxlen and 2 * sum(left) >= len(left):
                return self._move(1, self._tally())
        elif self._level:
            if self._num_calm_steps >= self._calm_steps:
                return self._move(-1, f"no preemption in {self._num_calm_steps} steps")
            if len(left) == left.maxlen and 8 * sum(left) <= len(left):
                return self._move(-1, self._tally())
        return None

    def most_quiet_steps(self, num_ended: int) -> int:
        """How many steps without a preemption would change nothing, if in the first of them so many
        sequences ended and afterwards none."""
        if not self._level:
            return sys.maxsize
        left = [*self._left, *[False] * num_ended][-(self._left.maxlen or 0) :]
        if len(left) == self._left.maxlen and 8 * sum(left) <= len(left):
            return 0
        return self._calm_steps - self._num_calm_steps - 1

    def quiet_steps(self, num_steps: int) -> None:
        """Count steps in which nobody left."""
        self._num_calm_steps += num_steps

    def reset(self) -> StormChange | None:
        """Nobody is left, neither running nor in line: back to normal at once."""
        return self._move(-self._level, "no request is left") if self._level else None

    def _tally(self) -> str:
        return (
            f"{sum(self._left)} of the last {len(self._left)} sequences that stopped running "
            "were preempted"
        )

    def _move(self, by: int, what: str) -> StormChange | None:
        old = self.watermark
        self._level = min(self._level + by, len(self._levels) - 1)
        self._left.clear()
        self._num_calm_steps = 0
        if self.watermark == old:
            return None  # at the cap
        why = f"{what}: admission keeps {self.watermark:.1%} of the pool free, was {old:.1%}"
        return StormChange(old, self.watermark, why)
