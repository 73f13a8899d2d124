"""The pictures of `octavo lab compare`: memory, batch, latency against rate, and distributions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from octavo.kv.ledger import TERMS
from octavo.lab.compare import Comparison
from octavo.lab.compare_tables import LIMIT_S, normalized_s
from octavo.lab.plots import Curve, Limit, cdfs, curves, save, stacked_bars, time_series

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figures(found: Comparison) -> dict[str, Figure]:
    """By file name without its end. Latency against rate only where there are several rates; the
    others are of the last rate. Where no request has ended there are no times to draw. Raises
    `ConfigError` without matplotlib."""
    at = _at(found)
    memory = [run.summary.memory for run in found.at_last_rate()]
    kinds = [kind for kind in TERMS if any(shares[kind] >= 5e-4 for shares in memory)]
    drawn = {
        "memory": stacked_bars(
            {
                run.policy: {kind: 100 * run.summary.memory[kind] for kind in kinds}
                for run in found.at_last_rate()
            },
            title=f"Where the KV pool is{at}",
            y_label="share of the pool, mean [%]",
            y_range=(0, 100),
        ),
        "batch": _batch(found, at),
        "ttft": cdfs(
            {policy: series.ttft_s.tolist() for policy, series in found.series.items()},
            title=f"Time to first token{at}",
            x_label="time to first token [s]",
            log_x=True,
        ),
        "tpot": _tpot(found, at),
    }
    if not any(len(series.ttft_s) for series in found.series.values()):
        del drawn["ttft"], drawn["tpot"]
    if len(found.rates) > 1 and any(normalized_s(run) for run in found.runs):
        drawn["latency"] = _latency(found)
    return drawn


def draw(found: Comparison, folder: Path) -> list[Path]:
    """Write all of them as PNG and SVG; returns the paths. Raises `ConfigError`."""
    return [path for name, figure in figures(found).items() for path in save(figure, folder / name)]


def _at(found: Comparison) -> str:
    rate = found.runs[-1].rate
    return "" if rate is None else f", {rate:.4g} requests/s"


def _batch(found: Comparison, at: str) -> Figure:
    """Up to twice the time in which requests came: how long the slowest took after that would
    leave no room for the others."""
    ends = {run.summary.window.end_s for run in found.at_last_rate()}
    until_s = 2 * ends.pop() if len(ends) == 1 else float("inf")
    lasted_s = max(run.summary.simulated_s for run in found.at_last_rate())
    lines = []
    for policy, series in found.series.items():
        shown = [sample for sample in series.samples if sample.time_s <= until_s]
        xs, ys = [sample.time_s for sample in shown], [sample.num_running for sample in shown]
        lines.append(Curve(name=policy, xs=xs, ys=ys))
    cut = f"; cut here, the last run ended at {lasted_s:,.0f} s" if until_s < lasted_s else ""
    return time_series(
        lines,
        title=f"Batch over time{at}",
        x_label=f"time [s]{cut}",
        y_label="sequences that run",
    )


def _tpot(found: Comparison, at: str) -> Figure:
    """Of policies whose tokens come one after another."""
    spread = {policy: series.tpot_s for policy, series in found.series.items()}
    at_once = [policy for policy, seconds in spread.items() if len(seconds) and not seconds.any()]
    remark = f"; {', '.join(at_once)}: all come at once" if at_once else ""
    return cdfs(
        {name: (1e3 * s).tolist() for name, s in spread.items() if name not in at_once},
        title=f"Time per output token after the first{at}",
        x_label=f"time per output token [ms]{remark}",
        log_x=True,
    )


def _latency(found: Comparison) -> Figure:
    lines = []
    for policy in found.policies:
        points = sorted(
            (run.rate or 0.0, normalized_s(run)) for run in found.of(policy) if normalized_s(run)
        )
        lines.append(Curve(name=policy, xs=[x for x, _ in points], ys=[y for _, y in points]))
    return curves(
        lines,
        title="Normalised latency against load",
        x_label="requests that come [requests/s]",
        y_label="normalised latency, mean [s/token]",
        log_y=True,
        limits=[Limit(LIMIT_S, f"{LIMIT_S} s/token")],
    )
