"""`octavo lab paper`: the figures of the PagedAttention paper, reproduced."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from octavo.cli.flags import flags, parse
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.lab.paper.figure import FigureResult
    from octavo.lab.paper.workloads import Workloads

_WIDTH = 120
"""Columns, where the output is no terminal."""
FigureName = Literal["2", "12", "13", "14", "15", "16", "17", "18b", "19"]


@flags
@dataclass(frozen=True, kw_only=True)
class Paper:
    """Make the figures of the PagedAttention paper (Kwon et al., SOSP 2023) again, by simulation,
    and print the paper's values, those found here, and their difference. Decisions are those of the
    scheduler and the memory manager that serve; what a step takes is a cost model of the paper's
    machines. Needs no GPU and no weights; everything takes a few minutes.
    """

    traces: Path | None = None
    """Folder with the request lengths: sharegpt_opt_lengths.csv and
    alpaca_fig11_synthetic_lengths.csv, or others called sharegpt*lengths*.csv and
    alpaca*lengths*.csv (.gz or not). By default synthetic lengths that octavo brings."""
    figure: FigureName | None = None
    """Only this one: where memory goes (2), rates (12), batches (13), samples and beams (14),
    blocks saved (15), a shared prefix (16), chat (17), block size (18b), preemption (19)."""
    processes: int | None = None
    """Processes to use, by default one for each CPU; the results are the same."""
    report: Path | None = None
    """Write everything, with plots and why what differs, into this HTML file."""
    json: bool = False
    """End with one line of JSON: a list of objects with figure, series, quantity, paper, here,
    difference and tolerance, instead of the table."""


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command; 0 whether or not the values agree."""
    args = parse(Paper, prog, argv)
    _check(args)
    from octavo.lab.paper.workloads import find_workloads

    began = time.perf_counter()
    workloads = find_workloads(args.traces)
    for lengths in (workloads.sharegpt, workloads.alpaca):
        print(lengths, file=sys.stderr if args.json else sys.stdout)
    results = _run(args, workloads)
    took_s = time.perf_counter() - began
    if args.json:
        print(json.dumps([row.as_dict() for result in results for row in result.rows]))
    else:
        _print_tables(results)
        print(f"\n{took_s:.0f} s")
    if args.report is not None:  # last: what was found is printed even if this fails
        _write_report(args.report, results, workloads, took_s)
        print(f"report: {args.report}", file=sys.stderr)
    return 0


def _check(args: Paper) -> None:
    """What cannot be done is said before it takes minutes."""
    if args.processes is not None and args.processes < 1:
        raise ConfigError(f"--processes must be at least 1, got {args.processes}")
    if args.report is None:
        return
    from octavo.lab.plots import require_matplotlib

    require_matplotlib()
    folder = args.report.absolute().parent
    if args.report.is_dir() or not folder.is_dir():
        raise ConfigError(f"--report {args.report}: not a file in a folder that exists")
    if not os.access(args.report if args.report.exists() else folder, os.W_OK):
        raise ConfigError(f"--report {args.report}: no permission to write there")


def _run(args: Paper, workloads: Workloads) -> list[FigureResult]:
    from octavo.cli.progress import counted
    from octavo.lab.paper.runner import all_figures, run_figures, tasks_of

    figures = all_figures()
    chosen = list(figures.values()) if args.figure is None else [figures[args.figure]]
    with counted("simulating", len(tasks_of(chosen, workloads))) as tell:
        return run_figures(
            chosen,
            workloads,
            num_processes=args.processes,
            progress=lambda key, num_done, _: tell(num_done, key),
        )


def _write_report(
    path: Path, results: Sequence[FigureResult], workloads: Workloads, took_s: float
) -> None:
    from octavo import __version__
    from octavo.lab.report import html_report

    text = html_report(
        results,
        workloads=[str(workloads.sharegpt), str(workloads.alpaca)],
        version=__version__,
        took_s=took_s,
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {path}: {error.strerror or error}") from None


def _print_tables(results: Sequence[FigureResult]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from octavo.lab.report import number

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_WIDTH)
    for result in results:
        table = Table(title=result.title, title_justify="left", box=None, pad_edge=False)
        for name in ("series", "quantity"):
            table.add_column(name, no_wrap=True)
        for name in ("paper", "here", "difference", "tolerance", ""):
            table.add_column(name, justify="right", no_wrap=True)
        for row in result.rows:
            mark = Text("outside", style="bold yellow") if row.within is False else ""
            table.add_row(
                row.series,
                row.quantity,
                number(row.paper),
                number(row.here),
                number(row.difference, sign=True),
                number(row.tolerance),
                mark,
            )
        console.print()
        console.print(table)
        off = sum(row.within is False for row in result.rows)
        if off:
            console.print(f"{off} outside the tolerance. {result.why}")
