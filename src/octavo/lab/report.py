"""The paper's figures as one HTML file: tables, plots as SVG, and why what differs. No scripts, and
nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from octavo.lab.paper.figure import BarPlot, FigureResult, LinePlot, Row, StackPlot
from octavo.lab.paper.systems import SYSTEMS, TITLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2em auto;
  max-width: 62em; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.25em; margin-top: 2.2em; }
table { border-collapse: collapse; font-size: 0.9em; margin: 1em 0; }
th, td { padding: 0.15em 0.8em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
td.off { font-weight: bold; background: #fff1d6; }
svg { max-width: 100%; height: auto; display: block; margin: 1em 0; }
details { margin: 0.8em 0; } summary { cursor: pointer; }
p.why { border-left: 4px solid #888; padding-left: 1em; }
"""


def html_report(
    results: Sequence[FigureResult], *, workloads: Iterable[str], version: str, took_s: float
) -> str:
    """The whole page. `workloads` says what lengths were used. Raises `ConfigError` without
    matplotlib."""
    rows = [row for result in results for row in result.rows]
    claimed = [row for row in rows if row.within is not None]
    num_within = sum(row.within is True for row in claimed)
    parts = [
        "<h1>The figures of the PagedAttention paper, simulated</h1>",
        "<p>Kwon et al., Efficient Memory Management for Large Language Model Serving with "
        "PagedAttention, SOSP 2023. Decisions are those of octavo's scheduler and memory manager; "
        "what a step takes is a cost model of the paper's machines. "
        f"{num_within} of {len(claimed)} values agree within their tolerances; for "
        f"{len(rows) - len(claimed)} more no agreement is claimed.</p>",
        "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in workloads) + "</ul>",
        f"<p>octavo {escape(version)}; it took {took_s:.0f} s.</p>",
        "<ul>"
        + "".join(
            f'<li><a href="#fig-{escape(r.name)}">{escape(r.title)}</a>{_summary(r.rows)}</li>'
            for r in results
        )
        + "</ul>",
    ]
    parts += [_section(result) for result in results]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        "<title>PagedAttention paper, simulated</title>\n"
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def _summary(rows: Sequence[Row]) -> str:
    off = sum(row.within is False for row in rows)
    return f": {off} outside the tolerance" if off else ""


def _section(result: FigureResult) -> str:
    pictures = "\n".join(
        _svg(plot, f"f{result.name}-{index}") for index, plot in enumerate(result.plots)
    )
    parts = [f'<h2 id="fig-{escape(result.name)}">{escape(result.title)}</h2>']
    if result.protocol:
        parts.append(f"<p>{escape(result.protocol)}</p>")
    parts.append(pictures)
    table = _table(result.rows)
    if len(result.rows) > 24:
        count = f"{len(result.rows)} values{_summary(result.rows)}"
        table = f"<details><summary>{count}</summary>{table}</details>"
    parts.append(table)
    if result.why:
        parts.append(f'<p class="why">Where it differs: {escape(result.why)}</p>')
    return "\n".join(parts)


def _table(rows: Sequence[Row]) -> str:
    head = "".join(
        f"<th>{name}</th>"
        for name in ("series", "quantity", "paper", "here", "difference", "tolerance")
    )
    lines = [f"<tr>{head}</tr>"]
    for row in rows:
        mark = ' class="off" title="outside the tolerance"' if row.within is False else ""
        lines.append(
            f"<tr><td>{escape(row.series)}</td><td>{escape(row.quantity)}</td>"
            f"<td>{number(row.paper)}</td><td{mark}>{number(row.here)}</td>"
            f"<td>{number(row.difference, sign=True)}</td><td>{number(row.tolerance)}</td></tr>"
        )
    return "<table>" + "\n".join(lines) + "</table>"


def number(value: float | None, sign: bool = False) -> str:
    """Three figures, or `-`."""
    if value is None:
        return "-"
    text = f"{value:{'+' if sign else ''}.3g}"
    return f"{value:{'+' if sign else ''},.0f}" if "e+" in text else text


def _svg(plot: LinePlot | StackPlot | BarPlot, scope: str) -> str:
    from octavo.lab.plots import svg_text

    return svg_text(figure_of(plot), scope)


def figure_of(plot: LinePlot | StackPlot | BarPlot) -> Figure:
    """Draw a plot. Raises `ConfigError` without matplotlib."""
    from octavo.lab import plots

    if isinstance(plot, StackPlot):
        return plots.stacked_bars(
            plot.bars, title=plot.title, y_label=plot.y_label, marks=plot.marks
        )
    if isinstance(plot, BarPlot):
        return plots.grouped_bars(plot.groups, plot.series, title=plot.title, y_label=plot.y_label)
    systems = [TITLES[system] for system in SYSTEMS]  # each looks the same in all figures
    looks: Mapping[str, plots.Look] = {
        name: plots.look_of(name, systems.index(name) if name in systems else index)
        for index, name in enumerate(dict.fromkeys(line.name for line in plot.lines))
    }
    lines = [
        plots.Curve(
            name=f"{line.name}, paper" if line.is_paper else line.name,
            xs=[x for x, _ in line.points],
            ys=[y for _, y in line.points],
            look=looks[line.name],
            points_only=line.is_paper,
        )
        for line in plot.lines
    ]
    ticks = sorted({x for line in plot.lines for x, _ in line.points}) if plot.log_x else None
    return plots.curves(
        lines,
        title=plot.title,
        x_label=plot.x_label,
        y_label=plot.y_label,
        log_x=plot.log_x,
        log_y=plot.log_y,
        y_range=plot.y_range,
        x_ticks=ticks,
    )
