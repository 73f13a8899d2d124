"""Distributions of seconds, with the percentiles that were asked for."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from octavo.bench.report import quantile
from octavo.errors import InvalidRequestError

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between chunks",
    "e2el": "whole request",
}
"""The times of a load, by the names that vLLM's benchmark gives them."""

_NOT_SHOWN = ("std", "median")

Times = dict[str, float]
"""mean, std, median, each percentile as `p99` or `p99.9`, max: in this order."""


def times_of(values: Sequence[float], shares: Sequence[float]) -> Times | None:
    """None of nothing. shares: percentiles, 0 to 100."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "mean": statistics.fmean(ordered),
        "std": statistics.pstdev(ordered),
        "median": statistics.median(ordered),
        **{f"p{share:.15g}": quantile(ordered, share / 100) for share in shares},
        "max": ordered[-1],
    }


def times_table(rows: Mapping[str, Times | None]) -> str:
    """Rows of milliseconds by name; those without a value are left out."""
    found = {name: row for name, row in rows.items() if row is not None}
    if not found:
        return ""
    columns = [name for name in next(iter(found.values())) if name not in _NOT_SHOWN]
    lines = [f"{'ms':24}" + "".join(f"{name:>10}" for name in columns)]
    for name, row in found.items():
        lines.append(f"{name:24}" + "".join(f"{1e3 * row[key]:>10,.1f}" for key in columns))
    return "\n".join(lines)


def parse_shares(text: str) -> tuple[float, ...]:
    """`50,99.9` as numbers, in order. Raises `InvalidRequestError`."""
    try:
        shares = sorted({float(word) for word in text.split(",")})
    except ValueError:
        shares = [-1.0]
    if not all(0 < share < 100 for share in shares):
        raise InvalidRequestError(
            f"--metric-percentiles {text!r}: write numbers above 0 and below 100 with commas "
            "between them, such as 50,90,99.9",
            parameter="metric_percentiles",
        )
    return tuple(shares)


def parse_metrics(text: str) -> tuple[str, ...]:
    """`ttft,itl` as names. Raises `InvalidRequestError`."""
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in names:
        if name not in METRICS:
            raise InvalidRequestError(
                f"--percentile-metrics {text!r}: {name!r} is none of {', '.join(METRICS)}",
                parameter="percentile_metrics",
            )
    return names
