"""Kernel calls recorded once and made again by one C call: what a CUDA graph is on a GPU.

At one token a step, preparing the calls of thirty layers in Python costs a fifth of the step. A
trace keeps their packed arguments, pointers included: it may be replayed as long as every tensor
that the calls named is alive and holds the new step's values.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.ops.cpu import native

_pack_call = struct.Struct("@2P").pack
_pack_replay = struct.Struct("@qP").pack


class Trace:
    """A sequence of kernel calls. Make one with `record`."""

    def __init__(self, calls: list[tuple[int, bytes]]) -> None:
        self._args = [ctypes.create_string_buffer(args, len(args)) for _, args in calls]
        table = b"".join(
            _pack_call(address, ctypes.addressof(args))
            for (address, _), args in zip(calls, self._args, strict=True)
        )
        self._table = ctypes.create_string_buffer(table, len(table))
        self._replay = _pack_replay(len(calls), ctypes.addressof(self._table))

    def replay(self) -> None:
        """Make all calls again, in order. Raises `RuntimeError` if one reports an error."""
        call = native.function("octavo_replay")
        assert call is not None, "a trace was recorded without the library"
        status = call(self._replay)
        if status:
            raise RuntimeError(f"kernel call {status - 1} of a replayed step failed")


@contextmanager
def record() -> Iterator[list[Trace]]:
    """Record this thread's kernel calls: the list holds one `Trace` after the block.

    It stays empty if the block made none, or one that cannot be replayed (because it used memory
    that does not outlive the call).
    """
    found: list[Trace] = []
    calls: list[tuple[int, bytes]] = []
    try:
        native.start_recording(calls)
        yield found
    finally:
        replayable = native.stop_recording()
    if calls and replayable:
        found.append(Trace(calls))
