"""`octavo top`, driven by textual's pilot, against a real pool's frames over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import uvicorn
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from octavo.cli.main import main
from octavo.dashboard.app import make_app
from octavo.dashboard.client import FrameClient
from octavo.dashboard.hub import LocalSource
from octavo.dashboard.terminal import TopApp
from octavo.dashboard.terminal_text import memory_text
from octavo.errors import ConfigError
from octavo.lab.config import SimConfig
from octavo.lab.costs import FixedCosts
from octavo.lab.demo import Stage
from octavo.lab.trace import Trace, TraceRequest
from octavo.lab.workload import make_workload


def make_stage(num_blocks: int = 40, num_requests: int = 12) -> Stage:
    """Requests that all come at once, of which not all fit."""
    requests = [TraceRequest(num_input=40, num_output=200) for _ in range(num_requests)]
    workload = make_workload(Trace(name="made up", requests=requests))
    return Stage(SimConfig(num_blocks=num_blocks), FixedCosts(), workload, "a-model")


@contextlib.asynccontextmanager
async def served(*sources: LocalSource) -> AsyncIterator[str]:
    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        app = make_app(sources, is_leaving=lambda: server.should_exit)
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        serving = asyncio.create_task(server._serve([sock]))
        while not server.started:
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        server.should_exit = server.force_exit = True
        await serving


def shown(app: TopApp, selector: str) -> str:
    return str(app.query_one(selector, Static).render())


async def until(pilot: Pilot[None], true: Callable[[], bool], source: LocalSource) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it is not shown"
        source.tell()
        await pilot.pause(0.01)


def run_top(
    stage: Stage,
    drive: Callable[[TopApp, Pilot[None], LocalSource], Awaitable[None]],
    size: tuple[int, int] = (100, 40),
) -> None:
    async def play() -> None:
        source = LocalSource(stage, clock=lambda: time.monotonic() * 1000)  # no frame is too early
        async with served(source) as url:
            app = TopApp(FrameClient(url, None))
            async with app.run_test(size=size) as pilot:
                await until(pilot, lambda: app.frame is not None, source)
                await drive(app, pilot, source)
            assert app.failure is None

    asyncio.run(play())


def test_it_shows_the_pool_and_why_requests_wait() -> None:
    stage = make_stage()
    stage.advance(3.0)

    async def drive(app: TopApp, pilot: Pilot[None], source: LocalSource) -> None:
        assert "a-model" in shown(app, "#head") and "paged" in shown(app, "#head")
        frame = app.frame
        assert frame is not None
        pool = shown(app, "#pool").splitlines()[0]
        assert len(pool) == 40
        assert pool.count("█") == sum(state == 2 for state in app.blocks.state)
        table = app.query_one(DataTable)
        assert table.row_count == len(frame["requests"]) == 12
        rows = [[str(cell) for cell in table.get_row_at(i)] for i in range(12)]
        waiting = [row for row in rows if row[3] != "running"]
        assert waiting and "blocks" in waiting[0][-1]
        assert waiting[1][-1] == f"behind {waiting[0][1]}"
        assert "tokens" in shown(app, "#memory") and "free" in shown(app, "#memory")
        assert "blocks missed: not asked" in shown(app, "#rates")

    run_top(stage, drive)


def test_a_usual_terminal_has_room_for_all_of_it() -> None:
    stage = make_stage(num_blocks=3000)
    stage.advance(1.0)

    async def drive(app: TopApp, pilot: Pilot[None], source: LocalSource) -> None:
        await pilot.pause()
        *cells, legend = shown(app, "#pool").splitlines()
        pool = app.query_one("#pool").content_region
        assert (pool.width, pool.height) == (78, len(cells) + 1)  # no line is broken in two
        assert max(map(len, cells)) == 78 and legend.startswith("█")
        assert app.query_one(DataTable).region.height >= 4
        assert app.query_one("#log").region.height == 3
        assert app.query_one("Footer").region.bottom == 24

    run_top(stage, drive, size=(80, 24))


def test_it_follows_the_pool_frame_by_frame() -> None:
    stage = make_stage()
    stage.advance(1.0)

    async def drive(app: TopApp, pilot: Pilot[None], source: LocalSource) -> None:
        first = app.frame
        assert first is not None
        stage.advance(16.0)
        await until(pilot, lambda: app.frame is not None and app.frame["time_s"] >= 16, source)
        assert app.frame is not None and app.frame["kind"] == "diff"
        whole = stage.frame(full=True)
        assert app.blocks.state == whole["blocks"]["state"]
        assert app.blocks.fill == whole["blocks"]["fill"]
        assert app.frame["totals"]["preemptions"] > 0
        assert "preempted" in shown(app, "#events")
        assert not shown(app, "#rates").startswith("0 tokens/s")

    run_top(stage, drive)


def test_pause_keeps_the_picture_and_step_goes_one_further() -> None:
    stage = make_stage()
    stage.advance(1.0)

    async def drive(app: TopApp, pilot: Pilot[None], source: LocalSource) -> None:
        await pilot.press("space")
        assert app.is_paused and app.frame is not None
        n = app.frame["n"]
        for second in (2.0, 3.0, 4.0):
            stage.advance(second)
            await until(pilot, lambda: len(app._held) > 0, source)
        await until(pilot, lambda: len(app._held) >= 3, source)
        assert app.frame["n"] == n and "paused" in shown(app, "#head")
        await pilot.press("s")
        assert app.frame["n"] == n + 1 and app.is_paused
        await pilot.press("space")
        assert app.frame["n"] > n + 1 and not app._held

    run_top(stage, drive)


@pytest.mark.parametrize(("width", "height"), [(40, 15), (200, 60)])
def test_a_large_pool_fits_a_terminal(width: int, height: int) -> None:
    stage = make_stage(num_blocks=50_000)
    stage.advance(1.0)

    async def play() -> None:
        source = LocalSource(stage, clock=lambda: time.monotonic() * 1000)
        async with served(source) as url:
            app = TopApp(FrameClient(url, None))
            async with app.run_test(size=(width, height)) as pilot:
                await until(pilot, lambda: app.frame is not None, source)
                *cells, legend = shown(app, "#pool").splitlines()
                assert 3 <= len(cells) <= height // 3 + 1
                assert all(len(line) <= width - 2 for line in cells)
                assert "a cell is" in legend

    asyncio.run(play())


def test_where_no_server_is_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    assert main(["top", "--url", f"http://127.0.0.1:{port}"]) == 2
    error = capsys.readouterr().err
    assert f"no server at http://127.0.0.1:{port}" in error and "octavo serve" in error
    assert error.endswith("(Connection refused)\n")


@pytest.mark.parametrize(
    ("cause", "why"),
    [
        (ConnectionRefusedError(111, "Connect call failed"), "Connection refused"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service"),
        (ssl.SSLError(1, "wrong version number"), "wrong version number"),
    ],
    ids=["refused", "name", "tls"],
)
def test_why_no_server_is_there(cause: OSError, why: str) -> None:
    """Numbers of names and of TLS are not the system's."""
    key: Any = SimpleNamespace(host="h", port=1, ssl=True)
    error = aiohttp.ClientConnectorError(key, cause)
    told = FrameClient("http://h:1", None)._why_unreachable(error)
    assert f"({why}" in told


