"""What a simulation comes to: rates, latencies, memory; as a table and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.kv.ledger import TERMS
from octavo.lab.config import SimConfig
from octavo.lab.results import SimResult
from octavo.lab.window import Window, pool_means, window_of

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution of seconds."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: _Floats | Sequence[float]) -> Latency | None:
        """None of nothing."""
        if not len(values):
            return None
        p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
        return cls(float(np.mean(values)), p50, p95, p99, float(np.max(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What became of a workload, in figures."""

    num_requests: int
    """Requests that came."""
    num_finished: int
    num_refused: int
    """Requests that can never fit."""
    refusal: str
    """Why, the first of them; empty if there is none."""
    num_measured: int
    """Requests that the latencies are of: those that came behind the warm-up, and have ended."""
    simulated_s: float
    requests_per_s: float
    """That ended, over the simulated time."""
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompts and outputs."""
    ttft_s: Latency | None
    """From arrival to the first token."""
    tpot_s: Latency | None
    """Per output token behind the first, of requests that have more than one; None where all come
    at once (`contiguous`)."""
    e2e_s: Latency | None
    """From arrival to the end."""
    normalized_s: Latency | None
    """From arrival to the end, per output token (the paper's normalised latency)."""
    num_steps: int
    mean_batch: float
    """Sequences computed in a step."""
    busy: float
    """Share of the time in which a step ran, over all replicas."""
    mean_running: float
    """Sequences in a replica's memory that have not ended, mean over the window."""
    mean_held: float
    """The same with those that have ended, and whose batch keeps their memory."""
    num_preemptions: int
    memory: dict[str, float]
    """Share of a replica's pool by kind of slot, mean over the window; adds up to 1."""
    window: Window
    """See `window_of`."""
    draining_s: float
    """Seconds of the run behind the last arrival, which throughput is over too; 0 where all came at
    once."""
    shared_saved: float
    """1 - physical / logical slots (the paper's Fig. 15), mean over the window."""
    hit_rate: float
    """Share of the prompt tokens that were found in the prefix cache."""
    wall_s: float
    """What simulating took."""

    @classmethod
    def of(cls, result: SimResult, config: SimConfig, warm_up_s: float = 0.0) -> Summary:
        """The figures of a simulation; latencies without the requests that came before
        `warm_up_s`."""
        times = result.times
        measured = times.since(warm_up_s) if warm_up_s else times
        tpot_s = measured.tpot_s()
        lasted_s = max(result.end_s, 1e-9)
        window = window_of(result, times.arrival_s.tolist())
        means = pool_means(result.samples, window)
        num_slots = config.num_slots  # a sample is of one replica
        tokens = result.num_input_tokens + result.num_output_tokens
        return cls(
            num_requests=result.num_requests,
            num_finished=len(times),
            num_refused=result.num_refused,
            refusal=result.refusals[0] if result.refusals else "",
            num_measured=len(measured),
            simulated_s=result.end_s,
            requests_per_s=len(times) / lasted_s,
            output_tokens_per_s=result.num_output_tokens / lasted_s,
            total_tokens_per_s=tokens / lasted_s,
            ttft_s=Latency.of(measured.ttft_s()),
            tpot_s=Latency.of(tpot_s) if tpot_s.any() else None,
            e2e_s=Latency.of(measured.e2e_s()),
            normalized_s=Latency.of(measured.normalized_s()),
            num_steps=result.num_steps,
            mean_batch=result.mean_seqs,
            busy=result.busy_s / lasted_s / config.num_replicas,
            mean_running=means["num_running"],
            mean_held=means["num_held"],
            num_preemptions=result.num_preemptions,
            memory={kind: means[kind] / num_slots for kind in TERMS},
            window=window,
            draining_s=_draining_s(result),
            shared_saved=means["saved"] / max(1.0, means["logical"]),
            hit_rate=result.num_cached_tokens / max(1, result.num_prompt_tokens),
            wall_s=result.wall_s,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values; times in seconds, shares as fractions."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join([*self._rates(), "", *self._latencies(), "", *self._pool()])

    def _rates(self) -> list[str]:
        ended = f"{self.num_finished:,} of {self.num_requests:,} requests ended"
        lines = [_line("requests", f"{self.requests_per_s:,.3f}", f"a second; {ended}")]
        if self.num_refused:
            lines.append(_line("refused", f"{self.num_refused:,}", f"such as: {self.refusal}"))
        lines += [
            _line("output tokens", f"{self.output_tokens_per_s:,.1f}", "a second"),
            _line("all tokens", f"{self.total_tokens_per_s:,.1f}", "a second"),
            _line("simulated", f"{self.simulated_s:,.1f}", f"s, in {self.wall_s:,.2f} s"),
        ]
        if self.draining_s > 0.05 * self.simulated_s:
            share = self.draining_s / self.simulated_s
            lines.append(_line("of it draining", f"{share:.0%}", "after the last arrival: rates "
                               "above are over this time too"))  # fmt: skip
        return lines

    def _latencies(self) -> list[str]:
        heads = ("mean", "p50", "p95", "p99", "max")
        lines = [f"{'latency, s':24}" + "".join(f"{head:>10}" for head in heads)]
        rows = {
            "time to first token": self.ttft_s,
            "time per output token": self.tpot_s,
            "whole request": self.e2e_s,
            "normalised (s/token)": self.normalized_s,
        }
        for name, row in rows.items():
            if row is not None:
                values = (row.mean, row.p50, row.p95, row.p99, row.max)
                lines.append(f"{name:24}" + "".join(f"{_seconds(v):>10}" for v in values))
        return lines if len(lines) > 1 else ["no request ended: no latencies"]

    def _pool(self) -> list[str]:
        window = f"{self.window.start_s:,.0f} to {self.window.end_s:,.0f} s"
        more = self.mean_held - self.mean_running
        ended = f"; beside {more:,.2f} that have ended" if more > 0.005 else ""
        lines = [
            _line(
                "batch", f"{self.mean_batch:,.2f}", f"sequences a step, {self.num_steps:,} steps"
            ),
            _line("in memory", f"{self.mean_running:,.2f}", f"sequences, mean of {window}{ended}"),
            _line("busy", f"{self.busy:.1%}", "of the time"),
            _line("preemptions", f"{self.num_preemptions:,}", ""),
            _line("prefix hits", f"{self.hit_rate:.1%}", "of prompt tokens"),
            "",
            f"{'of the pool':24}{'':10}  mean of {window}",
        ]
        lines += [_line(_KIND_NAMES[kind], f"{share:.1%}", "") for kind, share in
                  self.memory.items()]  # fmt: skip
        lines.append(_line("saved by sharing", f"{self.shared_saved:.1%}", "of the tables' blocks"))
        return [line.rstrip() for line in lines]


def _draining_s(result: SimResult) -> float:
    arrivals = result.times.arrival_s
    if not len(arrivals) or min(arrivals) == max(arrivals):
        return 0.0
    return max(0.0, result.end_s - max(arrivals))


_KIND_NAMES = {
    "tokens": "token states",
    "reserved": "reserved",
    "internal": "internal fragmentation",
    "external": "external fragmentation",
    "cached": "cached, unused",
    "free": "free",
}


def _line(name: str, value: str, remark: str) -> str:
    return f"{name:24}{value:>10}  {remark}"


def _seconds(value: float) -> str:
    """Three significant digits or so: latencies reach from milliseconds to hours."""
    return f"{value:.4f}" if value < 1 else f"{value:,.2f}"
