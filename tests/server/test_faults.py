"""What goes wrong around a server, and that it stays up."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

SERVER = Path(__file__).parents[2] / "src" / "octavo" / "server"
STREAM = (
    b'{"prompt": "hi", "max_tokens": 240, "ignore_eos": true, "stream": true, "n": 8, '
    b'"temperature": 1, "logprobs": 5}'
)


def post(server: Any, body: bytes = STREAM, receive_bytes: int | None = None) -> socket.socket:
    """A connection on which a request was sent."""
    client = socket.socket()
    client.settimeout(60)
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    client.sendall(head.encode() + body)
    return client


def is_idle(server: Any) -> bool:
    return server.call("/admin/requests").json == {"requests": []}


def test_the_engines_death_is_told_and_survived(start_server: Any) -> None:
    server = start_server()
    client = post(server)
    assert client.recv(20).startswith(b"HTTP/1.1 200")
    os.kill(server.engine_pid, signal.SIGKILL)
    rest = _rest(client)
    assert b"engine_dead" in rest and b"SIGKILL" in rest
    health = server.call("/health")
    assert health.status == 503 and "SIGKILL" in health.json["reason"]
    refused = server.complete()
    assert refused.status == 503 and refused.headers["retry-after"]
    server.until(lambda: server.call("/ready").status == 200)
    assert server.complete().status == 200 and server.call("/health").status == 200


def _rest(client: socket.socket) -> bytes:
    """Until the end mark of the stream."""
    found = b""
    while b"[DONE]" not in found:
        more = client.recv(65536)
        if not more:
            break
        found += more
    client.close()
    return found


def test_a_wedged_engine_is_given_up_on(start_server: Any) -> None:
    server = start_server("--step-timeout-s", "0.5", "--max-restarts", "0")
    os.kill(server.engine_pid, signal.SIGSTOP)
    answer = server.complete()
    assert answer.status == 503 and answer.error["code"] == "engine_dead"
    health = server.call("/health")
    assert health.status == 503 and "given up" in health.json["reason"]
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


def test_a_client_that_leaves_or_closes_its_half(server: Any) -> None:
    for leave in (lambda c: c.shutdown(socket.SHUT_WR), lambda c: c.close()):
        client = post(server)
        assert client.recv(20).startswith(b"HTTP/1.1 200")
        leave(client)
        server.until(lambda: is_idle(server))
        client.close()
    body = STREAM.replace(b'"stream": true', b'"stream": false')
    client = post(server, body)
    server.until(lambda: not is_idle(server))
    client.close()
    server.until(lambda: is_idle(server))


def test_a_client_that_reads_nothing(start_server: Any) -> None:
    server = start_server("--slow-reader-timeout-s", "0.5")
    body = STREAM.replace(b'"n": 8', b'"n": 64')
    client = post(server, body, receive_bytes=4096)
    server.until(lambda: "read nothing for 0.5 s" in server.log())
    server.until(lambda: is_idle(server))
    client.close()


def test_ten_thousand_idle_connections(server: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 12_000 if hard == resource.RLIM_INFINITY else hard
    num = min(10_000, most - 500)
    if num < 1000:
        pytest.skip(f"only {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, num + 400), hard))
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    clients = []
    try:
        for _ in range(num):
            clients.append(socket.create_connection(address, timeout=30))
        assert server.call("/health").status == 200
        assert server.complete(max_tokens=8).status == 200
        clients[-1].sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert clients[-1].recv(100).startswith(b"HTTP/1.1 200")
    finally:
        for client in clients:
            client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert server.complete().status == 200


def test_a_prompt_that_can_never_fit(start_server: Any) -> None:
    server = start_server("--num-gpu-blocks-override", "4", "--max-model-len", "64")
    for num_chars in (65, 1000):
        refused = server.complete(prompt="x" * num_chars)
        assert refused.status == 400 and refused.error["code"] == "capacity_exceeded"
        told = refused.error["message"]
        assert f"{num_chars:,}" in told and "64" in told
    beams = {"n": 4, "use_beam_search": True, "max_tokens": 30}
    wide = server.complete(prompt="x" * 30, **beams)
    assert wide.status == 400 and "4 beams x 3 further blocks" in wide.error["message"]
    assert server.complete(prompt="x" * 60).status == 200


def test_full_tiers(start_server: Any, tmp_path: Path) -> None:
    """Cached prompts of more blocks than pool, host and disk have together."""
    server = start_server(
        "--num-gpu-blocks-override", "16", "--swap-space", "0.00003", "--max-model-len", "128",
        "--kv-disk-dir", str(tmp_path / "kv"), "--kv-disk-bytes", "64KiB",
    )  # fmt: skip
    prompts = [f"{number:02}" * 45 for number in range(12)]
    first = [server.complete(prompt=prompt).json["choices"] for prompt in prompts]
    again = [server.complete(prompt=prompt).json["choices"] for prompt in prompts]
    assert first == again
    assert server.call("/health").status == 200
    sizes = [file.stat().st_size for file in (tmp_path / "kv").rglob("*") if file.is_file()]
    num_bytes = 64 * 2**10
    assert num_bytes / 2 < sum(sizes) < num_bytes * 1.5, "the disk tier was not full"


_JUMPING = """
import random, time
_time, _random = time.time, random.Random(0)
time.time = lambda: _time() + _random.uniform(-1e7, 1e7)
"""


def test_clock_jumps(start_server: Any, tmp_path: Path) -> None:
    """The wall clock of both processes is somewhere else at each look."""
    (tmp_path / "sitecustomize.py").write_text(_JUMPING)
    path = f"{tmp_path}:{SERVER.parents[1]}"
    server = start_server(
        "--request-timeout-s", "30", "--requests-per-minute", "1000", "--step-timeout-s", "20",
        env={"PYTHONPATH": path},
    )  # fmt: skip
    created = {server.complete().json["created"] // 100_000 for _ in range(5)}
    assert len(created) > 1, "the clock did not jump"
    client = post(server)
    assert b"[DONE]" in _rest(client)
    assert server.call("/health").status == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0


def test_the_wall_clock_is_for_people_only() -> None:
    looks = {
        str(path.relative_to(SERVER))
        for path in SERVER.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"\btime\.time\(|datetime\.now\(", line)
        and not re.search("created|completed_at", line)
    }
    assert looks <= {"state.py", "tracing.py"}, "use time.monotonic() or the loop's time"
