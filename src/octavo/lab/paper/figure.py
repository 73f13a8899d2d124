"""What a figure consists of: independent tasks, and rows and plots made of their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.lab.paper.workloads import Workloads


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work that needs no other one; it can be done in another process."""

    key: str
    """Name: the figure, and what of it. Tasks of one name do the same, for several figures."""
    run: Callable[[], Any]
    """A `functools.partial` of a function of a module: it is pickled."""
    weight: float = 1.0
    """About how long it takes, in any unit: the longest are begun first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison. `difference` and `tolerance` have the quantity's own unit."""

    figure: str
    series: str
    """The system, model, data set or setting that it is of."""
    quantity: str
    """What is compared, with its unit."""
    paper: float
    here: float | None
    """None: not found (a rate at which the latency never crosses the threshold)."""
    tolerance: float | None
    """How far `here` may be away on the side on which it is; None: no agreement is claimed."""

    @property
    def difference(self) -> float | None:
        """`here` - `paper`."""
        return None if self.here is None else self.here - self.paper

    @property
    def within(self) -> bool | None:
        """Whether it agrees; None where that is not claimed."""
        if self.tolerance is None:
            return None
        return self.difference is not None and abs(self.difference) <= self.tolerance + 1e-9

    def as_dict(self) -> dict[str, object]:
        """The keys of `--json`, in their order."""
        return {
            "figure": self.figure,
            "series": self.series,
            "quantity": self.quantity,
            "paper": self.paper,
            "here": self.here,
            "difference": self.difference,
            "tolerance": self.tolerance,
        }


@dataclass(frozen=True, slots=True)
class Line:
    """Points of a plot."""

    name: str
    points: Sequence[tuple[float, float]]
    """(x, y)"""
    is_paper: bool = False
    """They are the paper's, beside ours of the same name."""


@dataclass(frozen=True, slots=True)
class LinePlot:
    """Curves."""

    title: str
    lines: Sequence[Line]
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class StackPlot:
    """Bars of parts, and where the paper has their borders."""

    title: str
    bars: Mapping[str, Mapping[str, float]]
    """Name of the bar -> name of the part -> value."""
    marks: Mapping[str, Sequence[float]]
    """Name of the bar -> the paper's borders."""
    y_label: str


@dataclass(frozen=True, slots=True)
class BarPlot:
    """Groups of bars."""

    title: str
    groups: Sequence[str]
    """Under the bars."""
    series: Mapping[str, Sequence[float | None]]
    """Name -> a value for each group."""
    y_label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureResult:
    """A figure as it came out here."""

    name: str
    title: str
    rows: Sequence[Row]
    plots: Sequence[LinePlot | StackPlot | BarPlot] = ()
    protocol: str = ""
    """How it was measured."""
    why: str = ""
    """Where it differs from the paper, and why."""


class Figure(Protocol):
    """A figure, or several that are made of the same runs."""

    @property
    def name(self) -> str:
        """As on the command line."""
        ...

    def tasks(self, workloads: Workloads) -> list[Task]:
        """What to do."""
        ...

    def collect(self, results: Mapping[str, Any]) -> FigureResult:
        """Compare. `results` has the result of every task, by key."""
        ...
