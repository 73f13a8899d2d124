"""`octavo lab simulate`: a workload served in simulated time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.cli.flags import flags, parse
from octavo.cli.lab_checks import check_engine, check_warm_up, told_flags
from octavo.cli.lab_flags import MachineFlags, SimFlags
from octavo.cli.workload_flags import ArrivalFlags, TraceFlags
from octavo.errors import ConfigError
from octavo.util import flag_name

if TYPE_CHECKING:
    from octavo.lab.config import SimConfig
    from octavo.lab.costs import StepCosts
    from octavo.lab.results import SimResult
    from octavo.lab.workload import Workload


@flags
@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Serve a workload in simulated time: the scheduler and the memory manager are the live
    engine's, only the model is not there. Needs no GPU and no weights.

    Without further flags: synthetic ShareGPT lengths, all at once. The pool needs a size: say
    --num-blocks, or --model and --gpu.
    """

    until: float | None = None
    """Stop the clock after so many simulated seconds, though requests are still there."""
    warm_up: float = 0.0
    """Leave requests that come in the first so many seconds out of the latencies."""
    sample_interval: float | None = None
    """Simulated seconds between two looks at the pool. By default so that there are some 500 to
    1,000 of them."""
    json: bool = False
    """End with one line of JSON."""
    requests: TraceFlags
    arrivals: ArrivalFlags
    machine: MachineFlags
    engine: SimFlags


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Simulate, prog, argv)
    _check(args)
    config = args.engine.config(args.machine)
    # kernels read K and V block by block under paging only
    in_one_piece = config.kv_policy != "paged"
    costs = args.machine.step_costs(
        config.block_size, in_one_piece=in_one_piece, max_model_len=config.max_model_len
    )
    trace = args.requests.load()
    workload = args.arrivals.workload(trace, args.requests.num_requests, args.requests.seed)
    result = _simulated(args, workload, config, costs)

    from octavo.lab.summary import Summary

    summary = Summary.of(result, config, args.warm_up)
    print(_head(workload, config, costs, args.requests.left_out(trace)))
    if args.engine.num_blocks is None:
        print(f"\n{args.machine.pool(args.engine)}")
    print(f"\n{summary}")
    if args.json:
        values = told_flags(args.requests, workload) | {
            "rate": args.arrivals.rate,
            "costs": costs.name,
            "num_skipped": trace.num_skipped,
            "config": dataclasses.asdict(config),
        }
        print(json.dumps(values | summary.as_dict()))
    return 0


def _check(args: Simulate) -> None:
    for name in ("until", "sample_interval"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(
                f"{flag_name(name)} must be a number of seconds above 0, got {value:g}"
            )
    check_warm_up(args.warm_up)
    check_engine(args.engine, (args.engine.kv_policy,), args.arrivals)


def _simulated(
    args: Simulate, workload: Workload, config: SimConfig, costs: StepCosts
) -> SimResult:
    from octavo.cli.progress import counted
    from octavo.lab.simulator import simulate

    with counted("simulating", workload.num_requests) as tell:
        return simulate(
            workload.requests,
            config,
            costs,
            block_tokens=workload.block_tokens,
            concurrency=workload.concurrency,
            until_s=args.until,
            sample_s=args.sample_interval,
            progress=lambda num_ended, now_s: tell(num_ended, f"at {now_s:,.0f} s"),
        )


def _head(workload: Workload, config: SimConfig, costs: StepCosts, left_out: str) -> str:
    """What was simulated."""
    groups, share, of_groups = len(config.pool_windows), "", ""
    if groups > 1:
        share, of_groups = f" / {groups}", f" in {groups} groups of layers"
    num_slots = config.num_slots // groups
    replicas = f"{config.num_replicas} x " if config.num_replicas > 1 else ""
    lines = [
        workload.about + (f" ({left_out} left out)" if left_out else ""),
        f"{costs.name}",
        f"{replicas}{config.pool_blocks:,} blocks x {config.block_size}{share} = "
        f"{num_slots:,} tokens{of_groups}, "
        f"{config.kv_policy}, prefix caching {'on' if config.enable_prefix_caching else 'off'}, "
        f"at most {config.max_num_seqs:,} sequences and {config.max_num_batched_tokens:,} tokens "
        "a step",
    ]
    if config.num_replicas > 1:
        lines.append(f"router: {config.router}")
    return "\n".join(lines)
