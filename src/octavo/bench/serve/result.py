"""What a load showed: rates, times, goodput, errors; as a table, as JSON, beside others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from octavo.bench.serve.client import Timeline
from octavo.bench.serve.times import METRICS, Times, times_of, times_table
from octavo.errors import InvalidRequestError

_LATE_S = 0.05
"""A request sent so much later than planned says that the generator could not keep up."""
SLO_NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class ServeResult:
    """One run of a load."""

    label: str
    base_url: str
    model: str
    workload: str
    load: str
    """How requests were sent, in words."""
    settings: dict[str, Any]
    """The flags that it was made with."""
    elapsed_s: float
    num_requests: int
    num_completed: int
    errors: dict[str, int]
    num_input_tokens: int
    num_output_tokens: int
    num_wrong_length: int
    """Answers that did not have as many tokens as were asked for."""
    is_counted: bool
    """Whether the server told numbers of tokens; else chunks were counted."""
    tokens_per_chunk: float
    ttft_s: Times | None
    tpot_s: Times | None
    itl_s: Times | None
    """Gaps between chunks, as clients saw them."""
    e2e_s: Times | None
    mean_concurrency: float
    """Requests under way, over time."""
    num_late: int
    """Requests that the generator itself sent too late."""
    num_retried: int = 0
    """Requests that were refused and sent again, once or more."""
    num_good: int | None = None
    """Requests that met the goal; None: there was none."""
    slo: dict[str, float] = field(default_factory=dict)
    """The goal: milliseconds by name."""
    ttfts_s: tuple[float, ...] = ()
    """Of each completed request, for plots."""
    tpots_s: tuple[float, ...] = ()

    @property
    def rates(self) -> dict[str, float]:
        """Per second."""
        seconds = self.elapsed_s
        rates = {
            "requests_per_s": self.num_completed / seconds,
            "output_tokens_per_s": self.num_output_tokens / seconds,
            "total_tokens_per_s": (self.num_input_tokens + self.num_output_tokens) / seconds,
        }
        if self.num_good is not None:
            rates["goodput_per_s"] = self.num_good / seconds
        return rates

    @property
    def times(self) -> dict[str, Times | None]:
        """By the names of `METRICS`."""
        return {
            "ttft": self.ttft_s, "tpot": self.tpot_s, "itl": self.itl_s, "e2el": self.e2e_s,
        }  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self) | self.rates

    def text(self, metrics: Sequence[str] = tuple(METRICS)) -> str:
        """For people. metrics: which times to show."""
        rates = self.rates
        lines = [
            f"{self.workload} to {self.base_url} ({self.model}), {self.load}",
            f"{self.num_completed:,} of {self.num_requests:,} requests answered in "
            f"{self.elapsed_s:.2f} s: {self.num_input_tokens:,} tokens in, "
            f"{self.num_output_tokens:,} out",
            "",
            f"{'output tokens/s':24}{rates['output_tokens_per_s']:>10,.1f}",
            f"{'all tokens/s':24}{rates['total_tokens_per_s']:>10,.1f}",
            f"{'requests/s':24}{rates['requests_per_s']:>10,.2f}",
            f"{'requests under way':24}{self.mean_concurrency:>10,.1f}",
        ]
        if self.num_good is not None:
            goal = ", ".join(f"{name} {limit:g} ms" for name, limit in self.slo.items())
            lines.append(f"{'goodput, requests/s':24}{rates['goodput_per_s']:>10,.2f}  ({goal})")
        rows = {title: self.times[name] for name, title in METRICS.items() if name in metrics}
        lines += ["", times_table(rows), *self._remarks()]
        return "\n".join(lines)

    def _remarks(self) -> list[str]:
        remarks = []
        if self.errors:
            told = ", ".join(f"{name} x {num:,}" for name, num in sorted(self.errors.items()))
            remarks.append(f"errors: {told}")
        if self.num_retried:
            remarks.append(
                f"{self.num_retried:,} requests were refused at first and sent again, which their "
                "times include (--max-retries)"
            )
        if not self.is_counted and self.num_completed:
            remarks.append("the server does not tell numbers of tokens: chunks were counted")
        if self.num_wrong_length:
            remarks.append(
                f"{self.num_wrong_length:,} answers have not the length that was asked for "
                "(--ignore-eos makes servers that know it go on)"
            )
        if self.tokens_per_chunk > 1.1:
            remarks.append(f"{self.tokens_per_chunk:.1f} tokens a chunk")
        if self.num_late:
            remarks.append(
                f"{self.num_late:,} requests were sent more than {1e3 * _LATE_S:.0f} ms late: this "
                "generator could not keep up, and the times above are better than clients' were"
            )
        return ["", *remarks] if remarks else []


def summarize(
    lines: Sequence[Timeline],
    *,
    label: str,
    base_url: str,
    model: str,
    workload: str,
    load: str,
    slo: dict[str, float],
    settings: dict[str, Any] | None = None,
    shares: Sequence[float] = (50, 90, 99),
) -> ServeResult:
    """What timelines of one load amount to. slo: milliseconds by `SLO_NAMES`. shares: percentiles
    of the times."""
    done = [line for line in lines if line.error is None]
    begun_s = min((line.sent_s for line in lines), default=0.0)
    elapsed_s = max((line.ended_s for line in lines), default=0.0) - begun_s
    ttfts = [t for line in done if (t := line.ttft_s) is not None]
    tpots = [t for line in done if (t := line.tpot_s) is not None]
    num_output = sum(line.num_output for line in done)
    num_chunks = sum(len(line.chunk_s) for line in done)
    return ServeResult(
        label=label,
        base_url=base_url,
        model=model,
        workload=workload,
        load=load,
        settings=settings or {},
        elapsed_s=max(elapsed_s, 1e-9),
        num_requests=len(lines),
        num_completed=len(done),
        errors=dict(Counter(line.error for line in lines if line.error is not None)),
        num_input_tokens=sum(line.num_input for line in done),
        num_output_tokens=num_output,
        num_wrong_length=sum(
            line.is_counted and line.num_output != line.num_asked for line in done
        ),
        is_counted=all(line.is_counted for line in done),
        tokens_per_chunk=num_output / num_chunks if num_chunks else 0.0,
        ttft_s=times_of(ttfts, shares),
        tpot_s=times_of(tpots, shares),
        itl_s=times_of([gap for line in done for gap in line.itl_s], shares),
        e2e_s=times_of([line.e2e_s for line in done], shares),
        mean_concurrency=sum(line.e2e_s for line in lines) / max(elapsed_s, 1e-9),
        num_late=sum(line.sent_s - line.scheduled_s > _LATE_S for line in lines),
        num_retried=sum(line.num_retries > 0 for line in lines),
        num_good=sum(_is_good(line, slo) for line in done) if slo else None,
        slo=slo,
        ttfts_s=tuple(ttfts),
        tpots_s=tuple(tpots),
    )


def _is_good(line: Timeline, slo: dict[str, float]) -> bool:
    """Whether every limit was kept. A request of one token has no time per token to miss."""
    found = {"ttft": line.ttft_s, "tpot": line.tpot_s or 0.0, "e2el": line.e2e_s}
    return all((value := found[n]) is not None and 1e3 * value <= most for n, most in slo.items())


def parse_slo(words: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50` as milliseconds by name. Raises `InvalidRequestError`."""
    slo = {}
    for word in words:
        name, _, number = word.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = -1.0
        if name not in SLO_NAMES or not limit > 0:
            raise InvalidRequestError(
                f"--goodput {word!r}: write one of {', '.join(SLO_NAMES)}, a colon and "
                "milliseconds, such as ttft:500 tpot:50",
                parameter="goodput",
            )
        slo[name] = limit
    return slo


