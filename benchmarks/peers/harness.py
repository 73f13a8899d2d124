"""What the `run_*.py` scripts share: one command line, one way to time, one line of JSON.

The standard library alone, so that it runs in every engine's own environment, on Linux. Each
script hands `main` a function that starts its engine; what is measured is the same for all:

    startup_s              from the start of the process to the answer to a request of 4 tokens:
                           imports, weights, compiling
    out_tok_s, total_tok_s all requests at once, by the median of --reps runs (walls_s)
    single_ttft_ms         one request alone: to its first token, median of 3
    single_decode_tok_s    and the tokens after the first by the time they took, median of 3
    peak_rss_mib           sum of the peaks of this process and those below it; files mapped
                           into memory, such as weights, count
    outputs_ok             every request of every run got exactly the tokens it asked for
    first_ids              the first token of each request, for `compare.py` to hold against others
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

MAX_MODEL_LEN = 1024
"""Context every engine is set up for; the longest request has 600 + 400 tokens."""
KV_CACHE_GIB = 1
"""KV memory every engine is given: room for all requests at once (0.4 GiB in bf16)."""
_WARM_UP_TOKENS, _WARM_UP_REQUESTS = 4, 8
_NUM_SINGLES = 3


@dataclass(frozen=True)
class Request:
    """What goes in, and how many tokens must come out."""

    prompt_ids: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Options:
    """The command line."""

    workload: Path
    single: Path
    model: str
    threads: int
    reps: int


class Engine(Protocol):
    """What a script implements. Greedy, bfloat16; end-of-sequence does not end anything."""

    version: str

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """Run all requests at once; their tokens in the same order."""

    def stream(self, request: Request) -> tuple[list[int], float]:
        """Run one alone; its tokens, and `time.perf_counter()` when the first was there."""


def main(name: str, start: Callable[[Options], Engine]) -> None:
    """Measure the engine that `start` makes and print the line of JSON."""
    options = _parse()
    requests, single = read(options.workload), read(options.single)[0]
    engine = start(options)
    engine.generate([_shortened(single)])
    startup_s = _process_age_s()
    engine.generate([_shortened(request) for request in requests[:_WARM_UP_REQUESTS]])

    walls, first_ids, exact = [], [], True
    for _ in range(options.reps):
        begin = time.perf_counter()
        outputs = engine.generate(requests)
        walls.append(time.perf_counter() - begin)
        exact &= [len(ids) for ids in outputs] == [request.max_tokens for request in requests]
        first_ids = [ids[0] if ids else None for ids in outputs]
    ttfts, rates = [], []
    for _ in range(_NUM_SINGLES):
        begin = time.perf_counter()
        ids, first = engine.stream(single)
        end = time.perf_counter()
        exact &= len(ids) == single.max_tokens
        ttfts.append(first - begin)
        rates.append((single.max_tokens - 1) / (end - first))

    num_out = sum(request.max_tokens for request in requests)
    num_all = num_out + sum(len(request.prompt_ids) for request in requests)
    wall = statistics.median(walls)
    result = {
        "engine": name,
        "version": engine.version,
        "out_tok_s": round(num_out / wall, 1),
        "total_tok_s": round(num_all / wall, 1),
        "walls_s": [round(seconds, 3) for seconds in walls],
        "single_decode_tok_s": round(statistics.median(rates), 1),
        "single_ttft_ms": round(1e3 * statistics.median(ttfts), 1),
        "startup_s": round(startup_s, 2),
        "peak_rss_mib": round(peak_rss_mib(), 1),
        "outputs_ok": exact,
        "first_ids": first_ids,
    }
    print(json.dumps(result), flush=True)


def _parse() -> Options:
    parser = argparse.ArgumentParser(description="Measures one engine; ends with a line of JSON.")
    parser.add_argument("--workload", type=Path, required=True, help="of make_workload.py")
    parser.add_argument("--single", type=Path, required=True, help="of make_workload.py")
    parser.add_argument("--model", required=True, help="what the script's first lines say")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--reps", type=int, default=2, help="runs of the workload")
    return Options(**vars(parser.parse_args()))


def read(path: Path) -> list[Request]:
    """The requests of a file that `make_workload.py` wrote."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [Request(row["prompt_ids"], row["max_tokens"]) for row in rows]


def _shortened(request: Request) -> Request:
    return dataclasses.replace(request, max_tokens=_WARM_UP_TOKENS)


def _process_age_s() -> float:
    """Seconds since this process was started: more than Python itself can see."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def peak_rss_mib() -> float:
    """Of this process and its living descendants; a process that ended meanwhile counts not."""
    parents, peaks = {}, {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = path.read_text().splitlines()
        except OSError:  # it has just ended
            continue
        status = dict(line.split(":", 1) for line in lines if ":" in line)
        pid = int(status["Pid"])
        parents[pid] = int(status["PPid"])
        peaks[pid] = int(status.get("VmHWM", "0 kB").split()[0])
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(peaks.get(pid, 0) for pid in family) / 1024
