"""Where the time of a start goes: what `octavo bench startup` measures in the process that starts.

Functions of the engine's builder are wrapped while the clock runs, and only then.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from octavo.engine.profiling import patched

_LOADS = (("octavo.engine.build", "load_model_of"),)
_CAPTURES = (
    ("octavo.runner.gpu.runner", "GpuRunner.profile_run"),
    ("octavo.runner.gpu.runner", "GpuRunner.warm_up"),
    ("octavo.runner.gpu.runner", "GpuRunner.capture"),
)
_COMPILES = (("octavo.ops.cpu.native", "compile_library"),)


class StartupClock:
    """Seconds of parts of a start.

    cache: a folder where octavo's C kernels are kept once compiled. What they are built from is the
    same for every start, so that only the first one in a folder compiles.
    """

    def __init__(self, cache: str) -> None:
        import torch  # noqa: F401  (part of what importing takes)

        from octavo.engine import build  # noqa: F401

        self._cache = Path(cache)
        self.load_s = self.capture_s = self.compile_s = 0.0
        self.num_compiled = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure what is called in the context."""
        from octavo.ops.cpu import native

        with ExitStack() as stack:
            stack.enter_context(patched(native, "cache_dir", lambda: self._cache))
            for places, add in (
                (_LOADS, self._add_load),
                (_CAPTURES, self._add_capture),
                (_COMPILES, self._add_compiled),
            ):
                for module, name in places:
                    with suppress(ImportError, AttributeError):  # this engine has no such part
                        owner, attribute = _find(module, name)
                        timed = _timed(getattr(owner, attribute), add)
                        stack.enter_context(patched(owner, attribute, timed))
            with suppress(ImportError, AttributeError):
                from triton import knobs

                stack.enter_context(patched(knobs.compilation, "listener", self._on_triton))
            yield

    def _add_load(self, seconds: float) -> None:
        self.load_s += seconds

    def _add_capture(self, seconds: float) -> None:
        self.capture_s += seconds

    def _add_compiled(self, seconds: float) -> None:
        self.compile_s += seconds
        self.num_compiled += 1

    def _on_triton(self, *, times: Any, cache_hit: bool, **_: Any) -> None:
        """Triton tells of each kernel; times are microseconds."""
        self.compile_s += 1e-6 * times.total
        self.num_compiled += not cache_hit


def _find(module: str, name: str) -> tuple[Any, str]:
    """(Object, attribute) of a dotted name in a module."""
    owner: Any = importlib.import_module(module)
    *path, attribute = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    getattr(owner, attribute)
    return owner, attribute


def _timed(function: Callable[..., Any], add: Callable[[float], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            add(time.perf_counter() - begin)

    return timed
