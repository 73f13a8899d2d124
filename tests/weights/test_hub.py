"""The hub through `huggingface_hub`, against a stand-in server on this machine.

Each case runs in a process of its own: the library reads its environment when it is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest

from octavo.weights.progress import NullProgress

COMMIT = "c" * 40
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 400,
    "pytorch_model.bin": b"never",
    "onnx/model.safetensors": b"never",
}
SHARDS = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "additional_chat_templates/rag.jinja": b"rag",
    "additional_chat_templates/notes.txt": b"never",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    ).encode(),
    "model-1.safetensors": b"one" * 99,
    "model-2.safetensors": b"two" * 77,
}
BIG = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": bytes(24 << 20)}
"""More than twice what the library writes to the disk at a time."""
SPLIT = {f"M-Q4_0-0000{i}-of-00002.gguf": b"GGUF" * 20 * i for i in (1, 2)} | {
    f"Q8_0/M-Q8_0-0000{i}-of-00002.gguf": b"GGUF" * 30 * i for i in (1, 2)
}
GGUF_FILES = {"README.md": b"#", "M-Q4_0.gguf": b"GGUF" * 50, "M-Q8_0.gguf": b"GGUF" * 90}


class Hub(ThreadingHTTPServer):
    """Knows org/m, org/gguf, org/shards, org/split, and names that fail: gated, private.

    What it does to files of a name: `cut_once` ends the connection halfway, `hold` sends no more
    after half of it, `lie_about` announces more than there is, `damaged` sends other bytes than the
    stated sum is of, `gone` is listed but cannot be had. `commits`: revision -> commit.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, str | None]] = []
        self.cut_once = ""
        self.lie_about = ""
        self.hold = ""
        self.held = threading.Event()
        self.damaged = ""
        self.gone = ""
        self.commits = {"main": COMMIT}

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
        kinds = {"/org/gguf": GGUF_FILES, "/org/shards": SHARDS, "/org/split": SPLIT,
                 "/org/big": BIG}  # fmt: skip
        files = next((f for kind, f in kinds.items() if kind in path), FILES)
        if "/org/gated" in path:
            return self.fail(403, "GatedRepo")
        if "/org/private" in path:
            return self.fail(401, None)
        if "/org/m" not in path and not any(kind in path for kind in kinds):
            return self.fail(404, "RepoNotFound")
        if path.startswith("/api/models/"):
            commits = self.server.commits
            wanted = unquote(path.rsplit("/", 1)[1]) if "/revision/" in path else "main"
            if wanted not in (*commits, *commits.values()):
                return self.fail(404, "RevisionNotFound")
            siblings = [self.sibling(n, c) for n, c in files.items()]
            commit = commits.get(wanted, wanted)
            info = {"id": "org/m", "modelId": "org/m", "sha": commit, "siblings": siblings}
            return self.send(200, json.dumps(info).encode(), {}, body)
        commit, name = path.split("/resolve/")[1].split("/", 1)
        if name == self.server.gone:
            return self.fail(404, "EntryNotFound")
        content = files[name]
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if name == self.server.damaged:
            content = content[::-1]
        if name == self.server.lie_about and not body:
            headers["X-Linked-Size"] = str(len(content) + 50)
        first = 0
        if (span := self.headers.get("Range")) is not None and body:
            first = int(span.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        cut = body and name == self.server.cut_once
        if cut:
            self.server.cut_once = ""
        hold = body and name == self.server.hold
        self.send(206 if first else 200, content[first:], headers, body, cut=cut, hold=hold)

    def sibling(self, name: str, content: bytes) -> dict[str, Any]:
        """A file in the hub's listing; large ones have a checksum there."""
        lfs = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        large = {"lfs": lfs | {"pointerSize": 1}} if name.endswith((".safetensors", "gguf")) else {}
        return {"rfilename": name, "size": len(content), **large}

    def fail(self, status: int, code: str | None) -> None:
        self.send(status, b"", {"X-Error-Code": code} if code else {}, body=False)

    def send(
        self,
        status: int,
        content: bytes,
        headers: dict[str, str],
        body: bool,
        cut: bool = False,
        hold: bool = False,
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content[: len(content) // 2] if cut or hold else content)
        if hold:
            self.wfile.flush()
            self.server.held.set()
            self.connection.recv(1)  # until the other side is gone
        if cut or hold:
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
        found = function(**call) if name == "tokenizer" else function(**call, progress=bar)
        path = found if name == "tokenizer" else found.path
        files = sorted(p.name for p in path.iterdir()) if path.is_dir() else [path.name]
        print(json.dumps({"path": str(path), "files": files, "bar": bar.seen}), flush=True)
    except OctavoError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
"""


def environment_of(home: Path, endpoint: str, **env: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")} | {
        "HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "OCTAVO_HOME": str(home / "own"),
        "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", **env,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }  # fmt: skip


def ask(home: Path, endpoint: str, *calls: dict[str, Any], **env: str) -> list[dict[str, Any]]:
    """Runs the calls in a fresh process with that endpoint and an empty or given cache."""
    environment = environment_of(home, endpoint, **env)
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
    with socket.socket() as deaf:  # it does not listen
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        start = time.monotonic()
        (answer,) = ask(tmp_path, f"http://127.0.0.1:{port}", {"model": "org/m"})
    assert time.monotonic() - start < 30.0  # starting Python on a busy machine included
    assert answer["error"] == "HubUnreachableError"
    assert f"http://127.0.0.1:{port} cannot be reached for org/m" in answer["message"]


def test_hub_that_accepts_and_says_nothing_is_given_up_within_5_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import HfApi

    from octavo.weights import hub
    from octavo.weights.hub_errors import HubUnreachableError

    monkeypatch.setattr(hub, "GIVE_UP_S", 0.2)
    never = threading.Event()
    monkeypatch.setattr(HfApi, "model_info", lambda *_, **__: never.wait(60))
    start = time.monotonic()
    with pytest.raises(HubUnreachableError, match="did not answer within"):
        hub._ask(hub.HubName("org/m"), None)
    assert time.monotonic() - start < 30.0
    never.set()


def test_offline_mode_is_honoured(server: Hub, tmp_path: Path) -> None:
    (answer,) = ask(tmp_path, server.url, {"model": "org/m"}, HF_HUB_OFFLINE="1")
    assert answer["error"] == "HubUnreachableError" and "HF_HUB_OFFLINE" in answer["message"]
    assert not server.requests


def test_killed_download_is_resumed_and_its_half_is_never_used(server: Hub, tmp_path: Path) -> None:
    server.hold = "model.safetensors"
    call = json.dumps({"call": "locate", "model": "org/big"}) + "\n"
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment_of(tmp_path, server.url),
    ) as process:  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(call)
        process.stdin.flush()
        try:
            assert server.held.wait(30)
            end = time.monotonic() + 20
            while not _incomplete_bytes(tmp_path) and time.monotonic() < end:
                time.sleep(0.01)  # what was sent is on its way to the disk
        finally:
            process.kill()
    written = _incomplete_bytes(tmp_path)
    assert 0 < written <= 12 << 20
    server.hold = ""
    (offline,) = ask(tmp_path, server.url, {"model": "org/big"}, HF_HUB_OFFLINE="1")
    assert offline["error"] == "HubUnreachableError"  # the half is not taken for the model
    (second,) = ask(tmp_path, server.url, {"model": "org/big"})
    content = (Path(second["path"]) / "model.safetensors").read_bytes()
    assert content == BIG["model.safetensors"]
    spans = [
        span for method, path, span in server.requests
        if method == "GET" and path.endswith("/model.safetensors")
    ]  # fmt: skip
    assert spans[0] is None and spans[1] is not None
    assert int(spans[1].removeprefix("bytes=").split("-")[0]) == written


def _incomplete_bytes(home: Path) -> int:
    return sum(p.stat().st_size for p in home.rglob("*.octavo.part"))


def test_other_bytes_than_the_hub_states_are_deleted(server: Hub, tmp_path: Path) -> None:
    server.damaged = "model.safetensors"
    (answer,) = ask(tmp_path, server.url, {"model": "org/m"})
    assert answer["error"] == "WeightsError"
    assert "org/m/model.safetensors arrived damaged: its SHA-256 is" in answer["message"]
    left = [p.name for p in (tmp_path / "hf").rglob("*") if "safetensors" in p.name]
    assert left == []
    server.damaged = ""
    (again,) = ask(tmp_path, server.url, {"model": "org/m"})
    content = (Path(again["path"]) / "model.safetensors").read_bytes()
    assert content == FILES["model.safetensors"]


def test_listed_file_that_cannot_be_had_is_named(server: Hub, tmp_path: Path) -> None:
    server.gone = "model-2.safetensors"
    (first,) = ask(tmp_path, server.url, {"model": "org/shards"})
    assert first["error"] == "ModelNotFoundError"
    assert "org/shards/model-2.safetensors does not exist" in first["message"]
    # one of two shards is no model
    (offline,) = ask(tmp_path, server.url, {"model": "org/shards"}, HF_HUB_OFFLINE="1")
    assert offline["error"] == "HubUnreachableError"
    server.gone = ""
    (whole,) = ask(tmp_path, server.url, {"model": "org/shards"})
    names = {n for n in SHARDS if "/" not in n}
    assert set(whole["files"]) == names | {"additional_chat_templates"}
    assert (Path(whole["path"]) / "additional_chat_templates" / "rag.jinja").read_bytes() == b"rag"
    asked = [
        path
        for m, path, _ in server.requests
        if m == "GET" and path.endswith("model-1.safetensors")
    ]
    assert len(asked) == 1  # the one that arrived is not fetched again


def test_split_gguf_comes_whole(server: Hub, tmp_path: Path) -> None:
    server.gone = "M-Q4_0-00002-of-00002.gguf"
    (half,) = ask(tmp_path, server.url, {"model": "org/split"})
    assert half["error"] == "ModelNotFoundError" and "00002-of-00002" in half["message"]
    server.gone = ""
    plain, named = ask(tmp_path, server.url, {"model": "org/split"}, {"model": "org/split:Q4_0"})
    assert plain["path"] == named["path"] and plain["files"] == ["M-Q4_0-00001-of-00002.gguf"]
    assert sorted(p.name for p in Path(plain["path"]).parent.iterdir()) == list(SPLIT)[:2]
    # large ones lie in folders of the repository
    in_folder, offline = (
        ask(tmp_path, server.url, {"model": "org/split:Q8_0"}, HF_HUB_OFFLINE=flag)[0]
        for flag in ("0", "1")
    )
    assert in_folder["path"] == offline["path"] and in_folder["path"].endswith(list(SPLIT)[2])
    assert len(list(Path(in_folder["path"]).parent.iterdir())) == 2


def test_cache_that_cannot_be_written_is_no_fault_of_the_hub(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "hf").touch()
    (answer,) = ask(tmp_path, server.url, {"model": "org/m"})
    assert answer["error"] == "ModelError"
    assert "cannot be kept in" in answer["message"] and "set HF_HOME" in answer["message"]


def test_disk_without_room_is_found_out_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    from octavo.errors import ModelError
    from octavo.weights import hub

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3000))
    blobs = tmp_path / "hub" / "models--org--m" / "blobs"
    name, sizes, sums = hub.HubName("org/m"), {"a": 2000, "b": 3000}, {"b": "f" * 64}
    with pytest.raises(ModelError, match=r"org/m takes 4\.9 KiB more, and the disk of .* 2\.9 KiB"):
        hub._check_room(name, ["a", "b"], sizes, sums)
    hub._check_room(name, ["b"], sizes, sums)
    blobs.mkdir(parents=True)
    (blobs / f"{'f' * 64}.octavo.part").write_bytes(bytes(2000))
    hub._check_room(name, ["a", "b"], sizes, sums)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    with pytest.raises(ModelError, match=r"org/m cannot be kept in .*: Permission denied"):
        hub._check_room(name, ["a"], sizes, sums)


def test_checksum_that_would_be_a_path_names_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    from octavo.weights import hub_resume

    checksum = "../../../outside"
    found = SimpleNamespace(etag=checksum, size=4, location=None)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: found)
    monkeypatch.setattr(hub_resume, "_has_xet", lambda: False)
    fetched = hub_resume.fetch_blob("org/m", "f", COMMIT, checksum, 4, NullProgress(), 0)
    assert not fetched and list(tmp_path.iterdir()) == []


def test_revision_stays_what_it_was_when_the_branch_moves(server: Hub, tmp_path: Path) -> None:
    (first,) = ask(tmp_path, server.url, {"model": "org/m"})
    server.commits = {"main": "d" * 40, "v1": COMMIT, "refs/pr/7": COMMIT}
    pinned, tagged, offered, again, pulled, main = ask(
        tmp_path, server.url, {"model": "org/m", "revision": COMMIT},
        {"model": "org/m", "revision": "v1"}, {"model": "org/m", "revision": "refs/pr/7"},
        {"model": "org/m", "revision": "refs/pr/7"}, {"call": "pull", "name": "org/m"},
        {"model": "org/m"},
    )  # fmt: skip
    assert pinned["path"] == tagged["path"] == offered["path"] == first["path"]
    assert again["path"] == first["path"]
    assert Path(first["path"]).name == COMMIT
    assert pulled["path"] == main["path"] and Path(main["path"]).name == "d" * 40
