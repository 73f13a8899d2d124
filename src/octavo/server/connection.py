"""One client's connection: uvicorn's, with bounds, and with a short way for streamed tokens."""

from __future__ import annotations

from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.server.sse import DROP_EXTENSION, WRITE_EXTENSION

_MAX_HEAD_BYTES = 128 * 2**10
"""Of a request line and its headers."""
_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)


class Connection(HttpToolsProtocol):
    """Bounds what comes in front of a body, lets responses cut the connection of a client that does
    not read, and write parts of a body without a coroutine."""

    _num_head_bytes: int | None = None
    """Of the head that is being read."""

    def data_received(self, data: bytes) -> None:
        """Bytes of the client's."""
        super().data_received(data)
        if self._num_head_bytes is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                self.transport.write(_HEAD_TOO_LARGE)
                self.transport.close()

    def on_headers_complete(self) -> None:
        """A head is there."""
        self._num_head_bytes = None
        super().on_headers_complete()
        cycle, scope = self.cycle, cast("dict[str, Any]", self.scope)
        if cycle is not None and cycle.scope is self.scope:  # else there will be no response
            scope["extensions"][WRITE_EXTENSION] = _Writer(cycle)

    def on_message_begin(self) -> None:
        """A head begins."""
        self._num_head_bytes = 0
        super().on_message_begin()
        scope = cast("dict[str, Any]", self.scope)
        scope.setdefault("extensions", {})[DROP_EXTENSION] = self.transport.abort


class _Writer:
    """Does what `RequestResponseCycle.send` does with a part of a chunked body. (A function of its
    own, as a client may send its next request before it has this one's response.)"""

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow, self._transport = cycle, cycle.flow, cycle.transport

    def __call__(self, body: bytes) -> bool:
        cycle = self._cycle
        is_chunked = cycle.chunked_encoding and cycle.scope["method"] != "HEAD"
        if not is_chunked or not body or self._flow.write_paused or cycle.disconnected:
            return False  # a chunk without anything would be the last
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True
