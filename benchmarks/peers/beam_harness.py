"""What the `run_*_beam.py` scripts share: beam search timed, and the KV memory it took.

The standard library alone, on Linux; `harness.py` has the parts that are not about beams. Each
script hands `main` a function that starts its engine. Measured:

    req_s         requests a second, by the median of --reps runs (walls_s) of the whole workload
    kv_mib        most KV memory at one time during a run, as the engine itself can tell
    peak_rss_mib  see `harness.py`
    outputs_ok    every request of every run got `--width` beams of exactly the tokens it asked for
    first_ids     the tokens of each request's best beam, for `compare.py` to hold against others
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import harness
from harness import Request

_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Options:
    """The command line."""

    workload: Path
    model: str
    dtype: str
    threads: int
    reps: int
    width: int
    batch_size: int
    """Most requests at a time."""


class Engine(Protocol):
    """What a script implements. End-of-sequence does not end anything; length penalty 1."""

    version: str
    kv_bytes: int
    """Most KV memory of the last `search`."""

    def search(self, requests: Sequence[Request]) -> list[list[list[int]]]:
        """Run all requests; for each its beams, best first, without the prompt."""


def main(name: str, start: Callable[[Options], Engine]) -> None:
    """Measure the engine that `start` makes and print the line of JSON."""
    options = _parse()
    requests = harness.read(options.workload)
    engine = start(options)
    warm_up = requests[: options.batch_size]
    engine.search([dataclasses.replace(r, max_tokens=_WARM_UP_TOKENS) for r in warm_up])

    walls, exact, best = [], True, []
    for _ in range(options.reps):
        begin = time.perf_counter()
        found = engine.search(requests)
        walls.append(time.perf_counter() - begin)
        exact &= [[len(beam) for beam in beams] for beams in found] == [
            [request.max_tokens] * options.width for request in requests
        ]
        best = [beams[0] for beams in found]
    wall = statistics.median(walls)
    result = {
        "engine": name,
        "version": engine.version,
        "width": options.width,
        "batch_size": options.batch_size,
        "num_requests": len(requests),
        "req_s": round(len(requests) / wall, 4),
        "kv_mib": round(engine.kv_bytes / 2**20, 1),
        "walls_s": [round(seconds, 3) for seconds in walls],
        "peak_rss_mib": round(harness.peak_rss_mib(), 1),
        "outputs_ok": exact,
        "first_ids": best,
    }
    print(json.dumps(result), flush=True)


def _parse() -> Options:
    parser = argparse.ArgumentParser(description="Measures one engine; ends with a line of JSON.")
    parser.add_argument(
        "--workload", type=Path, required=True, help="beam.jsonl of make_workload.py"
    )
    parser.add_argument("--model", required=True, help="what the script's first lines say")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--reps", type=int, default=1, help="runs of the workload")
    parser.add_argument("--width", type=int, default=4, help="beams of a request")
    parser.add_argument("--batch-size", type=int, default=32, help="most requests at a time")
    return Options(**vars(parser.parse_args()))