@pytest.mark.parametrize(
    ("flags", "word"),
    [(["--url", "127.0.0.1:8000"], "--url"), (["--source", "-1"], "--source")],
)
def test_flags_that_cannot_be(
    flags: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", *flags]) == 2
    assert word in capsys.readouterr().err


def test_a_source_that_is_not_there_is_named() -> None:
    async def ask() -> None:
        source = LocalSource(make_stage(), time.monotonic)
        async with served(source) as url:
            assert await FrameClient(url + "/dashboard/", None).check() == "paged"
            with pytest.raises(ConfigError, match="--source 1 is not there; the server has 0: pag"):
                await FrameClient(url, None, source=1).check()

    asyncio.run(ask())


def test_groups_of_layers_are_told_where_there_are_any() -> None:
    requests = [TraceRequest(num_input=40, num_output=200)]
    workload = make_workload(Trace(name="made up", requests=requests))
    for windows, told in (
        ((0, 16, 16), r"groups of layers: 1 keeping all tokens (\d+) blocks; "
         r"2 keeping last 16 tokens (\d+) blocks, (\d+) given back"),
        ((0,), ""),
    ):  # fmt: skip
        config = SimConfig(num_blocks=80, windows=windows)
        stage = Stage(config, FixedCosts(), workload, "a-model")
        stage.advance(4.0)
        frame = stage.frame(full=True)
        text = memory_text(frame, frame["about"], 80).plain
        found = re.search(told or "groups", text)
        assert (found is None) == (not told)
        if found is not None:
            full, kept, back = map(int, found.groups())
            assert [full, kept, back] == [
                frame["groups"][0][0],
                sum(group[0] for group in frame["groups"][1:]),
                sum(group[1] for group in frame["groups"][1:]),
            ]
            assert back > 0
