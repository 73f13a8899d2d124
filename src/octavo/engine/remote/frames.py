"""Pictures of the pool, made in the engine's process, for any number of listeners."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

_MAX_WAITING = 8
"""Frames that a listener may leave lying; then it gets a full one instead."""


@dataclass(slots=True, eq=False)
class _Listener:
    hz: float
    needs_full: bool = True
    waiting: list[bytes] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)


class FrameHub:
    """Asks for frames while somebody listens, and hands each listener a full one first.

    ask: told how many frames a second are wanted, 0 for none; the next one is a full one then.
    """

    def __init__(self, ask: Callable[[float], None]) -> None:
        self._ask = ask
        self._listeners: set[_Listener] = set()
        self._is_closed = False

    def put(self, frame: bytes, is_full: bool) -> None:
        """A frame has come."""
        is_behind = False
        for listener in self._listeners:
            if is_full:
                listener.needs_full = False
                listener.waiting = [frame]
            elif listener.needs_full:
                continue
            elif len(listener.waiting) >= _MAX_WAITING:
                listener.needs_full = is_behind = True
                listener.waiting = []
                continue
            else:
                listener.waiting.append(frame)
            listener.news.set()
        if is_behind:
            self.restart()

    def restart(self) -> None:
        """Ask (a new engine, perhaps) for a full frame, if anybody listens."""
        if self._listeners:
            self._ask(max(listener.hz for listener in self._listeners))

    async def listen(self, hz: float) -> AsyncIterator[bytes]:
        """Frames until the hub is closed, or the listener leaves."""
        listener = _Listener(hz)
        self._listeners.add(listener)
        self.restart()
        try:
            while not self._is_closed:
                await listener.news.wait()
                listener.news.clear()
                frames, listener.waiting = listener.waiting, []
                for frame in frames:
                    yield frame
        finally:
            self._listeners.discard(listener)
            if not self._listeners:
                self._ask(0.0)

    def close(self) -> None:
        """There will be no more frames."""
        self._is_closed = True
        for listener in self._listeners:
            listener.news.set()
