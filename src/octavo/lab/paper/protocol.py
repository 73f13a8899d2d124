"""How the paper measures: normalised latency, the rate it allows, and means over time."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from octavo.lab.config import SimConfig
from octavo.lab.costs import StepCosts
from octavo.lab.paper.workloads import Source
from octavo.lab.results import PoolSample, RequestTimes
from octavo.lab.simulator import simulate
from octavo.lab.trace import TraceRequest

THRESHOLD_S = 0.5
"""Seconds a token: a system sustains the rates at which its normalised latency is below."""
WARM_UP_S = 60.0
"""Requests that come before are served but not counted."""
_HOPELESS_S = 20.0
"""Normalised latency above which a run is ended early."""
_NEVER_S = 1e9


class Point(NamedTuple):
    """A point of a curve of latency against rate."""

    rate: float
    """Requests a second."""
    latency_s: float
    """Normalised latency, seconds a token; of a run that was ended early, at least that."""
    num_requests: int
    is_complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long a run is: as in the paper, but not more requests than are needed."""

    max_s: float = 3600.0
    min_s: float = 180.0
    num_requests: int = 3000
    """Shorter than `max_s`, down to `min_s`, when more would come."""

    def of(self, rate: float) -> float:
        """Seconds at a rate, whole ones."""
        return float(round(min(self.max_s, max(self.min_s, self.num_requests / rate))))


class _Overloaded(Exception):
    """Ends a run of which enough is known."""

    def __init__(self, latency_s: float) -> None:
        super().__init__(latency_s)
        self.latency_s = latency_s


def measure(
    source: Source,
    rate: float,
    config: SimConfig,
    costs: StepCosts,
    length: Length,
    hopeless_s: float = _HOPELESS_S,
) -> Point:
    """Serve a workload at a rate until all of it is done.

    `hopeless_s`: the run is ended when the mean latency is sure to exceed it.
    """
    requests = source.requests(rate, length.of(rate))
    watch = _Watch(requests, hopeless_s).look
    try:
        result = simulate(requests, config, costs, sample_s=_NEVER_S, progress=watch)
    except _Overloaded as found:
        return Point(rate, found.latency_s, len(requests), False)
    return Point(rate, normalised_latency(result.times), len(requests), True)


def normalised_latency(times: RequestTimes, warm_up_s: float = WARM_UP_S) -> float:
    """Mean over requests of (end - arrival) / output length, in seconds a token; NaN of none."""
    arrival = np.asarray(times.arrival_s)
    counted = arrival >= warm_up_s
    if not counted.any():
        return math.nan
    latency = (np.asarray(times.finished_s) - arrival) / np.asarray(times.num_output)
    return float(latency[counted].mean())


class _Watch:
    """Looks on, and ends a run in which those who wait have waited too long already.

    Who ends first is not known here, so the oldest are taken to have: what the youngest have
    waited is the least that all who are still there can have.
    """

    def __init__(self, requests: Sequence[TraceRequest], limit_s: float) -> None:
        self._arrival = np.array([r.arrival_s for r in requests])
        inverse = np.array([1.0 / r.num_output for r in requests])
        inverse[self._arrival < WARM_UP_S] = 0.0
        self._weight = np.concatenate(([0.0], np.cumsum(inverse)))
        self._moment = np.concatenate(([0.0], np.cumsum(inverse * self._arrival)))
        self._num = max(1, int((self._arrival >= WARM_UP_S).sum()))
        self._limit_s = limit_s

    def look(self, num_ended: int, now_s: float) -> None:
        """Raises `_Overloaded`."""
        here = int(np.searchsorted(self._arrival, now_s, side="right"))
        weight = self._weight[here] - self._weight[min(num_ended, here)]
        moment = self._moment[here] - self._moment[min(num_ended, here)]
        at_least = float(now_s * weight - moment) / self._num
        if at_least > self._limit_s:
            raise _Overloaded(at_least)


class Crossing(NamedTuple):
    """Where a curve crosses the threshold."""

    rate: float | None
    """Requests a second, read off as in the paper's figures; None: not found near its rates."""
    searched: float | None
    """The same, searched to 1-3 %; None: not searched."""
    points: tuple[Point, ...]
    """All that were measured, by rate."""


_CLOSE = 1.03
_MAX_POINTS = 8


