"""The same requests through each policy: what is compared, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from octavo.config import KVPolicy
from octavo.errors import ConfigError
from octavo.kv.ledger import TERMS
from octavo.lab.compare import Comparison, compare, config_of, rate_at_latency
from octavo.lab.compare_tables import as_dict, tables
from octavo.lab.config import POLICIES, SimConfig
from octavo.lab.costs import FixedCosts
from octavo.lab.lengths import draw_lengths
from octavo.lab.results import PoolSample, RequestTimes, SimResult
from octavo.lab.trace import TraceRequest
from octavo.lab.window import Window, pool_means, window_of

CONFIG = SimConfig(num_blocks=983, max_num_batched_tokens=2560)
"""The pool of the paper's OPT-13B."""
COSTS = FixedCosts(0.026, 4.2e-4)


def sharegpt(num: int) -> Callable[[float | None], Sequence[TraceRequest]]:
    """`num` requests at even distances, or all at once."""
    lengths = draw_lengths("sharegpt", num)

    def at(rate: float | None) -> list[TraceRequest]:
        return [
            TraceRequest(num_input=i, num_output=o, arrival_s=k / rate if rate else 0.0)
            for k, (i, o) in enumerate(lengths)
        ]

    return at


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(
        sharegpt(120), CONFIG, lambda _: COSTS, rates=(0.2, 4.0), workload="120 requests"
    )


def test_every_policy_runs_at_every_rate_and_loses_nothing(found: Comparison) -> None:
    assert found.policies == POLICIES and found.rates == (0.2, 4.0)
    assert [(run.rate, run.policy) for run in found.runs] == [
        (rate, policy) for rate in (0.2, 4.0) for policy in POLICIES
    ]
    for run in found.runs:
        assert run.summary.num_finished == run.summary.num_requests == 120
        assert sum(run.summary.memory.values()) == pytest.approx(1)
        assert run.max_running >= run.summary.mean_running > 0
        is_padded = run.policy == "contiguous"
        assert (run.summary.mean_held > run.summary.mean_running + 0.1) == is_padded
        assert (run.summary.tpot_s is None) == is_padded


def test_under_load_the_order_is_the_papers(found: Comparison) -> None:
    last = found.at_last_rate()
    tokens = [run.summary.memory["tokens"] for run in last]
    assert tokens[0] > 0.75 and tokens == sorted(tokens, reverse=True)
    served = [run.summary.output_tokens_per_s for run in last]
    assert served == sorted(served, reverse=True) and served[0] > 2 * served[3]
    held = {run.policy: run.summary.mean_running for run in last}
    assert held["orca-max"] == pytest.approx(7, abs=0.1), "15,728 slots / 2,048"
    assert held["paged"] > 3.5 * held["orca-max"]


def test_where_memory_is_plenty_policies_are_equal(found: Comparison) -> None:
    light = {run.policy: run.summary.normalized_s for run in found.runs if run.rate == 0.2}
    paged, oracle = light["paged"], light["orca-oracle"]
    assert paged is not None and oracle is not None
    assert paged.mean == pytest.approx(oracle.mean, rel=0.01)


def test_curves_are_of_the_last_rate(found: Comparison) -> None:
    for run in found.at_last_rate():
        series, ttft = found.series[run.policy], run.summary.ttft_s
        assert ttft is not None and series.ttft_s.mean() == pytest.approx(ttft.mean)
        assert len(series.tpot_s) <= len(series.ttft_s) == 120
        assert len(series.samples) > 100


def test_the_text_says_what_was_found(found: Comparison) -> None:
    text = tables(found, bytes_per_token=819_200)
    assert max(map(len, text.splitlines())) <= 120
    assert "120 requests" in text and "983 blocks x 16 tokens = 15,728 slots, 12.0 GiB" in text
    for run in found.runs:
        share = f"{100 * run.summary.memory['tokens']:.1f}"
        assert any(
            line.startswith(run.policy) and f" {run.rate:g} " in line and share in line
            for line in text.splitlines()
        )
    first, second = found.at_last_rate()[:2]
    ratio = first.summary.output_tokens_per_s / second.summary.output_tokens_per_s
    assert f"orca-oracle  {ratio:>6.2f} x the tokens/s" in text


def test_the_dictionary_has_every_run(found: Comparison) -> None:
    values = as_dict(found)
    assert [run["policy"] for run in values["runs"]] == list(POLICIES) * 2
    assert set(values["runs"][0]["memory"]) == set(TERMS)
    limits = values["rate_at_limit"]
    assert limits["paged"] is None and 0.2 < limits["orca-max"] < limits["orca-pow2"] < 4


def test_all_at_once_needs_no_rate() -> None:
    told: list[tuple[KVPolicy, float | None, int, int]] = []
    found = compare(
        sharegpt(40),
        CONFIG,
        lambda _: COSTS,
        policies=("orca-oracle", "paged"),
        tell=lambda *words: told.append(words),
    )
    assert found.rates == (None,)
    assert told[0] == ("orca-oracle", None, 0, 40)
    text = tables(found)
    assert "requests/s at 0.5" not in text and "orca-oracle, against" in text


def test_costs_and_limits_are_those_of_the_policy() -> None:
    config = CONFIG.replace(max_batch=5, max_padded_tokens=2040, enable_prefix_caching=True)
    assert config_of("contiguous", config).max_batch == 5
    assert not config_of("contiguous", config).enable_prefix_caching
    paged = config_of("paged", config)
    assert paged.max_batch is None and paged.enable_prefix_caching
    asked: list[KVPolicy] = []

    def costs_of(policy: KVPolicy) -> FixedCosts:
        asked.append(policy)
        return COSTS

    found = compare(sharegpt(20), config, costs_of, policies=("paged", "contiguous"))
    assert set(asked) == {"paged", "contiguous"}
    assert found.runs[1].max_running <= 5


