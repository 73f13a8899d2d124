"""Rates that systems sustain: tasks that find them, and rows and plots made of the results."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from octavo.config import KVPolicy
from octavo.lab.config import SimConfig
from octavo.lab.costs import StepCosts
from octavo.lab.paper import reference
from octavo.lab.paper.figure import Line, LinePlot, Row, Task
from octavo.lab.paper.protocol import (
    THRESHOLD_S,
    Crossing,
    Curve,
    Length,
    Point,
    measure,
)
from octavo.lab.paper.systems import (
    TITLES,
    Model,
    paper_costs,
    system_config,
    trace_s,
)
from octavo.lab.paper.workloads import Source

RATE = "req/s at 0.5 s/token"
_RATE_AXIS = "request rate [req/s]"
_LATENCY_AXIS = "normalised latency [s/token]"
_SHOWN_S = 2 * THRESHOLD_S
"""Latencies that are drawn."""
LONG = Length()
SHORT = Length(max_s=600.0, min_s=120.0, num_requests=1000)
"""Of requests with many sequences, and of very many requests."""
PaperPoints = tuple[tuple[float, float], ...]
"""(requests a second, s/token)."""
_HOW = (
    "Poisson arrivals of the artifact's recipe, output lengths as in the list, requests of the "
    "first 60 s not counted, everything served to its end; mean over requests of latency over "
    "output length. The rate at which it crosses 0.5 s/token is read off as from the paper's "
    "figures: on the straight line between two of the rates that were measured there. A trace has "
    "an hour as in the paper (175B: 15 minutes) but at high rates only {num:,} requests, and at "
    "least {least:.0f} s"
)


def how(length: Length = LONG) -> str:
    """How rates are found, for the report."""
    return _HOW.format(num=length.num_requests, least=length.min_s)


def sustained_rate(
    source: Source,
    config: SimConfig,
    costs: StepCosts,
    length: Length,
    grid: Sequence[float],
    guess: float,
    first: Sequence[float] = (),
    search: bool = False,
) -> Crossing:
    """The rate at which a system's normalised latency crosses the threshold: the paper's `grid`,
    looked through from the `guess`. `first`: rates to measure anyway. `search`: find it more
    closely than the grid tells."""

    def latency_at(rate: float) -> Point:
        return measure(source, rate, config, costs, length)

    curve = Curve(latency_at)
    for rate in first:
        curve.at(rate)
    found = curve.read_off(grid, guess)
    return Crossing(found, curve.search() if search else None, curve.points)


def search_task(
    key: str,
    source: Source,
    policy: KVPolicy,
    grid: Sequence[float],
    guess: float,
    *,
    model: Model = "13b",
    dataset: str = "alpaca",
    first: Sequence[float] = (),
    search: bool = False,
    length: Length | None = None,
    costs: StepCosts | None = None,
    weight: float = 1.0,
    **changes: Any,
) -> Task:
    """A task that finds a rate."""
    config = system_config(policy, model, dataset, **changes)
    run = partial(
        sustained_rate,
        source,
        config,
        costs or paper_costs(policy, model),
        length or dataclasses.replace(LONG, max_s=trace_s(model)),
        grid,
        guess,
        first or (grid[0] / 2,),
        search,
    )
    return Task(key, run, weight * max(2.0, guess))


def curve_line(name: str, found: Crossing) -> Line:
    """What is worth drawing: a first point beyond the range shows where the curve goes."""
    inside = [(p.rate, p.latency_s) for p in found.points if p.latency_s <= _SHOWN_S]
    outside = [(p.rate, p.latency_s) for p in found.points if p.latency_s > _SHOWN_S]
    return Line(name, [*inside, *outside[:1]])


def rate_plot(
    title: str,
    found: Mapping[KVPolicy, Crossing],
    paper: Mapping[KVPolicy, float],
    points: Mapping[KVPolicy, PaperPoints] | None = None,
) -> LinePlot:
    """Curves, up to twice the threshold, and what the paper has: its `points` of a system if they
    are known, else where its curve crosses the threshold, at the rate in `paper`."""
    lines = []
    for policy, crossing in found.items():
        name = TITLES[policy]
        seen = (points or {}).get(policy, ((paper[policy], THRESHOLD_S),))
        lines += [curve_line(name, crossing), Line(name, seen, is_paper=True)]
    return LinePlot(title, lines, _RATE_AXIS, _LATENCY_AXIS, y_range=(0.0, _SHOWN_S))


def ratio(over: float | None, under: float | None) -> float | None:
    """None where one of them was not found."""
    return over / under if over is not None and under else None


def rate_rows(
    figure: str,
    series: str,
    paper: Mapping[KVPolicy, float],
    here: Mapping[KVPolicy, float | None],
) -> Iterable[Row]:
    """The rates of several systems."""
    for policy, rate in paper.items():
        yield reference.share(rate, reference.RATE_SHARE).row(
            figure, f"{series}, {TITLES[policy]}", RATE, here[policy]
        )


def ratio_row(
    figure: str,
    series: str,
    expected: reference.Expected,
    here: Mapping[KVPolicy, float | None],
    other: KVPolicy,
    quantity: str = "ratio of rates",
) -> Row:
    """How many times as much paging serves as another system. `series`: empty, or whose rates."""
    name = f"{TITLES['paged']} / {TITLES[other]}"
    if series:
        name = f"{series}, {name}"
    return expected.row(figure, name, quantity, ratio(here["paged"], here[other]))
