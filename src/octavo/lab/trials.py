"""Simulations that a plan is made of, and whether they keep what users are promised."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from octavo.errors import ConfigError
from octavo.lab.config import SimConfig
from octavo.lab.costs import StepCosts, StepShape
from octavo.lab.results import SimResult
from octavo.lab.simulator import simulate
from octavo.lab.slices import Slice
from octavo.lab.summary import Latency

Tell = Callable[[str], None]
"""Told what is being tried, for people who wait."""
_WHOLE = 4000
"""Requests of a check of all replicas, or three times what one is simulated with if that is less;
at least four each."""
MAX_CHECKED = 64
"""Replicas in a check: of more, as many, with their share of the requests."""
NUM_SAMPLES = 400
"""Looks at the pool in a simulation."""
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


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulation and what came of it."""

    config: SimConfig
    """num_replicas: how many were simulated."""
    part: Slice
    """What they served."""
    result: SimResult
    service: Service

    @property
    def utilization(self) -> float:
        """Share of the time in which a step ran."""
        return self.result.busy_s / max(1e-12, self.result.end_s * self.config.num_replicas)


class ScaledCosts:
    """A machine that is `factor` times as slow (below 1: faster)."""

    def __init__(self, costs: StepCosts, factor: float) -> None:
        self._costs, self._factor = costs, factor
        self.name = f"{costs.name} x {factor:g}"

    def step_s(self, shape: StepShape) -> float:
        """See `StepCosts.step_s`."""
        return self._factor * self._costs.step_s(shape)

    def copy_s(self, num_host_blocks: int) -> float:
        """See `StepCosts.copy_s`."""
        return self._factor * self._costs.copy_s(num_host_blocks)


class Trials:
    """Runs simulations of one workload; keeps count and time."""

    def __init__(
        self,
        part: Slice,
        slo: Slo,
        *,
        replica_requests: int,
        limit_s: float | None = None,
        tell: Tell | None = None,
    ) -> None:
        """replica_requests: what a simulation serves, where the workload has it: of many replicas
        only as many are simulated as that takes. limit_s: seconds of
        computing that are to be enough: `spent` tells how far they are."""
        self.part, self.slo = part, slo
        self._replica_requests = replica_requests
        self._tell = tell or (lambda text: None)
        self._began, self._used_s = time.perf_counter(), time.process_time()
        self._limit_s = limit_s
        self.num_run = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began

    def spent(self, share: float = 1.0) -> bool:
        """Whether that share of the time is over."""
        used_s = time.process_time() - self._used_s  # a busy neighbour changes no answer
        return self._limit_s is not None and used_s >= share * self._limit_s

    def share(self, num_replicas: int, whole: bool = False) -> tuple[Slice, int]:
        """What is simulated of `num_replicas`: requests, and how many replicas they are for.

        Under round robin the replicas know nothing of each other, so some of them with every
        request that they would get behave as among all. whole: all of them (of very many, a part),
        for fewer requests each.
        """
        part = self.part
        if whole and num_replicas > MAX_CHECKED:
            some = part.of_replicas(MAX_CHECKED, num_replicas)
            return some.first_of(max(_WHOLE, self._replica_requests)), MAX_CHECKED
        each = max(1, len(part.requests) // num_replicas)
        num = min(num_replicas, -(-self._replica_requests // each))
        if whole or num == num_replicas:
            most = max(self._replica_requests, 4 * num_replicas)
            if whole:
                most = max(most, min(_WHOLE, 3 * self._replica_requests))
            return part.first_of(most), num_replicas
        return part.of_replicas(num, num_replicas).first_of(self._replica_requests), num

    def run(
        self,
        what: str,
        part: Slice,
        config: SimConfig,
        costs: StepCosts,
    ) -> Trial:
        """Simulate."""
        self.num_run += 1
        self._tell(f"simulation {self.num_run}: {what}")
        result = simulate(
            part.requests,
            config,
            costs,
            block_tokens=part.block_tokens,
            sample_s=max(part.span_s / NUM_SAMPLES, 1e-6),
        )
        return Trial(config, part, result, measure(result, self.slo))
