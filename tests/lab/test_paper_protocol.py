"""How the paper's figures are measured."""

from __future__ import annotations

import math
from functools import partial

import pytest

from octavo.lab.config import SimConfig
from octavo.lab.costs import FixedCosts
from octavo.lab.paper.protocol import (
    Curve,
    Length,
    Point,
    measure,
    measure_pool,
    normalised_latency,
    pool_means,
)
from octavo.lab.paper.workloads import Lengths, Plain
from octavo.lab.results import PoolSample, RequestTimes
from octavo.lab.simulator import simulate


def _times(*rows: tuple[float, float, int]) -> RequestTimes:
    times = RequestTimes()
    for arrival_s, finished_s, num_output in rows:
        times.arrival_s.append(arrival_s)
        times.finished_s.append(finished_s)
        times.num_output.append(num_output)
    return times


def test_normalised_latency_is_a_mean_over_requests_after_the_warm_up() -> None:
    times = _times((10, 1000, 1), (60, 64, 4), (70, 100, 10))
    assert normalised_latency(times) == pytest.approx((1 + 3) / 2)
    assert normalised_latency(times, warm_up_s=65) == pytest.approx(3)
    assert math.isnan(normalised_latency(_times((1, 2, 3))))


def test_traces_have_an_hour_or_as_many_requests_as_are_needed() -> None:
    length = Length(max_s=3600, min_s=600, num_requests=6000)
    assert [length.of(rate) for rate in (0.1, 2.0, 4.0, 30.0)] == [3600, 3000, 1500, 600]


class _Steep:
    """Latency of a queue: 0.04 s at rest, without end towards rate 2."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def __call__(self, rate: float) -> Point:
        self.asked.append(rate)
        return Point(rate, 0.04 / (1 - rate / 2) if rate < 2 else 50 * (rate - 1.9), 100, True)


CROSSING = 2 * (1 - 0.04 / 0.5)


@pytest.mark.parametrize("guess", [0.1, 0.7, 1.7, 9.0])
def test_a_rate_is_read_off_on_the_line_between_two_of_the_papers(guess: float) -> None:
    steep = _Steep()
    curve = Curve(steep)
    low, high = steep(1.5).latency_s, steep(2.0).latency_s
    expected = 1.5 + 0.5 * (0.5 - low) / (high - low)
    assert curve.read_off((0.5, 1.0, 1.5, 2.0), guess) == pytest.approx(expected)
    assert [p.rate for p in curve.points] == sorted(p.rate for p in curve.points)


@pytest.mark.parametrize("grid", [(0.5, 0.75), (1.0, 1.5), (2.5, 4.0), (4.0, 4.5, 5.0)])
def test_a_grid_that_misses_the_crossing_goes_on(grid: tuple[float, ...]) -> None:
    found = Curve(_Steep()).read_off(grid, grid[0])
    assert found == pytest.approx(CROSSING, rel=0.25)


def test_each_rate_is_measured_once_and_the_search_comes_close() -> None:
    steep = _Steep()
    curve = Curve(steep)
    curve.read_off((0.5, 1.0, 1.5, 2.0, 2.5), 1.2)
    assert curve.search() == pytest.approx(CROSSING, rel=0.015)
    assert len(set(steep.asked)) == len(steep.asked)


def test_nothing_is_found_where_nothing_crosses() -> None:
    for latency_s in (0.03, 3.0):
        curve = Curve(partial(Point, latency_s=latency_s, num_requests=100, is_complete=True))
        assert curve.read_off((1.0, 2.0), 1.5) is None
        assert curve.search() is None
        assert 0.2 < min(p.rate for p in curve.points) <= max(p.rate for p in curve.points) < 11


CONFIG = SimConfig(num_blocks=64, max_num_seqs=64, max_num_batched_tokens=512)
SOURCE = Plain(Lengths("alpaca", [(20, 30), (10, 60), (40, 15)], "made up"))
LENGTH = Length(max_s=200.0, min_s=200.0)


def test_a_measured_point_is_the_mean_of_its_run() -> None:
    costs = FixedCosts(0.02, 1e-4)
    point = measure(SOURCE, 2.0, CONFIG, costs, LENGTH)
    times = simulate(SOURCE.requests(2.0, 200.0), CONFIG, costs).times
    assert point.is_complete
    assert point.latency_s == pytest.approx(normalised_latency(times))
    assert point.num_requests == len(times)


def test_a_hopeless_run_is_ended_with_less_than_its_latency() -> None:
    costs = FixedCosts(0.2, 1e-2)
    whole = measure(SOURCE, 20.0, CONFIG, costs, LENGTH, hopeless_s=math.inf)
    ended = measure(SOURCE, 20.0, CONFIG, costs, LENGTH, hopeless_s=3.0)
    assert whole.is_complete and not ended.is_complete
    assert 3.0 < ended.latency_s < whole.latency_s


def _sample(time_s: float, **values: int) -> PoolSample:
    zero = dict.fromkeys(PoolSample._fields, 0)
    return PoolSample(**(zero | {"time_s": time_s} | values))  # type: ignore[arg-type]


def test_means_over_time_are_shares_of_the_pool() -> None:
    samples = [
        _sample(0, free=100, num_running=9),
        _sample(10, tokens=60, reserved=20, external=10, free=5, cached=5, num_running=3,
                logical=200, saved=100),
        _sample(20, tokens=80, internal=20, num_running=5, logical=200, saved=150),
        _sample(30, free=100),
    ]  # fmt: skip
    means = pool_means(samples, 5, 25)
    assert means[:5] == pytest.approx((70, 10, 10, 10, 4))
    assert sum(means[:4]) == pytest.approx(100)
    assert means.saved == pytest.approx(62.5)  # mean of 50 and 75


def test_the_pool_is_looked_at_in_the_span_alone() -> None:
    costs = FixedCosts(0.02, 1e-4)
    means, samples = measure_pool(
        SOURCE, 2.0, CONFIG, costs, from_s=50, until_s=100, settle_s=20, sample_s=5.0
    )
    assert max(s.time_s for s in samples) <= 100
    assert means == pool_means(samples, 50, 100)
    assert means.num_running > 0 and means.saved == 0
