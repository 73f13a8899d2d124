"""Signals, ports, and what becomes of requests at the end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import signal
import threading
import time
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.server.config import ServeConfig
from octavo.server.keys import load_keys
from octavo.server.metrics import Metrics
from octavo.server.middleware import Front
from octavo.server.state import ServerState
from octavo.stats import EngineStats


def sent(server: Any, max_tokens: int = 240, n: int = 4) -> http.client.HTTPConnection:
    """A request for a stream."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    body = (
        b'{"prompt": "hi", "max_tokens": %d, "ignore_eos": true, "stream": true, "n": %d, '
        b'"temperature": 1}' % (max_tokens, n)
    )
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    return connection


def opened(server: Any) -> http.client.HTTPResponse:
    """A stream whose first bytes have come."""
    response = sent(server).getresponse()
    assert response.status == 200 and response.readline()
    return response


def held(server: Any) -> http.client.HTTPConnection:
    """A request that is under way and gets no further: the engine is stopped."""
    os.kill(server.engine_pid, signal.SIGSTOP)
    connection = sent(server)
    server.until(lambda: len(server.call("/admin/requests").json["requests"]) == 1)
    return connection


def test_a_port_in_use_is_told_before_loading(server: Any, start_server: Any) -> None:
    port = server.url.rpartition(":")[2]
    second = start_server("--port", port, waits=False)
    assert second.wait() == 2
    assert f"127.0.0.1:{port} is in use" in second.log() and len(second.log().splitlines()) == 1


def test_a_public_address_wants_a_key(start_server: Any) -> None:
    refused = start_server("--host", "0.0.0.0", waits=False)
    assert refused.wait() == 2 and "--insecure" in refused.log()


def test_a_server_that_is_stopped_while_it_loads(start_server: Any) -> None:
    code = (
        "import os, psutil, sys, octavo.cli.main as m, octavo.engine.async_engine as a, asyncio\n"
        "def ports():\n"
        "    all = psutil.net_connections('tcp')\n"
        "    return [c.laddr.port for c in all if c.pid == os.getpid() and c.status == 'LISTEN']\n"
        "async def start(self, progress=None):\n"
        "    while not ports():\n"
        "        await asyncio.sleep(0.01)\n"
        "    print('loads at port', ports()[0], flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "a.AsyncEngine.start = start\n"
        "sys.exit(m.main(sys.argv[1:]))\n"
    )
    server = start_server(waits=False, code=code)
    server.until(lambda: server.banner().endswith("\n"))
    server.url = f"http://127.0.0.1:{server.banner().split()[-1]}"
    assert server.call("/health").status == 200
    assert server.call("/ready").status == 503
    early = server.complete()
    assert early.status == 503 and "starting" in early.error["message"]
    assert early.headers["retry-after"]
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


def test_a_model_that_is_not_there(start_server: Any) -> None:
    server = start_server("--tokenizer", "/nowhere/at/all", waits=False)
    assert server.wait() == 2 and "/nowhere/at/all" in server.log()


def test_a_pool_that_is_too_small(start_server: Any) -> None:
    """What the engine's process finds out, it tells and is gone; the server ends all the same."""
    flags = ("--num-gpu-blocks-override", "4", "--max-model-len", "200")
    servers = [start_server(*flags, waits=False) for _ in range(2)]
    for server in servers:
        assert server.wait() == 2 and "needs 13 KV blocks" in server.log()


def test_running_requests_finish_under_load(start_server: Any) -> None:
    server = start_server()
    streams = [opened(server) for _ in range(6)]
    rests: list[bytes] = []
    threads = [threading.Thread(target=lambda s=s: rests.append(s.read())) for s in streams]
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [rest.endswith(b"data: [DONE]\n\n") for rest in rests] == [True] * 6
    assert not any(b'"error"' in rest for rest in rests)
    assert server.wait() == 0


def test_new_requests_are_turned_away_meanwhile(start_server: Any) -> None:
    server = start_server()
    connection = held(server)
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: server.call("/ready").status == 503)
    refused = server.complete()
    assert refused.status == 503 and "stopping" in refused.error["message"]
    assert refused.headers["connection"] == "close" and refused.headers["retry-after"]
    assert server.call("/health").status == 200
    assert server.call("/admin/undrain", b"").status == 503, "the end cannot be taken back"
    engine_pid = server.engine_pid
    begin_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)  # a second one
    with contextlib.suppress(OSError):  # whether it answers or is gone: it has seen the signal
        server.call("/health")
    os.kill(engine_pid, signal.SIGCONT)
    assert server.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - begin_s < 20
    with pytest.raises(ProcessLookupError):
        os.kill(engine_pid, 0)
    connection.close()


def test_what_does_not_finish_in_time_is_cut_off(start_server: Any) -> None:
    server = start_server("--shutdown-timeout-s", "0.3")
    connection, engine_pid = held(server), server.engine_pid
    server.process.send_signal(signal.SIGINT)
    answer = connection.getresponse()
    assert answer.status == 503 and b"--shutdown-timeout-s" in answer.read()
    os.kill(engine_pid, signal.SIGCONT)
    assert server.wait() == 1


def test_the_api_process_has_no_torch(server: Any) -> None:
    with open(f"/proc/{server.pid}/maps") as maps:
        assert "libtorch" not in maps.read()


def test_what_has_not_begun_to_be_answered_is_told_of_the_end() -> None:
    """Cancelled, when the server can wait no longer: while its body comes, or is looked at."""
    sent: list[Any] = []
    begun = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> None:
        config, engine = ServeConfig(), AsyncEngine(EngineConfig())
        state = ServerState(
            config, engine, load_keys(config, {}), model_names=["m"],
            metrics=Metrics("m", EngineStats),
        )  # fmt: skip
        scope = {"type": "http", "method": "POST", "path": "/ping", "headers": []}
        task = asyncio.create_task(Front(app, state)(scope, asyncio.Event().wait, send))  # type: ignore[arg-type]
        await begun.wait()
        task.cancel()
        await task

    asyncio.run(main())
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 503 and b"the server is shutting down" in sent[1]["body"]
