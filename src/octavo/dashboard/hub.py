"""A source of this process: frames are made for those who listen, by whoever owns the pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec

from octavo.engine.remote.frames import FrameHub


class Watched(Protocol):
    """Something that makes frames."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    def frame(self, full: bool = False) -> dict[str, Any]:
        """See `sched.watch.PoolWatch`."""
        ...

    def block(self, block_id: int) -> dict[str, Any]:
        """See there."""
        ...

    def close(self) -> None:
        """Nobody watches any more."""
        ...


class LocalSource:
    """A `FrameSource` over something that is watched; `tell` is to be called when it has moved."""

    def __init__(self, watched: Watched, clock: Callable[[], float]) -> None:
        """`clock` says when the next frame is due, in seconds."""
        self._watched, self._clock = watched, clock
        self._hub = FrameHub(self._ask)
        self._encode = msgspec.json.Encoder().encode
        self._hz = 0.0
        self._needs_full = False
        self._next_s = 0.0

    @property
    def name(self) -> str:
        """For people."""
        return self._watched.name

    def frames(self, hz: float) -> AsyncIterator[bytes]:
        """See `FrameSource`."""
        return self._hub.listen(hz)

    async def block(self, block_id: int) -> dict[str, Any]:
        """See `FrameSource`."""
        return self._watched.block(block_id)

    def tell(self) -> None:
        """It may have moved: make a frame, if anybody listens and one is due."""
        now_s = self._clock()
        if not self._hz or now_s < self._next_s:
            return
        self._next_s = now_s + 1 / self._hz
        frame = self._watched.frame(self._needs_full)
        self._needs_full = False
        self._hub.put(self._encode(frame), frame["kind"] == "full")

    def _ask(self, hz: float) -> None:
        self._hz, self._needs_full, self._next_s = hz, True, 0.0
        if not hz:
            self._watched.close()
