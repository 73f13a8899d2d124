"""What it costs to bring a preempted sequence back: by measured speeds, copied or computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import combinations
from typing import Literal, NamedTuple

RestoreMode = Literal["recompute", "swap"]

_WINDOW = 15
"""Measurements kept for each power of two of the size."""
_LEAST_RANGE = 4
"""Sizes tell a slope when the largest is so many times the smallest..."""
_LEAST_SPREAD = 32
"""...and larger by so much; of smaller differences the noise is larger than what they cost."""
_LEAST_SHARE = 1 / 16
"""Of the time for each unit at the best size, the slope is at least this much."""


class Comparison(NamedTuple):
    """The two ways to bring a sequence back. Times in seconds."""

    num_tokens: int
    """Tokens to compute again; none of those that others keep in the pool."""
    num_blocks: int
    """Blocks to copy to the host now, and back later."""
    token_s: float
    """Of one token."""
    block_s: float
    """Of one block in one direction."""

    @property
    def recompute_s(self) -> float:
        """Seconds to compute the tokens again."""
        return self.num_tokens * self.token_s

    @property
    def swap_s(self) -> float:
        """Seconds to copy the blocks out and in."""
        return 2 * self.num_blocks * self.block_s

    @property
    def mode(self) -> RestoreMode:
        """The cheaper one; recompute if they are equal, as it needs no host memory."""
        return "swap" if self.swap_s < self.recompute_s else "recompute"

    @property
    def recompute_phrase(self) -> str:
        """`recompute 180 tokens x 0.4 ms = 72 ms`."""
        return (
            f"recompute {self.num_tokens} tokens x {_human_s(self.token_s)} "
            f"= {_human_s(self.recompute_s)}"
        )

    @property
    def swap_phrase(self) -> str:
        """`swap 12 blocks out and in = 24 x 0.08 ms = 1.9 ms`."""
        return (
            f"swap {self.num_blocks} blocks out and in = {2 * self.num_blocks} x "
            f"{_human_s(self.block_s)} = {_human_s(self.swap_s)}"
        )

    def __str__(self) -> str:
        if self.mode == "swap":
            return f"{self.swap_phrase} < {self.recompute_phrase}"
        return f"{self.recompute_phrase} <= {self.swap_phrase}"


class CostModel:
    """Seconds per recomputed token and per copied block, learned from what steps took.

    The same measurements in the same order give the same answers. Until the first measurement of
    a kind its prior holds.
    """

    def __init__(self, *, token_s: float = 1e-3, block_s: float = 1e-4) -> None:
        """`token_s` and `block_s` are priors: what can be guessed from the model's and the
        block's size."""
        self._token_s = token_s
        self._block_s = block_s
        self._steps = _Timings()
        self._copies = _Timings()

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed that many tokens, of decodes and of prompts, in that time; host and
        disk copies not counted."""
        self._steps.add(num_tokens, seconds)

    def observe_alike(self, num_tokens: int, seconds: Sequence[float]) -> None:
        """Steps of that many tokens each, in that time each, one after the other: what comes of
        `observe_step` for each of them, as far as it is remembered."""
        for one in seconds[-_WINDOW:]:
            self._steps.add(num_tokens, one)

    def observe_copies(self, num_blocks: int, seconds: float) -> None:
        """That many blocks were copied to or from the host in that time, one after another."""
        self._copies.add(num_blocks, seconds)

    @property
    def token_s(self) -> float:
        """Seconds that one more token adds to a step.

        Not a step's time per token: weights are read in every step, whatever its size, and a
        sequence that is computed again shares steps with those that decode. Attention over what
        came before is in it only as far as it was in the steps observed.
        """
        return self._steps.marginal_s(self._token_s) if self._steps else self._token_s

    @property
    def block_s(self) -> float:
        """Seconds to copy one block in one direction."""
        return self._copies.average_s if self._copies else self._block_s

    def compare(self, num_tokens: int, num_blocks: int) -> Comparison:
        """Both ways to bring back a sequence of which `num_tokens` would have to be computed
        again, or `num_blocks` copied out and in.

        Whether recomputing will find some tokens in a cache is not known when the choice is made
        (the pool is full, so likely not): they count as lost.
        """
        return Comparison(num_tokens, num_blocks, self.token_s, self.block_s)


class _Timings:
    """How long jobs of various sizes took, where some took far longer than they needed to.

    The last few are kept for each power of two of the size. So thousands of small steps do not
    push out what the few large ones told, without which the slope would not be known. Medians
    throughout: a neighbour that steals the processor now and then changes nothing.
    """

    def __init__(self) -> None:
        self._by_magnitude: dict[int, deque[tuple[int, float]]] = {}
        self._average_s: float | None = None
        self._marginal_s: float | None = None
        """Both worked out once for all questions between two additions."""

    def __bool__(self) -> bool:
        return bool(self._by_magnitude)

    def add(self, size: int, seconds: float) -> None:
        """One job. Sizes below 1 and negative times say nothing."""
        if size < 1 or seconds < 0:
            return
        magnitude = size.bit_length()
        window = self._by_magnitude.get(magnitude)
        if window is None:
            window = self._by_magnitude[magnitude] = deque(maxlen=_WINDOW)
        window.append((size, seconds))
        self._average_s = self._marginal_s = None

    @property
    def average_s(self) -> float:
        """Seconds for each unit of size, fixed costs included: the median over sizes, in which a
        size weighs as much as it is large."""
        if self._average_s is None:
            self._average_s = _weighted_median([(s / n, n) for n, s in self._points()])
        return self._average_s

    def marginal_s(self, prior_s: float) -> float:
        """Seconds that one more unit of size adds: the median of the slopes between sizes, each
        weighing as much as the two are apart (Theil and Sen's estimator, weighted).

        At most the least seconds for each unit seen at any size, as fixed costs are not negative;
        and never nothing, as a machine that computes for free does not exist. While the sizes are
        too much alike to tell, `prior_s` within the same bounds.
        """
        if self._marginal_s is None:
            points = self._points()
            most = min(s / n for n, s in points)
            smallest, largest = points[0][0], points[-1][0]
            slope = prior_s
            if largest >= max(_LEAST_RANGE * smallest, smallest + _LEAST_SPREAD):
                slopes = [((t - s) / (m - n), m - n) for (n, s), (m, t) in combinations(points, 2)]
                slope = _weighted_median(slopes)
            self._marginal_s = min(most, max(slope, most * _LEAST_SHARE))
        return self._marginal_s

    def _points(self) -> list[tuple[int, float]]:
        """For each power of two the job of median speed, as (size, seconds), by size."""
        points = []
        for _, window in sorted(self._by_magnitude.items()):
            by_speed = sorted(window, key=lambda job: job[1] / job[0])
            points.append(by_speed[(len(by_speed) - 1) // 2])
        return points


def _weighted_median(values: list[tuple[float, int]]) -> float:
    """The lower median of (value, weight > 0) pairs, at least one."""
    half = sum(weight for _, weight in values) / 2
    reached = 0
    for value, weight in sorted(values):
        reached += weight
        if reached >= half:
            return value
    raise AssertionError("a median of nothing")


def _human_s(seconds: float) -> str:
    """`0.0019` -> `1.9 ms`."""
    if seconds >= 1:
        return f"{seconds:,.1f} s"
    milli = 1000 * seconds
    if milli >= 10:
        return f"{milli:.0f} ms"
    if milli >= 0.01 or seconds == 0:
        return f"{milli:.2g} ms"
    return f"{1000 * milli:.2g} us"
