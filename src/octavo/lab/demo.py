"""The same requests through several memory policies, in real time, for people to watch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.lab.config import SimConfig
from octavo.lab.costs import StepCosts
from octavo.lab.simulator import Simulation
from octavo.lab.workload import Workload
from octavo.sched.watch import PoolWatch


class Stage:
    """One policy at work: a simulated engine whose clock somebody moves, and a watch on its pool.

    Nothing is watched before the first frame, and after `close`.
    """

    def __init__(self, config: SimConfig, costs: StepCosts, workload: Workload, model: str) -> None:
        """`config` is of one replica; `model` is what frames say that it serves. Raises what
        `Simulation` does."""
        assert config.num_replicas == 1, f"{config.num_replicas} replicas on one stage"
        self.config = config
        self._model = model
        self._simulation = Simulation(
            workload.requests,
            config,
            costs,
            block_tokens=workload.block_tokens,
            concurrency=workload.concurrency,
        )
        (self._replica,) = self._simulation.replicas
        self._watch = PoolWatch(self._replica.kv, self._replica.scheduler)
        self._now_s = 0.0
        self._most_running = 0

    @property
    def name(self) -> str:
        """The policy's."""
        return self.config.kv_policy

    @property
    def is_over(self) -> bool:
        """Whether every request that came by the last `advance` has ended."""
        return not self._replica.has_work

    def advance(self, until_s: float) -> None:
        """Play up to a time of the simulation's clock. The step that is under way then is finished,
        so that its pool may be a step ahead."""
        self._simulation.run(until_s)
        self._now_s = max(self._now_s, until_s)
        self._most_running = max(self._most_running, self._replica.kv.num_sequences)

    def frame(self, full: bool = False) -> dict[str, Any]:
        """See `PoolWatch.frame`."""
        replica = self._replica
        frame = self._watch.frame(max(self._now_s, replica.now_s), full)
        frame["num_waiting"] = replica.num_waiting
        frame["num_requests"] += replica.num_waiting - replica.scheduler.num_waiting
        if frame["kind"] == "full":
            frame["about"] |= {
                "model": self._model,
                "scheduling_policy": self.config.scheduling_policy,
                "max_model_len": self.config.max_model_len,
            }
        return frame

    def block(self, block_id: int) -> dict[str, Any]:
        """See `PoolWatch.block`. Without tokens: simulated ones have no meaning."""
        return self._watch.block(block_id) | {"token_ids": []}

    def close(self) -> None:
        """Nobody watches any more."""
        self._watch.close()

    def reached(self) -> Reached:
        """What it has made of the requests until now."""
        result = self._simulation.result(self._now_s, 0.0)
        seconds = max(self._now_s, 1e-9)
        weights = [sample.lasts_s for sample in result.samples]
        num_slots = self.config.num_slots
        total_s = sum(weights) or math.inf
        shares = {
            term: sum(getattr(s, term) * s.lasts_s for s in result.samples) / total_s / num_slots
            for term in ("tokens", "reserved", "internal", "external")
        }
        ttft = result.times.ttft_s()
        has_any = len(ttft) > 0
        return Reached(
            policy=self.name,
            num_ended=len(result.times),
            num_waiting=self._replica.num_waiting,
            most_running=self._most_running,
            output_tokens_per_s=self._replica.scheduler.roster.num_output_tokens / seconds,
            ttft_p50_s=float(np.percentile(ttft, 50)) if has_any else None,
            ttft_p99_s=float(np.percentile(ttft, 99)) if has_any else None,
            num_preemptions=self._replica.scheduler.num_preemptions,
            shares=shares,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What a policy came to."""

    policy: str
    num_ended: int
    num_waiting: int
    most_running: int
    """Sequences in memory, at most."""
    output_tokens_per_s: float
    ttft_p50_s: float | None
    """Of requests that have ended; None: none has."""
    ttft_p99_s: float | None
    num_preemptions: int
    shares: dict[str, float]
    """Of the pool, on average while it worked: tokens, and the three kinds of waste."""


def table(found: Sequence[Reached], seconds: float) -> str:
    """What each came to, side by side."""

    def secs(value: float | None) -> str:
        return "-" if value is None else f"{value:,.2f} s"

    rows: list[tuple[str, list[str]]] = [
        ("requests answered", [f"{one.num_ended:,}" for one in found]),
        ("still in line", [f"{one.num_waiting:,}" for one in found]),
        ("output tokens/s", [f"{one.output_tokens_per_s:,.0f}" for one in found]),
        ("at once, at most", [f"{one.most_running:,}" for one in found]),
        ("first token, median", [secs(one.ttft_p50_s) for one in found]),
        ("first token, 99 %", [secs(one.ttft_p99_s) for one in found]),
        ("preemptions", [f"{one.num_preemptions:,}" for one in found]),
    ]
    names = {
        "tokens": "pool: tokens",
        "reserved": "pool: reserved",
        "internal": "pool: never used",
        "external": "pool: in pieces",
    }
    for term, name in names.items():
        rows.append((name, [f"{one.shares[term]:.1%}" for one in found]))
    lines = [f"after {seconds:,.0f} simulated seconds"]
    lines.append(f"{'':22}" + "".join(f"{one.policy:>14}" for one in found))
    lines += [f"{name:22}" + "".join(f"{cell:>14}" for cell in cells) for name, cells in rows]
    return "\n".join(lines)
