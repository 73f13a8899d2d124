"""Running figures, and what is made of the results."""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Mapping
from functools import partial
from multiprocessing import active_children
from typing import Any

import pytest

from octavo.lab.paper.figure import (
    BarPlot,
    FigureResult,
    Line,
    LinePlot,
    Row,
    StackPlot,
    Task,
)
from octavo.lab.paper.reference import Expected, near
from octavo.lab.paper.runner import all_figures, run_figures, tasks_of
from octavo.lab.paper.workloads import Lengths, Workloads
from octavo.lab.report import html_report, number

LISTS = Workloads(
    Lengths("sharegpt", [(30, 20)], "made up"), Lengths("alpaca", [(3, 2)], "made <up>")
)


class Squares:
    """A figure without a simulation."""

    name = "2"

    def tasks(self, workloads: Workloads) -> list[Task]:
        num = len(workloads.sharegpt.pairs)
        return [Task(f"square {i}", partial(operator.pow, i, num + 1), i) for i in range(6)]

    def collect(self, results: Mapping[str, Any]) -> FigureResult:
        values = [results[f"square {i}"] for i in range(6)]
        rows = [near(i * i, 0.5).row("2", f"square {i}", "value", values[i]) for i in range(6)]
        rows.append(near(7, 1).row("2", "<nobody>", "value", 9.5))
        plots = [
            LinePlot("lines", [Line("a", [(1, 1), (2, 4)]), Line("a", [(1, 2)], True)], "x", "y"),
            StackPlot("stack", {"a": {"one": 1.0}}, {"a": [0.5]}, "share [%]"),
            BarPlot("bars", ["g"], {"here": [1.0], "paper": [None]}, "y"),
        ]
        return FigureResult(name="2", title="Squares", rows=rows, plots=plots, why="It is so.")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_results_do_not_depend_on_the_number_of_processes(num_processes: int) -> None:
    told: list[tuple[str, int, int]] = []
    (result,) = run_figures(
        [Squares()],
        LISTS,
        num_processes=num_processes,
        progress=lambda key, done, num: told.append((key, done, num)),
    )
    assert [row.here for row in result.rows[:6]] == [0, 1, 4, 9, 16, 25]
    assert sorted(key for key, _, _ in told) == [f"square {i}" for i in range(6)]
    assert [(done, num) for _, done, num in told] == [(i, 6) for i in range(1, 7)]
    if num_processes == 1:
        assert told[0][0] == "square 5"  # the longest first


class Failing(Squares):
    """One of its tasks fails, another one would take for ever."""

    def tasks(self, workloads: Workloads) -> list[Task]:
        return [Task("forever", partial(time.sleep, 600.0), 9), Task("bad", partial(int, "x"), 1)]


def test_a_failure_ends_what_still_runs() -> None:
    before = set(active_children())
    began = time.monotonic()
    with pytest.raises(ValueError, match="invalid literal"):
        run_figures([Failing()], LISTS, num_processes=2)
    for process in set(active_children()) - before:
        process.join(30)
        assert not process.is_alive()
    assert time.monotonic() - began < 120


def test_tasks_of_all_figures_have_their_own_names() -> None:
    figures = all_figures()
    assert list(figures) == ["2", "12", "13", "14", "15", "16", "17", "18b", "19"]
    num_tasks = 0
    for figure in figures.values():
        keys = [task.key for task in figure.tasks(LISTS)]
        assert len(set(keys)) == len(keys)
        num_tasks += len(keys)
    # block sizes of ShareGPT under recomputation are of two figures
    assert len(tasks_of(list(figures.values()), LISTS)) == num_tasks - 9


def test_a_tolerance_is_that_of_the_side() -> None:
    expected = Expected(1.75, 1.5, 2.7)
    for here, within, tolerance in ((1.55, True, 0.25), (1.45, False, 0.25), (2.6, True, 0.95)):
        row = expected.row("12", "ratio", "x", here)
        assert row.within is within
        assert row.tolerance == pytest.approx(tolerance)
        assert row.difference == pytest.approx(here - 1.75)
    assert Expected(3.0).row("12", "a", "b", 9.0).within is None
    assert near(3.0, 1.0).row("12", "a", "b", None).within is False
    assert list(Row(figure="2", series="s", quantity="q", paper=1.0, here=None,
                    tolerance=None).as_dict()) == [
        "figure", "series", "quantity", "paper", "here", "difference", "tolerance",
    ]  # fmt: skip


def test_the_report_stands_alone() -> None:
    pytest.importorskip("matplotlib")
    results = run_figures([Squares()], LISTS, num_processes=1)
    text = html_report(
        results,
        workloads=[str(LISTS.sharegpt), str(LISTS.alpaca)],
        version="1.2",
        took_s=3.2,
    )
    assert text.count("<svg") == 3
    assert "6 of 7 values agree" in text
    assert "made &lt;up&gt;" in text and "&lt;nobody&gt;" in text
    assert 'class="off"' in text and "It is so." in text
    # nothing is fetched: the only addresses are names of XML namespaces
    assert "<script" not in text and "<link" not in text and "<img" not in text
    loaded = re.findall(r'(?:src|xlink:href|href)="(?!#)([^"]*)"', text)
    assert not loaded


def test_numbers_have_three_figures() -> None:
    values = (0.0998, 30.42, 15728.0, None)
    assert [number(v) for v in values] == ["0.0998", "30.4", "15,728", "-"]
    assert number(0.5, sign=True) == "+0.5"
