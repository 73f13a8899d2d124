"""A real server process with the tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

START_S = 120


@dataclass
class Answer:
    """Of an HTTP request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


class Server:
    """A running `octavo serve`."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process, self._folder = process, folder
        self.url = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        for child in children:
            if b"octavo.engine.remote.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        raise AssertionError("the server has no engine process")

    def log(self) -> str:
        return (self._folder / "err").read_text()

    def banner(self) -> str:
        return (self._folder / "out").read_text()

    def call(
        self, path: str, body: Any = None, *, method: str | None = None, **headers: str
    ) -> Answer:
        """GET, or POST where there is a body (bytes, or what becomes JSON)."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if data is not None:
            named.setdefault("content-type", "application/json")
        request = urllib.request.Request(self.url + path, data, named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return Answer(response.status, response.headers, response.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read())

    def complete(self, max_tokens: int = 4, prompt: str = "hi", **fields: Any) -> Answer:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return self.call("/v1/completions", body | fields)

    def wait(self, seconds: float = START_S) -> int:
        return self.process.wait(seconds)

    def until(self, true: Callable[[], bool], seconds: float = 60) -> None:
        """Wait until something is so."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, self.log()
            time.sleep(0.02)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


StartServer = Callable[..., Server]


def _spawn(folder: Path, command: list[str], env: dict[str, str]) -> Server:
    source = str(Path(__file__).parents[2] / "src")
    own = {k: v for k, v in os.environ.items() if not k.startswith("OCTAVO_")}
    own |= {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "OCTAVO_TEST_DEVICE": "cpu", **env}
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=own)
    return Server(process, folder)


@pytest.fixture(scope="session")
def launch(
    tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartServer]:
    """Starts servers, and stops all at the end."""
    started: list[Server] = []

    def start(
        *flags: str, env: dict[str, str] | None = None, waits: bool = True, code: str = ""
    ) -> Server:
        launcher = ["-c", code] if code else ["-m", "octavo"]
        words = ["serve", str(tiny_model_path), "--load-format", "dummy", "--device", "cpu"]
        words += ["--num-threads", "1", "--kv-cache-memory-bytes", "4MiB", "--port", "0", *flags]
        folder = tmp_path_factory.mktemp("server")
        server = _spawn(folder, [sys.executable, *launcher, *words], env or {})
        started.append(server)
        if waits:
            server.until(lambda: "octavo serves" in server.banner() or _ended(server), START_S)
            assert server.process.poll() is None, server.log()
            server.url = server.banner().split(" at ", 1)[1].split()[0]
        return server

    yield start
    for server in started:
        server.stop()


def _ended(server: Server) -> bool:
    return server.process.poll() is not None


@pytest.fixture(scope="session")
def server(launch: StartServer) -> Server:
    """One that tests share: they leave it as they found it."""
    return launch()


@pytest.fixture
def start_server(launch: StartServer) -> Iterator[StartServer]:
    """Starts servers of a test's own, with more flags; they end with the test."""
    mine: list[Server] = []

    def start(*flags: str, **options: Any) -> Server:
        mine.append(launch(*flags, **options))
        return mine[-1]

    yield start
    for one in mine:
        one.stop()