class Curve:
    """Latency against rate; measures each rate once."""

    def __init__(
        self, latency_at: Callable[[float], Point], threshold_s: float = THRESHOLD_S
    ) -> None:
        self._latency_at, self._threshold_s = latency_at, threshold_s
        self._points: dict[float, Point] = {}

    @property
    def points(self) -> tuple[Point, ...]:
        """All that were measured, by rate."""
        return tuple(self._points[rate] for rate in sorted(self._points))

    def at(self, rate: float) -> Point:
        """A point of it."""
        if rate not in self._points:
            self._points[rate] = self._latency_at(rate)
        return self._points[rate]

    def sustains(self, rate: float) -> bool:
        """Whether latency is below the threshold."""
        return self.at(rate).latency_s < self._threshold_s

    def read_off(self, grid: Sequence[float], guess: float) -> float | None:
        """Where the straight line between two rates of a grid crosses the threshold.

        Looked for from the `guess` up or down. Beyond its ends the grid goes on in steps of a
        fourth, to four times the last rate and a fourth of the first. None: not there either.
        """
        rates = list(grid)
        high = min(max(1, bisect.bisect_right(rates, guess)), len(rates) - 1)
        while self.sustains(rates[high]):
            high += 1
            if high == len(rates):
                if rates[-1] > 4 * grid[-1]:
                    return None
                rates.append(rates[-1] * 1.25)
        low = high - 1
        while not self.sustains(rates[low]):
            low -= 1
            if low < 0:
                if rates[0] < grid[0] / 4:
                    return None
                rates.insert(0, rates[0] / 1.25)
                low = 0
        first, last = self.at(rates[low]), self.at(rates[low + 1])
        part = (self._threshold_s - first.latency_s) / (last.latency_s - first.latency_s)
        return first.rate + part * (last.rate - first.rate)

    def search(self) -> float | None:
        """Where it crosses, between points that are there: until they are 3 % apart, then on a
        straight line over the logarithm of latency."""
        found = None
        for _ in range(_MAX_POINTS):
            below = [p for p in self.points if self.sustains(p.rate)]
            above = [p for p in self.points if below and p.rate > below[-1].rate]
            if not above:
                return None
            low, high = below[-1], above[0]
            part = math.log(self._threshold_s / low.latency_s)
            part /= math.log(high.latency_s / low.latency_s)
            found = low.rate + part * (high.rate - low.rate)
            if high.rate / low.rate < _CLOSE:
                break
            inside = min(0.8, max(0.2, part))  # so that both ends come closer
            self.at(low.rate + inside * (high.rate - low.rate))
        return found


class PoolMeans(NamedTuple):
    """Means over time, in per cent of the pool's slots, and the sequences in it."""

    tokens: float
    reserved: float
    internal: float
    external: float
    """Free, cached and lost to rounding or fragmentation: all the rest, as in the paper."""
    num_running: float
    saved: float
    """Per cent of the blocks that sharing saves: mean of 1 - physical / logical."""


def pool_means(samples: Sequence[PoolSample], from_s: float, until_s: float) -> PoolMeans:
    """Over the samples of a span of time. There must be one."""
    seen = [s for s in samples if from_s <= s.time_s <= until_s]
    assert seen, f"no sample of the pool between {from_s} and {until_s} s"
    rows = np.array(
        [
            (s.tokens, s.reserved, s.internal, s.external + s.free + s.cached, s.num_running)
            for s in seen
        ],
        dtype=np.float64,
    )
    num_slots = rows[0, :4].sum()
    shares = 100 * rows[:, :4].mean(axis=0) / num_slots
    ratios = [s.saved / s.logical for s in seen if s.logical]
    saved = 100 * float(np.mean(ratios)) if ratios else 0.0
    tokens, reserved, internal, external = (float(value) for value in shares)
    return PoolMeans(tokens, reserved, internal, external, float(rows[:, 4].mean()), saved)


def measure_pool(
    source: Source,
    rate: float,
    config: SimConfig,
    costs: StepCosts,
    *,
    from_s: float,
    until_s: float,
    settle_s: float = 0.0,
    sample_s: float = 1.0,
) -> tuple[PoolMeans, list[PoolSample]]:
    """Serve a workload that comes until `until_s`, and look at the pool from `from_s` on.

    The run goes on for `settle_s`, so that it is known of those in the pool at the end what they
    came to need.
    """
    requests = source.requests(rate, until_s)
    result = simulate(requests, config, costs, until_s=until_s + settle_s, sample_s=sample_s)
    seen = [s for s in result.samples if s.time_s <= until_s]
    return pool_means(seen, from_s, until_s), seen
