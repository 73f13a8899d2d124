"""Engines in processes of their own, for tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine, EngineOptions, EngineState, OutputStream
from octavo.outputs import CompletionOutput, RequestOutput

NULL = "null_engine:build"


def config_of(path: Path, **options: object) -> EngineConfig:
    """Of the tiny model; small enough to run out of blocks."""
    values = {"dtype": "float32", "num_gpu_blocks_override": 64, "swap_space": 0, "num_threads": 1}
    return EngineConfig(model=str(path), load_format="dummy", **{**values, **options})  # type: ignore[arg-type]


def run(
    config: EngineConfig,
    what: Callable[[AsyncEngine], Awaitable[None]],
    **options: object,
) -> None:
    """Run a coroutine with a started engine; nothing of it may be left behind."""

    async def main() -> None:
        engine = AsyncEngine(config, options=EngineOptions(**options))  # type: ignore[arg-type]
        await engine.start()
        try:
            await asyncio.wait_for(what(engine), 60)
        finally:
            pid = engine.info.pid
            await engine.close()
        assert engine.state is EngineState.DEAD
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(main())


async def whole(stream: OutputStream) -> RequestOutput:
    """All differences joined by hand. A completion that has ended is in none after its last."""
    parts: dict[int, CompletionOutput] = {}
    prompt_logprobs = None
    async for output in stream:
        for part in output.outputs:
            before = parts.get(part.index)
            if before is not None:
                assert before.finish_reason is None, "nothing comes after the end"
                part.text = before.text + part.text
                part.token_ids = before.token_ids + part.token_ids
                if part.logprobs is not None:
                    part.logprobs = (before.logprobs or []) + part.logprobs
            parts[part.index] = part
        if output.prompt_logprobs is not None:
            assert prompt_logprobs is None, "they come once"
            prompt_logprobs = output.prompt_logprobs
    assert output.finished
    output.outputs = [parts[index] for index in sorted(parts)]
    output.prompt_logprobs = prompt_logprobs
    return output


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that must come."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)
