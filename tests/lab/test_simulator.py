"""The simulator: clocks, arrivals, sessions, batches, samples, metrics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.errors import ConfigError, OctavoError, TraceError
from octavo.kv.manager import KVCacheManager
from octavo.lab.config import SimConfig
from octavo.lab.costs import FixedCosts, StepShape
from octavo.lab.feed import Feed
from octavo.lab.sampling import MAX_SAMPLES, PoolSampler
from octavo.lab.simulator import Simulation, simulate
from octavo.lab.summary import Summary
from octavo.lab.trace import TraceRequest
from octavo.lab.window import Window, pool_means

CONFIG = SimConfig(num_blocks=100, block_size=4, max_model_len=200, watermark=0.0)
ONE_S = FixedCosts(1.0, 0.0, 0.0)
"""Every step takes a second."""


class TokenCosts:
    """Seconds by what a step computes, so that a test can tell."""

    name = "test"

    def step_s(self, shape: StepShape) -> float:
        prefill = shape.num_prefill_tokens + 0.001 * shape.prefill_context
        return prefill + 100.0 * shape.num_decodes + 0.01 * shape.decode_context

    def copy_s(self, num_host_blocks: int) -> float:
        return 0.0


def request(
    num_input: int, num_output: int, arrival_s: float | None = None, **fields: Any
) -> TraceRequest:
    return TraceRequest(num_input=num_input, num_output=num_output, arrival_s=arrival_s, **fields)


def test_times_of_one_request() -> None:
    result = simulate([request(8, 5, 2.5)], CONFIG, ONE_S)
    times = result.times
    assert (times.arrival_s[0], times.first_token_s[0], times.finished_s[0]) == (2.5, 3.5, 7.5)
    assert (result.num_steps, result.num_tokens_computed, result.busy_s) == (5, 8 + 4, 5.0)
    assert result.end_s == 7.5
    assert times.ttft_s()[0] == times.tpot_s()[0] == times.normalized_s()[0] == 1.0


def test_nobody_is_lost_and_nothing_is_counted_twice() -> None:
    requests = [request(1 + i % 9, 1 + 5 * i % 40, 0.7 * i) for i in range(60)]
    result = simulate(iter(requests), CONFIG, FixedCosts(0.1, 1e-3))
    assert result.num_requests == len(result.times) == 60
    assert result.num_output_tokens == sum(r.num_output for r in requests)
    assert result.num_input_tokens == sum(r.num_input for r in requests)
    assert sorted(result.times.arrival_s) == [r.arrival_s for r in requests]


def test_what_can_never_fit_is_refused_and_the_rest_goes_on() -> None:
    result = simulate([request(8, 500, 0.0), request(8, 2, 0.0)], CONFIG, ONE_S)
    assert (result.num_requests, result.num_refused, len(result.times)) == (2, 1, 1)
    assert "max_model_len 200" in result.refusals[0]


def test_the_clock_stops_while_requests_are_there() -> None:
    result = simulate([request(8, 50, 0.0), request(8, 5, 100.0)], CONFIG, ONE_S, until_s=10.5)
    assert result.num_requests == 1 and not len(result.times)
    assert result.end_s == 11.0 and result.num_steps == 11


def test_a_closed_loop_keeps_so_many_there() -> None:
    requests = [request(4, 3) for _ in range(7)]
    result = simulate(requests, CONFIG, ONE_S, concurrency=2)
    assert list(result.times.arrival_s) == [0.0, 0.0, 3.0, 3.0, 6.0, 6.0, 9.0]
    assert result.end_s == 12.0


@pytest.mark.parametrize("stride", [False, True])
@pytest.mark.parametrize("router", ["round-robin", "least-loaded"])
def test_in_a_closed_loop_of_replicas_each_comes_at_the_end_of_another(
    router: str, stride: bool
) -> None:
    """Whichever replica that was, and however far the clocks of the others are."""
    config = CONFIG.replace(num_replicas=3, router=router, max_num_seqs=4, stride=stride)
    lengths = itertools.product((1, 5, 150), (1, 3, 40))
    requests = [request(*pair) for pair in itertools.islice(itertools.cycle(lengths), 120)]
    costs = FixedCosts(0.03, 3e-4)
    result = simulate(requests, config, costs, concurrency=5, sample_s=1e9)
    times = result.times
    assert sorted(times.arrival_s) == [0.0] * 5 + sorted(times.finished_s)[:-5]
    assert min(times.ttft_s()) >= 0.0303 - 1e-9


def test_in_a_closed_loop_a_conversation_goes_on_before_a_new_one_begins() -> None:
    """One seat: b, and then c, take it while a thinks."""
    requests = [
        request(4, 2, session="a"),
        request(4, 3, session="a", think_s=4.0),
        request(4, 1, session="b"),
        request(4, 6, session="c"),
        request(4, 9, session="d"),
    ]
    times = simulate(requests, CONFIG, ONE_S, concurrency=1).times
    assert list(zip(times.num_output, times.arrival_s, strict=True)) == [
        (2, 0.0), (1, 2.0), (6, 3.0), (3, 9.0), (9, 12.0),
    ]  # fmt: skip


def test_a_refused_request_leaves_its_seat_at_once() -> None:
    requests = [request(4, 3), request(4, 500), request(4, 5)]
    result = simulate(requests, CONFIG, ONE_S, concurrency=1)
    assert list(result.times.arrival_s) == [0.0, 3.0] and result.num_refused == 1


def test_a_session_goes_on_when_its_last_request_has_ended() -> None:
    requests = [
        request(4, 3, 0.0, session="a"),
        request(4, 2, 0.1, session="a", think_s=10.0),
        request(4, 1, 0.2, session="a", think_s=5.0),
        request(4, 30, 1.0),
    ]
    times = simulate(requests, CONFIG, ONE_S).times
    by_length = dict(zip(times.num_output, times.arrival_s, strict=True))
    assert by_length[3] == 0.0 and by_length[30] == 1.0
    ends = dict(zip(times.num_output, times.finished_s, strict=True))
    assert by_length[2] == ends[3] + 10.0
    assert by_length[1] == ends[2] + 5.0


def test_feed_reads_no_more_than_it_must() -> None:
    read = []

    def source() -> Iterator[TraceRequest]:
        for index in range(100):
            read.append(index)
            yield request(4, 1, float(index))

    feed = Feed(source())
    assert feed.next_s == 0.0
    feed.pop()
    assert len(read) == 2


def test_feed_reacts_only_to_those_whom_somebody_waits_for() -> None:
    """And it keeps no more of an ended session than the time."""
    requests = [request(4, 1, float(i), session=str(i)) for i in range(50)]
    requests.append(request(4, 1, 50.0, session="49", think_s=7.0))
    requests.append(request(4, 1, 51.0, session="3", think_s=90.0))
    feed = Feed(requests)
    for index in range(49):
        assert not feed.is_reactive
        one, arrival_s = feed.pop()
        assert (one.session, arrival_s) == (str(index), index)
        feed.ended(one, arrival_s + 0.5)
    assert not feed._sessions
    last, _ = feed.pop()
    assert feed.is_reactive and feed.next_s == 3.5 + 90.0, "who ended long ago still counts"
    feed.ended(last, 60.0)
    assert not feed.is_reactive and feed.next_s == 67.0
    assert [feed.pop()[1] for _ in range(2)] == [67.0, 93.5]


def test_who_goes_on_comes_after_those_in_front_of_him() -> None:
    """He thinks for a second, but nobody knows of him before the second one has come."""
    requests = [
        request(4, 1, 0.0, session="a"),
        request(4, 5, 20.0),
        request(4, 2, 30.0, session="a", think_s=1.0),
    ]
    times = simulate(requests, CONFIG, ONE_S).times
    by_length = dict(zip(times.num_output, times.arrival_s, strict=True))
    assert by_length == {1: 0.0, 5: 20.0, 2: 20.0}


@pytest.mark.parametrize(
    ("requests", "changes", "options", "error", "says"),
    [
        ([], {}, {"concurrency": 0}, ConfigError, "--concurrency must be at least 1, got 0"),
        ([], {}, {"concurrency": -1}, ConfigError, "got -1"),
        ([], {"num_replicas": 0}, {}, ConfigError, "--num-replicas must be at least 1, got 0"),
        ([], {"router": "random"}, {}, ConfigError, "round-robin, least-loaded.*got 'random'"),
        ([], {}, {"until_s": math.nan}, ConfigError, "--until must be.*got nan"),
        ([], {}, {"sample_s": -1.0}, ConfigError, "--sample-interval must be.*got -1"),
        ([request(4, 0)], {}, {}, TraceError, "request 1 has 4 prompt .* and 0 output"),
        ([request(0, 4)], {}, {}, TraceError, "request 1 has 0 prompt"),
        ([request(4, 4, math.nan)], {}, {}, TraceError, "request 1 has arrival_s=nan"),
        ([request(4, 4, -2.0)], {}, {}, TraceError, "arrival_s=-2"),
        ([request(4, 4, think_s=-1.0)], {}, {}, TraceError, "think_s=-1"),
        (
            [request(4, 4, 3.0), request(4, 4, 2.5)], {}, {}, TraceError,
            "request 2 comes at 2.5 s, the one before it at 3 s: sort",
        ),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(
    requests: list[TraceRequest],
    changes: dict[str, Any],
    options: dict[str, Any],
    error: type[OctavoError],
    says: str,
) -> None:
    with pytest.raises(error, match=says):
        simulate(requests, CONFIG.replace(**changes), ONE_S, **options)


def test_prefix_hits_follow_hash_ids() -> None:
    config = CONFIG.replace(enable_prefix_caching=True)
    requests = [
        request(17, 2, 0.0, hash_ids=(1, 2)),
        request(17, 2, 50.0, hash_ids=(1, 2)),
        request(17, 2, 99.0, hash_ids=(1, 3)),
    ]
    result = simulate(requests, config, ONE_S, block_tokens=8)
    assert list(result.times.num_cached) == [0, 16, 8]
    assert result.num_cached_tokens / result.num_prompt_tokens == 24 / 51


def test_a_long_line_costs_no_decision() -> None:
    """Behind so many, requests wait outside of the scheduler."""
    config = CONFIG.replace(max_num_seqs=2)
    requests = [request(4, 3, 0.0) for _ in range(300)]
    simulation = Simulation(requests, config, ONE_S)
    end_s = simulation.run()
    result = simulation.result(end_s, 0.0)
    assert end_s == 450.0 and len(result.times) == 300
    assert result.samples[0].num_waiting == 298


def test_counts_are_of_those_who_have_ended() -> None:
    """The second has found its prompt's beginning, and runs when the clock stops."""
    config = CONFIG.replace(enable_prefix_caching=True)
    requests = [
        request(17, 2, 0.0, hash_ids=(1, 2)),
        request(17, 50, 9.0, hash_ids=(1, 2)),
    ]
    result = simulate(requests, config, ONE_S, block_tokens=8, until_s=20.0)
    assert (result.num_requests, result.num_prompt_tokens, result.num_cached_tokens) == (2, 17, 0)


