"""The shared library of the C kernels in csrc/: find it, or compile it, and load it once.

1. A library shipped beside this file (`_octavo_cpu*.so`, built at install time by
   `compile_library`), if it was built from the sources that lie here now.
2. Else all of csrc/*.c compiled at first use into the user's cache directory.
3. Else None, with one logged reason; callers use their torch fallbacks.

Threads come from the library's own pool (csrc/pool.c), not from an OpenMP runtime: torch brings one
of those, two in a process spin against each other, and a barrier waits for threads that a busy
machine has put aside.

Environment: OCTAVO_CPU_ISA=plain|avx2|avx512|avx512_bf16|amx lowers the instruction set that is
used, none does without the library; CC chooses the compiler; XDG_CACHE_HOME moves the cache.

This file imports only the standard library, so that a build step can load it by its path.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "csrc"
ISA_LEVELS = ("plain", "avx2", "avx512", "avx512_bf16", "amx")

_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"
# -O3 would spend most of the compile time on unrolling the loops over row ends.
_FLAGS = [
    *("-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas"),
]
_LINK_FLAGS = ["-shared", "-pthread", "-lm"]
_COMPILE_TIMEOUT_S = 120

_log = logging.getLogger(__name__)


class CompileError(RuntimeError):
    """No compiler was found, or it failed; the message has the command and its output."""


def source_files() -> list[Path]:
    """The C files of the library, in a fixed order; empty if csrc/ was not shipped."""
    return sorted(SOURCE_DIR.glob("*.c"))


def source_hash(sources: Iterable[Path] | None = None) -> str:
    """16 hex digits over names and contents of the C files and of the headers beside them."""
    files = set(source_files() if sources is None else sources)
    for folder in {f.parent for f in files}:
        files.update(folder.glob("*.h"))
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda f: f.name):
        digest.update(f"{file.name}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> str | None:
    """$CC, else the first of gcc, cc and clang on the path (on macOS: cc, clang, gcc)."""
    order = ("cc", "clang", "gcc") if sys.platform == "darwin" else ("gcc", "cc", "clang")
    for name in (os.environ.get("CC", ""), *order):
        path = shutil.which(name) if name else None
        if path:
            return path
    return None


def compile_library(
    output: Path,
    sources: Sequence[Path] | None = None,
    cc: str | None = None,
) -> Path:
    """Compiles the kernels into the shared library `output`, replacing it atomically.

    Args:
        output: path of the library; its folder must exist.
        sources: C files; default `source_files()`.
        cc: compiler; default `find_compiler()`.

    Returns: `output`.
    Raises: CompileError.
    """
    sources = source_files() if sources is None else list(sources)
    cc = cc or find_compiler()
    if cc is None:
        raise CompileError("no C compiler: none of $CC, gcc, cc, clang is on the path")
    if not sources:
        raise CompileError(f"no C sources in {SOURCE_DIR}")
    flags = [*_FLAGS, f'-DOCTAVO_SOURCE_HASH="{source_hash(sources)}"']
    with tempfile.TemporaryDirectory(prefix=".octavo-build-", dir=output.parent) as tmp:
        pairs = [(source, Path(tmp) / f"{source.stem}.o") for source in sources]
        _run_all([[cc, *flags, "-c", str(s), "-o", str(o)] for s, o in pairs])
        library = Path(tmp) / output.name
        _run_all([[cc, *(str(o) for _, o in pairs), *_LINK_FLAGS, "-o", str(library)]])
        os.replace(library, output)
    return output


def _run_all(commands: list[list[str]]) -> None:
    """Runs the commands side by side; raises CompileError with the first failure's output."""
    running = []
    try:
        for command in commands:
            pipe = subprocess.PIPE
            running.append(subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT))
        for process in running:
            text, _ = process.communicate(timeout=_COMPILE_TIMEOUT_S)
            if process.returncode:
                command_line = " ".join(map(str, process.args))  # type: ignore[arg-type]
                raise CompileError(f"{command_line}\n{text.decode(errors='replace')[-4000:]}")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(str(error)) from error
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def cache_dir() -> Path:
    """Where libraries compiled at first use are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "octavo"


def _compiled() -> Path:
    """Path of the cached library for the present sources, flags and compiler."""
    cc = find_compiler()
    if cc is None:
        raise CompileError("no C compiler: none of $CC, gcc, cc, clang is on the path")
    version = subprocess.run([cc, "--version"], capture_output=True, timeout=20, check=False)
    key = hashlib.sha256(
        "\0".join([source_hash(), cc, *_FLAGS, *_LINK_FLAGS]).encode() + version.stdout
    ).hexdigest()[:16]
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"octavo_cpu-{key}{_SUFFIX}"
    return output if output.exists() else compile_library(output, cc=cc)


def _open(path: Path) -> ctypes.CDLL | None:
    """Loads a library; None if it does not load or was built from other sources than csrc/'s."""
    try:
        library = ctypes.CDLL(str(path))
        library.octavo_source_hash.restype = ctypes.c_char_p
        built_from = library.octavo_source_hash().decode()
    except (OSError, AttributeError) as error:
        _log.debug("cannot load %s: %s", path, error)
        return None
    if source_files() and built_from != source_hash():
        _log.info("%s is stale: built from other sources than those in %s", path, SOURCE_DIR)
        return None
    return library


