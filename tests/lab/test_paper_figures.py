"""What the paper's figures must come out as, on a slice of the synthetic lists, and on the real
ones in the folder that OCTAVO_TRACES names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from octavo.config import KVPolicy
from octavo.lab.paper import reference
from octavo.lab.paper.blocks import (
    best_block,
    crossover,
    latency_at_block_size,
    preemption_ms,
)
from octavo.lab.paper.grids import FIG12_GRIDS
from octavo.lab.paper.pool import SYSTEMS, pool_of
from octavo.lab.paper.protocol import Length, PoolMeans
from octavo.lab.paper.rates import sustained_rate
from octavo.lab.paper.reference import BLOCK_SIZES, FIG2, FIG13, FIG15, KINDS, Expected
from octavo.lab.paper.runner import all_figures
from octavo.lab.paper.systems import num_slots, paper_costs, system_config
from octavo.lab.paper.workloads import Plain, Workloads, find_workloads

MAIN = ("13b", "sharegpt")


@pytest.fixture(scope="module", params=["synthetic", "traces"])
def workloads(request: pytest.FixtureRequest) -> Workloads:
    if request.param == "synthetic":
        return find_workloads(None).first(5000)
    folder = os.environ.get("OCTAVO_TRACES")
    if not folder:
        pytest.skip("OCTAVO_TRACES names no folder with the real lists")
    return find_workloads(Path(folder))


@pytest.fixture(scope="module")
def overloaded(workloads: Workloads) -> Mapping[KVPolicy, PoolMeans]:
    """The pool at 4 requests/s, by policy."""
    source = Plain(workloads.sharegpt)
    return {p: pool_of(source, 4.0, p, settle_s=80) for p in SYSTEMS}


def _agrees(expected: Expected, here: float | None) -> bool:
    row = expected.row("", "", "", here)
    assert row.within is not None, "nothing is claimed"
    return row.within


def test_kinds_of_memory_are_those_of_fig_2(overloaded: Mapping[KVPolicy, PoolMeans]) -> None:
    for policy in SYSTEMS:
        for kind, here in zip(KINDS, overloaded[policy][:4], strict=True):
            assert _agrees(FIG2[policy][kind], here), f"{policy}, {kind}: {here}"
        assert sum(overloaded[policy][:4]) == pytest.approx(100)


def test_batches_are_those_of_fig_13(
    workloads: Workloads, overloaded: Mapping[KVPolicy, PoolMeans]
) -> None:
    # two requests a second and four are the same to the Orcas: more than they can serve
    here = {policy: overloaded[policy].num_running for policy in SYSTEMS[:3]}
    for policy in SYSTEMS[:3]:
        assert _agrees(FIG13["sharegpt"][policy], here[policy]), f"{policy}: {here[policy]}"
    # paged is at the edge of overload, where the order of the lengths decides
    paged = pool_of(Plain(workloads.sharegpt), 2.0, "paged", 300, 900).num_running
    assert paged == pytest.approx(FIG13["sharegpt"]["paged"].paper, rel=0.12)


@pytest.mark.parametrize("policy", SYSTEMS)
def test_batches_of_alpaca_are_those_of_fig_13(workloads: Workloads, policy: KVPolicy) -> None:
    here = pool_of(Plain(workloads.alpaca), 30.0, policy, 60, 180).num_running
    assert _agrees(FIG13["alpaca"][policy], here), here


@pytest.mark.parametrize("kind,width", FIG15)
def test_sharing_saves_what_it_saves_in_fig_15(workloads: Workloads, kind: str, width: int) -> None:
    is_beam = kind == "beam"
    source = Plain(workloads.alpaca, 1 if is_beam else width, width if is_beam else 0)
    here = pool_of(source, 20.0, "paged", 20, 40).saved
    # a short time, early on: samples save a little less while many are young
    expected = FIG15[kind, width].paper
    assert here == pytest.approx(expected, abs=5.0 if is_beam else 0.35 * expected)


def test_ratios_of_rates_are_those_of_fig_12(workloads: Workloads) -> None:
    rates = {}
    for policy in ("contiguous", "orca-max", "orca-oracle", "paged"):
        rates[policy] = sustained_rate(
            Plain(workloads.sharegpt),
            system_config(policy),
            paper_costs(policy),
            Length(max_s=1200.0),
            FIG12_GRIDS[MAIN][policy],
            reference.FIG12[MAIN][policy],
        ).rate
    for other, expected in reference.FIG12_RATIOS.items():
        over, under = rates["paged"], rates[other]
        assert over is not None and under is not None
        assert _agrees(expected, over / under), f"{other}: {rates}"


def test_the_best_block_size_is_that_of_fig_18b(workloads: Workloads) -> None:
    source = Plain(workloads.sharegpt)
    here = {
        size: latency_at_block_size(source, 2.01, size, length=Length(max_s=400))
        for size in (4, 16, 32, 64, 256)
    }
    best = min(here, key=lambda size: here[size])
    assert _agrees(reference.BEST_BLOCK, best), here
    assert here[4] > here[best] < here[256]


def test_computing_again_and_swapping_cross_where_they_do_in_fig_19a() -> None:
    recompute = [preemption_ms("recompute", size) for size in BLOCK_SIZES]
    swap = [preemption_ms("swap", size) for size in BLOCK_SIZES]
    at = crossover(recompute, swap)
    assert at is not None and 16 <= at <= 64
    assert recompute == pytest.approx(reference.FIG19A["recompute"], rel=0.1)
    assert swap == pytest.approx(reference.FIG19A["swap"], rel=0.1)


def test_crossover_and_best_block_by_hand() -> None:
    nine = [5.0, 4, 3, 2, 1, 2, 3, 4, 5]
    assert best_block(nine) == 16
    assert crossover([10.0] * 9, [40, 30, 20, 15, 12, 8, 7, 6, 5]) == pytest.approx(16 * 2**0.5)
    assert crossover([10.0] * 9, [20.0] * 9) is None
    assert crossover([10.0] * 9, [2.0] * 9) is None


def test_systems_are_set_up_as_in_the_artifact() -> None:
    assert num_slots("13b") == 15_728 and num_slots("13b") // 2048 == 7
    paged = system_config("paged")
    assert (paged.num_blocks, paged.block_size) == (983, 16)
    assert (paged.max_num_seqs, paged.max_num_batched_tokens) == (2048, 2560)
    assert not paged.enable_prefix_caching
    batches = {
        (model, dataset): system_config("contiguous", model, dataset).max_batch  # type: ignore[arg-type]
        for model, dataset in reference.FIG12
    }
    assert list(batches.values()) == [5, 2, 24, 14, 8, 80]
    assert system_config("contiguous", "13b", "alpaca").region_tokens == 15_728 // 14
    assert system_config("contiguous", "175b").region_tokens == 2048


def test_steps_take_what_fig_1_has() -> None:
    """Throughput of a batch of 40 is 922 tokens/s, of 4 it is 147."""
    from octavo.lab.costs import StepShape

    costs = paper_costs()
    for batch, tokens_s in ((4, 147), (40, 922)):
        step_s = costs.step_s(StepShape(0, 0, batch, batch * 160, batch))
        assert batch / step_s == pytest.approx(tokens_s, rel=0.1)


def test_every_figure_says_how_and_why() -> None:
    """Of what was measured, and of what differs; `collect` is given made-up results."""
    figures = all_figures()
    two = figures["2"].collect({f"2/{p}": PoolMeans(25, 25, 25, 25, 7, 0) for p in SYSTEMS})
    assert len(two.rows) == 16 and two.protocol and two.why
    fifteen = figures["15"].collect(
        {f"15/{kind}/{width}": PoolMeans(0, 0, 0, 0, 0, 9.0) for kind, width in FIG15}
    )
    assert [row.within for row in fifteen.rows] == [False, True, True, False, False, False]
    nineteen = figures["19"].collect(
        {f"19a/{mode}/{size}": ms for mode, ms in (("recompute", 40.0), ("swap", 50.0))
         for size in BLOCK_SIZES}
        | {f"blocks/sharegpt/{mode}/{size}": 0.1 for mode in ("recompute", "swap")
           for size in BLOCK_SIZES}
    )  # fmt: skip
    crossing = nineteen.rows[0]
    assert crossing.here is None and crossing.within is False
    assert nineteen.protocol and nineteen.why
