"""A long, unfriendly load on a real server: nobody may be lost, nothing may stay behind.

    python benchmarks/serve_load.py --seconds 600 [--clients 200] [--model M]

Starts `octavo serve` on this machine and sends it what clients send: streams of random lengths,
some of them left in the middle, aborted by the administrator or read slowly, and between them bad
JSON, bodies that are too large, broken UTF-8, unknown fields, prompts that can never fit. At the
end the pool must be whole again, no answer may have been a 5xx other than the 503s by design, the
memory of both processes flat, and greedy answers those of the offline engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import aiohttp
import psutil

_ADMIN = {"Authorization": "Bearer administrator"}
_KEY = {"Authorization": "Bearer some-client"}
_NUM_COMPARED = 48
_MOST_GROWTH = 2.0
"""MiB a minute, over the second half of the run: a short run grows more, by what it warms up."""
_WORDS = (
    "the",
    "of",
    "printer",
    "folds",
    "sheet",
    "page",
    "cat",
    "sky",
    "why",
    "how",
    "many",
    "two",
)


class Load:
    """Clients, and what they met."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self._rng = url, random.Random(seed)
        self.statuses: Counter[str] = Counter()
        self.endings: Counter[str] = Counter()
        self.greedy: dict[str, tuple[int, str]] = {}
        """Prompt -> (tokens, text) of answers that came whole."""
        self.num_tokens = 0
        self.wrong: list[str] = []

    async def client(self, session: aiohttp.ClientSession, until_s: float) -> None:
        """One client: one thing after another."""
        kinds = [self._stream] * 12 + [self._leave] * 3 + [self._abort, self._slow, self._whole]
        kinds += [self._bad] * 2
        while time.monotonic() < until_s:
            try:
                await self._rng.choice(kinds)(session)
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                self.wrong.append(f"{type(error).__name__}: {error}"[:200])
                await asyncio.sleep(0.5)

    def _body(self, **more: Any) -> dict[str, Any]:
        prompt = " ".join(self._rng.choices(_WORDS, k=self._rng.randint(2, 120)))
        num = self._rng.choice((1, 8, 24, 64, 160))
        return {"prompt": prompt, "max_tokens": num, "temperature": 0, "stream": True, **more}

    def _status(self, what: str, status: int, *allowed: int) -> None:
        self.statuses[f"{what}: {status}"] += 1
        if status not in (*allowed, 503) and not (status == 200 and 200 in allowed):
            self.wrong.append(f"{what} was answered {status}")

    async def _read(self, response: aiohttp.ClientResponse, most: int | None = None) -> str | None:
        """The text of a stream; None if it was left after `most` chunks or ended with an error."""
        text, num = "", 0
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                return text
            chunk = json.loads(line[6:])
            if "error" in chunk:
                self.endings[f"error event: {chunk['error']['code']}"] += 1
                return None
            text += "".join(choice["text"] for choice in chunk["choices"])
            num += 1
            if most is not None and num >= most:
                return None
        self.wrong.append("a stream ended without [DONE] or error")
        return None

    async def _stream(self, session: aiohttp.ClientSession) -> None:
        body = self._body()
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            self._status("stream", response.status, 200)
            if response.status != 200:
                return
            text = await self._read(response)
            if text is not None:
                self.endings["whole"] += 1
                self.num_tokens += body["max_tokens"]
                self.greedy.setdefault(body["prompt"], (body["max_tokens"], text))

    async def _leave(self, session: aiohttp.ClientSession) -> None:
        async with session.post(f"{self.url}/v1/completions", json=self._body(n=2)) as response:
            self._status("left", response.status, 200)
            if response.status != 200:
                return
            await self._read(response, most=self._rng.randint(1, 6))
            response.close()  # the connection, too
        self.endings["left"] += 1

    async def _abort(self, session: aiohttp.ClientSession) -> None:
        name = f"abort-{self._rng.getrandbits(64):x}"
        headers = {"X-Request-Id": name}
        body = self._body(max_tokens=400, ignore_eos=True)
        url = f"{self.url}/v1/completions"
        async with session.post(url, json=body, headers=headers) as response:
            self._status("to abort", response.status, 200)
            if response.status != 200:
                return
            admin = f"{self.url}/admin/abort"
            told = {"request_id": name}
            async with session.post(admin, json=told, headers=_ADMIN) as answer:
                self._status("abort", answer.status, 200, 404)
            await self._read(response)
        self.endings["aborted"] += 1

    async def _slow(self, session: aiohttp.ClientSession) -> None:
        body = self._body(max_tokens=64, logprobs=5, n=4, temperature=1)
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            self._status("slow", response.status, 200)
            await asyncio.sleep(self._rng.uniform(1, 5))
            if response.status == 200:
                await self._read(response)
        self.endings["read slowly"] += 1

    async def _whole(self, session: aiohttp.ClientSession) -> None:
        body = self._body(stream=False, n=2, logprobs=2, temperature=0.7)
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            self._status("whole", response.status, 200)
            await response.read()

    async def _bad(self, session: aiohttp.ClientSession) -> None:
        url, kind = f"{self.url}/v1/completions", self._rng.randrange(8)
        as_json = {"content-type": "application/json"}
        cases: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
            ("bad JSON", {"data": b'{"prompt": "x"', "headers": as_json}, (400,)),
            ("bad UTF-8", {"data": b'{"prompt": "\xff\xfe"}', "headers": as_json}, (400,)),
            ("large body", {"data": b"x" * 2_000_000, "headers": as_json}, (413,)),
            ("unknown field", {"json": self._body(nonsense=1)}, (400,)),
            ("too long", {"json": self._body(prompt=[5] * 9000)}, (400,)),
            ("too many tokens", {"json": self._body(max_tokens=10**9)}, (400,)),
            ("wrong type", {"json": self._body(temperature="hot")}, (400,)),
            ("no such model", {"json": self._body(model="nobody")}, (404,)),
        ]
        name, request, allowed = cases[kind]
        async with session.post(url, **request) as response:
            self._status(name, response.status, *allowed)
            await response.read()


