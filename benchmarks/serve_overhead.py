"""What serving costs: `octavo serve` beside the same engine without a server, at the same load.

    python benchmarks/serve_overhead.py [--num 96] [--clients 64] [--rounds 3]

Three questions. The share of offline output tokens/s that a server reaches with so many streams at
a time (offline: `LLM.generate` with `max_num_seqs` of as many). The time that a token is later at
its client than at the engine, with so many streams. And, with a null model (no time is spent on
computing), how many streamed tokens a second server and client manage on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from octavo.bench.serve.arrivals import random_arrivals
from octavo.bench.serve.client import Timeline
from octavo.bench.serve.load import Target, run_load, wait_ready
from octavo.bench.serve.prompts import in_words, make_jobs
from octavo.bench.workload import Sample, random_workload

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HERE = Path(__file__).parent
_NULL = """
import sys
from octavo.config import EngineConfig
from octavo.engine.async_engine import EngineOptions
from octavo.server.config import ServeConfig
from octavo.server.run import Hooks, serve
options = EngineOptions(build="null_engine:build")
serve(EngineConfig(), ServeConfig(port=int(sys.argv[1])), hooks=Hooks(options=options))
"""


def offline(samples: list[Sample], clients: int) -> float:
    """Output tokens a second, in a process of its own."""
    code = (
        "import sys, time, json\n"
        "from octavo import LLM, SamplingParams\n"
        "work = json.load(sys.stdin)\n"
        f"with LLM(model={MODEL!r}, max_num_seqs={clients}) as llm:\n"
        "    def params(n): return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)\n"
        "    llm.generate([work[0][0]], params(8), use_tqdm=False)\n"
        "    begun = time.perf_counter()\n"
        "    llm.generate([p for p, _ in work], [params(n) for _, n in work], use_tqdm=False)\n"
        "    print(sum(n for _, n in work) / (time.perf_counter() - begun))\n"
    )
    import json

    work = json.dumps([(s.prompt_token_ids, s.output_len) for s in samples])
    run = subprocess.run(
        [sys.executable, "-c", code], input=work, text=True, capture_output=True, check=True
    )
    return float(run.stdout.split()[-1])


@contextlib.contextmanager
def server(port: int, clients: int, *, null: bool) -> Iterator[str]:
    """A running server's URL."""
    path = os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "octavo", "serve", MODEL, "--port", str(port)]
    command += ["--max-num-seqs", str(clients)]
    if null:
        command = [sys.executable, "-c", _NULL, str(port)]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


async def served(url: str, samples: list[Sample], clients: int) -> tuple[list[Timeline], float]:
    """What clients saw, and output tokens a second."""
    target = Target(base_url=url, headers={})
    model = await wait_ready(target, 120)
    jobs = make_jobs(
        samples, random_arrivals(len(samples), float("inf"), 1.0, 0), endpoint=target.endpoint,
        model=model, ignore_eos=True, temperature=0.0, tokenizer=None, extra_body={},
    )  # fmt: skip
    await run_load(target, jobs[:1], max_concurrency=None, on_end=lambda _: None)
    begun_s = time.monotonic()
    lines = await run_load(target, jobs, max_concurrency=clients, on_end=lambda _: None)
    seconds = time.monotonic() - begun_s
    assert all(line.error is None for line in lines), {line.error for line in lines}
    return lines, sum(line.num_output for line in lines) / seconds


async def delay(url: str, clients: int, num_tokens: int) -> float:
    """Median seconds a token takes from the engine to its client: a client's mean time of a token,
    less the engine's own (`vllm:request_time_per_output_token_seconds`), over equal streams."""
    samples = [Sample([1000 + i * 7 + j for j in range(32)], num_tokens) for i in range(clients)]
    lines, _ = await served(url, samples, clients)
    own = [line.tpot_s for line in lines if line.tpot_s is not None]
    import aiohttp

    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        rows = (await response.text()).splitlines()
    name = "vllm:request_time_per_output_token_seconds"
    total, count = (
        float(next(row for row in rows if row.startswith(f"{name}{end}")).split()[-1])
        for end in ("_sum", "_count")
    )
    return statistics.mean(own) - total / count


def main() -> int:
    """Alternate, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=96, help="requests of a round")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8766)
    args = parser.parse_args()
    load = random_workload(args.num, 160, 128, 0.5, vocab_size=49_000, max_model_len=4096)
    samples = in_words(load.samples, range(1000, 49_000), 0)
    ratios = []
    for _ in range(args.rounds):
        alone = offline(samples, args.clients)
        with server(args.port, args.clients, null=False) as url:
            _, rate = asyncio.run(served(url, samples, args.clients))
        ratios.append(rate / alone)
        print(f"offline {alone:,.1f}, served {rate:,.1f} output tokens/s: {ratios[-1]:.3f}")
    print(f"median share of offline: {statistics.median(ratios):.3f}")
    with server(args.port, args.clients, null=False) as url:
        seconds = asyncio.run(delay(url, args.clients, 64))
    print(f"a token is {1e3 * seconds:.2f} ms later at its client, {args.clients} streams")
    long = [Sample([1000 + i * 7 + j for j in range(32)], 400) for i in range(4 * args.clients)]
    rates = []
    with server(args.port, args.clients, null=True) as url:
        for _ in range(args.rounds):
            lines, rate = asyncio.run(served(url, long, args.clients))
            chunks = sum(len(line.chunk_s) for line in lines)
            rates.append(rate)
            print(
                f"null model: {rate:,.0f} streamed tokens/s, {400 * len(long) / chunks:.1f} a chunk"
            )
    print(f"median {statistics.median(rates):,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
