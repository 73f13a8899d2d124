"""Parts of a body that are written past the ASGI server, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from octavo.server.connection import Connection
from octavo.server.sse import WRITE_EXTENSION

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
START = {"type": "http.response.start", "status": 200, "headers": []}


def body(text: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


def serve(app: Any, talk: Talk) -> None:
    """One connection to the app."""

    async def main() -> None:
        config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
        config.load()
        state = ServerState()
        server = await asyncio.get_running_loop().create_server(
            lambda: Connection(config, state, {}), "127.0.0.1", 0
        )
        async with server, asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await talk(reader, writer)
            writer.close()

    asyncio.run(main())


def chunks(*texts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(text), text) for text in texts)


def test_both_ways_keep_their_order_also_when_requests_queue_up() -> None:
    seen: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        write, name = scope["extensions"][WRITE_EXTENSION], scope["path"].encode()
        seen.append(write(b"too early"))
        await send(START)
        seen.append(write(b""))
        seen.append(write(name + b"1"))
        await send(body(name + b"2"))
        seen.append(write(name + b"3"))
        await send(body(b"end", more=False))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(b"GET /%c HTTP/1.1\r\nHost: h\r\n\r\n" % name for name in b"abc"))
        for name in (b"/a", b"/b", b"/c"):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"transfer-encoding: chunked" in head
            told = await reader.readuntil(b"0\r\n\r\n")
            assert told == chunks(name + b"1", name + b"2", name + b"3", b"end", b"")

    serve(app, talk)
    assert seen == [False, False, True, True] * 3


@pytest.mark.parametrize(
    ("method", "headers"), [(b"HEAD", []), (b"GET", [(b"content-length", b"3")])]
)
def test_what_is_no_chunked_body_is_sent(method: bytes, headers: list[Any]) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START | {"headers": headers})
        assert not scope["extensions"][WRITE_EXTENSION](b"abc")
        await send(body(b"abc", more=False))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(method + b" / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b"\r\n\r\nabc" if headers else b"\r\n\r\n")

    serve(app, talk)


@pytest.mark.parametrize("told", [[], [(b"content-length", b"6")]], ids=["endless", "length"])
@pytest.mark.parametrize("keep", [b"", b"Connection: keep-alive\r\n"], ids=["", "keep"])
def test_who_knows_no_chunks_is_sent_none(told: list[Any], keep: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START | {"headers": told})
        assert not scope["extensions"][WRITE_EXTENSION](b"abc")
        await send(body(b"abc"))
        await send(body(b""))
        await send(body(b"def", more=False))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.0\r\n" + keep + b"\r\n")
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        assert rest == b"abcdef" and b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()

    serve(app, talk)


def test_a_client_that_reads_nothing_or_is_gone_is_not_written_to() -> None:
    found: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        write, num = scope["extensions"][WRITE_EXTENSION], 0
        await send(START)
        while write(bytes(2**20)):
            num += 1
        found.append(num)
        while (await receive())["type"] != "http.disconnect":
            pass
        found.append(write(b"x"))

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        while not found:
            await asyncio.sleep(0)
        writer.transport.abort()
        while len(found) < 2:
            await asyncio.sleep(0)

    serve(app, talk)
    assert 0 < found[0] < 100 and not found[1]
