"""`octavo lab replay`: a recorded run again, exactly or with a change."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from octavo import __version__
from octavo.cli.flags import flags, parse
from octavo.cli.progress import counted
from octavo.config import KVPolicy, PreemptionMode, PreemptionVictim, SchedulingPolicy
from octavo.errors import ConfigError, RecordError

if TYPE_CHECKING:
    from octavo.lab.costs import StepCosts
    from octavo.lab.replay_report import ReplayReport
    from octavo.lab.replay_whatif import WhatIf
    from octavo.lab.replay_workload import RecordedWorkload


@flags
@dataclass(frozen=True, kw_only=True)
class Changes:
    """What if: the engine's limits, where they are to differ from the recorded ones. The recorded
    requests come at their recorded times, and generate their recorded tokens."""

    kv_policy: KVPolicy | None = None
    """How sequences get KV memory."""
    num_blocks: int | None = None
    """KV blocks in the pool."""
    block_size: int | None = None
    """Tokens in a KV block; pool and host keep the tokens that they hold."""
    max_model_len: int | None = None
    """Longest context (prompt and output) of a sequence."""
    max_num_seqs: int | None = None
    """Most sequences in one step."""
    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step."""
    enable_prefix_caching: bool = False
    """Turn it on."""
    no_enable_prefix_caching: bool = False
    """Turn it off."""
    num_host_blocks: int | None = None
    """Blocks in host memory, for preempted sequences and evicted cached blocks."""
    preemption_mode: PreemptionMode | None = None
    """What becomes of a preempted sequence's KV."""
    preemption_victim: PreemptionVictim | None = None
    """Who is preempted when the pool is full."""
    scheduling_policy: SchedulingPolicy | None = None
    """Order in which waiting requests are admitted."""
    watermark: float | None = None
    """Share of the pool that admission keeps free."""

    def values(self) -> dict[str, Any]:
        """What was asked for, by the names of `EngineLimits`. Raises `ConfigError`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        on, off = values["enable_prefix_caching"], values.pop("no_enable_prefix_caching")
        if on and off:
            raise ConfigError("--enable-prefix-caching and --no-enable-prefix-caching: drop one")
        values["enable_prefix_caching"] = on if on or off else None
        return {name: value for name, value in values.items() if value is not None}


@flags
@dataclass(frozen=True, kw_only=True)
class Replay:
    """Decide again what an engine decided that ran with --record FILE, and compare every plan, bit
    for bit; exit status 1 if one differs or the file is damaged. With a change, also tell how the
    same requests would have fared."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """What --record wrote."""
    costs: Path | None = None
    """With a change: how long steps take, a file written by 'octavo lab calibrate'. By default
    fitted to the recorded steps."""
    json: bool = False
    """End with one line of JSON."""
    changes: Changes


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Replay, prog, argv)
    asked = args.changes.values()
    if args.costs is not None and not asked:
        raise ConfigError("--costs has no effect on a replay that changes nothing: drop it")
    from octavo.lab.replay import replay
    from octavo.lab.replay_meter import Meter
    from octavo.lab.replay_whatif import changed_limits, what_if
    from octavo.lab.replay_workload import RecordedWorkload
    from octavo.record import RecordReader

    reader = RecordReader(args.file)
    limits = reader.header.limits
    changed = changed_limits(limits, asked) if asked else None
    workload, meter = RecordedWorkload(), Meter()
    with counted("replaying") as tell:
        report = replay(
            reader,
            (workload, meter) if asked else (),
            progress=lambda num_calls: tell(num_calls, "calls"),
        )
    print(_summary(report))
    answer: dict[str, Any] = report.as_dict()
    answer["replayed_by"] = __version__
    status = 0 if report.is_identical else 1
    if changed is not None and report.difference is None:
        costs = _costs(args, workload)
        with counted("simulating") as tell:
            found = what_if(
                workload,
                meter.figures(),
                limits,
                changed,
                costs,
                lambda num_steps, now_s: tell(num_steps, "steps"),
            )
        print(f"\n{_table(found)}")
        answer["what_if"] = found.as_dict()
    if args.json:
        print(json.dumps(answer))
    return status


def _costs(args: Replay, workload: RecordedWorkload) -> StepCosts:
    from octavo.lab.calibrated import CalibratedCosts
    from octavo.lab.replay_costs import FittedCosts

    if args.costs is not None:
        return CalibratedCosts.load(args.costs)
    if not workload.steps:
        raise RecordError(f"{args.file} has no step that computed anything: nothing to simulate")
    return FittedCosts(workload.steps)


def _summary(report: ReplayReport) -> str:
    limits = report.header.limits
    copies = ", ".join(f"{num:,} {kind}" for kind, num in sorted(report.num_copies.items()))
    lines = [
        f"{report.header.model}, recorded by octavo {report.header.octavo}: {limits.num_blocks:,} "
        f"blocks of {limits.block_size}, {limits.kv_policy}, preemption by "
        f"{limits.preemption_mode}",
        f"steps        {report.num_steps:>9,}  {report.num_tokens:,} tokens computed",
        f"requests     {report.num_requests:>9,}"
        + (f"  {report.num_refused:,} more refused" if report.num_refused else ""),
        f"admissions   {report.num_admissions:>9,}  {report.num_forks:,} sequences forked",
        f"preemptions  {report.num_preemptions:>9,}",
        f"evictions    {report.num_evictions:>9,}",
        f"copies       {report.num_copies.total():>9,}" + (f"  {copies}" if copies else ""),
    ]
    plans = f"{report.num_steps:,} plan{'s' * (report.num_steps != 1)}"
    if report.difference is None:
        if not report.num_steps:
            lines.append("nothing was decided: there is no plan to compare")
        elif report.damage is not None:
            lines.append(f"identical as far as it was replayed: {plans}")
        else:
            lines.append(f"identical: all {plans}")
    else:
        versions = f"recorded by octavo {report.header.octavo}, replayed by {__version__}"
        lines += [
            f"different: {_where(report)}",
            f"  recorded {_short(report.difference.recorded)}",
            f"  replayed {_short(report.difference.replayed)}",
            f"  {versions}",
        ]
    if report.damage is not None:
        lines.append(f"not the whole record: {report.damage}")
    elif report.ended is None and report.difference is None:
        lines.append("the record does not tell how the engine ended: it runs on, or has crashed")
    elif report.ended not in (None, "closed"):
        lines.append(f"the engine was not closed: {report.ended}")
    return "\n".join(lines)


def _where(report: ReplayReport) -> str:
    found = report.difference
    assert found is not None
    step = "" if found.step_id is None else f"step {found.step_id}, "
    return f"{step}{found.field} (line {found.line} of the record)"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


_ROWS = (
    ("seconds", "seconds", 1.0, ",.2f"),
    ("output tokens/s", "tokens_per_s", 1.0, ",.1f"),
    ("requests/s", "requests_per_s", 1.0, ",.2f"),
    ("time to first token, mean s", "ttft_mean_s", 1.0, ",.3f"),
    ("time to first token, p99 s", "ttft_p99_s", 1.0, ",.3f"),
    ("between tokens, mean ms", "tpot_mean_s", 1e3, ",.2f"),
    ("latency, mean s", "latency_mean_s", 1.0, ",.3f"),
    ("latency, p99 s", "latency_p99_s", 1.0, ",.3f"),
    ("latency a token, mean ms", "normalized_s", 1e3, ",.2f"),
    ("steps", "num_steps", 1.0, ",.0f"),
    ("sequences a step, mean", "mean_seqs", 1.0, ",.2f"),
    ("sequences a step, most", "peak_seqs", 1.0, ",.0f"),
    ("tokens computed", "computed_tokens", 1.0, ",.0f"),
    ("preemptions", "num_preemptions", 1.0, ",.0f"),
    ("evictions", "num_evictions", 1.0, ",.0f"),
    ("blocks to and from the host", "num_host_copies", 1.0, ",.0f"),
    ("prompt tokens found, %", "hit_rate", 100.0, ".1f"),
    ("requests refused", "num_refused", 1.0, ",.0f"),
    ("requests aborted", "num_aborted", 1.0, ",.0f"),
)


def _table(found: WhatIf) -> str:
    """Side by side."""
    changes = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in found.changes.items())
    lines = [
        f"What if: {changes}",
        f"({found.costs}; how far 'again' is from 'recorded' is the error of the simulation)",
        f"{'':30}{'recorded':>12}{'again':>12}{'changed':>12}{'changed/again':>15}",
    ]
    runs = (found.recorded, found.before, found.after)
    for title, name, scale, spec in _ROWS:
        lines.append(_row(title, [getattr(run, name) * scale for run in runs], spec))
    for kind in found.before.memory:
        shares = [100 * run.memory.get(kind, 0.0) for run in runs]
        if any(shares):
            lines.append(_row(f"pool: {kind}, %", shares, ".1f"))
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join(lines)


def _row(title: str, values: Sequence[float], spec: str) -> str:
    cells = "".join(f"{value:>12{spec}}" for value in values)
    _, before, after = values
    ratio = f"{after / before:>14.2f}x" if before else ""
    return f"{title:30}{cells}{ratio}".rstrip()
