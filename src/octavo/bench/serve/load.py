"""Sends a workload to a server as its clients would, and gathers what they saw."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from octavo.bench.serve.client import Client, Timeline
from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go."""

    base_url: str
    """Such as http://127.0.0.1:8000."""
    endpoint: str = "/v1/completions"
    model: str | None = None
    """None: the first that the server has."""
    headers: dict[str, str]
    timeout_s: float | None = None
    max_retries: int = 0
    """How often a request that is refused for the time being is sent again."""

    @property
    def url(self) -> str:
        """Of the endpoint."""
        return self.base_url.rstrip("/") + self.endpoint


@dataclass(frozen=True, slots=True)
class Job:
    """One request of the load."""

    body: dict[str, Any]
    at_s: float
    """When to send it, from the start."""
    num_input: int
    num_output: int


async def wait_ready(
    target: Target, timeout_s: float, tell: Callable[[str], None] | None = None
) -> str:
    """Ask for the models until the server answers; the name to ask for. `tell` is told once that
    it did not at first. Raises `ConfigError` if it does not in time, or has not got the model."""
    until_s = time.monotonic() + timeout_s
    url, trouble = target.base_url.rstrip("/") + "/v1/models", "no answer"
    async with aiohttp.ClientSession(headers=target.headers) as session:
        while True:
            try:
                async with session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as response:
                    if response.status == 200:
                        names = [m["id"] for m in (await response.json())["data"]]
                        return _name(target, names)
                    trouble = f"HTTP {response.status}"
                    if response.status in (401, 403):
                        raise ConfigError(f"{url} answers {trouble}: give --api-key")
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                trouble = str(error) or type(error).__name__
            if time.monotonic() >= until_s:
                raise ConfigError(
                    f"{url} was not ready within {timeout_s:g} s ({trouble}): check --base-url, or "
                    "raise --ready-check-timeout-sec"
                )
            if tell is not None:
                tell(f"waiting up to {timeout_s:g} s for {url} ({trouble})")
                tell = None
            await asyncio.sleep(0.5)


def _name(target: Target, names: Sequence[str]) -> str:
    if target.model is not None:
        return target.model
    if not names:
        raise ConfigError(f"{target.base_url} lists no model: name one with --model")
    return names[0]


async def run_load(
    target: Target,
    jobs: Sequence[Job],
    *,
    max_concurrency: int | None,
    on_end: Callable[[Timeline], None],
) -> list[Timeline]:
    """Send all jobs at their times, at most so many at once; what became of each, in their order.

    A request that has to wait for its turn counts as scheduled when it got it: the limit stands
    for clients that ask one thing after another (a closed loop).
    """
    turns: contextlib.AbstractAsyncContextManager[Any] = (
        contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )
    begun_s = time.monotonic()
    is_closed = max_concurrency is not None

    async def one(client: Client, job: Job) -> Timeline:
        due_s = begun_s + job.at_s
        delay_s = due_s - time.monotonic()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        async with turns:
            if is_closed:
                due_s = max(due_s, time.monotonic())
            line = Timeline(due_s, num_input=job.num_input, num_asked=job.num_output)
            await client.stream(job.body, line)
        on_end(line)
        return line

    async with Client(
        target.url, headers=target.headers, timeout_s=target.timeout_s,
        max_retries=target.max_retries,
    ) as client:  # fmt: skip
        return list(await asyncio.gather(*(one(client, job) for job in jobs)))
