"""One client's connection: uvicorn's, with bounds, and with a short way for streamed tokens."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import httptools
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.errors import InvalidRequestError
from octavo.server.errors import error_shape
from octavo.server.sse import DROP_EXTENSION, WRITE_EXTENSION

_MAX_HEAD_BYTES = 128 * 2**10
"""Of a request line and its headers."""
_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)

_NO_HTTP = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b"
)


class Connection(HttpToolsProtocol):
    """Bounds what comes in front of a body, declines offers of other protocols, lets responses cut
    the connection of a client that does not read, and write parts of a body without a coroutine."""

    _num_head_bytes: int | None = None
    """Of the head that is being read."""
    _is_offer = False
    """Whether the head that was read offers another protocol."""

    def data_received(self, data: bytes) -> None:
        """Bytes of the client's."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            (end,) = offer.args
            self.data_received(self._without_offer() + data[end:])
            return
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._num_head_bytes is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                self.transport.write(_HEAD_TOO_LARGE)
                self.transport.close()

    def on_headers_complete(self) -> None:
        """A head is there."""
        self._num_head_bytes = None
        self._is_offer = self.parser.should_upgrade()
        if self._is_offer:  # what follows is not parsed: this head is read again without the offer
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("this is no proxy")
            return
        super().on_headers_complete()
        cycle, scope = self.cycle, cast("dict[str, Any]", self.scope)
        if cycle is not None and cycle.scope is self.scope:  # else there will be no response
            scope["extensions"][WRITE_EXTENSION] = _Writer(cycle)

    def on_message_complete(self) -> None:
        """A request is whole."""
        if not self._is_offer:
            super().on_message_complete()

    def _without_offer(self) -> bytes:
        """The head that was read, which a server may take as if there was no offer in it."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            if name == b"connection":
                words = [word.strip() for word in value.split(b",")]
                value = b", ".join(word for word in words if word.lower() != b"upgrade")
            if name not in (b"upgrade", b"http2-settings"):
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        return b"\r\n".join([*lines, b"", b""])

    def send_400_response(self, msg: str) -> None:
        """To what is no HTTP, as all other errors are told; nothing that follows can be read."""
        body = msgspec.json.encode(error_shape(InvalidRequestError(msg)))
        self.transport.write(_NO_HTTP % (len(body), body))
        self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = partial(_serve_old, app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_message_begin(self) -> None:
        """A head begins."""
        self._num_head_bytes = 0
        super().on_message_begin()
        scope = cast("dict[str, Any]", self.scope)
        scope.setdefault("extensions", {})[DROP_EXTENSION] = self.transport.abort


async def _serve_old(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """To a client of HTTP/1.0, which knows no chunks: where no length is told, a body ends with the
    connection."""
    is_endless = False

    async def send_plain(message: Message) -> None:
        nonlocal is_endless
        if message["type"] == "http.response.start":
            names = [name.lower() for name, _ in message.get("headers", ())]
            is_endless = b"content-length" not in names
            if is_endless:
                cycle.chunked_encoding = False
        elif is_endless:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_plain)


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