def _find() -> ctypes.CDLL:
    """Steps 1 and 2 of the module's docstring. Raises CompileError."""
    for path in sorted(Path(__file__).parent.glob(f"_octavo_cpu*{_SUFFIX}")):
        library = _open(path)
        if library is not None:
            return library
    library = _open(_compiled())
    if library is None:
        raise CompileError("the compiled library does not load")
    return library


class _Loader:
    """Loads at most once a process, whichever thread asks first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._library: ctypes.CDLL | None = None

    def get(self) -> ctypes.CDLL | None:
        if not self._done:
            with self._lock:
                if not self._done:
                    self._library = self._load()
                    self._done = True
        return self._library

    @staticmethod
    def _load() -> ctypes.CDLL | None:
        wanted = os.environ.get("OCTAVO_CPU_ISA", "")
        if wanted == "none":
            return None
        level = _level(wanted) if wanted else -1
        try:
            library = _find()
        except (CompileError, OSError, subprocess.SubprocessError) as error:
            _log.warning("CPU kernels fall back to torch, which is slower: %s", error)
            return None
        library.octavo_set_isa.argtypes = [ctypes.c_int]
        library.octavo_set_isa(level)
        return library


def _level(name: str) -> int:
    if name not in ISA_LEVELS:
        raise ValueError(f"CPU instruction set must be one of {ISA_LEVELS} (or none), not {name!r}")
    return ISA_LEVELS.index(name)


_loader = _Loader()


def load() -> ctypes.CDLL | None:
    """The library, or None (reason logged once). Cheap after the first call; thread safe.

    Raises: ValueError if OCTAVO_CPU_ISA names no level.
    """
    return _loader.get()


class _Recording(threading.local):
    """The calls that `trace.record` collects in this thread; None while it does not."""

    calls: list[tuple[int, bytes]] | None = None
    replayable = True


_recording = _Recording()


def start_recording(calls: list[tuple[int, bytes]]) -> None:
    """From now on the calls of this thread are also put, as (address, arguments), into `calls`."""
    assert _recording.calls is None, "kernel calls are being recorded already"
    _recording.replayable, _recording.calls = True, calls


def stop_recording() -> bool:
    """Ends it. Returns whether the calls may be made again."""
    _recording.calls = None
    return _recording.replayable


def cannot_replay() -> None:
    """A launcher says that its call uses memory which does not outlive it."""
    _recording.replayable = False


@functools.cache
def function(name: str) -> Callable[[bytes], int] | None:
    """A C function that takes one packed argument struct and returns an int64 status, 0 for good.

    Packing with `struct` and passing the bytes costs a fifth of converting arguments one by one.
    Returns: None without the library. Raises: as `load`.
    """
    library = load()
    if library is None:
        return None
    found = getattr(library, name)
    found.argtypes = [ctypes.c_char_p]
    found.restype = ctypes.c_int64
    address = ctypes.cast(found, ctypes.c_void_p).value
    assert address is not None
    recording = _recording

    def call(args: bytes) -> int:
        if recording.calls is not None:
            recording.calls.append((address, args))
        status: int = found(args)
        return status

    return call


def isa() -> str:
    """The level in use, one of ISA_LEVELS, or "none" without the library."""
    library = load()
    return "none" if library is None else ISA_LEVELS[library.octavo_get_isa()]


def set_isa(name: str | None) -> str:
    """Uses a lower level from now on (None: the machine's best), in all threads; for tests.

    Returns: the level that is now in use, which is lower than asked if the machine lacks it.
    Raises: ValueError for an unknown name; RuntimeError without the library.
    """
    library = load()
    if library is None:
        raise RuntimeError("the CPU library is not available, so it has no instruction set")
    return ISA_LEVELS[library.octavo_set_isa(-1 if name is None else _level(name))]
