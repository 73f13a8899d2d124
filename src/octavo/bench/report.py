"""What a measurement prints: a table for people, one JSON object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Percentiles:
    """A distribution of seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """None of nothing."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(
            mean=sum(ordered) / len(ordered),
            p50=quantile(ordered, 0.5),
            p90=quantile(ordered, 0.9),
            p99=quantile(ordered, 0.99),
            max=ordered[-1],
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which this share (0 to 1) of them lie, by linear interpolation between
    neighbours, as numpy's default does."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def times_table(rows: dict[str, Percentiles | None]) -> str:
    """Rows of milliseconds by name; those without a value are left out."""
    lines = [f"{'ms':24}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}"]
    for name, row in rows.items():
        if row is not None:
            values = (row.mean, row.p50, row.p90, row.p99, row.max)
            lines.append(f"{name:24}" + "".join(f"{1e3 * value:>10,.1f}" for value in values))
    return "\n".join(lines)


def ttft_s(outputs: Sequence[RequestOutput]) -> list[float]:
    """Time to first token of each request, seconds."""
    times = [output.metrics.ttft_s for output in outputs]
    return [time for time in times if time is not None]


def tpot_s(outputs: Sequence[RequestOutput]) -> list[float]:
    """Time per output token after the first, of each request that has more than one; seconds."""
    times = []
    for output in outputs:
        metrics = output.metrics
        count = max(len(sample.token_ids) for sample in output.outputs)
        if metrics.first_token_s is not None and metrics.last_token_s is not None and count > 1:
            times.append((metrics.last_token_s - metrics.first_token_s) / (count - 1))
    return times


def e2e_s(outputs: Sequence[RequestOutput]) -> list[float]:
    """From arrival to the end of each request, seconds."""
    times = [output.metrics.e2e_s for output in outputs]
    return [time for time in times if time is not None]
