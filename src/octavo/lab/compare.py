"""The same requests through each policy, at one or several rates: what a memory manager buys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from octavo.config import KVPolicy
from octavo.errors import ConfigError
from octavo.lab.config import POLICIES, SimConfig
from octavo.lab.costs import StepCosts
from octavo.lab.results import PoolSample, Values
from octavo.lab.simulator import simulate
from octavo.lab.summary import Summary
from octavo.lab.trace import TraceRequest

Tell = Callable[[KVPolicy, float | None, int, int], None]
"""Told now and then: policy and rate, requests that have ended, requests in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """What became of the workload under one policy at one rate."""

    policy: KVPolicy
    rate: float | None
    """Requests a second that came; None: as the workload has them."""
    summary: Summary
    max_running: int
    """Most sequences that ran at one time."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values; times in seconds, shares as fractions."""
        own = {"policy": self.policy, "rate": self.rate, "max_running": self.max_running}
        return own | self.summary.as_dict()


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What one run's curves are drawn from."""

    samples: Sequence[PoolSample]
    ttft_s: Values
    """Time to first token of each request."""
    tpot_s: Values
    """Time per output token behind the first, of each request that has more than one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All runs, by rate and then by policy."""

    workload: str
    """For people: whose requests, and how they come."""
    machine: str
    """For people: the cost model."""
    config: SimConfig
    runs: Sequence[PolicyRun]
    series: Mapping[KVPolicy, Series]
    """Of the runs at the last rate."""

    @property
    def policies(self) -> tuple[KVPolicy, ...]:
        """In the order they were asked for."""
        return tuple(dict.fromkeys(run.policy for run in self.runs))

    @property
    def rates(self) -> tuple[float | None, ...]:
        """In the order they were asked for."""
        return tuple(dict.fromkeys(run.rate for run in self.runs))

    def at_last_rate(self) -> list[PolicyRun]:
        """A run a policy."""
        return [run for run in self.runs if run.rate == self.runs[-1].rate]

    def of(self, policy: KVPolicy) -> list[PolicyRun]:
        """A run a rate."""
        return [run for run in self.runs if run.policy == policy]


def compare(
    workload_at: Callable[[float | None], Iterable[TraceRequest]],
    config: SimConfig,
    costs_of: Callable[[KVPolicy], StepCosts],
    *,
    policies: Sequence[KVPolicy] = POLICIES,
    rates: Sequence[float | None] = (None,),
    workload: str = "",
    block_tokens: int = 0,
    concurrency: int | None = None,
    warm_up_s: float = 0.0,
    tell: Tell | None = None,
) -> Comparison:
    """Serve the same requests under each policy at each rate, each to its end.

    `workload_at(rate)` gives the requests in order of arrival; None is the workload's own rhythm.
    `costs_of(policy)` is the machine: paging has its price, contiguous keys and values are read
    without it. Limits of `contiguous` in `config` are for that policy alone. `concurrency` makes a
    closed loop; requests that come before `warm_up_s` are left out of the latencies.
    Raises `ConfigError` for an empty list, or one with the same thing twice.
    """
    for flag, values in (("--policies", policies), ("--rates", rates)):
        if not values or len(set(values)) < len(values):
            listed = ", ".join(str(value) for value in values) or "nothing"
            raise ConfigError(f"{flag} must name at least one, each once, got {listed}")
    runs, series = [], {}
    for rate in rates:
        requests = list(workload_at(rate))
        for policy in policies:
            engine = config_of(policy, config)
            result = simulate(
                requests,
                engine,
                costs_of(policy),
                block_tokens=block_tokens,
                concurrency=concurrency,
                progress=_progress(tell, policy, rate, len(requests)),
            )
            runs.append(
                PolicyRun(
                    policy=policy,
                    rate=rate,
                    summary=Summary.of(result, engine, warm_up_s),
                    max_running=max((sample.num_running for sample in result.samples), default=0),
                )
            )
            series[policy] = Series(
                samples=result.samples,
                ttft_s=result.times.ttft_s(),
                tpot_s=result.times.tpot_s(),
            )
    return Comparison(
        workload=workload,
        machine=costs_of(policies[0]).name,
        config=config,
        runs=runs,
        series=series,
    )


def config_of(policy: KVPolicy, config: SimConfig) -> SimConfig:
    """The engine under a policy: without what does not exist there (prefix sharing, swapping, and
    limits of request-level batches)."""
    if policy != "contiguous":
        config = config.replace(max_batch=None, region_tokens=None, max_padded_tokens=None)
    if policy != "paged":
        config = config.replace(
            enable_prefix_caching=False, num_host_blocks=0, preemption_mode="recompute"
        )
    return config.replace(kv_policy=policy)


def _progress(
    tell: Tell | None, policy: KVPolicy, rate: float | None, num: int
) -> Callable[[int, float], None] | None:
    if tell is None:
        return None
    tell(policy, rate, 0, num)
    return lambda num_ended, _: tell(policy, rate, num_ended, num)


def rate_at_latency(points: Iterable[tuple[float, float]], limit_s: float) -> float | None:
    """The rate at which normalised latency reaches `limit_s`, from (rate, latency) points.

    Between two points the logarithm of latency is taken as a straight line, as on the paper's axes.
    None where the points do not cross the limit.
    """
    for (low, before), (high, after) in pairwise(sorted(points)):
        if before <= limit_s < after:
            logs = np.log([before, limit_s, after])
            return float(low + (high - low) * (logs[1] - logs[0]) / (logs[2] - logs[0]))
    return None
