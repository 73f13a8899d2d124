"""An engine in its own process: the same answers as `LLM`, and what else it does."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from remote_support import NULL, config_of, run, until, whole

from octavo import LLM
from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine, EngineState
from octavo.engine.remote.process import EngineProcess
from octavo.engine.remote.streams import OutputStream
from octavo.errors import (
    CapacityError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    RequestCapacityError,
    StepFailedError,
)
from octavo.outputs import OutputKind, PositionLogprobs, RequestOutput
from octavo.request import BeamSearchParams, SamplingParams

Logprobs = Sequence[PositionLogprobs | None] | None
PROMPTS = ["The printer folds a sheet", "Ünïcödé — ½ ducats", "a", "one two three four five six"]


def assert_close(mine: Logprobs, theirs: Logprobs) -> None:
    """The same logprobs, but for what the other sequences of a step change in their last bits."""
    assert (mine is None) == (theirs is None)
    for one, other in zip(mine or (), theirs or (), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.keys() == other.keys()
            for token_id, entry in one.items():
                assert entry.decoded_token == other[token_id].decoded_token
                assert entry.logprob == pytest.approx(other[token_id].logprob, abs=1e-4)


def test_same_answers_as_offline(tiny_model_path: Path) -> None:
    config = config_of(tiny_model_path, seed=3)
    cases = [
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=1.0, seed=11, max_tokens=24, n=2, logprobs=2),
        SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1),
    ]
    with LLM(config=config) as llm:
        offline = [llm.generate(PROMPTS, params, use_tqdm=False) for params in cases]
        beams = llm.generate(PROMPTS[0], BeamSearchParams(beam_width=3, max_tokens=6))[0]
        stop = offline[0][0].outputs[0].text[3:6]  # it straddles tokens: each is a byte or so
        stopped = llm.generate(
            PROMPTS, SamplingParams(temperature=0, max_tokens=24, stop=[stop]), use_tqdm=False
        )

    async def compare(engine: AsyncEngine) -> None:
        assert "torch" in sys.modules  # of this test's LLM; the server's process has none of it
        for params, expected in zip(cases, offline, strict=True):
            streams = [engine.submit(f"s{i}", p, params) for i, p in enumerate(PROMPTS)]
            for stream, known in zip(streams, expected, strict=True):
                output = await whole(stream)
                for mine, theirs in zip(output.outputs, known.outputs, strict=True):
                    assert mine.token_ids == theirs.token_ids
                    assert mine.text == theirs.text
                    assert mine.finish_reason == theirs.finish_reason
                    assert_close(mine.logprobs, theirs.logprobs)
                assert_close(output.prompt_logprobs, known.prompt_logprobs)
        params = SamplingParams(temperature=0, max_tokens=24, stop=[stop])
        for i, known in enumerate(stopped):
            output = await whole(engine.submit(f"t{i}", PROMPTS[i], params))
            assert output.outputs[0].text == known.outputs[0].text
            assert output.outputs[0].stop_reason == known.outputs[0].stop_reason
            assert stop not in output.outputs[0].text
            assert output.kv.peak_blocks > 0, "the cost is told with the end, also behind a stop"
        stream = engine.submit(
            "b",
            PROMPTS[0],
            BeamSearchParams(beam_width=3, max_tokens=6),
            kind=OutputKind.FINAL_ONLY,
        )
        output = await stream.__anext__()
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in beams.outputs]
        with pytest.raises(InvalidRequestError, match="cannot be streamed"):
            engine.submit("b2", "x", BeamSearchParams(beam_width=3, max_tokens=6))

    run(config, compare)


def test_blocks_come_back_when_a_stream_is_left(tiny_model_path: Path) -> None:
    async def leave(engine: AsyncEngine) -> None:
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        closed, dropped, aborted = (engine.submit(i, "hello", params) for i in "abc")
        for stream in (closed, dropped, aborted):
            assert await anext(stream)
        closed.close()
        assert engine.abort("c") and not engine.abort("c")
        with pytest.raises(StepFailedError, match="aborted"):
            while True:
                await anext(aborted)
        del stream, dropped
        await until(lambda: engine.num_unfinished == 0)
        report = await engine.memory_report()
        assert report["num_running"] == 0
        assert report["ledger"]["num_physical_blocks"] == 0
        with pytest.raises(StopAsyncIteration):
            await anext(closed)

    run(config_of(tiny_model_path), leave, build=NULL)


def test_outputs_that_nobody_takes_are_joined(tiny_model_path: Path) -> None:
    async def wait(engine: AsyncEngine) -> None:
        calls = []
        stream = engine.submit("a", [1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
        stream.on_news = lambda _: calls.append(1)
        await until(lambda: stream.has_end)
        output = stream.take_nowait()
        assert output is not None and output.finished
        assert len(output.outputs[0].token_ids) == 50
        assert len(output.outputs[0].text) == 50  # of this tokenizer each token is a byte
        assert calls == [1], "one call until it is taken"
        assert stream.take_nowait() is None

    run(config_of(tiny_model_path), wait, build=NULL)


@pytest.mark.parametrize("has_more", [False, True])
def test_news_that_nothing_follows_are_told_as_the_latest(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, has_more: bool
) -> None:
    monkeypatch.setattr(EngineProcess, "has_more", has_more)
    told: list[bool] = []

    async def watch(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        streams = [engine.submit(f"r{i}", [1, 2, 3], params) for i in range(20)]

        def take(stream: OutputStream, is_latest: bool) -> None:
            output = stream.take_nowait()
            assert output is not None
            if not output.finished:
                told.append(is_latest)

        for stream in streams:
            stream.on_news = partial(take, stream)
        await until(lambda: all(stream.is_over for stream in streams))

    run(config_of(tiny_model_path), watch, build=NULL)
    assert told == [not has_more] * 60, "three before the last of each"


@pytest.mark.parametrize("at_end", [False, True])
def test_a_reader_that_fails_is_the_only_one_that_is_hit(
    tiny_model_path: Path, at_end: bool
) -> None:
    async def read(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        streams = [engine.submit(f"r{i}", [1, 2, 3], params) for i in range(3)]

        def fail(output: RequestOutput) -> None:
            if output.finished or not at_end:
                raise ZeroDivisionError

        streams[0].on_put = fail
        others = await asyncio.gather(*map(text_of, streams[1:]))
        assert others[0] == others[1] and len(others[0]) == 4
        with pytest.raises(ZeroDivisionError):
            await text_of(streams[0])
        await until(lambda: not engine.has_request("r0"))

    async def text_of(stream: OutputStream) -> list[int]:
        return [i async for output in stream for i in output.outputs[0].token_ids]

    run(config_of(tiny_model_path), read, build=NULL)


def test_what_is_refused(tiny_model_path: Path) -> None:
    async def ask(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=4)
        with pytest.raises(RequestCapacityError, match=r"exceed max_model_len"):
            engine.submit("a", [1] * 5000, params)
        with pytest.raises(InvalidRequestError, match="vocabulary"):
            engine.submit("a", [10**6], params)
        with pytest.raises(InvalidRequestError, match="no effect") as error:
            engine.submit("a", "x", params, priority=3)
        assert error.value.parameter == "priority"
        stream = engine.submit("a", "x", params)
        with pytest.raises(InvalidRequestError, match="has not ended"):
            engine.submit("a", "x", params)
        await whole(stream)
        # only the scheduler sees that so many beams cannot stand side by side
        many = engine.submit(
            "n",
            [1] * 60,
            BeamSearchParams(beam_width=40, max_tokens=9),
            kind=OutputKind.FINAL_ONLY,
        )
        with pytest.raises(RequestCapacityError):
            async for _ in many:
                pass
        assert engine.num_unfinished == 0
        assert [e.kind for e in await engine.events("n")] == ["refused"]
        await whole(engine.submit("b", "still here", params))

    run(config_of(tiny_model_path, max_num_seqs=32), ask, build=NULL)


def test_admin(tiny_model_path: Path) -> None:
    async def ask(engine: AsyncEngine) -> None:
        await whole(engine.submit("a", [5] * 40, SamplingParams(max_tokens=4, ignore_eos=True)))
        assert await engine.reset_prefix_cache() > 0
        size = engine.info.bytes_per_block
        assert await engine.resize_kv_cache(32 * size) == 32 * size
        assert (await engine.memory_report())["plan"]["num_blocks"] == 32
        with pytest.raises(CapacityError, match="the pool can have"):
            await engine.resize_kv_cache(10**15)
        with pytest.raises(InvalidRequestError, match="level"):
            await engine.set_log_level("LOUD")
        await until(lambda: engine.stats.generation_tokens_total == 4)
        assert engine.stats.prompt_tokens_total == 40
        assert engine.stats.steps_total > 0
        assert sum(engine.stats.ledger.values()) == engine.stats.num_blocks * 16

    run(config_of(tiny_model_path), ask, build=NULL)


def test_a_killed_engine_is_answered_for_and_restarted(tiny_model_path: Path) -> None:
    async def kill(engine: AsyncEngine) -> None:
        states = []
        engine.on_state = states.append
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        streams = [engine.submit(str(i), "hello", params) for i in range(3)]
        await anext(streams[0])
        first = engine.info.pid
        os.kill(first, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match=r"SIGKILL.*started again in 0.05 s"):
                async for _ in stream:
                    pass
        with pytest.raises(EngineDeadError, match="restarting"):
            engine.submit("x", "hello", params)
        await until(lambda: engine.state is EngineState.READY)
        assert states == [EngineState.RESTARTING, EngineState.READY]
        assert engine.info.pid != first and engine.num_restarts == 1
        assert (await whole(engine.submit("0", "again", params))).finished

    run(config_of(tiny_model_path), kill, build="faulty_engines:build", restart_backoff_s=0.05)


def test_a_wedged_step_is_noticed(tiny_model_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def wedge(engine: AsyncEngine) -> None:
        stream = engine.submit("a", "hello", SamplingParams(max_tokens=9, ignore_eos=True))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            async for _ in stream:
                pass
        assert engine.state is EngineState.RESTARTING

    run(
        config_of(tiny_model_path), wedge, build="faulty_engines:build_hanging", step_timeout_s=1.5,
        restart_backoff_s=60.0,
    )  # fmt: skip
    assert "in launch" in capfd.readouterr().err, "where it hung is on stderr"


def test_an_engine_that_cannot_be_restarted_is_given_up(tiny_model_path: Path) -> None:
    async def kill(engine: AsyncEngine) -> None:
        os.kill(engine.info.pid, signal.SIGKILL)
        await until(lambda: engine.state is EngineState.DEAD)
        assert engine.why_not_ready is not None and "given up" in engine.why_not_ready
        with pytest.raises(EngineDeadError, match="no second time"):
            engine.submit("x", "hello", SamplingParams())

    run(
        config_of(tiny_model_path), kill, build="faulty_engines:build_once", restart_backoff_s=0.01,
        max_restarts=2,
    )  # fmt: skip


def test_errors_of_building_are_those_of_the_engine(tmp_path: Path) -> None:
    async def start(config: EngineConfig) -> None:
        engine = AsyncEngine(config)
        try:
            await engine.start()
        finally:
            assert engine.state is EngineState.DEAD

    with pytest.raises(ModelNotFoundError):
        asyncio.run(start(EngineConfig(model=str(tmp_path / "nothing"))))


def test_the_engine_ends_with_its_parent(tiny_model_path: Path, tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(
        "import asyncio, os, sys\n"
        "from octavo.config import EngineConfig\n"
        "from octavo.engine.async_engine import AsyncEngine, EngineOptions\n"
        "async def main():\n"
        "    config = EngineConfig(model=sys.argv[1], load_format='dummy')\n"
        "    engine = AsyncEngine(config, options=EngineOptions(build='null_engine:build'))\n"
        "    await engine.start()\n"
        "    assert 'torch' not in sys.modules\n"
        "    print(engine.info.pid, flush=True)\n"
        "    os._exit(9)\n"
        "asyncio.run(main())\n"
    )

    async def main() -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(program), str(tiny_model_path), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert process.returncode == 9
        return int(out)

    pid = asyncio.run(main())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return  # ended; nobody has asked how
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} outlived its parent")