def compare(paths: Sequence[Path]) -> str:
    """A table of saved results, each beside the first. Raises `InvalidRequestError` for a file that
    is none."""
    results = [_read(path) for path in paths]
    rows: list[tuple[str, str, float]] = [
        ("output tokens/s", "output_tokens_per_s", 1),
        ("requests/s", "requests_per_s", 1),
        ("goodput, requests/s", "goodput_per_s", 1),
        *(
            (f"{name} {share}, ms", f"{key}.{share}", 1e3)
            for name, key in (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("itl", "itl_s"))
            for share in ("p50", "p99")
        ),
    ]
    labels = [str(r["label"] or path.stem) for r, path in zip(results, paths, strict=True)]
    width = max(12, *(len(label) + 2 for label in labels))
    lines = [f"{'':22}" + "".join(f"{label:>{width}}{'':>9}" for label in labels)]
    for title, key, scale in rows:
        values = [_at(result, key) for result in results]
        if values[0] is None:
            continue
        text = f"{title:22}"
        for value in values:
            ratio = "" if value is None or value is values[0] else f"{value / values[0]:.2f} x"
            text += f"{'-' if value is None else format(scale * value, ',.1f'):>{width}}{ratio:>9}"
        lines.append(text.rstrip())
    for name, told in _differences(results).items():
        lines.append(f"not the same {name}: {told}")
    return "\n".join(lines)


def _differences(results: Sequence[dict[str, Any]]) -> dict[str, str]:
    """What of the loads was not the same, by name."""
    found = {}
    loads = [
        {"workload": r["workload"], "load": r["load"], **r.get("settings", {})} for r in results
    ]
    for name in loads[0]:
        values = [str(load.get(name)) for load in loads]
        if len(set(values)) > 1:
            found[name] = ", ".join(values)
    return found


def _at(result: dict[str, Any], key: str) -> float | None:
    value: Any = result
    for part in key.split("."):
        value = None if value is None else value.get(part)
    return None if value is None else float(value)


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if not {"workload", "load", "output_tokens_per_s"} <= result.keys():
            raise ValueError
    except (OSError, ValueError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or "it is no result of octavo bench serve"
        raise InvalidRequestError(f"{path}: {reason}", parameter="compare") from None
    return dict(result)