def test_what_never_fits_is_told() -> None:
    def requests(_: float | None) -> list[TraceRequest]:
        return [TraceRequest(num_input=100, num_output=n) for n in (10, 2000)]

    small = CONFIG.replace(num_blocks=64)
    found = compare(requests, small, lambda _: COSTS, policies=("paged", "orca-oracle"))
    for run in found.runs:
        assert (run.summary.num_refused, run.summary.num_finished) == (1, 1)
    assert "paged: 1 of 2 requests can never fit: " in tables(found)


@pytest.mark.filterwarnings("error")
def test_where_nothing_ends_there_is_nothing_to_divide(tmp_path: Path) -> None:
    def requests(_: float | None) -> list[TraceRequest]:
        return [TraceRequest(num_input=2000, num_output=40, arrival_s=0.0)]

    small = CONFIG.replace(num_blocks=64)
    found = compare(requests, small, lambda _: COSTS, policies=("paged", "orca-max"), rates=(1, 2))
    text = tables(found)
    assert "x the tokens/s" not in text and "0.5 s/token" not in text
    assert as_dict(found)["runs"][0]["ttft_s"] is None
    pytest.importorskip("matplotlib")
    from octavo.lab.plots_compare import draw

    assert {path.stem for path in draw(found, tmp_path)} == {"memory", "batch"}


@pytest.mark.parametrize("policies", [(), ("paged", "paged")])
def test_policies_are_named_once(policies: tuple[KVPolicy, ...]) -> None:
    with pytest.raises(ConfigError, match="--policies must name at least one, each once"):
        compare(sharegpt(1), CONFIG, lambda _: COSTS, policies=policies)


def test_rates_are_read_off_at_a_latency() -> None:
    points = [(3.0, 1.0), (1.0, 0.01), (2.0, 0.1)]
    assert rate_at_latency(points, 0.1) == pytest.approx(2.0)
    assert rate_at_latency(points, 0.316228) == pytest.approx(2.5, abs=1e-4)
    assert rate_at_latency(points, 2.0) is None and rate_at_latency(points, 0.001) is None
    assert rate_at_latency([], 0.5) is None


def sample(time_s: float, tokens: int, lasts_s: float) -> PoolSample:
    return PoolSample(time_s, 1, 0, tokens, 0, 0, 0, 0, 100 - tokens, 0, tokens, 1, lasts_s)


def result(samples: list[PoolSample], times: RequestTimes | None = None) -> SimResult:
    return SimResult(
        num_requests=1, num_refused=0, refusals=(), times=times or RequestTimes(), samples=samples,
        end_s=9.0, num_steps=1, busy_s=9.0, mean_seqs=1.0, num_preemptions=0,
        num_tokens_computed=1, num_input_tokens=1, num_output_tokens=1, num_cached_tokens=0,
        num_prompt_tokens=1, wall_s=0.0,
    )  # fmt: skip


def test_the_window_leaves_out_filling_and_draining() -> None:
    times = RequestTimes()
    for end_s, num_output in ((4.0, 30), (1.0, 20), (3.0, 30), (9.0, 20)):
        times.arrival_s.append(0.0)
        times.finished_s.append(end_s)
        times.num_input.append(0)
        times.num_output.append(num_output)
    run = result([], times)
    assert window_of(run, [0.0, 4.0, 900.0]) == Window(start_s=300.0, end_s=900.0)
    at_once = window_of(run, [0.0, 0.0])
    assert at_once == Window(start_s=3.0, end_s=4.0), "of 20, 50, 80 and 100 tokens"
    assert window_of(result([]), [None, None]) == Window(start_s=0.0, end_s=9.0)


def test_samples_weigh_what_they_last() -> None:
    uneven = [sample(0.0, 10, 1.0), sample(1.0, 20, 3.0), sample(4.0, 90, 6.0)]

    def tokens(start_s: float, end_s: float) -> float:
        return pool_means(uneven, Window(start_s=start_s, end_s=end_s))["tokens"]

    assert tokens(0.0, 10.0) == pytest.approx((10 + 60 + 540) / 10)
    assert tokens(3.0, 5.0) == pytest.approx((20 + 90) / 2)
    assert tokens(100.0, 200.0) == pytest.approx(61), "outside: all of it"
    assert pool_means([], Window(start_s=0, end_s=1))["tokens"] == 0


def test_pictures_are_drawn_of_every_kind(found: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from octavo.lab.plots_compare import draw, figures

    drawn = figures(found)
    assert list(drawn) == ["memory", "batch", "ttft", "tpot", "latency"]
    heights = [patch.get_height() for patch in drawn["memory"].axes[0].patches[: len(POLICIES)]]
    shares = [100 * run.summary.memory["tokens"] for run in found.at_last_rate()]
    assert heights == pytest.approx(shares)
    lines = drawn["latency"].axes[0].get_lines()[:5]
    assert [list(line.get_xdata()) for line in lines] == [[0.2, 4.0]] * 5
    cut_s = drawn["batch"].axes[0].get_lines()[-1].get_xdata()[-1]
    lasted_s = max(run.summary.simulated_s for run in found.at_last_rate())
    assert cut_s < 2 * 120 / 4.0 < lasted_s
    remark = f"cut here, the last run ended at {lasted_s:,.0f} s"
    assert remark in drawn["batch"].axes[0].get_xlabel()
    spread = drawn["tpot"].axes[0]
    assert len(spread.get_lines()) == 4 and "contiguous: all come at once" in spread.get_xlabel()
    paths = draw(found, tmp_path)
    assert len(paths) == 10 and all(path.stat().st_size > 5000 for path in paths)
