"""Compiling many kernels at a time.

Triton compiles a kernel where it is first launched: half a second each, one after the other. Within
`compiling_only` launches hand their kernels to threads and do nothing else; afterwards all of them
are ready. (LLVM and ptxas, which take most of the time, run outside Python's lock.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode, FutureKernel
from triton.runtime import JITFunction
from triton.runtime._async_compile import active_mode

_MAX_THREADS = 16


@contextmanager
def compiling_only() -> Iterator[None]:
    """Kernels launched within are compiled and not run: what they would write is left as it was.

    For one thread of the process at a time. Raises what compiling raises, at the end.
    """
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        JITFunction.run = compile_only
        try:
            with AsyncCompileMode(threads):
                yield
        finally:
            JITFunction.run = run


def is_compiling_only() -> bool:
    """Whether `compiling_only` is under way."""
    return active_mode.get() is not None


def finished(kernel: Any) -> Any:
    """A kernel that was compiled within `compiling_only`, or elsewhere, as it is launched."""
    return kernel.result() if isinstance(kernel, FutureKernel) else kernel