def test_padded_batches_take_what_their_longest_takes() -> None:
    """Two join, the third comes too late: it waits for the batch, and computes alone."""
    config = CONFIG.replace(kv_policy="contiguous", region_tokens=100, max_model_len=100)
    requests = [request(10, 3, 0.0), request(30, 6, 0.0), request(5, 2, 1.0)]
    for stride in (True, False):
        result = simulate(requests, config.replace(stride=stride), TokenCosts())
        first = 60 + 0.001 * 2 * (30 * 31 // 2)
        decodes = sum(200 + 0.01 * 2 * (30 + i) for i in range(1, 6))
        end_s = first + decodes
        alone = 5 + 0.001 * 15 + 100 + 0.01 * 6
        assert list(result.times.finished_s) == pytest.approx([end_s, end_s, end_s + alone])
        assert list(result.times.first_token_s) == list(result.times.finished_s)


@pytest.mark.parametrize("policy", ["orca-max", "orca-pow2", "orca-oracle", "contiguous", "paged"])
def test_terms_of_samples_add_up(policy: str) -> None:
    config = CONFIG.replace(kv_policy=policy, max_model_len=64)
    requests = [request(3 + i % 11, 1 + 7 * i % 50, 2.0 * i) for i in range(40)]
    result = simulate(requests, config, ONE_S, sample_s=3.0)
    assert len(result.samples) > 20
    for one in result.samples:
        terms = (one.tokens, one.reserved, one.internal, one.external, one.cached, one.free)
        assert min(terms) >= 0 and sum(terms) == 400
    means = pool_means(result.samples, Window(start_s=0.0, end_s=result.end_s))
    assert means["tokens"] > 0
    assert (means["internal"] > 40) == (policy not in ("orca-oracle", "paged"))


def test_samples_are_bounded_where_no_interval_is_asked_for() -> None:
    simulation = Simulation([request(8, 5, 0.0)], CONFIG, ONE_S)
    (replica,) = simulation.replicas
    sampler = PoolSampler()
    for index in range(3 * MAX_SAMPLES):
        if index >= sampler.next_s:
            sampler.look(float(index), replica.kv, 0)
    samples = sampler.samples(3.0 * MAX_SAMPLES)
    assert MAX_SAMPLES / 2 <= len(samples) <= MAX_SAMPLES
    lasts = [one.lasts_s for one in samples]
    assert sum(lasts) == 3 * MAX_SAMPLES and min(lasts[:-1]) >= 4 and max(lasts) <= 8
    gaps = [later.time_s - one.time_s for one, later in itertools.pairwise(samples)]
    assert lasts[:-1] == gaps, "without idle time each stands until the next"


@pytest.mark.parametrize("sample_s", [None, 0.5, 2.0, 30.0])
@pytest.mark.parametrize("policy", ["paged", "contiguous"])
def test_idle_time_counts(sample_s: float | None, policy: str) -> None:
    """One request every 20 s, which takes 1.61 s of them: whatever the spacing of the samples."""
    config = CONFIG.replace(kv_policy=policy, max_model_len=64)
    requests = [request(8, 7, 20.0 * i) for i in range(100)]
    result = simulate(requests, config, FixedCosts(0.23, 0.0), sample_s=sample_s, until_s=2000.0)
    means = pool_means(result.samples, Window(start_s=0.0, end_s=result.end_s))
    assert result.end_s == pytest.approx(1981.61)
    assert sum(one.lasts_s for one in result.samples) == pytest.approx(result.end_s)
    assert means["num_running"] == pytest.approx(100 * 1.61 / 1981.61, rel=0.01)
    assert means["num_held"] == means["num_running"]
    assert 0.6 < means["tokens"] / (11 * means["num_running"]) < 1.4, "8 to 14 of them"


def test_replicas_weigh_the_same() -> None:
    """One has all the work, the other is idle: half a sequence in each."""
    requests = [request(8, 10, 0.0)]
    config = CONFIG.replace(num_replicas=2)
    result = simulate(requests, config, ONE_S, sample_s=1.0)
    means = pool_means(result.samples, Window(start_s=0.0, end_s=result.end_s))
    assert means["num_running"] == pytest.approx(0.5)


@pytest.mark.parametrize("sample_s", [None, 0.2])
def test_uneven_replicas_have_the_mean_of_all(sample_s: float | None) -> None:
    """One of three serves long ones, one short ones, one is idle for most of the time."""
    lengths = (90, 20, 2)
    requests = [request(8, lengths[i % 3], 0.2 * i) for i in range(300)]
    config = CONFIG.replace(num_replicas=3, num_blocks=10_000)
    result = simulate(requests, config, FixedCosts(0.01, 0.0), sample_s=sample_s)
    means = pool_means(result.samples, Window(start_s=0.0, end_s=result.end_s))
    expected = result.times.e2e_s().sum() / (3 * result.end_s)
    assert means["num_running"] == pytest.approx(expected, rel=0.03)
    assert sum(one.lasts_s for one in result.samples) == pytest.approx(3 * result.end_s)


def test_members_of_a_batch_that_have_ended_do_not_run() -> None:
    config = CONFIG.replace(kv_policy="contiguous", max_model_len=64)
    result = simulate([request(8, 2, 0.0), request(8, 8, 0.0)], config, ONE_S, sample_s=1.0)
    assert [(one.num_running, one.num_held) for one in result.samples] == [(2, 2)] * 2 + [
        (1, 2)
    ] * 6
    means = pool_means(result.samples, Window(start_s=0.0, end_s=8.0))
    assert (means["num_running"], means["num_held"]) == (1.25, 2.0)


@pytest.mark.parametrize("policy", ["orca-max", "orca-oracle", "contiguous", "paged"])
def test_samples_are_what_the_live_ledger_settles_on(policy: str) -> None:
    """Reserved is what prompt and true output come to, less what is filled: the last token, which
    is drawn and never computed, among it."""
    config = CONFIG.replace(
        kv_policy=policy, max_model_len=64, stride=False, num_blocks=10, block_size=16
    )
    simulation = Simulation([request(5, 4, 0.0)], config, ONE_S, sample_s=0.0)
    (replica,) = simulation.replicas
    history = replica.kv.keep_history()
    look = replica.sampler.look

    def look_twice(now_s: float, kv: KVCacheManager, num_waiting: int) -> None:
        look(now_s, kv, num_waiting)
        history.sample(now_s, num_waiting)

    replica.sampler.look = look_twice  # type: ignore[method-assign]
    samples = simulation.result(simulation.run(), 0.0).samples
    settled = history.samples()
    assert [one.tokens for one in samples] == [5, 6, 7, 8]
    assert [one.reserved for one in samples] == [4, 3, 2, 1]
    for sample, known in zip(samples, settled, strict=True):
        assert (sample.tokens, sample.reserved, sample.internal) == (
            known.tokens, known.reserved, known.internal,
        )  # fmt: skip


def test_summary() -> None:
    """The second comes behind the warm-up: 21 tokens, a second each."""
    requests = [request(8, 11, 0.0), request(8, 21, 100.0)]
    result = simulate(requests, CONFIG, ONE_S, sample_s=1.0)
    summary = Summary.of(result, CONFIG, 60.0)
    assert (summary.num_finished, summary.num_measured) == (2, 1)
    assert summary.e2e_s is not None and summary.e2e_s.p50 == summary.e2e_s.max == 21.0
    assert summary.normalized_s is not None and summary.normalized_s.mean == 1.0
    assert summary.tpot_s is not None and summary.tpot_s.p99 == 1.0
    assert summary.output_tokens_per_s == pytest.approx(32 / 121)
    assert (summary.window.start_s, summary.window.end_s) == pytest.approx((100 / 3, 100.0))
    assert sum(summary.memory.values()) == pytest.approx(1.0)
    assert Summary.of(result, CONFIG, 200.0).e2e_s is None


def test_recorded_tokens_can_be_fed() -> None:
    """What the first request generates is what the second one's prompt goes on with."""
    config = CONFIG.replace(enable_prefix_caching=True)
    requests = [
        request(8, 9, 0.0, hash_ids=(1, 2)),
        request(17, 1, 50.0, hash_ids=(1, 2, 3, 3)),
    ]
    asked = []

    def tokens(seq_id: int, position: int) -> int:
        asked.append((seq_id, position))
        return 3 * 3  # of id 3

    simulation = Simulation(requests, config, ONE_S, block_tokens=4, tokens=tokens)
    (replica,) = simulation.replicas
    result = simulation.result(simulation.run(), 0.0)
    assert replica.num_strides == 0
    assert asked == [(0, position) for position in range(8, 17)] + [(1, 17)]
    assert list(result.times.num_cached) == [0, 16]
