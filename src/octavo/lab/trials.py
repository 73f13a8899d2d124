"""Simulations that a plan is made of: part of the replicas, for as many requests as it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.lab.config import SimConfig
from octavo.lab.costs import StepCosts, StepShape
from octavo.lab.results import SimResult
from octavo.lab.simulator import simulate
from octavo.lab.slices import Slice
from octavo.lab.slo import Service, Slo, measure

Tell = Callable[[str], None]
"""Told what is being tried, for people who wait."""
_WHOLE = 4000
"""Requests of a check of all replicas, or three times what one is simulated with if that is less;
at least four each."""
MAX_CHECKED = 64
"""Replicas in a check: of more, as many, with their share of the requests."""
NUM_SAMPLES = 400
"""Looks at the pool in a simulation."""


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
