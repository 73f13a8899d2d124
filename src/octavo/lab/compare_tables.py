"""What `octavo lab compare` prints: two tables, and what follows from them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from octavo.kv.ledger import TERMS
from octavo.lab.compare import Comparison, PolicyRun, rate_at_latency
from octavo.lab.summary import Latency
from octavo.util import human_bytes

LIMIT_S = 0.5
"""Normalised latency at which rates are held against each other (the paper reads its curves so)."""


def tables(found: Comparison, bytes_per_token: int = 0) -> str:
    """The comparison as text, some 110 columns wide."""
    config = found.config
    groups, slots = len(config.windows), config.num_blocks * config.block_size
    size = f", {human_bytes(slots * bytes_per_token // groups)}" if bytes_per_token else ""
    if groups > 1:
        size += f" in {groups} groups of layers (paged; one group in other policies)"
    lines = [
        f"Requests  {found.workload}",
        f"Engine    {config.num_blocks:,} blocks x {config.block_size} tokens = {slots:,} slots"
        f"{size}; at most {config.max_num_seqs:,} sequences, "
        f"{config.max_num_batched_tokens:,} tokens a step",
        f"Costs     {found.machine}",
        "",
        *_served(found.runs),
        "",
        *_latencies(found.runs),
    ]
    notes = [
        *_batches(found),
        *_shared(found.runs),
        *_draining(found.runs),
        *_refusals(found.runs),
        *_sustained(found),
        *_ratios(found),
    ]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def as_dict(found: Comparison) -> dict[str, Any]:
    """The comparison for machines: seconds, and shares as fractions of 1."""
    config = asdict(found.config)
    del config["kv_policy"]  # the runs say theirs
    return {
        "workload": found.workload,
        "costs": found.machine,
        "config": config,
        "runs": [run.as_dict() for run in found.runs],
        "rate_at_limit": {"limit_s_per_token": LIMIT_S, **sustained_rates(found)},
    }


def sustained_rates(found: Comparison) -> dict[str, float | None]:
    """By policy, the rate at which normalised latency reaches `LIMIT_S`; None where the rates that
    were tried do not tell."""
    return {
        policy: rate_at_latency(
            ((run.rate or 0.0, normalized_s(run)) for run in found.of(policy)), LIMIT_S
        )
        for policy in found.policies
    }


def normalized_s(run: PolicyRun) -> float:
    """Mean seconds an output token, from arrival to end; 0 where no request has ended."""
    found = run.summary.normalized_s
    return 0.0 if found is None else found.mean


def _rate(run: PolicyRun) -> str:
    return "-" if run.rate is None else f"{run.rate:.4g}"


def _served(runs: Sequence[PolicyRun]) -> list[str]:
    lines = [
        f"{'':20}{'served':^18}{'batch':^13}{'of the pool, %':^50}",
        f"{'policy':13}{'rate':>6} {'req/s':>8}{'tok/s':>9}{'mean':>7}{'max':>5} "
        + "".join(f"{kind:>9}" for kind in TERMS)
        + f"{'preempt':>9}",
    ]
    for run in runs:
        one = run.summary
        shares = "".join(f"{100 * one.memory[kind]:>9.1f}" for kind in TERMS)
        lines.append(
            f"{run.policy:13}{_rate(run):>6} {one.requests_per_s:>8.3f}"
            f"{one.output_tokens_per_s:>9,.1f}{one.mean_running:>7.1f}{run.max_running:>5} {shares}"
            f"{one.num_preemptions:>9,}"
        )
    return lines


def _latencies(runs: Sequence[PolicyRun]) -> list[str]:
    three = f"{'mean':>8}{'p50':>8}{'p95':>8}"
    lines = [
        f"{'':20}{'first token, s':^25}{'token after it, ms':^25}{'whole / tokens, s/token':^25}",
        f"{'policy':13}{'rate':>6} {three} {three} {three}",
    ]
    for run in runs:
        lines.append(
            f"{run.policy:13}{_rate(run):>6} {_three(run.summary.ttft_s)} "
            f"{_three(run.summary.tpot_s, 1e3)} {_three(run.summary.normalized_s)}"
        )
    return lines


def _three(found: Latency | None, scale: float = 1.0) -> str:
    if found is None:
        return f"{'-':>8}" * 3
    return "".join(f"{_short(scale * v):>8}" for v in (found.mean, found.p50, found.p95))


def _short(value: float) -> str:
    """Three digits that matter, in at most seven characters."""
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 1000 else 0
    return f"{value:,.{digits}f}"


def _batches(found: Comparison) -> list[str]:
    if "contiguous" not in found.policies:
        return []
    return ["contiguous: all tokens of a batch come when it has ended"]


def _shared(runs: Sequence[PolicyRun]) -> list[str]:
    """What was found in the prefix cache, and what sharing saves, where that is anything."""
    lines = []
    for run in runs:
        one, at = run.summary, "" if run.rate is None else f" at {_rate(run)}/s"
        parts = [f"{one.hit_rate:.1%} of the prompt tokens found in the cache"] * (one.hit_rate > 0)
        if one.shared_saved >= 5e-4:
            parts.append(f"sharing saves {one.shared_saved:.1%} of the blocks in tables")
        if parts:
            lines.append(f"{run.policy}{at}: {', '.join(parts)}")
    return lines


def _draining(runs: Sequence[PolicyRun]) -> list[str]:
    """Runs whose throughput is much of a time in which nobody came any more."""
    listed = [
        f"{run.policy}{'' if run.rate is None else f' at {_rate(run)}/s'} "
        f"{run.summary.draining_s / run.summary.simulated_s:.0%}"
        for run in runs
        if run.summary.draining_s > 0.2 * run.summary.simulated_s
    ]
    if not listed:
        return []
    return _wrapped("of these runs so much was after the last arrival: " + ", ".join(listed))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 110, subsequent_indent="  ")


def _refusals(runs: Sequence[PolicyRun]) -> list[str]:
    return [
        f"{run.policy}: {run.summary.num_refused:,} of {run.summary.num_requests:,} requests can "
        f"never fit: {run.summary.refusal}"
        for run in {run.policy: run for run in runs}.values()
        if run.summary.num_refused
    ]


def _sustained(found: Comparison) -> list[str]:
    if len(found.rates) < 2 or not all(normalized_s(run) for run in found.runs):
        return []
    rates = sustained_rates(found)
    known = ", ".join(f"{policy} {rate:.3g}" for policy, rate in rates.items() if rate)
    lines = [f"requests/s at {LIMIT_S} s/token: {known}"] if known else []
    for where, is_there in (
        ("below", lambda run: normalized_s(run) <= LIMIT_S),
        ("above", lambda run: normalized_s(run) > LIMIT_S),
    ):
        listed = ", ".join(p for p in found.policies if all(map(is_there, found.of(p))))
        if listed:
            lines.append(f"{where} {LIMIT_S} s/token at all rates that were tried: {listed}")
    return lines


def _ratios(found: Comparison) -> list[str]:
    """The first policy against the others, where most came."""
    first, *others = found.at_last_rate()
    if not others or not all(normalized_s(run) for run in (first, *others)):
        return []
    at = "" if first.rate is None else f" at {first.rate:.4g} requests/s"
    return [f"{first.policy}{at}, against"] + [_ratio(first, other) for other in others]


def _ratio(first: PolicyRun, other: PolicyRun) -> str:
    own, its = first.summary, other.summary
    if own.num_refused != its.num_refused:
        return f"  {other.policy:13}   no ratio: they did not serve the same requests"
    return (
        f"  {other.policy:13}"
        f"{own.output_tokens_per_s / its.output_tokens_per_s:>6.2f} x the tokens/s, "
        f"{own.mean_running / max(1e-12, its.mean_running):>6.2f} x the batch, "
        f"{normalized_s(first) / normalized_s(other):>7.3f} x the latency"
    )
