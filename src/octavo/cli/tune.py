"""`octavo tune block-size`: which block size suits a workload, and whether it matters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.cli.flags import Hidden, flags, parse
from octavo.cli.lab_flags import MachineFlags, SimFlags
from octavo.cli.workload_flags import ArrivalFlags, TraceFlags
from octavo.config import KVPolicy
from octavo.errors import ConfigError
from octavo.lab.config import Router

if TYPE_CHECKING:
    from octavo.lab.config import SimConfig
    from octavo.lab.slices import Slice
    from octavo.lab.tuner import Place, Tuning


@flags
@dataclass(frozen=True, kw_only=True)
class TuneEngine(SimFlags):
    """The engine: its limits. One replica, paged."""

    kv_policy: Hidden[KVPolicy] = "paged"
    max_batch: Hidden[int | None] = None
    region_tokens: Hidden[int | None] = None
    max_padded_tokens: Hidden[int | None] = None
    num_replicas: Hidden[int] = 1
    router: Hidden[Router] = "round-robin"
    stride: Hidden[bool] = True
    enable_prefix_caching: bool = True
    """Find again what prompts have in common, where the trace says."""


@flags
@dataclass(frozen=True, kw_only=True)
class TuneCommand:
    """Serve the same requests out of the same bytes with each block size, in simulated time, and
    recommend one: waste at the ends of sequences, block tables, time of kernels and copies, prefix
    hits, preemptions, and what they add up to.

    With times of arrival (of the trace, or --rate) latency counts, else throughput. How long blocks
    of a size take comes from the GPU's figures; --measure measures it here.
    """

    block_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Block sizes to try, in tokens."""
    measure: str | None = None
    """Measure decoding with blocks of each size on this machine, with this model (a folder, a .gguf
    file, a hub name); needs --costs FILE of the same machine for everything else."""
    simulated_requests: int | None = None
    """Requests of a simulation: the busiest stretch of the trace that has so many. By default
    1,000, fewer where prompts are long."""
    measure_host: bool = True
    """Also time the scheduler and the memory manager on this machine."""
    json: bool = False
    """End with one line of JSON."""
    requests: TraceFlags
    arrivals: ArrivalFlags
    machine: MachineFlags
    engine: TuneEngine


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(TuneCommand, prog, argv)
    _check(args)
    config = args.engine.config(args.machine)
    costs = args.machine.step_costs(config.block_size, max_model_len=config.max_model_len)
    part, about, saturated = _part(args)
    extra = {} if args.measure is None else _measured(args, args.measure)
    tuning = _tuned(args, config, part, extra, saturated)

    from octavo.lab.tune_report import report
    from octavo.lab.tuner import REQUESTS

    slots = config.num_slots // len(config.windows)
    pool = f"pool of {slots:,} tokens; {costs.name}"
    if args.measure is not None:
        pool += f"; decoding by block size measured here with {args.measure}"
    print(report(tuning, f"{about}; {part}", pool))
    wanted = min(REQUESTS, part.num_all)
    if args.simulated_requests is None and len(part.requests) < wanted:
        print(
            f"  less sure: prompts are long, so only {len(part.requests):,} requests were "
            "simulated with each size (--simulated-requests)"
        )
    if args.json:
        values = {"workload": about, "slice": str(part), "num_slots": slots, "costs": costs.name}
        print(json.dumps(values | tuning.as_dict()))
    return 0


def _check(args: TuneCommand) -> None:
    if not args.block_sizes or min(args.block_sizes) < 1:
        raise ConfigError(f"--block-sizes must be at least 1 each, got {args.block_sizes}")
    if args.simulated_requests is not None and args.simulated_requests < 2:
        raise ConfigError(f"--simulated-requests must be at least 2, got {args.simulated_requests}")
    if args.arrivals.concurrency is not None:
        raise ConfigError(
            "--concurrency is not compared here: say --rate, or leave it out for throughput"
        )
    if args.measure is not None and not _is_file(args.machine.costs):
        raise ConfigError(
            "--measure tells how blocks of different sizes compare, not how long steps take: add "
            "--costs FILE ('octavo lab calibrate' writes it)"
        )


