"""Event streams over fake engine streams and a fake ASGI server: errors, leaving, slow readers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from octavo.engine.remote.streams import OutputStream
from octavo.errors import EngineDeadError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.server.sse import DROP_EXTENSION, WRITE_EXTENSION, EventStreamResponse


def output(text: str, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", None, [1], None, [CompletionOutput(0, text)], finished)


class Source:
    """Writes the texts."""

    def events(self, index: int, output: RequestOutput) -> bytes:
        return f"{index}:{output.outputs[0].text};".encode()

    def end(self) -> bytes:
        return b"END"

    def error(self, error: Exception) -> bytes:
        return b"ERROR"


class Connection:
    """A fake ASGI server's side."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.is_closed = self.is_dropped = self.breaks = self.has_short_way = False
        self.written: list[bytes] = []
        """Past the server."""
        self.aborted: list[str] = []
        self.stream = OutputStream("r", self.aborted.append, merges=True)

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.may_write.wait()
        self.sent.append(message)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        self.stream.close()

    def drop(self) -> None:
        self.is_dropped = True

    def write(self, body: bytes) -> bool:
        if self.breaks:
            raise ConnectionResetError
        if self.may_write.is_set():
            self.written.append(body)
        return self.may_write.is_set()

    def serve(self, **options: Any) -> Awaitable[None]:
        response = EventStreamResponse([self.stream], Source(), close=self.close, **options)
        extensions: dict[str, Any] = {DROP_EXTENSION: self.drop}
        if self.has_short_way:
            extensions[WRITE_EXTENSION] = self.write
        scope = {"type": "http", "extensions": extensions}
        return asyncio.ensure_future(response(scope, self.receive, self.send))

    @property
    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.sent if m["type"] == "http.response.body"]


def run(scenario: Callable[[Connection], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await scenario(Connection())

    asyncio.run(main())


async def rounds(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_outputs_are_written_as_they_come_and_merged_when_they_come_together() -> None:
    async def scenario(c: Connection) -> None:
        serving = c.serve()
        await rounds()
        assert c.sent == []  # the response starts with the first output
        c.stream.put(output("a"))
        await rounds()
        c.stream.put(output("b"))
        c.stream.put(output("c"))
        await rounds()
        c.stream.put(output("d", finished=True))
        await serving
        assert c.sent[0]["type"] == "http.response.start" and c.sent[0]["status"] == 200
        assert c.bodies == [b"0:a;", b"0:bc;", b"0:d;END"]
        assert [m.get("more_body") for m in c.sent[1:]] == [True, True, False]
        assert c.is_closed and c.aborted == []

    run(scenario)


def test_the_latest_output_is_written_at_once_past_the_server() -> None:
    async def scenario(c: Connection) -> None:
        c.has_short_way = True
        serving = c.serve()
        await rounds()
        c.stream.put(output("a"), is_latest=True)
        assert c.bodies == [b"0:a;"], "the head and what comes with it are the server's"
        c.stream.put(output("b"), is_latest=True)
        assert c.written == [b"0:b;"]
        c.stream.put(output("c"))  # more is known to come
        assert c.written == [b"0:b;"]
        c.stream.put(output("d"), is_latest=True)
        await rounds()
        assert c.written == [b"0:b;", b"0:cd;"]
        c.stream.put(output("e", finished=True), is_latest=True)
        await serving
        assert c.bodies == [b"0:a;", b"0:e;END"] and len(c.written) == 2

    run(scenario)


def test_what_the_connection_does_not_take_waits_in_the_server() -> None:
    async def scenario(c: Connection) -> None:
        c.has_short_way = True
        serving = c.serve()
        await rounds()
        c.stream.put(output("a"), is_latest=True)
        c.may_write.clear()
        for text in "bcd":
            c.stream.put(output(text), is_latest=True)
            await rounds()
        assert c.written == [] and c.bodies == [b"0:a;"]
        c.may_write.set()
        await rounds()
        c.stream.put(output("e", finished=True), is_latest=True)
        await serving
        assert c.bodies[1] == b"0:b;" and b"".join(c.written) == b"0:cd;"
        assert c.bodies[-1] == b"0:e;END"

    run(scenario)


def test_a_connection_that_breaks_ends_only_its_own_stream() -> None:
    async def scenario(c: Connection) -> None:
        c.has_short_way = True
        serving = c.serve()
        await rounds()
        c.stream.put(output("a"), is_latest=True)
        c.breaks = True
        c.stream.put(output("b"), is_latest=True)  # raises nothing into the engine
        await serving
        assert c.is_closed and c.aborted == ["r"]

    run(scenario)


def test_an_error_before_the_first_output_is_raised() -> None:
    async def scenario(c: Connection) -> None:
        serving = c.serve()
        await rounds()
        c.stream.fail(EngineDeadError("gone"))
        with pytest.raises(EngineDeadError, match="gone"):
            await serving
        assert c.sent == [] and c.is_closed

    run(scenario)


def test_an_error_after_it_is_an_event() -> None:
    async def scenario(c: Connection) -> None:
        serving = c.serve()
        c.stream.put(output("a"))
        await rounds()
        c.stream.fail(EngineDeadError("gone"))
        await serving
        assert c.bodies == [b"0:a;", b"ERROR"] and c.sent[-1]["more_body"] is False
        assert c.is_closed

    run(scenario)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_client_that_leaves_ends_the_request_at_once(has_begun: bool) -> None:
    async def scenario(c: Connection) -> None:
        serving = c.serve()
        if has_begun:
            c.stream.put(output("a"))
        await rounds()
        c.gone.set()
        await serving
        assert c.is_closed and c.aborted == ["r"]

    run(scenario)


def test_a_slow_reader_gets_what_came_meanwhile_as_one() -> None:
    async def scenario(c: Connection) -> None:
        serving = c.serve(slow_reader_timeout_s=60.0)
        c.stream.put(output("a"))
        await rounds()
        c.may_write.clear()
        for text in "bcd":
            c.stream.put(output(text))
            await rounds()
        assert c.bodies == [b"0:a;"]
        c.may_write.set()
        await rounds(6)
        assert c.bodies == [b"0:a;", b"0:b;", b"0:cd;"]
        c.stream.put(output("e", finished=True))
        await serving
        assert c.bodies[-1] == b"0:e;END"

    run(scenario)


def test_a_reader_that_reads_nothing_is_dropped() -> None:
    async def scenario(c: Connection) -> None:
        serving = c.serve(slow_reader_timeout_s=0.02)
        c.may_write.clear()
        c.stream.put(output("a"))
        await serving
        assert c.is_dropped and c.is_closed and c.aborted == ["r"]

    run(scenario)


def test_an_error_behind_an_output_that_was_not_taken_is_written() -> None:
    async def main() -> Connection:
        connection = Connection()
        serving = connection.serve()
        await asyncio.sleep(0)
        connection.stream.put(output("a"))
        await asyncio.sleep(0.01)
        connection.stream.put(output("b"))
        connection.stream.fail(EngineDeadError("gone"))
        await asyncio.wait_for(serving, 5)
        return connection

    connection = asyncio.run(main())
    assert b"".join(connection.bodies) == b"0:a;0:b;ERROR"
