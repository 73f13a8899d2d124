"""Live runs predicted: what the simulator says, with this machine's own calibration, and what the
engine then does.

    python benchmarks/predict.py [--rounds 5] [--costs FILE] [--json]

Three workloads of the default model on this machine, with lengths drawn like ShareGPT's, scaled:

* batch: all requests at once;
* poisson: requests that come at random, at `--load` of the rate that the batch was served at;
* prefixes: at random too, each beginning with one of a few long prefixes, with the prefix cache.

In every round all points of the calibration are measured once, and every workload is run once, so
that slow hours of the machine fall on both. The prediction is made with
the medians of the calibration, and compared with medians over the rounds. Printed for each of the
workloads: throughput in output tokens, and mean time to first token, time per output token, and
latency. The goal is 10 % on each. `--costs FILE` takes a calibration that was made before instead
of measuring.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo import LLM, SamplingParams
from octavo.bench.calibrate import Calibration, engine_config, measure_round
from octavo.cli.calibrate import contents, summary
from octavo.config import EngineConfig
from octavo.lab.calibrated import CalibratedCosts
from octavo.lab.config import SimConfig
from octavo.lab.costs import StepCosts
from octavo.lab.lengths import draw_lengths
from octavo.lab.results import SimResult
from octavo.lab.simulator import simulate
from octavo.lab.trace import TraceRequest

METRICS = ("output tokens/s", "mean TTFT, ms", "mean TPOT, ms", "mean latency, ms")


@dataclass(frozen=True)
class Figures:
    """What a run, or its prediction, comes to; in the units of `METRICS`."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, times: Sequence[tuple[float, float, float, int]]) -> Figures:
        """From (arrival, first token, end, output tokens) of each request; seconds."""
        arrivals, firsts, ends, counts = zip(*times, strict=True)
        tpot = [(end - first) / (n - 1) for _, first, end, n in times if n > 1]
        return cls(
            (
                sum(counts) / (max(ends) - min(arrivals)),
                1e3 * statistics.fmean(f - a for f, a in zip(firsts, arrivals, strict=True)),
                1e3 * statistics.fmean(tpot),
                1e3 * statistics.fmean(e - a for e, a in zip(ends, arrivals, strict=True)),
            )
        )

    @classmethod
    def median(cls, figures: Sequence[Figures]) -> Figures:
        """Of each figure its own."""
        columns = zip(*(f.values for f in figures), strict=True)
        return cls(tuple(map(statistics.median, columns)))


def batch_requests(num: int, scale: float, seed: int) -> list[TraceRequest]:
    """All at once."""
    return [
        TraceRequest(num_input=i, num_output=o, arrival_s=0.0)
        for i, o in _lengths(num, scale, seed)
    ]


def poisson_requests(num: int, scale: float, rate: float, seed: int) -> list[TraceRequest]:
    """At random, so many a second on average."""
    requests = batch_requests(num, scale, seed)
    return _arriving(requests, rate, random.Random(f"arrivals {seed}"))


def prefix_requests(num: int, scale: float, rate: float, seed: int) -> list[TraceRequest]:
    """At random; each begins with one of four prefixes of 240 to 480 tokens."""
    rng = random.Random(f"prefixes {seed}")
    prefixes = [(f"prefix {i}", 240 + 80 * i) for i in range(4)]
    requests = []
    for num_input, num_output in _lengths(num, scale / 2, seed):
        name, length = rng.choice(prefixes)
        requests.append(
            TraceRequest(
                num_input=length + num_input,
                num_output=num_output,
                prefix=name,
                prefix_tokens=length,
            )
        )
    return _arriving(requests, rate, rng)


def _lengths(num: int, scale: float, seed: int) -> list[tuple[int, int]]:
    drawn = draw_lengths("sharegpt", num, seed)
    return [(max(1, round(i * scale)), max(2, round(o * scale))) for i, o in drawn]


def _arriving(
    requests: Sequence[TraceRequest], rate: float, rng: random.Random
) -> list[TraceRequest]:
    now, found = 0.0, []
    for request in requests:
        found.append(dataclasses.replace(request, arrival_s=now))
        now += rng.expovariate(rate)
    return found


def serve(llm: LLM, requests: Sequence[TraceRequest], seed: str) -> Figures:
    """Run a workload live, with prompts of this round's own."""
    rng = random.Random(seed)
    vocab_size = llm.arch.vocab_size

    def draw(count: int) -> list[int]:
        return [rng.randrange(17, vocab_size) for _ in range(count)]

    prefixes = {r.prefix: draw(r.prefix_tokens) for r in requests if r.prefix}
    jobs = [
        (
            r.arrival_s or 0.0,
            prefixes.get(r.prefix, []) + draw(r.num_input - r.prefix_tokens),
            SamplingParams(
                temperature=0,
                max_tokens=r.num_output,
                ignore_eos=True,
                detokenize=llm.get_tokenizer() is not None,
            ),
        )
        for r in requests
    ]
    begin = time.monotonic()  # the engine's clock
    streams: list[Any] = []

    def add_due() -> None:
        while len(streams) < len(jobs):
            arrival_s, prompt, params = jobs[len(streams)]
            if arrival_s > time.monotonic() - begin:
                return
            streams.append(llm.stream(prompt, params, final_only=True))

    found = []
    llm.after_step = add_due
    try:
        for number, (arrival_s, _, _) in enumerate(jobs):
            while len(streams) <= number:  # nobody is here
                time.sleep(max(0.0, begin + arrival_s - time.monotonic()))
                add_due()
            (output,) = streams[number]
            metrics = output.metrics
            assert metrics.first_token_s is not None and metrics.finished_s is not None
            times = (arrival_s, metrics.first_token_s - begin, metrics.finished_s - begin)
            found.append((*times, len(output.outputs[0].token_ids)))
    finally:
        llm.after_step = None
    return Figures.of(found)


