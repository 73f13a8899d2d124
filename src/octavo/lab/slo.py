"""Service objectives, and whether a simulation kept them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from octavo.errors import ConfigError
from octavo.lab.results import SimResult
from octavo.lab.summary import Latency

WARM_UP = 0.2
"""Of the requests, the first to come: they find an engine emptier than it will be."""

_NONE = Latency(0.0, 0.0, 0.0, 0.0, 0.0)
"""Of no requests."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What users are promised: `percentile` % of the requests keep each of the two."""

    ttft_s: float
    """Time to first token: from arrival to the first token."""
    tpot_s: float
    """Time per output token behind the first, mean over a request."""
    percentile: float = 95.0

    def __post_init__(self) -> None:
        for flag, value in (("--slo-ttft", self.ttft_s), ("--slo-tpot", self.tpot_s)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"{flag} must be a number of seconds above 0, got {value:g}")
        if not 0 < self.percentile < 100:
            raise ConfigError(
                f"--percentile must be above 0 and below 100, got {self.percentile:g}; the worst "
                "request of all says nothing about the next one"
            )

    def __str__(self) -> str:
        p = f"p{self.percentile:g}"
        return f"{p} TTFT <= {self.ttft_s:g} s, {p} TPOT <= {self.tpot_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What users got in a simulation, the warm-up left out."""

    num_measured: int
    """Requests that are counted."""
    num_refused: int
    """Requests that can never fit: they keep no objective."""
    ttft: Latency
    tpot: Latency
    e2e: Latency
    ttft_at: float
    """At the percentile of the objectives."""
    tpot_at: float
    missed_ttft: float
    """Share of the requests that missed the TTFT."""
    missed_tpot: float
    kept: float
    """Share that kept both."""
    ok: bool
    """Whether the objectives are kept."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def measure(result: SimResult, slo: Slo, warm_up: float = WARM_UP) -> Service:
    """Percentiles over the requests that came behind the first `warm_up` of them."""
    num_new = int(len(result.times) * warm_up)
    arrivals = sorted(result.times.arrival_s)
    times = result.times.since(arrivals[num_new]) if num_new else result.times
    ttft, tpot, e2e = times.ttft_s(), times.tpot_s(), times.e2e_s()
    late = ttft > slo.ttft_s
    slow = np.zeros(len(e2e), dtype=bool)
    slow[np.asarray(times.num_output) > 1] = tpot > slo.tpot_s
    share = 1 / max(1, len(e2e) + result.num_refused)
    may_miss = 1 - slo.percentile / 100
    ttft_at, tpot_at = (
        float(np.percentile(v, slo.percentile)) if len(v) else 0.0 for v in (ttft, tpot)
    )
    return Service(
        num_measured=len(e2e),
        num_refused=result.num_refused,
        ttft=Latency.of(ttft) or _NONE,
        tpot=Latency.of(tpot) or _NONE,
        e2e=Latency.of(e2e) or _NONE,
        ttft_at=ttft_at,
        tpot_at=tpot_at,
        missed_ttft=float(late.sum() + result.num_refused) * share,
        missed_tpot=float(slow.sum() + result.num_refused) * share,
        kept=float((~late & ~slow).sum()) * share,
        ok=len(e2e) > 0
        and ttft_at <= slo.ttft_s
        and tpot_at <= slo.tpot_s
        and result.num_refused * share <= may_miss,
    )
