"""What serving costs: `octavo serve` beside the same engine without a server, at the same load.

    python benchmarks/serve_overhead.py [--num 96] [--clients 64] [--rounds 3]

Three questions. The share of offline output tokens/s that a server reaches with so many streams at
a time (offline: `LLM.generate` with `max_num_seqs` of as many). How much later a token is at its
client than at the engine, with so many streams: with the model, whose threads take the cores that
serving needs; and, with a null model whose steps sleep as long, from the end of each step. And,
with a null model (no time is spent on computing), how many streamed tokens a second server and
client manage on this machine.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import bisect
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import aiohttp
import uvloop

from octavo.bench.serve.arrivals import random_arrivals
from octavo.bench.serve.client import Timeline
from octavo.bench.serve.load import Target, run_load, wait_ready
from octavo.bench.serve.prompts import in_words, make_jobs
from octavo.bench.workload import Sample, random_workload

T = TypeVar("T")
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HERE = Path(__file__).parent
_STEP_S = 0.02
"""About what a step of 64 sequences takes; asleep, so that the cores are free for serving."""
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
    work = json.dumps([(s.prompt_token_ids, s.output_len) for s in samples])
    run = subprocess.run(
        [sys.executable, "-c", code], input=work, text=True, capture_output=True, check=True
    )
    return float(run.stdout.split()[-1])


@contextlib.contextmanager
def server(port: int, clients: int, *, null: bool, **env: str) -> Iterator[str]:
    """A running server's URL. env: variables for it."""
    path = os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "octavo", "serve", MODEL, "--port", str(port)]
    command += ["--max-num-seqs", str(clients)]
    if null:
        command = [sys.executable, "-c", _NULL, str(port)]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path, **env},
        stdout=subprocess.DEVNULL,
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


async def delay(url: str, clients: int, num_tokens: int) -> tuple[float, float]:
    """Seconds that a first token, and a last one, are later at their client than at the engine: the
    clients' mean times from sending, less the engine's own from arrival (`/metrics`), over streams
    that begin 50 ms apart, so that all run side by side without having come at once. What a request
    takes to be read is in both."""
    samples = [Sample([1000 + i * 7 + j for j in range(32)], num_tokens) for i in range(clients)]
    target = Target(base_url=url, headers={})
    model = await wait_ready(target, 120)
    jobs = make_jobs(
        samples, [0.05 * i for i in range(clients)], endpoint=target.endpoint, model=model,
        ignore_eos=True, temperature=0.0, tokenizer=None, extra_body={},
    )  # fmt: skip
    await run_load(target, jobs[:1], max_concurrency=None, on_end=lambda _: None)
    before = await _times(url)
    lines = await run_load(target, jobs, max_concurrency=None, on_end=lambda _: None)
    after = await _times(url)
    firsts = statistics.mean(line.chunk_s[0] - line.sent_s for line in lines)
    lasts = statistics.mean(line.chunk_s[-1] - line.sent_s for line in lines)
    own = [(a - b) / clients for a, b in zip(after, before, strict=True)]
    return firsts - own[0], lasts - own[1]


class _Arrivals(asyncio.Protocol):
    """Asks for one stream, and notes when pieces of its body come: a client that costs little."""

    def __init__(self, request: bytes) -> None:
        self._request, self.came_s, self.ended = request, list[float](), asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.WriteTransport", transport).write(self._request)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if b"[DONE]" in data:
            self.ended.set()
        elif data.startswith(b"HTTP/1.1 200") or b"data:" in data:
            self.came_s.append(time.monotonic())


async def _arrivals(url: str, clients: int, num_tokens: int) -> list[float]:
    """When pieces of the answers came, over streams that begin 5 ms apart."""
    model = await wait_ready(Target(base_url=url, headers={}), 120)
    host, port = url.removeprefix("http://").split(":")
    loop, protocols = asyncio.get_running_loop(), []
    for i in range(clients):
        body = json.dumps(
            {"model": model, "prompt": [1000 + 7 * i + j for j in range(32)], "stream": True,
             "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0}
        )  # fmt: skip
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        request = (head + body).encode()
        _, protocol = await loop.create_connection(partial(_Arrivals, request), host, int(port))
        protocols.append(protocol)
        await asyncio.sleep(0.005)
    for protocol in protocols:
        await asyncio.wait_for(protocol.ended.wait(), 60)
    return [at for protocol in protocols for at in protocol.came_s]


def token_latency(port: int, clients: int, num_tokens: int) -> list[float]:
    """Seconds from the end of a step to each of its tokens at its client, sorted; of a null model
    whose steps sleep. Both clocks are the machine's monotonic one. A token that took longer than
    a step would be ascribed to the next one; none comes near that."""
    with tempfile.NamedTemporaryFile() as log:
        env = {"OCTAVO_NULL_STEP_S": str(_STEP_S), "OCTAVO_NULL_STEP_LOG": log.name}
        with server(port, clients, null=True, **env) as url:
            came = _run(_arrivals(url, clients, num_tokens))
        ends = array.array("d", log.read())
    return sorted(at - ends[bisect.bisect(ends, at) - 1] for at in came)


async def _times(url: str) -> list[float]:
    """Sums of the engine's times to the first token, and to the end."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        rows = (await response.text()).splitlines()
    names = ("vllm:time_to_first_token_seconds_sum", "vllm:e2e_request_latency_seconds_sum")
    return [float(next(r for r in rows if r.startswith(name)).split()[-1]) for name in names]


def _run(what: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(what)


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
            _, rate = _run(served(url, samples, args.clients))
        ratios.append(rate / alone)
        print(f"offline {alone:,.1f}, served {rate:,.1f} output tokens/s: {ratios[-1]:.3f}")
    print(f"median share of offline: {statistics.median(ratios):.3f}")
    with server(args.port, args.clients, null=False) as url:
        first_s, last_s = _run(delay(url, args.clients, 200))
    print(
        f"{args.clients} streams: the first token is {1e3 * first_s:.2f} ms later at its client "
        f"than at the engine, the last {1e3 * last_s:.2f} ms (reading the request is in both)"
    )
    for clients in (1, args.clients):
        added = token_latency(args.port, clients, 200)
        shown = ", ".join(f"p{p} {1e3 * added[len(added) * p // 100]:.2f}" for p in (50, 90, 99))
        print(
            f"{clients} streams of a null model whose steps sleep {1e3 * _STEP_S:g} ms: from the "
            f"end of a step to its tokens at their clients {shown}, mean "
            f"{1e3 * statistics.mean(added):.2f} ms"
        )
    long = [Sample([1000 + i * 7 + j for j in range(32)], 400) for i in range(4 * args.clients)]
    rates = []
    with server(args.port, args.clients, null=True) as url:
        for _ in range(args.rounds):
            lines, rate = _run(served(url, long, args.clients))
            chunks = sum(len(line.chunk_s) for line in lines)
            rates.append(rate)
            print(
                f"null model: {rate:,.0f} streamed tokens/s, {400 * len(long) / chunks:.1f} a chunk"
            )
    print(f"median {statistics.median(rates):,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
