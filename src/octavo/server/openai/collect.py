"""Waiting for whole answers, as long as the client does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from starlette.types import Receive

from octavo.engine.remote.streams import OutputStream
from octavo.outputs import RequestOutput
from octavo.server.errors import ClientGoneError

CLIENT_GONE = ClientGoneError.status
T = TypeVar("T")


async def collect(receive: Receive, streams: Sequence[OutputStream]) -> list[RequestOutput] | None:
    """The last output of each stream, made with the kind FINAL_ONLY; None: the client is gone.

    Raises the first stream's error.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    found: dict[int, RequestOutput] = {}

    def take(_: bool = True) -> None:
        try:
            for index, stream in enumerate(streams):
                if index not in found and (output := stream.take_nowait()) is not None:
                    found[index] = output
        except Exception as error:
            if not done.done():
                done.set_exception(error)
            return
        if len(found) == len(streams) and not done.done():
            done.set_result(None)

    async def listen() -> None:
        await _left(receive)
        if not done.done():
            done.set_result(None)

    for stream in streams:
        stream.on_news = take
    listener = loop.create_task(listen())
    try:
        take()
        await done
    finally:
        listener.cancel()
        for stream in streams:
            stream.on_news = None
    if len(found) < len(streams):
        return None
    return [found[index] for index in range(len(streams))]


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What it returns; it is cancelled when the client leaves. Raises `ClientGoneError` then."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError("the client is gone")
    finally:
        working.cancel()
        leaving.cancel()


async def _left(receive: Receive) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
