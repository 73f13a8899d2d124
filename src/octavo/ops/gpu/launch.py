"""Kernel launches that cost the host little.

Triton looks the compiled kernel up by all arguments at every launch, which takes some 40 us of
Python. Here that is done once for a set of constants; a launch is then a few microseconds.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

ALIGNMENT = 16
"""Bytes of the widest load. Triton compiles a version of its own for pointers that are no multiples
of it, so all that is put side by side begins at one."""


class Prepared:
    """A kernel of fixed constants, argument types and device.

    Its runtime arguments are tensors, None, and numbers that the kernel does not specialize on
    (`do_not_specialize`, or floats); the constants (tl.constexpr) come behind them.
    """

    __slots__ = ("_compiled", "_compiling", "_constants", "_kernel", "_options", "_types")

    def __init__(
        self, kernel: Any, arguments: tuple[Any, ...], constants: tuple[Any, ...], **options: Any
    ) -> None:
        """arguments: as in a launch; only types of tensors count. Compiles, where there is a GPU.

        options: num_warps and the like.
        """
        from octavo.ops.gpu import compiling  # needs triton, which not every machine has

        self._compiling = compiling
        self._kernel, self._constants, self._options = kernel, constants, options
        self._compiled = None
        self._types = [x.dtype if isinstance(x, Tensor) else x is None for x in arguments]
        if any(isinstance(x, Tensor) and x.is_cuda for x in arguments):
            types = [x.dtype if isinstance(x, Tensor) else x for x in arguments]
            self._compiled = kernel.warmup(*types, *constants, grid=(1, 1, 1), **options)

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Queue the kernel in the current stream. Raises `TypeError` for other types than those
        that it was compiled for."""
        types: list[Any] = []
        bits = 0
        for x in arguments:
            if isinstance(x, Tensor):
                types.append(x.dtype)
                bits |= x.data_ptr()
            else:
                types.append(x is None)
        if types != self._types:
            raise TypeError(f"compiled for {self._types}, not for {types}")
        if self._compiled is None or bits % ALIGNMENT:
            self._kernel[grid](*arguments, *self._constants, **self._options)
        elif not self._compiling.is_compiling_only():
            self._compiled = compiled = self._compiling.finished(self._compiled)
            compiled[grid](*arguments, *self._constants)
