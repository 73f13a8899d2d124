"""Plots of the lab: curves, time series, distributions and bars that are readable without colour.

Every function returns a matplotlib `Figure` of its own and touches no state of pyplot; `save` and
`svg_text` (plots_style.py) write it. Legends stand below the axes, never on data. Labels carry
the units. Without matplotlib all raise `ConfigError`; `require_matplotlib` asks before long work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.lab.plots_style import (
    BLACK,
    BLUE,
    INK,
    Limit,
    Look,
    finish,
    look_of,
    new_figure,
    plain_ticks,
    require_matplotlib,
    save,
    styled,
    svg_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Curve",
    "Limit",
    "Look",
    "cdfs",
    "curves",
    "grouped_bars",
    "look_of",
    "require_matplotlib",
    "save",
    "stacked_bars",
    "svg_text",
    "time_series",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a plot."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    look: Look | None = None
    """None: by name (a policy's own), or by place."""
    points_only: bool = False
    """Hollow markers without a line: somebody else's measurements beside ours."""


@styled
def curves(
    lines: Sequence[Curve],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    y_range: tuple[float, float] | None = None,
    limits: Sequence[Limit] = (),
    x_ticks: Sequence[float] | None = None,
) -> Figure:
    """Values over a few points of x, with a marker at each: latency against rate, block size.

    `x_ticks`: label just these, as plain numbers (for block sizes on a log axis). Labels carry
    the units.
    """
    figure = new_figure()
    axes = figure.subplots()
    for index, line in enumerate(lines):
        look = line.look or look_of(line.name, index)
        hollow: dict[str, Any] = {"markerfacecolor": "white", "markeredgewidth": 1.8}
        axes.plot(
            line.xs,
            line.ys,
            label=line.name,
            color=look.colour,
            marker=look.marker,
            linestyle="none" if line.points_only else look.dash,
            **(hollow if line.points_only else {}),
        )
    _scale(axes, log_x, log_y, y_range, x_ticks)
    finish(figure, axes, title, x_label, y_label, limits)
    return figure


@styled
def time_series(
    lines: Sequence[Curve],
    *,
    title: str,
    y_label: str,
    x_label: str = "time [s]",
) -> Figure:
    """Values that hold until the next one, over many points of time; a few markers a line."""
    figure = new_figure()
    axes = figure.subplots()
    for index, line in enumerate(lines):
        look = line.look or look_of(line.name, index)
        every = max(1, len(line.xs) // 8)
        axes.plot(
            line.xs,
            line.ys,
            label=line.name,
            color=look.colour,
            marker=look.marker,
            markevery=(index * every // max(1, len(lines)), every),
            linestyle=look.dash,
            linewidth=1.6,
            drawstyle="steps-post",
        )
    axes.set_ylim(0, None)
    axes.margins(x=0.01)
    finish(figure, axes, title, x_label, y_label)
    return figure


@styled
def cdfs(
    values: Mapping[str, Sequence[float]],
    *,
    title: str,
    x_label: str,
    log_x: bool = False,
) -> Figure:
    """The share of values at or below x, by name. Empty lists are left out; on a log axis values
    of 0 stand at its left end."""
    import numpy as np

    figure = new_figure()
    axes = figure.subplots()
    for index, (name, found) in enumerate(values.items()):
        if not len(found):
            continue
        look = look_of(name, index)
        xs = np.sort(np.asarray(found, dtype=float))
        shares = np.arange(1, len(xs) + 1) / len(xs)
        if len(xs) > 2000:  # a picture has no more points than that
            keep = np.unique(np.linspace(0, len(xs) - 1, 2000).astype(int))
            xs, shares = xs[keep], shares[keep]
        axes.plot(
            np.concatenate((xs[:1], xs)),
            100 * np.concatenate(([0.0], shares)),
            label=name,
            color=look.colour,
            linestyle=look.dash,
            marker=look.marker,
            markevery=max(1, len(xs) // 6),
            drawstyle="steps-post",
        )
    if log_x and any(max(found, default=0) > 0 for found in values.values()):
        axes.set_xscale("log", nonpositive="clip")
        plain_ticks(axes.xaxis)
    axes.set_ylim(0, 102)
    finish(figure, axes, title, x_label, "share of requests at or below [%]")
    return figure


@styled
def stacked_bars(
    bars: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    y_label: str,
    marks: Mapping[str, Sequence[float]] | None = None,
    y_range: tuple[float, float] | None = None,
) -> Figure:
    """One bar a name, made of its kinds from the bottom up: {bar: {kind: value}}.

    All bars have their kinds in the order of the first. `marks`: heights at which a bar is crossed
    by a black line with a diamond, where the paper's borders are ({bar: (after the first kind,
    after the second, ...)}). Segments that have room for it bear their value.
    """
    figure = new_figure()
    axes = figure.subplots()
    names = list(bars)
    top = max((sum(parts.values()) for parts in bars.values()), default=1.0) or 1.0
    bottoms = [0.0] * len(names)
    for index, kind in enumerate(dict.fromkeys(k for parts in bars.values() for k in parts)):
        look = look_of(kind, index)
        heights = [bars[name].get(kind, 0.0) for name in names]
        axes.bar(
            range(len(names)), heights, 0.62, bottom=bottoms, label=kind, color=look.colour,
            hatch=look.hatch, edgecolor=INK, linewidth=0.8,
        )  # fmt: skip
        for place, height in enumerate(heights):
            if height >= 0.045 * top:
                _inside(axes, place, bottoms[place] + height / 2, f"{height:.1f}", look)
            bottoms[place] += height
    borders = [(names.index(name), y) for name, ys in (marks or {}).items() for y in ys]
    for number, (place, height) in enumerate(borders):
        axes.plot(
            (place - 0.38, place + 0.38), (height, height), color=BLACK, marker="D",
            markersize=5.5, linewidth=1.8, label=None if number else "paper",
        )  # fmt: skip
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(*(y_range or (0, top * 1.02)))
    axes.grid(False, axis="x")
    finish(figure, axes, title, "", y_label)
    return figure


@styled
def grouped_bars(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    y_label: str,
) -> Figure:
    """Bars beside each other in groups, such as `paper` and `here`: a value of each of `series`
    for each of `groups`, None where there is none; over the bars."""
    figure = new_figure(width=max(8.0, 0.55 * len(groups) * len(series) + 2.0))
    axes = figure.subplots()
    width = 0.8 / max(1, len(series))
    for index, (name, values) in enumerate(series.items()):
        look = look_of(name, index)
        places = [g + (index - (len(series) - 1) / 2) * width for g in range(len(groups))]
        there = [(p, v) for p, v in zip(places, values, strict=True) if v is not None]
        drawn = axes.bar(
            [p for p, _ in there], [v for _, v in there], width * 0.94, label=name,
            color=look.colour, hatch=look.hatch, edgecolor=INK, linewidth=0.8,
        )  # fmt: skip
        axes.bar_label(drawn, [f"{v:.3g}" for _, v in there], padding=2, fontsize=10)
    axes.margins(y=0.12)
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(False, axis="x")
    finish(figure, axes, title, "", y_label)
    return figure


def _scale(
    axes: Axes,
    log_x: bool,
    log_y: bool,
    y_range: tuple[float, float] | None,
    x_ticks: Sequence[float] | None,
) -> None:
    for is_log, name in ((log_x, "x"), (log_y, "y")):
        if is_log:
            getattr(axes, f"set_{name}scale")("log")
            plain_ticks(getattr(axes, f"{name}axis"))
    if x_ticks is not None:
        from matplotlib.ticker import NullLocator

        axes.set_xticks(x_ticks, [f"{tick:g}" for tick in x_ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    if y_range is not None or not log_y:
        axes.set_ylim(*(y_range or (0, None)))


def _inside(axes: Axes, x: float, y: float, text: str, look: Look) -> None:
    """A value in a segment: white on dark, else ink on a white plate that hides the hatch."""
    dark = look.colour in (BLUE, BLACK) and not look.hatch
    plate = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    axes.text(
        x, y, text, ha="center", va="center", fontsize=10.5, color="white" if dark else INK,
        bbox=None if dark else plate,
    )  # fmt: skip
