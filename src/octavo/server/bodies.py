"""JSON bodies of requests: large ones are parsed in slices, between which others get their turn.

Another thread would not help. A parser in C holds the interpreter's lock for all of its work: while
10 MB of small lists were parsed in a thread, one that only slept for a millisecond at a time was
held up for 2.6 s.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, ParamSpec, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute

_LARGE_BYTES = 256 * 2**10
_SLICE_BYTES = 64 * 2**10
_MOST_ITEMS = 4096
"""In a slice."""
_MOST_DEPTH = 4
"""Each level of slices looks at all that is inside: enough for prompts, and parts of messages."""
_NESTING = (b'"', b"[", b"{")


_IS_LARGE = "octavo.large_body"
"""Key of an ASGI scope."""
P = ParamSpec("P")
T = TypeVar("T")


async def in_turn(
    request: Request, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a function that looks at all of a body: where that is large in another thread, as
    Python lets others go on."""
    if request.scope.get(_IS_LARGE):
        return await asyncio.to_thread(function, *args, **kwargs)
    return function(*args, **kwargs)


class BodyRoute(APIRoute):
    """Of endpoints that take large bodies."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's, with another way to read the body."""
        handle = super().get_route_handler()

        async def with_slices(request: Request) -> Response:
            return await handle(_SlicedRequest(request.scope, request.receive))

        return with_slices


class _SlicedRequest(Request):
    async def json(self) -> Any:
        """The body. Raises `JSONDecodeError` if it is none."""
        body = await self.body()
        self.scope[_IS_LARGE] = len(body) > _LARGE_BYTES
        return await parse_json(body)


async def parse_json(body: bytes) -> Any:
    """What JSON says; a large body does not hold up the event loop.

    Small ones may say what is no JSON, too, as Python's parser lets them: NaN, and half a surrogate
    pair, which those who take it refuse by the name of their field. Raises `JSONDecodeError`.
    """
    if len(body) <= _LARGE_BYTES:
        return json.loads(body)
    try:
        encoding = json.detect_encoding(body)
        plain = body if encoding == "utf-8" else body.decode(encoding).encode()
        return await _large(bytes(msgspec.json.decode(plain, type=msgspec.Raw)), 0)
    except (ValueError, msgspec.MsgspecError) as error:
        raise json.JSONDecodeError(str(error), "", 0) from None


async def _members(data: bytes, depth: int) -> dict[str, Any]:
    """Of an object: small ones at once, large ones each in slices."""
    found: dict[str, Any] = {}
    num_bytes = 0
    for name, raw in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items():
        size = len(memoryview(raw))
        num_bytes += size
        is_small = size <= _SLICE_BYTES
        found[name] = msgspec.json.decode(raw) if is_small else await _large(bytes(raw), depth)
        if num_bytes > _SLICE_BYTES:
            num_bytes = 0
            await asyncio.sleep(0)
    return found


async def _large(data: bytes, depth: int) -> Any:
    """A valid value that is large, so far inside of others."""
    await asyncio.sleep(0)
    if data[:1] not in (b"[", b"{") or depth == _MOST_DEPTH:
        return _at_once(data)
    if data[:1] == b"{":
        return await _members(data, depth + 1)
    if any(data.find(mark, 1) > 0 for mark in _NESTING):
        return await _items(msgspec.json.decode(data, type=list[msgspec.Raw]), depth + 1)
    return await _scalars(data)


def _at_once(data: bytes) -> Any:
    """Without Python's collector, which would look at a million new lists again and again: that is
    nine tenths of the time."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(data)
    finally:
        if is_on:
            gc.enable()


async def _items(raws: Iterable[msgspec.Raw], depth: int) -> list[Any]:
    """Of an array: small ones in groups, large ones each in slices."""
    found: list[Any] = []
    group: list[msgspec.Raw] = []
    num_bytes = 0

    def take() -> None:
        found.extend(msgspec.json.decode(b"[" + b",".join(group) + b"]"))
        group.clear()

    for raw in raws:
        size = len(memoryview(raw))
        if size > _SLICE_BYTES:
            take()
            found.append(await _large(bytes(raw), depth))
            continue
        group.append(raw)
        num_bytes += size
        if num_bytes > _SLICE_BYTES or len(group) >= _MOST_ITEMS:
            take()
            num_bytes = 0
            await asyncio.sleep(0)
    take()
    return found


async def _scalars(data: bytes) -> list[Any]:
    """Of an array of numbers and the like: every comma is between two of them."""
    found: list[Any] = []
    begin, last = 1, data.rindex(b"]")
    while begin < last:
        end = data.find(b",", begin + _SLICE_BYTES, last)
        end = last if end < 0 else end
        found += msgspec.json.decode(b"[" + data[begin:end] + b"]")
        begin = end + 1
        await asyncio.sleep(0)
    return found