def _is_file(costs: str | None) -> bool:
    from octavo.lab.gpus import gpu_names

    return costs is not None and costs.lower() not in ("fixed", *gpu_names())


def _part(args: TuneCommand) -> tuple[Slice, str, bool]:
    """The requests, whose they are, and whether they come all at once."""
    from dataclasses import replace

    from octavo.lab.slices import Slice, busiest
    from octavo.lab.tuner import affordable

    trace = args.requests.load()
    workload = args.arrivals.workload(trace, None, args.requests.seed)
    requests = list(workload.requests)
    times = {request.arrival_s for request in requests}
    tokens = workload.block_tokens
    num = args.simulated_requests
    if num is None:
        whole = Slice(requests, 0, len(requests), 1.0, 1.0, tokens)
        prefixes = args.engine.enable_prefix_caching and whole.has_prefixes
        num = affordable(whole, args.block_sizes, prefixes)
    if times - {None, 0.0}:
        part = busiest(requests, num, rate=args.arrivals.rate, block_tokens=tokens)
        return part, workload.about, False
    chosen = [replace(r, arrival_s=0.0) for r in requests[:num]]
    rate = float(len(chosen))
    part = Slice(chosen, 0, len(requests), rate, rate, tokens)
    return part, workload.about, True


def _tuned(
    args: TuneCommand, config: SimConfig, part: Slice, extra: dict[int, float], saturated: bool
) -> Tuning:
    from octavo.cli.progress import counted
    from octavo.lab.tuner import TuneOptions, tune

    options = TuneOptions(
        config=config,
        sizes=args.block_sizes,
        saturated=saturated,
        measure_host=args.measure_host,
    )
    with counted("trying", len(set(args.block_sizes)) + 1) as bar:
        num = 0

        def tell(text: str) -> None:
            nonlocal num
            bar(num, text)
            num += 1

        return tune(part, _place(args, config, extra), options, tell)


def _place(args: TuneCommand, config: SimConfig, extra: dict[int, float]) -> Place:
    """The same bytes, and costs for blocks of a size."""
    from octavo.lab.capacity import Placement
    from octavo.lab.tuner import ResizedCosts

    measured = args.machine.calibration()
    has_model = args.machine.model is not None
    token_bytes = len(config.windows)
    if has_model:
        token_bytes = args.machine.shape().kv_shape(1, config.max_model_len).bytes_per_token
    pool_bytes = config.num_slots * token_bytes // len(config.windows)

    def place(size: int) -> Placement:
        costs = args.machine.step_costs(size, max_model_len=config.max_model_len)
        if measured is not None:
            more_s = extra.get(size, 0.0)
            costs = ResizedCosts(
                measured, size, base=measured.block_size * len(config.windows), extra_token_s=more_s
            )
        return Placement(
            num_gpus=1,
            costs=costs,
            pool_bytes=pool_bytes,
            token_bytes=token_bytes,
            windows=config.windows,
            layer_windows=config.layer_windows,
        )

    return place


def _measured(args: TuneCommand, model: str) -> dict[int, float]:
    """Seconds a token of context, by block size, beyond what the calibration's took."""
    from octavo.bench.block_size import measure_decode
    from octavo.cli.start import note, start_engine
    from octavo.config import EngineConfig

    costs = args.machine.calibration()
    assert costs is not None, "checked"
    batch, context, steps, usual = 16, 512, 32, costs.block_size
    seconds = measure_decode(
        EngineConfig(model=model),
        start_engine,
        block_sizes=sorted({*args.block_sizes, usual}),
        batch_size=batch,
        context=context,
        num_steps=steps,
        tell=note,
    )
    tokens = batch * (context + steps / 2)
    return {size: (seconds[size] - seconds[usual]) / tokens for size in args.block_sizes}
