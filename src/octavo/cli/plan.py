"""`octavo plan`: how many GPUs a workload needs, with which limits, and what limits it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.cli.flags import Hidden, flags, parse
from octavo.cli.lab_flags import MachineFlags
from octavo.cli.workload_flags import ArrivalFlags, TraceFlags
from octavo.errors import ConfigError
from octavo.lab.config import Router
from octavo.util import flag_name

if TYPE_CHECKING:
    from octavo.lab.machine import Machine
    from octavo.lab.plan_report import Plan
    from octavo.lab.search import PlanOptions
    from octavo.lab.trace import Trace


@flags
@dataclass(frozen=True, kw_only=True)
class PlanMachine(MachineFlags):
    """The model, and the GPUs that it could be put on."""

    tensor_parallel_size: Hidden[int] = 1
    costs: Hidden[str | None] = None
    host_gpus: int = 8
    """GPUs of a host: a model is split over at most so many."""
    max_gpus: int = 512
    """Most GPUs that an answer may have."""


@flags
@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Tell how many GPUs keep the objectives for a workload, how the model is put on them, with
    which limits of the engine, what waste and what latencies; what limits it; and what to change
    next. The arithmetic is shown, and checked by simulation. Needs no GPU and no weights, only a
    config.json or the name of a shape.
    """

    slo_ttft: float = 0.5
    """Objective: seconds to the first token."""
    slo_tpot: float = 0.05
    """Objective: seconds for each token behind it, mean over a request."""
    percentile: float = 95.0
    """So many per cent of the requests keep each objective."""
    block_size: int = 16
    """Tokens in a KV block; 'octavo tune block-size' compares them."""
    max_model_len: int | None = None
    """Longest sequence; by default the model's own."""
    enable_prefix_caching: bool = True
    """Find again what prompts of the trace have in common, where it says."""
    router: Router = "round-robin"
    """Which replica a request goes to: the next, the least loaded, or the one that holds most of
    its prompt. The search assumes the next one; the check has this one."""
    simulated_requests: int | None = None
    """Requests of a replica in each simulation; by default about 1,000, fewer of long ones. The
    whole is the busiest stretch of the trace that has enough of them."""
    time_limit: float = 45.0
    """Seconds of computing that are to be enough. Where they are not, the answer says what it is
    less sure of."""
    json: bool = False
    """End with one line of JSON."""
    requests: TraceFlags
    arrivals: ArrivalFlags
    machine: PlanMachine


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(PlanCommand, prog, argv)
    machine, options = _machine(args.machine, args.max_model_len), _options(args)
    plan = _planned(args, machine, options, args.requests.load())
    print(plan)
    if args.json:
        print(json.dumps(plan.as_dict()))
    return 0


def _machine(args: PlanMachine, max_model_len: int | None) -> Machine:
    from octavo.lab.machine import GpuMachine

    shape, gpu = args.shape(), args.found_gpu()
    if gpu.flops == 0:
        raise ConfigError("--gpu is missing: --gpu-memory alone does not say how fast it is")
    return GpuMachine(
        shape,
        gpu,
        host_gpus=args.host_gpus,
        utilization=args.gpu_memory_utilization,
        software=args.software,
        max_model_len=max_model_len,
    )


def _options(args: PlanCommand) -> PlanOptions:
    from octavo.lab.search import PlanOptions
    from octavo.lab.trials import Slo

    for name in ("block_size", "max_model_len", "simulated_requests"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"{flag_name(name)} must be at least 1, got {value}")
    if args.machine.max_gpus < 1:
        raise ConfigError(f"--max-gpus must be at least 1, got {args.machine.max_gpus}")
    return PlanOptions(
        slo=Slo(args.slo_ttft, args.slo_tpot, args.percentile),
        max_model_len=args.max_model_len or args.machine.shape().max_position_embeddings,
        block_size=args.block_size,
        max_gpus=args.machine.max_gpus,
        enable_prefix_caching=args.enable_prefix_caching,
        router=args.router,
        replica_requests=args.simulated_requests,
        limit_s=args.time_limit,
    )


def _planned(args: PlanCommand, machine: Machine, options: PlanOptions, trace: Trace) -> Plan:
    from octavo.cli.progress import counted
    from octavo.lab.examiner import Examiner
    from octavo.lab.plan_report import Plan
    from octavo.lab.planner import find_answer

    if args.arrivals.concurrency is not None:
        raise ConfigError(
            "--concurrency has no rate to plan for: a closed loop slows down with its engine; say "
            "--rate (requests a second)"
        )
    if args.arrivals.rate is None and not trace.has_arrivals:
        raise ConfigError(
            f"{trace.name} has no times of arrival, so no rate is known: say --rate (requests a "
            "second)"
        )
    workload = args.arrivals.workload(trace, None, args.requests.seed)
    requests = list(workload.requests)
    with counted("planning") as bar:
        num = 0

        def tell(text: str) -> None:
            nonlocal num
            bar(num, text)
            num += 1

        answer, trials = find_answer(
            requests,
            machine,
            options,
            rate=args.arrivals.rate,
            block_tokens=workload.block_tokens,
            tell=tell,
        )
        limits = Examiner(answer, machine, options, trials).limits()
    return Plan(
        machine=machine.name,
        workload=workload.about,
        part=trials.part,
        options=options,
        answer=answer,
        limits=limits,
        num_simulations=trials.num_run,
        elapsed_s=trials.elapsed_s,
    )
