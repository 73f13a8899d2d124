"""Server-sent events: the outputs of engine requests written as they come.

A token costs no task switch: the engine's news are rendered and handed to the ASGI server, or past
it to the connection, while they are taken in. A task wakes only when the client reads too slowly,
is gone, or the end has come.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.engine.remote.streams import OutputStream
from octavo.errors import OctavoError
from octavo.outputs import RequestOutput

logger = logging.getLogger("octavo")

DROP_EXTENSION = "octavo.drop"
"""Key of `scope["extensions"]` under which a server may put a function that closes the connection
without waiting for what the client has not read."""
WRITE_EXTENSION = "octavo.write"
"""Key under which it may put a function that writes a part of a body that has begun and goes on,
without a coroutine; False: it has to be sent, as the client has not read what was written before.
"""
DONE = b"data: [DONE]\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventSource(Protocol):
    """What is written for the outputs of an HTTP request's engine requests."""

    def events(self, index: int, output: RequestOutput) -> bytes:
        """Of request number `index`; empty when there is nothing to tell."""

    def end(self) -> bytes:
        """After the last output of the last request."""

    def error(self, error: Exception) -> bytes:
        """Instead of all that would follow, once the response has started."""


class EventStreamResponse(Response):
    """Writes what `source` makes of the streams' outputs.

    The response starts with the first output, so that an error before it has a status of its own:
    it is raised. close: called once, when nothing more will be taken. slow_reader_timeout_s: so
    long may the client leave a full buffer unread.
    """

    def __init__(
        self,
        streams: Sequence[OutputStream],
        source: EventSource,
        *,
        close: Callable[[], object],
        slow_reader_timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # Response.__init__ would state a length
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.background = None
        self.init_headers(_HEADERS | dict(headers or {}))
        self._streams, self._source, self._close = streams, source, close
        self._slow_reader_timeout_s = slow_reader_timeout_s
        self._running = dict(enumerate(streams))
        self._is_started = self._is_over = self._is_gone = self._is_scheduled = False
        self._failure: Exception | None = None
        self._rest: _Rest | None = None
        """The write that waits for the client."""
        self._waiter: asyncio.Future[None] | None = None
        self._write_more: Callable[[bytes], bool] | None = None
        self._send: Send
        self._loop: asyncio.AbstractEventLoop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve until the end, the client's leaving, or a failure before the first output."""
        self._send, self._loop = send, asyncio.get_running_loop()
        self._write_more = (scope.get("extensions") or {}).get(WRITE_EXTENSION)
        listener = self._loop.create_task(self._listen(receive))
        # several streams' news of one step are written together
        on_news = self._on_news if len(self._streams) == 1 else self._schedule
        for stream in self._streams:
            stream.on_news = on_news
        try:
            self._flush()
            await self._serve(scope)
        finally:
            for stream in self._streams:
                stream.on_news = None
            self._is_over = True
            listener.cancel()
            self._close()
        if self._failure is not None:
            raise self._failure

    async def _serve(self, scope: Scope) -> None:
        while not self._is_gone and self._failure is None:
            if self._rest is not None:
                try:
                    async with asyncio.timeout(self._slow_reader_timeout_s):
                        await self._rest
                except TimeoutError:
                    self._drop(scope)
                    return
                self._rest = None
                self._flush()
                continue
            if self._is_over:
                return
            self._waiter = self._loop.create_future()
            await self._waiter

    def _drop(self, scope: Scope) -> None:
        logger.warning(
            "a client read nothing for %g s: its requests are aborted", self._slow_reader_timeout_s
        )
        drop = (scope.get("extensions") or {}).get(DROP_EXTENSION)
        if drop is not None:
            drop()

    async def _listen(self, receive: Receive) -> None:
        """Until the client is gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self._wake()  # a write that waits for the client is let go by the server

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _on_news(self, is_latest: bool) -> None:
        """News: written now, if nothing is known to come."""
        if is_latest and not self._is_scheduled:
            self._flush()
        else:
            self._schedule(is_latest)

    def _schedule(self, _: bool) -> None:
        """News: written in the loop's next round, together with what else comes until then."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write what there is, unless the client has not read what was written before."""
        self._is_scheduled = False
        if self._is_over or self._rest is not None or self._is_gone:
            return
        body = self._take()
        if self._failure is None and (body or self._is_over):
            self._write(body)
        if self._is_over:
            self._wake()

    def _take(self) -> bytes:
        """The events of all outputs that are there."""
        parts = []
        try:
            for index, stream in list(self._running.items()):
                # again after each output: an error may have come behind it, of which no news come
                while (output := stream.take_nowait()) is not None:
                    parts.append(self._source.events(index, output))
                    if output.finished:
                        del self._running[index]
                        break
            if not self._running:
                self._is_over = True
                parts.append(self._source.end())
        except Exception as error:
            if not isinstance(error, OctavoError):
                logger.exception("writing events failed")
            self._is_over = True
            if not self._is_started:
                self._failure = error
                return b""
            parts.append(self._source.error(error))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _write(self, body: bytes) -> None:
        """Hand it to the server, which is done at once unless the client is slow."""
        write_more = self._write_more if self._is_started and not self._is_over else None
        try:
            if write_more is not None and write_more(body):
                return
            sending = self._sending(body)
            waits_for = sending.send(None)
        except StopIteration:
            return
        except Exception as error:
            if not isinstance(error, OSError):  # else the connection broke
                logger.exception("writing events failed")
            self._is_gone = True
        else:
            self._rest = _Rest(sending, waits_for)
        self._wake()

    async def _sending(self, body: bytes) -> None:
        more = not self._is_over
        if not self._is_started:
            self._is_started = True
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


class _Rest:
    """The rest of a coroutine that was begun outside of a task, to be awaited in one."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine, self._waits_for = coroutine, waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            try:
                value = yield waits_for
            except BaseException as error:
                step = partial(self._coroutine.throw, error)
            else:
                step = partial(self._coroutine.send, value)
            try:
                waits_for = step()
            except StopIteration:
                return
