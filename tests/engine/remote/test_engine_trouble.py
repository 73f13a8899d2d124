"""What an engine in its own process does when something in it goes wrong, and what clients hear.

`faulty_engines` holds the engines that go wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
from remote_support import NULL, config_of, run, until, whole

from octavo.engine.async_engine import AsyncEngine, EngineOptions, EngineState
from octavo.errors import EngineDeadError, InvalidRequestError, StepFailedError
from octavo.request import SamplingParams

LONG = SamplingParams(max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)


def test_a_failed_step_hits_its_requests_only(tiny_model_path: Path) -> None:
    async def fail(engine: AsyncEngine) -> None:
        hit = [engine.submit(f"hit{i}", "hello", LONG) for i in range(2)]
        for stream in hit:
            with pytest.raises(StepFailedError, match="a bad kernel") as error:
                async for _ in stream:
                    pass
            assert set(error.value.request_ids) >= {stream.request_id}
        assert len((await whole(engine.submit("hit0", "again", SHORT))).outputs[0].token_ids) == 8
        assert engine.num_restarts == 0 and engine.num_unfinished == 0

    run(config_of(tiny_model_path), fail, build="faulty_engines:build_failing")


def test_a_lost_device_restarts_the_engine(tiny_model_path: Path) -> None:
    async def lose(engine: AsyncEngine) -> None:
        stream = engine.submit("a", "hello", LONG)
        with pytest.raises(StepFailedError, match="it fell off the bus"):
            async for _ in stream:
                pass
        await until(lambda: engine.num_restarts == 1 and engine.state is EngineState.READY)
        assert (await whole(engine.submit("a", "hello", SHORT))).finished

    run(
        config_of(tiny_model_path),
        lose,
        build="faulty_engines:build_lost",
        restart_backoff_s=0.01,
    )


def test_why_it_ended_is_told(tiny_model_path: Path) -> None:
    reasons = []

    async def lose(engine: AsyncEngine) -> None:
        engine.on_state = lambda _: reasons.append(engine.why_not_ready)
        with pytest.raises(StepFailedError):
            await whole(engine.submit("a", "hello", LONG))
        await until(lambda: bool(reasons))

    run(config_of(tiny_model_path), lose, build="faulty_engines:build_lost", restart_backoff_s=9.0)
    assert "the device is lost" in reasons[0] and "started again in 9 s" in reasons[0]


def test_a_lost_sequence_is_answered_for_and_its_blocks_come_back(tiny_model_path: Path) -> None:
    async def lose(engine: AsyncEngine) -> None:
        lost = engine.submit("lost", [1] * 40, LONG)
        other = engine.submit("other", [2] * 40, SamplingParams(max_tokens=20, ignore_eos=True))
        assert len((await whole(other)).outputs[0].token_ids) == 20
        with pytest.raises(StepFailedError, match="had lost 1 requests"):
            await whole(lost)
        leaks = [event for event in await engine.events() if event.kind == "leak"]
        assert [event.request_id for event in leaks] == ["lost", "lost"]
        assert "still holds 3 blocks" in leaks[1].why
        assert (await engine.memory_report())["ledger"]["num_physical_blocks"] == 0
        whole_pool = SamplingParams(max_tokens=20, ignore_eos=True)
        assert (await whole(engine.submit("lost", [3] * (64 * 16 - 20), whole_pool))).finished

    run(config_of(tiny_model_path), lose, build="faulty_engines:build_forgetful")


def test_an_abort_that_was_not_heard_is_repeated(tiny_model_path: Path) -> None:
    async def leave(engine: AsyncEngine) -> None:
        stream = engine.submit("deaf", "hello", SamplingParams(max_tokens=900, ignore_eos=True))
        await anext(stream)
        stream.close()
        await until(lambda: engine.num_unfinished == 0)
        await until(lambda: engine.stats.num_running == 1)
        await until(lambda: engine.stats.num_running == 0)
        assert engine.stats.generation_tokens_total < 500
        leaks = [event for event in await engine.events() if event.kind == "leak"]
        assert [event.request_id for event in leaks] == ["deaf"]

    run(config_of(tiny_model_path), leave, build="faulty_engines:build_deaf")


def test_news_of_an_aborted_request_are_not_taken_for_its_successors(tiny_model_path: Path) -> None:
    async def reuse(engine: AsyncEngine) -> None:
        first = engine.submit("x", "hello", LONG)
        await anext(first)
        assert engine.abort("x")
        with pytest.raises(InvalidRequestError, match="has not ended"):
            engine.submit("x", "hello", SHORT)
        expected = await whole(engine.submit("y", "hello", SHORT))  # the abort was heard before
        again = await whole(engine.submit("x", "hello", SHORT))
        assert again.outputs[0].token_ids == expected.outputs[0].token_ids

    run(config_of(tiny_model_path), reuse, build="faulty_engines:build")


def test_signals_are_the_parents(tiny_model_path: Path) -> None:
    async def signals(engine: AsyncEngine) -> None:
        stream = engine.submit("a", "hello", SHORT)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine.info.pid, number)
        assert (await whole(stream)).finished
        assert os.getsid(engine.info.pid) != os.getsid(0), "a terminal's signals do not reach it"

    run(config_of(tiny_model_path), signals, build="faulty_engines:build")


def test_progress_of_loading_is_told(tiny_model_path: Path) -> None:
    told: list[object] = []

    class Told:
        def start(self, what: str, total_bytes: int | None = None) -> None:
            told.append((what, total_bytes))

        def update(self, done_bytes: int) -> None:
            told.append(done_bytes)

        def finish(self) -> None:
            told.append("end")

    async def main() -> None:
        options = EngineOptions(build="faulty_engines:build")
        engine = AsyncEngine(config_of(tiny_model_path), options=options)
        with pytest.raises(EngineDeadError, match="starting"):
            engine.submit("a", "hello", SHORT)
        await engine.start(Told())
        await engine.close()
        await engine.close()

    asyncio.run(main())
    assert told[0] == ("reading nothing", 3) and told[-1] == "end"


def test_an_engine_that_is_closed_while_it_loads(
    tiny_model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        is_loading = asyncio.Event()

        class Told:
            def start(self, what: str, total_bytes: int | None = None) -> None:
                is_loading.set()

            def update(self, done_bytes: int) -> None: ...

            def finish(self) -> None: ...

        engine = AsyncEngine(
            config_of(tiny_model_path), options=EngineOptions(build="faulty_engines:build")
        )
        starting = asyncio.create_task(engine.start(Told()))
        await is_loading.wait()
        await engine.close()  # the process says that it is ready before it hears of this
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(main())
    assert caplog.messages == []


def test_too_slow_a_start_is_ended(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tempfile.mkdtemp()
    monkeypatch.setattr(tempfile, "tempdir", folder)

    async def main() -> None:
        options = EngineOptions(build=NULL, start_timeout_s=0.01)
        engine = AsyncEngine(config_of(tiny_model_path), options=options)
        with pytest.raises(EngineDeadError, match=r"not ready within 0\.01 s"):
            await engine.start()
        assert engine.state is EngineState.DEAD

    asyncio.run(main())
    assert os.listdir(folder) == [], "no folder is left"
    os.rmdir(folder)


def test_nothing_is_left_on_disk(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))

    async def look(engine: AsyncEngine) -> None:
        assert os.listdir(tmp_path / "temp") == [], "not even while it runs: it may be killed"
        assert (await whole(engine.submit("a", "hello", SHORT))).finished

    run(config_of(tiny_model_path), look, build=NULL)


def test_frames(tiny_model_path: Path) -> None:
    async def watch(engine: AsyncEngine) -> None:
        stream = engine.submit("a", [1] * 40, LONG)
        await anext(stream)
        frames = engine.frames(50.0)
        first, second = [json.loads(await anext(frames)) for _ in range(2)]
        assert first["kind"] == "full" and second["kind"] == "diff"
        assert first["about"]["model"] == str(tiny_model_path)
        assert len(first["blocks"]["state"]) == 64
        assert first["requests"][0]["id"] == "a"
        late = engine.frames(5.0)
        assert json.loads(await anext(late))["kind"] == "full"
        held = first["blocks"]["owner"].index(first["requests"][0]["no"])
        info = await engine.block_info(held)
        assert info["owners"][0]["id"] == "a" and info["token_ids"][0] == 1
        with pytest.raises(InvalidRequestError, match="blocks 0 to 63"):
            await engine.block_info(64)
        await frames.aclose()
        await late.aclose()
        await whole(stream)

    run(config_of(tiny_model_path), watch, build="faulty_engines:build")
