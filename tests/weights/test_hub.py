"""The hub through `huggingface_hub`, against a stand-in server on this machine.

Each case runs in a process of its own: the library reads its environment when it is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "c" * 40
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 400,
    "pytorch_model.bin": b"never",
    "onnx/model.safetensors": b"never",
}
GGUF_FILES = {"README.md": b"#", "M-Q4_0.gguf": b"GGUF" * 50, "M-Q8_0.gguf": b"GGUF" * 90}


class Hub(ThreadingHTTPServer):
    """Knows org/m, org/gguf, and names that fail: gated, private; `cut` and `lie` break files."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, str | None]] = []
        self.cut_once = ""
        self.lie_about = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        files = GGUF_FILES if "/org/gguf" in path else FILES
        if "/org/gated" in path:
            return self.fail(403, "GatedRepo")
        if "/org/private" in path:
            return self.fail(401, None)
        if "/org/m" not in path and "/org/gguf" not in path:
            return self.fail(404, "RepoNotFound")
        if path.startswith("/api/models/"):
            if "/revision/" in path and path.rsplit("/", 1)[1] not in ("main", COMMIT):
                return self.fail(404, "RevisionNotFound")
            siblings = [{"rfilename": n, "size": len(c)} for n, c in files.items()]
            info = {"id": "org/m", "modelId": "org/m", "sha": COMMIT, "siblings": siblings}
            return self.send(200, json.dumps(info).encode(), {}, body)
        name = path.split(f"/resolve/{COMMIT}/")[1]
        content = files[name]
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if name == self.server.lie_about and not body:
            headers["X-Linked-Size"] = str(len(content) + 50)
        first = 0
        if (wanted := self.headers.get("Range")) is not None and body:
            first = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        cut = body and name == self.server.cut_once
        if cut:
            self.server.cut_once = ""
        self.send(206 if first else 200, content[first:], headers, body, cut=cut)

    def fail(self, status: int, code: str | None) -> None:
        self.send(status, b"", {"X-Error-Code": code} if code else {}, body=False)

    def send(
        self, status: int, content: bytes, headers: dict[str, str], body: bool, cut: bool = False
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True


@pytest.fixture
def server() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


PROGRAM = """
import json, sys
from octavo.errors import OctavoError
from octavo.weights.locate import locate, locate_tokenizer
from octavo.weights.manage import list_models, pull

class Bar:
    def __init__(self): self.seen = []
    def start(self, what, total_bytes=None): self.seen.append([what, total_bytes])
    def update(self, done_bytes): self.last = done_bytes
    def finish(self): self.seen.append(self.last if hasattr(self, "last") else None)

for line in sys.stdin:
    call, bar = json.loads(line), Bar()
    try:
        name = call.pop("call")
        function = {"locate": locate, "pull": pull, "tokenizer": locate_tokenizer}[name]
        found = function(**call, progress=bar)
        path = found if name == "tokenizer" else found.path
        files = sorted(p.name for p in path.iterdir()) if path.is_dir() else [path.name]
        print(json.dumps({"path": str(path), "files": files, "bar": bar.seen}), flush=True)
    except OctavoError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
"""


def ask(home: Path, endpoint: str, *calls: dict[str, Any], **env: str) -> list[dict[str, Any]]:
    """Runs the calls in a fresh process with that endpoint and an empty or given cache."""
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")} | {
        "HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "OCTAVO_HOME": str(home / "own"),
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", **env,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="".join(json.dumps({"call": "locate"} | c) + "\n" for c in calls),
        capture_output=True, text=True, timeout=60, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_downloads_what_is_needed_and_remembers_it(server: Hub, tmp_path: Path) -> None:
    first, again, pinned, tokenizer = ask(
        tmp_path, server.url, {"model": "org/m"}, {"model": "org/m"},
        {"model": "org/m", "revision": COMMIT}, {"call": "tokenizer", "name": "org/m"},
    )  # fmt: skip
    needed = ["config.json", "model.safetensors", "tokenizer.json"]
    assert first["files"] == needed and again["path"] == first["path"] == pinned["path"]
    assert tokenizer["path"] == first["path"]
    total = sum(len(FILES[n]) for n in needed)
    assert first["bar"] == [["downloading org/m", total], total]
    assert again["bar"] == []
    assert (Path(first["path"]) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    fetched = [path for method, path, _ in server.requests if method == "GET" and "resolve" in path]
    assert sorted(p.rsplit("/", 1)[1] for p in fetched) == needed
    # a later run, offline or with the hub away, uses what is there
    away = ask(
        tmp_path, "http://127.0.0.1:9", {"model": "org/m"}, {"call": "pull", "name": "org/m"}
    )
    offline = ask(tmp_path, server.url, {"model": "org/m"}, HF_HUB_OFFLINE="1")
    assert {a["path"] for a in away + offline} == {first["path"]}


def test_formats_tokenizer_and_choice_of_file(server: Hub, tmp_path: Path) -> None:
    tokenizer, dummy, unclear, chosen, second, all_there = ask(
        tmp_path, server.url, {"call": "tokenizer", "name": "org/m"},
        {"model": "org/m", "load_format": "dummy"}, {"model": "org/gguf"},
        {"model": "org/gguf:Q4_0"}, {"model": "org/gguf:Q8_0"}, {"model": "org/gguf"},
    )  # fmt: skip
    assert tokenizer["files"] == dummy["files"] == ["config.json", "tokenizer.json"]
    assert chosen["files"] == ["M-Q4_0.gguf"] and second["files"] == ["M-Q8_0.gguf"]
    for answer in (unclear, all_there):
        assert "choose one as org/gguf:FILE" in answer["message"]


def test_refusals(server: Hub, tmp_path: Path) -> None:
    gated, private, missing, revision = ask(
        tmp_path, server.url, {"model": "org/gated"}, {"model": "org/private"},
        {"model": "org/none"}, {"model": "org/m", "revision": "v9"},
    )  # fmt: skip
    for answer in (gated, private, missing, revision):
        assert answer["error"] == "ModelNotFoundError"
    assert "access to org/gated is restricted (HTTP 403)" in gated["message"]
    assert "HF_TOKEN" in gated["message"] and f"{server.url}/org/gated" in gated["message"]
    assert "private" in private["message"] and "HTTP 401" in private["message"]
    assert "org/none does not exist" in missing["message"]
    assert "org/m has no revision 'v9'" in revision["message"]


def test_broken_connection_is_got_over(server: Hub, tmp_path: Path) -> None:
    server.cut_once = "model.safetensors"
    first, second = ask(tmp_path, server.url, {"model": "org/m"}, {"model": "org/m"})
    if "error" in first:  # library versions before 1.0 leave trying again to the user
        assert first["error"] in ("HubUnreachableError", "WeightsError")
        assert "org/m/model.safetensors" in first["message"]
    content = FILES["model.safetensors"]
    assert (Path(second["path"]) / "model.safetensors").read_bytes() == content
    fetched = [m for m, path, _ in server.requests if path.endswith("/model.safetensors")]
    assert fetched.count("GET") == 2


def test_file_shorter_than_announced_is_a_weights_error(server: Hub, tmp_path: Path) -> None:
    server.lie_about = "model.safetensors"
    (answer,) = ask(tmp_path, server.url, {"model": "org/m"})
    assert answer["error"] == "WeightsError"
    assert "org/m/model.safetensors arrived cut short" in answer["message"]


def test_unreachable_hub_is_given_up_at_once(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    (answer,) = ask(tmp_path, f"http://127.0.0.1:{port}", {"model": "org/m"})
    assert time.monotonic() - start < 15.0  # starting Python on a busy machine included
    assert answer["error"] == "HubUnreachableError"
    assert f"http://127.0.0.1:{port} cannot be reached for org/m" in answer["message"]


def test_hub_that_accepts_and_says_nothing_is_given_up_within_5_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import HfApi

    from octavo.weights import hub

    monkeypatch.setattr(hub, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: time.sleep(3))
    start = time.monotonic()
    with pytest.raises(hub.HubUnreachableError, match="did not answer within"):
        hub._ask(hub.HubName("org/m"), None)
    assert time.monotonic() - start < 2.0


def test_offline_mode_is_honoured(server: Hub, tmp_path: Path) -> None:
    (answer,) = ask(tmp_path, server.url, {"model": "org/m"}, HF_HUB_OFFLINE="1")
    assert answer["error"] == "HubUnreachableError" and "HF_HUB_OFFLINE" in answer["message"]
    assert not server.requests