class Watch:
    """Memory of both processes over the run."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.rows: list[tuple[float, int, int]] = []

    async def run(self) -> None:
        """Once a second."""
        begun_s = time.monotonic()
        while True:
            server = psutil.Process(self._pid)
            with contextlib.suppress(psutil.NoSuchProcess):  # an engine that is started again
                engine = sum(child.memory_info().rss for child in server.children(recursive=True))
                self.rows.append((time.monotonic() - begun_s, server.memory_info().rss, engine))
            await asyncio.sleep(1)

    def growth(self, column: int) -> tuple[float, float]:
        """(MiB now, MiB a minute over the second half)."""
        half = self.rows[len(self.rows) // 2 :]
        seconds = max(1e-9, half[-1][0] - half[0][0])
        fifth = max(1, len(half) // 5)
        first = sum(row[column] for row in half[:fifth]) / fifth
        last = sum(row[column] for row in half[-fifth:]) / fifth
        return half[-1][column] / 2**20, (last - first) / 2**20 / (0.8 * seconds) * 60


async def _run(args: argparse.Namespace, url: str, pid: int) -> int:
    load, watch = Load(url, args.seed), Watch(pid)
    until_s = time.monotonic() + args.seconds
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=_KEY, timeout=timeout, connector=connector) as session:
        watching = asyncio.create_task(watch.run())
        await asyncio.gather(*(load.client(session, until_s) for _ in range(args.clients)))
        watching.cancel()
        report = await _drained(session, url)
        async with session.get(f"{url}/metrics") as response:
            metrics = await response.text()
        async with session.get(f"{url}/admin/events", headers=_ADMIN) as response:
            events = (await response.json())["events"]
    print(f"{args.clients} clients, {args.seconds:g} s: {sum(load.statuses.values()):,} answers, "
          f"{load.num_tokens:,} tokens asked for in whole answers")  # fmt: skip
    for name, num in sorted(load.statuses.items()):
        print(f"  {name:28}{num:>8,}")
    print("endings: " + ", ".join(f"{name} {num:,}" for name, num in sorted(load.endings.items())))
    for name, column in (("server", 1), ("engine", 2)):
        now, slope = watch.growth(column)
        print(f"memory of the {name}: {now:,.0f} MiB, {slope:+.2f} MiB a minute (second half)")
    ledger = report["ledger"]
    num_slots = ledger["num_blocks"] * ledger["block_size"]
    is_drained = ledger["cached"] + ledger["free"] == num_slots and not report["num_running"]
    leaks = [event for event in events if event["kind"] == "leak"]
    preempted = [row for row in metrics.splitlines() if row.startswith("octavo:preemptions_total")]
    print(f"pool: {num_slots:,} slots = cached {ledger['cached']:,} + free {ledger['free']:,}: "
          f"{'drained' if is_drained else 'NOT DRAINED'}; leaks found: {len(leaks)}")  # fmt: skip
    print("\n".join(preempted))
    different, num_compared = _compare(args, load.greedy)
    print(f"greedy answers unlike the offline engine's: {different} of {num_compared}")
    if num_compared < _NUM_COMPARED:
        load.wrong.append(f"only {num_compared} answers came whole")
    for needed in ("stream: 200", "abort: 200", "bad JSON: 400", "large body: 413"):
        if not load.statuses[needed]:
            load.wrong.append(f"never met: {needed}")
    for name, column in (("server", 1), ("engine", 2)):
        if watch.growth(column)[1] > _MOST_GROWTH:
            load.wrong.append(f"the memory of the {name} grows")
    for wrong, num in Counter(load.wrong).most_common(8):
        print(f"WRONG x {num}: {wrong}")
    return 1 if load.wrong or not is_drained or leaks or different else 0


async def _drained(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """The memory report once nothing runs."""
    for _ in range(100):
        async with session.get(f"{url}/admin/memory", headers=_ADMIN) as response:
            report: dict[str, Any] = await response.json()
        if not report["num_running"] and not report["num_waiting"]:
            break
        await asyncio.sleep(0.2)
    await asyncio.sleep(2)  # the leak check comes when it has been idle for a second
    return report


def _compare(args: argparse.Namespace, greedy: dict[str, tuple[int, str]]) -> tuple[int, int]:
    """(How many of some answers the offline engine gives otherwise, of how many)."""
    from octavo import LLM, SamplingParams

    chosen = list(greedy.items())[:: max(1, len(greedy) // _NUM_COMPARED)][:_NUM_COMPARED]
    with LLM(model=args.model, dtype=args.dtype) as llm:
        params = [SamplingParams(temperature=0, max_tokens=num) for _, (num, _) in chosen]
        outputs = llm.generate([prompt for prompt, _ in chosen], params, use_tqdm=False)
    pairs = zip(outputs, chosen, strict=True)
    different = sum(output.outputs[0].text != text for output, (_, (_, text)) in pairs)
    return different, len(chosen)


def main() -> int:
    """Start a server, load it, stop it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--blocks", type=int, default=2000, help="of the KV pool: few, to preempt")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    command = [
        sys.executable, "-m", "octavo", "serve", args.model, "--port", str(args.port),
        "--dtype", args.dtype, "--num-gpu-blocks-override", str(args.blocks),
        "--max-body-bytes", "1000000",
    ]  # fmt: skip
    keys = {"OCTAVO_API_KEY": "some-client", "OCTAVO_ADMIN_KEY": "administrator"}
    server = subprocess.Popen(command, env={**os.environ, **keys}, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{args.port}"
    try:
        asyncio.run(_ready(url))
        status = asyncio.run(_run(args, url, server.pid))
    finally:
        server.terminate()
        code = server.wait(60)
    print(f"the server ended with status {code}")
    return status or code


async def _ready(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(300):
            try:
                async with session.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise TimeoutError("the server was not ready within a minute")


if __name__ == "__main__":
    sys.exit(main())
