"""Waiting for whole answers, as long as the client does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import Receive

from octavo.engine.remote.streams import OutputStream
from octavo.outputs import RequestOutput

CLIENT_GONE = 499
"""nginx's status for a client that left: nobody receives it, logs show it."""


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
        while (await receive())["type"] != "http.disconnect":
            pass
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
