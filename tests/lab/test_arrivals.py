"""Arrival processes have the rate and burstiness that were asked for; workloads hold them."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import ConfigError, TraceError
from octavo.lab import arrivals
from octavo.lab.lengths import built_in_trace
from octavo.lab.readers import read_trace
from octavo.lab.trace import Trace, TraceRequest
from octavo.lab.workload import load_trace, make_workload


def some(num: int, **values: object) -> list[TraceRequest]:
    return [
        TraceRequest(num_input=i + 1, num_output=1, **values)  # type: ignore[arg-type]
        for i in range(num)
    ]


def timed(*times: float) -> Trace:
    requests = [TraceRequest(num_input=1, num_output=i + 1, arrival_s=t) for i, t in
                enumerate(times)]  # fmt: skip
    return Trace(name="timed", requests=requests)


def times_of(requests: object) -> list[float | None]:
    return [request.arrival_s for request in requests]  # type: ignore[attr-defined]


def gaps(requests: object) -> np.ndarray:
    return np.diff(np.array([0.0, *times_of(requests)], dtype=float))


def test_poisson_has_its_rate_and_no_memory() -> None:
    found = gaps(arrivals.poisson(some(20_000), rate=5.0))
    assert found.min() >= 0
    assert found.mean() == pytest.approx(0.2, rel=0.02)
    assert found.std() / found.mean() == pytest.approx(1.0, abs=0.02)
    assert np.percentile(found, 50) == pytest.approx(0.2 * np.log(2), rel=0.03)


@pytest.mark.parametrize("cv", [0.5, 3.0])
def test_gamma_has_its_rate_and_burstiness(cv: float) -> None:
    found = gaps(arrivals.gamma(some(20_000), rate=5.0, cv=cv))
    assert found.mean() == pytest.approx(0.2, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.05)


def test_processes_are_seeded_and_lazy() -> None:
    endless = arrivals.repeat(some(3))
    stream = arrivals.poisson(endless, rate=1.0, seed=7)
    first = list(itertools.islice(stream, 5))
    assert [r.num_input for r in first] == [1, 2, 3, 1, 2]
    again = itertools.islice(arrivals.poisson(some(5), rate=1.0, seed=7), 5)
    assert times_of(again) == times_of(first)
    assert times_of(first) != times_of(arrivals.poisson(some(5), rate=1.0, seed=8))
    assert times_of(first)[0] == pytest.approx(0.0793769, abs=1e-6)  # the same on every machine


def test_at_once_and_untimed() -> None:
    requests = timed(3.0, 4.0).requests
    assert times_of(arrivals.all_at_once(requests)) == [0.0, 0.0]
    assert times_of(arrivals.untimed(requests)) == [None, None]


def test_an_arrival_process_takes_the_pauses_of_sessions_away() -> None:
    requests = some(2, session="s", think_s=4.0)
    assert [r.think_s for r in arrivals.poisson(requests, 1.0)] == [None, None]
    assert [r.think_s for r in arrivals.at_trace_times(requests, 2.0)] == [8.0, 8.0]


def test_the_papers_recipe_step_by_step() -> None:
    lengths = [TraceRequest(num_input=n, num_output=1) for n in (1, 2, 3000, 3)]
    trace = arrivals.paper_trace(lengths, rate=2.0, duration_s=30.0)
    counts = np.random.RandomState(0).poisson(lam=0.02, size=3000)
    assert len(trace) == counts.sum() and 40 < len(trace) < 80
    assert times_of(trace) == sorted(times_of(trace))
    assert times_of(trace)[0] == pytest.approx(0.01 * np.flatnonzero(counts)[0])
    inputs = [r.num_input for r in trace]
    assert inputs != sorted(inputs) and set(inputs) == {1, 2, 3}
    drawn = [inputs.count(n) for n in (1, 2, 3)]
    assert max(drawn) - min(drawn) <= 1
    with pytest.raises(ConfigError, match="no request of the trace is below 2048 tokens"):
        arrivals.paper_trace(lengths[2:3], rate=2.0, duration_s=30.0)


@pytest.mark.skipif("OCTAVO_TRACES" not in os.environ, reason="OCTAVO_TRACES names no folder")
@pytest.mark.parametrize(
    ("lengths", "trace", "rate", "duration_s"),
    [
        ("sharegpt_opt_lengths", "sharegpt_opt_poisson_2rps_1h", 2.0, 3600.0),
        ("alpaca_fig11_synthetic_lengths", "alpaca_fig11_poisson_20rps_15min", 20.0, 900.0),
    ],
)
def test_the_papers_recipe_gives_the_recorded_traces(
    lengths: str, trace: str, rate: float, duration_s: float
) -> None:
    folder = Path(os.environ["OCTAVO_TRACES"])
    made = arrivals.paper_trace(read_trace(folder / f"{lengths}.csv.gz").requests, rate, duration_s)
    recorded = read_trace(folder / f"{trace}.csv.gz").requests
    assert [(r.num_input, r.num_output) for r in made] == [
        (r.num_input, r.num_output) for r in recorded
    ]
    assert times_of(made) == pytest.approx(times_of(recorded))


def test_a_workload_chooses_its_process_by_what_is_given() -> None:
    lengths, trace = built_in_trace("alpaca", 50), timed(0.5, 2.0, 9.0)
    assert times_of(make_workload(lengths).requests) == [0.0] * 50
    assert times_of(make_workload(trace).requests) == [0.5, 2.0, 9.0]
    assert times_of(make_workload(trace, time_scale=2.0).requests) == [1.0, 4.0, 18.0]
    assert times_of(make_workload(trace, duration=5.0).requests) == [0.5, 2.0]
    poisson = make_workload(trace, rate=3.0, seed=4)
    assert times_of(poisson.requests) == times_of(arrivals.poisson(trace.requests, 3.0, 4))
    assert list(poisson.requests) == list(poisson.requests)  # it can be iterated again
    closed = make_workload(lengths, concurrency=4)
    assert closed.concurrency == 4 and times_of(closed.requests) == [None] * 50
    burst = make_workload(trace, arrival="gamma", rate=3.0, cv=5.0)
    assert times_of(burst.requests) == times_of(arrivals.gamma(trace.requests, 3.0, 5.0))
    paper = make_workload(lengths, arrival="paper", rate=2.0, duration=60.0)
    assert list(paper.requests) == arrivals.paper_trace(lengths.requests, 2.0, 60.0)
    assert (poisson.num_requests, closed.num_requests, paper.num_requests) == (3, 50, None)
    assert [one.arrival for one in (poisson, closed, burst)] == ["poisson", "closed", "gamma"]


def test_a_workload_says_what_comes_how() -> None:
    lengths, trace = built_in_trace("alpaca", 50), timed(0.5, 2.0, 9.0)
    assert make_workload(trace).about.endswith(
        "3 requests at its own times in 9.0 s, 0.333 a second"
    )
    halved = make_workload(trace, time_scale=2.0).about
    assert halved.endswith("3 requests at its own times x 2 in 18.0 s, 0.167 a second")
    cut = make_workload(lengths, rate=2.0, num_requests=50, duration=5.0).about
    assert cut.endswith("of 50 requests by Poisson, 2 a second, those of the first 5 s")
    assert make_workload(lengths, rate=2.0, duration=5.0).about.endswith("2 a second, for 5 s")
    closed = make_workload(lengths, concurrency=4).about
    assert closed.endswith("50 requests in a closed loop of 4")
    long = [TraceRequest(num_input=1000, num_output=1048), TraceRequest(num_input=9, num_output=9)]
    paper = make_workload(
        Trace(name="long", requests=long), arrival="paper", rate=1.0, duration=30.0
    )
    assert "(without 1 of 2,048 tokens or more)" in paper.about
    assert {r.num_tokens for r in paper.requests} == {18}


def test_each_round_of_a_trace_has_its_own_hash_ids() -> None:
    requests = [
        TraceRequest(num_input=16, num_output=1, hash_ids=ids) for ids in ((0, 1), (0, 2), ())
    ]
    rounds = list(arrivals.repeat(requests, 8))
    assert [r.hash_ids for r in rounds] == [
        (0, 1), (0, 2), (), (3, 4), (3, 5), (), (6, 7), (6, 8),
    ]  # fmt: skip


def test_a_workload_repeats_a_short_trace() -> None:
    trace = timed(0.0, 1.0)
    outputs = [r.num_output for r in make_workload(trace, rate=1.0, num_requests=5).requests]
    assert outputs == [1, 2, 1, 2, 1]
    long = make_workload(trace, rate=100.0, duration=10.0)
    assert len(list(long.requests)) == pytest.approx(1000, rel=0.1)


def test_a_workload_says_what_every_request_asks_for() -> None:
    trace = built_in_trace("alpaca", 200)
    (first, *_) = make_workload(trace, n=3).requests
    assert (first.n, first.beam_width) == (3, 0)
    (first, *_) = make_workload(trace, beam_width=4).requests
    assert (first.n, first.beam_width) == (1, 4)
    with_prefix = list(make_workload(trace, shared_prefix_tokens=80).requests)
    assert len({r.prefix for r in with_prefix}) == 1
    assert all(
        (r.num_input, r.prefix_tokens) == (t.num_input + 80, 80)
        for r, t in zip(with_prefix, trace.requests, strict=True)
    )
    priorities = [r.priority for r in make_workload(trace, priorities=(0, 5)).requests]
    assert set(priorities) == {0, 5} and 70 < sum(p == 0 for p in priorities) < 130


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"arrival": "poisson"}, "--arrival poisson needs --rate"),
        ({"arrival": "closed"}, "--arrival closed needs --concurrency"),
        ({"arrival": "paper", "rate": 1.0}, "--arrival paper needs --duration"),
        ({"arrival": "trace"}, "has no times"),
        ({"rate": 1.0, "cv": 2.0}, "--cv does nothing to --arrival poisson"),
        ({"rate": 1.0, "concurrency": 2}, "--concurrency does nothing to --arrival poisson"),
        ({"time_scale": 2.0}, "--time-scale does nothing to --arrival all-at-once"),
        ({"rate": 0.0}, "--rate must be a number above 0, got 0"),
        ({"rate": float("nan")}, "--rate must be a number above 0"),
        ({"concurrency": 0}, "--concurrency must be"),
        ({"n": 0}, "--n must be at least 1"),
        ({"n": 2, "beam_width": 2}, "--n and --beam-width exclude each other"),
        ({"shared_prefix_tokens": -1}, "--shared-prefix-tokens must be at least 0"),
        ({"arrival": "paper", "rate": 1.0, "duration": 9.0, "num_requests": 4}, "--num-requests"),
    ],
)
def test_what_would_do_nothing_is_refused(values: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_workload(built_in_trace("alpaca", 3), **values)  # type: ignore[arg-type]
    assert problem in str(caught.value)


def test_a_trace_at_its_own_times_is_not_repeated() -> None:
    with pytest.raises(ConfigError, match="5 is more than the 2 of timed"):
        make_workload(timed(0.0, 1.0), num_requests=5)


def test_load_trace_takes_names_and_files(tmp_path: Path) -> None:
    assert load_trace("sharegpt", limit=30, seed=2) == built_in_trace("sharegpt", 30, 2)
    assert len(load_trace("alpaca", limit=60_000).requests) == 52_000  # to be repeated
    short = load_trace("sharegpt", limit=300, max_tokens=500)
    assert max(r.num_tokens for r in short.requests) <= 500
    assert len(short.requests) == 300 and short.num_skipped > 50, "so many are left"
    full = built_in_trace("sharegpt").requests[: 300 + short.num_skipped]
    assert list(short.requests) == [r for r in full if r.num_tokens <= 500]
    for option in ({"format": "csv"}, {"skip_bad_lines": True}, {"tokenize": len}):
        with pytest.raises(ConfigError, match="--trace sharegpt is no file"):
            load_trace("sharegpt", **option)  # type: ignore[arg-type]
    for seed in (-1, 2**32):
        with pytest.raises(ConfigError, match="--seed must be from 0 to 4294967295"):
            load_trace("sharegpt", seed=seed)
    with pytest.raises(TraceError, match="--trace is empty"):
        load_trace("")
    path = tmp_path / "x.csv"
    path.write_text("input_tokens,output_tokens\n7,9\n80,2\n")
    assert load_trace(path, limit=1).mean_input == 7
    with pytest.raises(TraceError, match=r"no trace 'sharegtp'.*did you mean sharegpt"):
        load_trace("sharegtp")
    with pytest.raises(ConfigError, match="--num-requests must be at least 1"):
        load_trace("sharegpt", limit=0)


def test_lengths_are_scaled_with_their_blocks(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1030, "output_length": 3, "hash_ids": [1, 2, 3]}'
    )
    trace = load_trace(path, length_scale=0.125)
    (request,) = trace.requests
    assert (trace.block_tokens, request.num_input, request.num_output) == (64, 129, 1)
    with pytest.raises(ConfigError, match=r"hash ids of 51\.2 tokens"):
        load_trace(path, length_scale=0.1)
    with pytest.raises(ConfigError, match="--length-scale 1e\\+07 makes 10,300,000,000 tokens"):
        load_trace(path, length_scale=1e7)
