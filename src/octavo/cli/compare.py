"""`octavo lab compare`: the same requests under paging and under what came before it."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.flags import Hidden, flags, parse
from octavo.cli.lab_checks import check_engine, check_warm_up, told_flags
from octavo.cli.lab_flags import MachineFlags, SimFlags
from octavo.cli.workload_flags import ArrivalFlags, TraceFlags
from octavo.config import KVPolicy
from octavo.errors import ConfigError
from octavo.lab.config import POLICIES
from octavo.util import flag_name

if TYPE_CHECKING:
    from octavo.lab.compare import Comparison
    from octavo.lab.config import SimConfig
    from octavo.lab.trace import Trace
    from octavo.lab.workload import Workload


@flags
@dataclass(frozen=True, kw_only=True)
class CompareArrivals(ArrivalFlags):
    """The requests: when they come, and what each asks for. With --rates, poisson by
    default; trace stretches the times of the trace to each rate."""

    rate: Hidden[float | None] = None


@flags
@dataclass(frozen=True, kw_only=True)
class CompareEngine(SimFlags):
    """The engine: its limits. Prefix caching, host blocks and preemption are of paged alone."""

    kv_policy: Hidden[KVPolicy] = "contiguous"
    """Of which all limits may be said; --policies says what runs."""


@flags
@dataclass(frozen=True, kw_only=True)
class Compare:
    """Serve the same requests under each memory policy in simulated time, and tell what each made
    of the pool: throughput, latency, batch, and where every slot was. The scheduler and the memory
    manager are the live engine's. Needs no GPU and no weights.

    The pool needs a size: say --num-blocks, or --model and --gpu.
    """

    policies: tuple[KVPolicy, ...] = POLICIES
    """What to compare; the first is held against the others."""
    rates: tuple[float, ...] = ()
    """Requests a second to try, one after another. By default the requests come as the trace has
    them, else all at once."""
    plots: Path | None = None
    """Draw the results into this folder, as PNG and SVG; those of one rate are of the last."""
    warm_up: float = 0.0
    """Leave requests that come in the first so many seconds out of the latencies."""
    json: bool = False
    """End with one line of JSON."""
    requests: TraceFlags
    arrivals: CompareArrivals
    machine: MachineFlags
    engine: CompareEngine


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Compare, prog, argv)
    _check(args)
    config = args.engine.config(args.machine)
    trace = args.requests.load()
    workload = _workload_at(args, _rates(args)[0], trace)
    found = _compared(args, config, trace, workload)

    from octavo.lab.compare_tables import as_dict, tables

    print(tables(found, _bytes_per_token(args.machine)))
    if trace.num_skipped:
        print(f"{args.requests.left_out(trace)} of {trace.name} left out")
    try:
        if args.plots is not None:
            from octavo.lab.plots_compare import draw

            for path in draw(found, args.plots):
                print(path)
    finally:  # what was computed is told, whatever became of the drawing
        if args.json:
            told = {"rates": args.rates, "num_skipped": trace.num_skipped}
            print(json.dumps(told_flags(args.requests, workload) | told | as_dict(found)))
    return 0


def _check(args: Compare) -> None:
    """Refuse what cannot be done, before anything takes long."""
    for rate in args.rates:
        if not 0 < rate < float("inf"):
            raise ConfigError(f"--rates must be above 0 requests a second, got {rate:g}")
    check_warm_up(args.warm_up)
    check_engine(args.engine, args.policies, args.arrivals)
    if "contiguous" not in args.policies:
        for name in ("max_batch", "region_tokens", "max_padded_tokens"):
            if getattr(args.engine, name) is not None:
                raise ConfigError(
                    f"{flag_name(name)} is for contiguous, which --policies does not name"
                )
    arrival = args.arrivals.arrival
    if args.rates and arrival in ("closed", "all-at-once"):
        raise ConfigError(f"--rates does nothing to --arrival {arrival}: drop one of the two")
    if not args.rates and arrival in ("poisson", "gamma", "paper"):
        raise ConfigError(f"--arrival {arrival} needs --rates")
    if args.plots is not None:
        from octavo.lab.plots_style import require_matplotlib

        require_matplotlib()


def _make_folder(path: Path) -> None:
    """Before the work, so that it is not for nothing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plots {path}: {error.strerror}") from None


def _rates(args: Compare) -> tuple[float | None, ...]:
    return args.rates or (None,)


def _workload_at(args: Compare, rate: float | None, trace: Trace) -> Workload:
    changed = _at_rate(args.arrivals, rate, trace)
    try:
        return changed.workload(trace, args.requests.num_requests, args.requests.seed)
    except ConfigError as error:  # its flag of that name takes several here
        raise ConfigError(re.sub(r"--rate\b", "--rates", str(error))) from None


def _compared(args: Compare, config: SimConfig, trace: Trace, first: Workload) -> Comparison:
    from octavo.cli.progress import counted
    from octavo.lab.compare import compare

    rates = _rates(args)
    if args.plots is not None:
        _make_folder(args.plots)
    runs = [(policy, rate) for rate in rates for policy in args.policies]
    with counted("simulating", (first.num_requests or 0) * len(runs) or None) as bar:

        def tell(policy: KVPolicy, rate: float | None, num_ended: int, num: int) -> None:
            at = "" if rate is None else f" at {rate:g}/s"
            bar(runs.index((policy, rate)) * num + num_ended, f"{policy}{at}")

        return compare(
            lambda rate: _workload_at(args, rate, trace).requests,
            config,
            lambda policy: args.machine.step_costs(
                config.block_size,
                in_one_piece=policy != "paged",
                max_model_len=config.max_model_len,
            ),
            policies=args.policies,
            rates=rates,
            workload=_about(first, trace, args),
            block_tokens=first.block_tokens,
            concurrency=first.concurrency,
            warm_up_s=args.warm_up,
            tell=tell,
        )


def _about(first: Workload, trace: Trace, args: Compare) -> str:
    """Whose requests, and how they come: at the first rate, and at the others."""
    listed = ", ".join(f"{rate:g}" for rate in args.rates)
    if args.rates and args.arrivals.arrival == "trace":
        return (
            f"{trace.name}: {first.num_requests or 0:,} requests at its own times, stretched to "
            f"{listed} a second"
        )
    return first.about + (f"; then {listed.split(', ', 1)[1]} a second" if ", " in listed else "")


def _at_rate(arrivals: CompareArrivals, rate: float | None, trace: Trace) -> ArrivalFlags:
    """The arrival flags at one of the rates."""
    if rate is None:
        return arrivals
    if arrivals.arrival != "trace":
        return dataclasses.replace(arrivals, rate=rate)
    if arrivals.time_scale != 1.0:
        raise ConfigError("--time-scale and --rates both stretch the trace: drop one of the two")
    times = [request.arrival_s or 0.0 for request in trace.requests]
    span_s = max(times) - min(times)
    if not trace.has_arrivals or span_s <= 0:
        raise ConfigError(f"{trace.name} has no times that --arrival trace could stretch: drop it")
    return dataclasses.replace(arrivals, time_scale=(len(times) - 1) / span_s / rate)


def _bytes_per_token(machine: MachineFlags) -> int:
    return machine.shape().kv_shape().bytes_per_token if machine.model is not None else 0
