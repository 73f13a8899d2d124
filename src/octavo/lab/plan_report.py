"""A plan for people and for programs."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from octavo.kv.ledger import TERMS
from octavo.lab.capacity import arithmetic
from octavo.lab.limits import Change, Limits
from octavo.lab.search import Answer, PlanOptions
from octavo.lab.slices import Slice
from octavo.lab.summary import Latency
from octavo.lab.window import pool_means, window_of

_WIDTH = 100
_NOTABLE = 0.02
"""Gains below are not worth a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An answer, what limits it, and how it was found."""

    machine: str
    workload: str
    """The trace, and how its requests come."""
    part: Slice
    """What was simulated."""
    options: PlanOptions
    answer: Answer
    limits: Limits
    num_simulations: int
    elapsed_s: float

    def memory(self) -> dict[str, float]:
        """Share of the pool by kind of slot, mean over the check."""
        trial = self.answer.trial
        window = window_of(trial.result, [r.arrival_s for r in trial.part.requests])
        means = pool_means(trial.result.samples, window)
        total = sum(means[kind] for kind in TERMS) or 1.0
        return {kind: means[kind] / total for kind in TERMS}

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        answer, trial = self.answer, self.answer.trial
        return {
            "machine": self.machine,
            "workload": self.workload,
            "slice": str(self.part),
            "num_requests_simulated": len(trial.part.requests),
            "rate": self.part.rate,
            "slo": asdict(self.options.slo),
            "num_gpus": answer.num_gpus,
            "tensor_parallel_size": answer.placement.num_gpus,
            "num_replicas": answer.num_replicas,
            "block_size": answer.config.block_size,
            "max_num_seqs": answer.config.max_num_seqs,
            "max_num_batched_tokens": answer.config.max_num_batched_tokens,
            "num_blocks": answer.config.num_blocks,
            "router": self.options.router,
            "enable_prefix_caching": answer.config.enable_prefix_caching,
            "service": trial.service.as_dict(),
            "busy": trial.utilization,
            "mean_batch": trial.result.mean_seqs,
            "load_factor": self.limits.load,
            "memory": self.memory(),
            "limits": asdict(self.limits),
            "arithmetic": self.arithmetic(),
            "rejected": list(answer.rejected),
            "doubts": list(answer.doubts),
            "num_simulations": self.num_simulations,
            "elapsed_s": self.elapsed_s,
        }

    def arithmetic(self) -> list[str]:
        """The reckoning, line by line."""
        answer, tpot_s = self.answer, self.options.slo.tpot_s
        return arithmetic(answer.capacity, self.part.rate, answer.num_replicas, tpot_s)

    def __str__(self) -> str:
        parts = (
            self._question(),
            self._answer_lines(),
            ["arithmetic", *_indented(self.arithmetic())],
            self._check_lines(),
            self._memory_lines(),
            self._limit_lines(),
            self._change_lines(),
            self._rejected_lines(),
            [f"{self.num_simulations} simulations in {self.elapsed_s:.0f} s"],
        )
        return "\n\n".join("\n".join(part) for part in parts if part)

    def _question(self) -> list[str]:
        return _wrapped(f"{self.machine}: {self.workload}; {self.options.slo}", "") + _wrapped(
            f"planned with {self.part}", ""
        )

    def _answer_lines(self) -> list[str]:
        answer, config = self.answer, self.answer.config
        gpus, each, num = answer.num_gpus, answer.placement.num_gpus, answer.num_replicas
        how = f"{num} replica{'s' * (num > 1)} of {each} GPU{'s' * (each > 1)} each"
        flags = (
            f"--max-num-seqs {config.max_num_seqs} "
            f"--max-num-batched-tokens {config.max_num_batched_tokens} "
            f"--block-size {config.block_size}"
        )
        lines = [f"answer: {gpus} GPU{'s' * (gpus > 1)}, {how}", f"  {flags}"]
        for doubt in answer.doubts:
            lines += _wrapped(f"less sure: {doubt}")
        return lines

    def _check_lines(self) -> list[str]:
        answer, trial, slo = self.answer, self.answer.trial, self.options.slo
        service, num = trial.service, self.answer.num_simulated
        which = f"{num} replica{'s' * (num > 1)}"
        if num < answer.num_replicas:
            which = f"{num} of {answer.num_replicas} replicas"
        if num > 1:
            which += f" behind a {self.options.router} router"
        rows = (
            ("TTFT", service.ttft, service.ttft_at, slo.ttft_s),
            ("TPOT", service.tpot, service.tpot_at, slo.tpot_s),
        )
        lines = [
            f"check: {which}, {len(trial.part.requests):,} requests simulated",
            f"  {'ms':8}{'mean':>10}{'p50':>10}{'p95':>10}{'p99':>10}"
            f"{f'p{slo.percentile:g}':>14}{'objective':>14}",
        ]
        lines += [_latency_row(*row) for row in rows]
        lines.append(_latency_row("E2E", service.e2e))
        load = self.limits.load
        spare = (
            f"and at {load:g} x the rate they are still kept"
            if load > 1
            else "with nothing to spare"
        )
        lines += _wrapped(
            f"{service.kept:.1%} of the requests keep both, {spare}; {trial.result.mean_seqs:.0f} "
            f"sequences a step, a step runs {trial.utilization:.0%} of the time"
        )
        fewer = answer.tried_fewer
        if fewer is not None and not fewer.service.ok:
            one_less = answer.num_replicas - 1
            lines.append(
                f"  with {one_less} replica{'s' * (one_less > 1)}: p{slo.percentile:g} TTFT "
                f"{1e3 * fewer.service.ttft_at:,.0f} ms, TPOT {1e3 * fewer.service.tpot_at:,.1f} ms"
            )
        return lines

    def _memory_lines(self) -> list[str]:
        shares = self.memory()
        told = ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items() if share >= 5e-4)
        taken = shares["tokens"] + shares["reserved"] + shares["internal"]
        waste = (shares["reserved"] + shares["internal"]) / taken if taken else 0.0
        return [
            f"memory: {told}",
            f"  waste: {waste:.1%} of the slots of sequences hold no token (ends of last blocks)",
        ]

    def _limit_lines(self) -> list[str]:
        limits = self.limits
        waiting = limits.waiting
        where = f"at {limits.stress:.3g} x the rate"
        lines = [f"limit: {limits.limit}", *_wrapped(limits.why)]
        lines += _wrapped(
            f"{where}: {limits.missed_ttft:.1%} of the requests miss the TTFT, "
            f"{limits.missed_tpot:.1%} the TPOT; {limits.num_preemptions:,} preemptions; "
            f"{waiting.mean:.3g} requests wait on average, for memory {waiting.memory:.0%}, seats "
            f"{waiting.seats:.0%}, their turn {waiting.compute:.0%}"
        )
        return lines

    def _change_lines(self) -> list[str]:
        limits = self.limits
        if limits.limit == "nothing":
            return []
        useful = [change for change in limits.changes if change.gain >= _NOTABLE]
        useless = [change.name for change in limits.changes if change.gain < _NOTABLE]
        best = useful[0] if useful else None
        if not useful and limits.untried:
            return _wrapped(
                f"next best change: no time to try any ({', '.join(limits.untried)})", ""
            )
        lines = ["next best change: " + (_told(best) if best else "none of those tried helps")]
        lines += [f"  {_told(change)}" for change in useful[1:]]
        if useless:
            lines += _wrapped(f"brings nothing: {', '.join(useless)}")
        if limits.untried:
            lines += _wrapped(f"no time to try: {', '.join(limits.untried)} (--time-limit)")
        return lines

    def _rejected_lines(self) -> list[str]:
        rejected = self.answer.rejected
        return ["not chosen", *(line for why in rejected for line in _wrapped(why))] * bool(
            rejected
        )


def _told(change: Change) -> str:
    how = f" ({change.flags})" if change.flags else ""
    least = "at least " if change.is_least else ""
    note = f", {change.note}" if change.note else ""
    return f"{change.name}{how}: {least}{change.gain:+.0%} requests a second{note}"


def _latency_row(
    name: str, found: Latency, at: float | None = None, limit: float | None = None
) -> str:
    values = "".join(f"{1e3 * v:>10,.1f}" for v in (found.mean, found.p50, found.p95, found.p99))
    wide = "".join(f"{1e3 * v:>14,.1f}" for v in (at, limit) if v is not None)
    return f"  {name:8}{values}{wide}"


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  " * bool(indent)
    )


def _indented(lines: list[str]) -> list[str]:
    return [
        part
        for line in lines
        for part in (_wrapped(line) if len(line) > _WIDTH - 2 else ["  " + line])
    ]