def sim_config(llm: LLM) -> SimConfig:
    """The engine as the simulator has it."""
    config, report = llm.config, llm.memory_report()
    assert config.max_model_len is not None
    return SimConfig(
        num_blocks=report.ledger.num_blocks,
        block_size=config.block_size,
        kv_policy=config.kv_policy,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_blocks=0 if report.host is None else report.host.num_blocks,
        preemption_mode=config.preemption_mode,
        preemption_victim=config.preemption_victim,
        scheduling_policy=config.scheduling_policy,
    )


def predict(requests: Sequence[TraceRequest], config: SimConfig, costs: StepCosts) -> Figures:
    """Run a workload in the simulator."""
    result: SimResult = simulate(requests, config, costs)
    times = result.times
    assert len(times) == len(requests), f"{result.num_refused} refused: {result.refusals}"
    return Figures.of(
        list(
            zip(
                times.arrival_s,
                times.first_token_s,
                times.finished_s,
                times.num_output,
                strict=True,
            )
        )
    )


def table(name: str, predicted: Figures, runs: Sequence[Figures]) -> list[str]:
    """For people."""
    measured = Figures.median(runs)
    lines = [f"{name:20}{'predicted':>12}{'measured':>12}{'off by':>9}{'rounds':>22}"]
    for place, metric in enumerate(METRICS):
        ours, theirs = predicted.values[place], measured.values[place]
        each = [run.values[place] for run in runs]
        spread = f"{min(each):,.1f} to {max(each):,.1f}"
        lines.append(
            f"  {metric:18}{ours:>12,.1f}{theirs:>12,.1f}{ours / theirs - 1:>+9.1%}{spread:>22}"
        )
    return lines


def main() -> None:
    """Measure, predict, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-requests", type=int, default=64, help="of each workload")
    parser.add_argument("--scale", type=float, default=0.4, help="of ShareGPT's lengths")
    parser.add_argument("--load", type=float, default=0.6, help="share of the batch's rate")
    parser.add_argument("--costs", help="a calibration that was made before")
    parser.add_argument("--out", help="write the calibration to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model,
        dtype=args.dtype,
        load_format=args.load_format,
        num_threads=args.num_threads,
        skip_tokenizer_init=args.load_format == "dummy",
        seed=args.seed,
    )
    with LLM(config=engine_config(config)) as llm:
        compare(llm, args)


def compare(llm: LLM, args: argparse.Namespace) -> None:
    """All rounds, and what they come to."""
    known = None if args.costs is None else CalibratedCosts.load(args.costs)
    measured = Calibration()
    if known is None:
        note("warming up ...")
        measure_round(llm, Calibration(), lambda _: None)
    batch = batch_requests(args.num_requests, args.scale, args.seed)
    serve(llm, batch, "warm-up")
    begin = time.monotonic()
    serve(llm, batch, "rate")
    rate = args.load * len(batch) / (time.monotonic() - begin)
    workloads: dict[str, list[TraceRequest]] = {
        "batch": batch,
        "poisson": poisson_requests(args.num_requests, args.scale, rate, args.seed + 1),
        "prefixes": prefix_requests(args.num_requests, args.scale, 1.5 * rate, args.seed + 2),
    }
    runs: dict[str, list[Figures]] = {name: [] for name in workloads}
    for number in range(args.rounds):
        note(f"round {number + 1} of {args.rounds} ...")
        jobs: list[Callable[[], None]] = [
            lambda name=name, requests=requests, number=number: runs[name].append(  # type: ignore[misc]
                serve(llm, requests, f"{args.seed} {number} {name}")
            )
            for name, requests in workloads.items()
        ]
        if known is None:
            jobs.insert(number % 4, lambda: measure_round(llm, measured, lambda _: None))
        for job in jobs:
            job()
    values: dict[str, Any] = {}
    costs = known
    if costs is None:
        values = contents(llm, measured)
        costs = CalibratedCosts.of(values)
        print(summary(values) + "\n")
        if args.out:
            from octavo.cli.calibrate import as_json

            with open(args.out, "w", encoding="utf-8") as file:
                file.write(as_json(values))
    predicted = {n: predict(requests, sim_config(llm), costs) for n, requests in workloads.items()}
    print(f"{args.num_requests} requests each, {rate:.2f} a second where they come at random")
    for name in workloads:
        print("\n".join(table(name, predicted[name], runs[name])))
    if args.json:
        found = {
            name: {
                metric: {"predicted": ours, "measured": theirs, "rounds": each}
                for metric, ours, theirs, each in zip(
                    METRICS,
                    predicted[name].values,
                    Figures.median(runs[name]).values,
                    zip(*(run.values for run in runs[name]), strict=True),
                    strict=True,
                )
            }
            for name in workloads
        }
        constants = values.get("constants")
        print(json.dumps({"rate": rate, "workloads": found, "constants": constants}))


def note(text: str) -> None:
    """A remark for whoever waits."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
