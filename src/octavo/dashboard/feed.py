"""Frames over HTTP: one endless stream of server-sent events for each who looks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DEFAULT_HZ, LEAST_HZ, MOST_HZ = 4.0, 0.1, 10.0
PING = b": ping\n\n"
END = b"event: end\ndata: \n\n"
"""The source will never have another frame."""
_LOOK_S = 1.0
"""So often it is seen whether the server leaves."""
_PING_S = 10.0


class FrameSource(Protocol):
    """A pool that can be watched."""

    @property
    def name(self) -> str:
        """For people; of several the one that tells them apart."""
        ...

    def frames(self, hz: float) -> AsyncIterator[bytes]:
        """Frames as JSON (see `sched.watch`), the first one full. Its end is the source's."""
        ...

    async def block(self, block_id: int) -> dict[str, Any]:
        """All about one block. Raises `IntegrityError` for one that does not exist."""
        ...


class FrameStream(Response):
    """Writes a source's frames until the client leaves, the source ends, or `is_leaving` says that
    the server does. Nothing is asked of the source before the client is there or after it left."""

    def __init__(
        self, source: FrameSource, hz: float, is_leaving: Callable[[], bool] = lambda: False
    ) -> None:
        # Response.__init__ would state a length
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._source, self._hz, self._is_leaving = source, hz, is_leaving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one client."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": PING, "more_body": True})
        left = asyncio.ensure_future(_until_gone(receive))
        writing = asyncio.ensure_future(self._write(send))
        try:
            await asyncio.wait((left, writing), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            for task in (left, writing):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await task

    async def _write(self, send: Send) -> None:
        frames = self._source.frames(self._hz)
        following = asyncio.ensure_future(anext(frames, None))
        silent_s, last = 0.0, b""
        try:
            while not self._is_leaving():
                done, _ = await asyncio.wait((following,), timeout=_LOOK_S)
                if not done:
                    silent_s += _LOOK_S
                    if silent_s >= _PING_S:
                        silent_s = 0.0
                        await send({"type": "http.response.body", "body": PING, "more_body": True})
                    continue
                frame = following.result()
                if frame is None:
                    last = END
                    break
                silent_s = 0.0
                following = asyncio.ensure_future(anext(frames, None))
                body = b"data: " + frame + b"\n\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
            close = getattr(frames, "aclose", None)
            if close is not None:
                await close()
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
