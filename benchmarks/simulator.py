"""How fast the simulator is: ShareGPT requests through the pool of OPT-13B on an A100-40GB.

    python benchmarks/simulator.py [LENGTHS.csv.gz] [--requests 100000] [--rate 1.8] [--stepped]

983 blocks of 16, 2,560 tokens a step, Poisson arrivals at a rate that the pool just sustains, so
that requests wait and are preempted (at 2.0 a second and more the line only grows). Without a file
the lengths are drawn from published quantiles. Prints milliseconds of processor time for each
request, by tenths of the run, which should not rise, and the process's peak memory; the last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from itertools import islice

from octavo.lab.arrivals import poisson, repeat
from octavo.lab.config import SimConfig
from octavo.lab.costs import FixedCosts
from octavo.lab.lengths import built_in_trace
from octavo.lab.readers import read_trace
from octavo.lab.simulator import simulate
from octavo.lab.summary import Summary

CONFIG = SimConfig(num_blocks=983, max_num_batched_tokens=2560)
COSTS = FixedCosts(0.026, 4.2e-4)
"""Roughly OPT-13B on an A100: 26 GB of weights at 1 TB/s, 62 TFLOP/s in prompts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("lengths", nargs="?", help="CSV of lengths")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=1.8, help="requests a second")
    parser.add_argument("--stepped", action="store_true", help="take every step by itself")
    args = parser.parse_args()

    if args.lengths:
        lengths = [r for r in read_trace(args.lengths).requests if r.num_tokens < 2048]
    else:
        lengths = list(built_in_trace("sharegpt", 80_000).requests)
    requests = poisson(islice(repeat(lengths), args.requests), args.rate)
    marks = [(0, time.process_time())]
    tenth = max(1, args.requests // 10)

    def note(num_ended: int, now_s: float) -> None:
        if num_ended >= marks[-1][0] + tenth:
            marks.append((num_ended, time.process_time()))
            num, cpu_s = num_ended - marks[-2][0], marks[-1][1] - marks[-2][1]
            print(
                f"{num_ended:>10,} requests, {now_s:>12,.0f} s simulated, "
                f"{1000 * cpu_s / num:.3f} ms each",
                file=sys.stderr,
            )

    config = CONFIG.replace(stride=not args.stepped)
    result = simulate(requests, config, COSTS, progress=note)
    cpu_s = time.process_time() - marks[0][1]
    summary = Summary.of(result, config, 60.0)
    assert summary.normalized_s is not None, "requests ended"
    figures = {
        "num_requests": result.num_requests,
        "num_tokens": result.num_input_tokens + result.num_output_tokens,
        "cpu_s": round(cpu_s, 2),
        "wall_s": round(result.wall_s, 2),
        "ms_per_request": round(1000 * cpu_s / max(1, result.num_requests), 4),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "num_steps": result.num_steps,
        "num_preemptions": result.num_preemptions,
        "mean_batch": round(summary.mean_running, 2),
        "normalized_s": round(summary.normalized_s.mean, 4),
    }
    for name, value in figures.items():
        print(f"{name:<16} {value:>16,}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
