"""Reading a server's frames over HTTP, for programs; and keeping the picture that they tell of."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from octavo.errors import ConfigError

_MAX_FRAME_BYTES = 256 * 2**20
_SILENCE_S = 30.0
"""After which a connection is given up; a server that has nothing to tell pings every 10 s."""


class FrameClient:
    """The frames of one source of one server."""

    def __init__(self, url: str, key: str | None, *, source: int = 0, hz: float = 4.0) -> None:
        """url: the server's, with or without /dashboard. key: its administrator's, if any."""
        self.url = url.rstrip("/").removesuffix("/dashboard")
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._source, self._hz = source, hz

    async def check(self) -> str:
        """The name of the source. Raises `ConfigError` that says why there is none to be seen."""
        try:
            async with self._session() as session:
                return await self._name(session)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ConfigError(self._why_unreachable(error)) from None

    async def frames(self) -> AsyncIterator[dict[str, Any]]:
        """Frames until the stream ends. Raises `ConfigError` as `check`."""
        decode = msgspec.json.Decoder().decode
        path = f"{self.url}/dashboard/frames?source={self._source}&hz={self._hz:g}"
        try:
            async with self._session() as session, session.get(path) as answer:
                await self._refuse(answer)
                body = b""
                async for part in answer.content.iter_any():
                    body += part
                    if len(body) > _MAX_FRAME_BYTES:
                        raise ConfigError(f"--url {self.url} sends more than a frame can have")
                    if b"\n\n" not in part and b"\n\n" not in body:
                        continue
                    *events, body = body.split(b"\n\n")
                    for event in events:
                        if event.startswith(b"data: {"):
                            frame: dict[str, Any] = decode(event[6:])
                            yield frame
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ConfigError(self._why_unreachable(error)) from None

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=_SILENCE_S)
        return aiohttp.ClientSession(headers=self._headers, timeout=timeout)

    async def _name(self, session: aiohttp.ClientSession) -> str:
        async with session.get(f"{self.url}/dashboard/sources") as answer:
            await self._refuse(answer)
            rows = await answer.json()
        if self._source >= len(rows):
            names = ", ".join(f"{i}: {row['name']}" for i, row in enumerate(rows))
            raise ConfigError(f"--source {self._source} is not there; the server has {names}")
        return str(rows[self._source]["name"])

    async def _refuse(self, answer: aiohttp.ClientResponse) -> None:
        """Raise for an answer that is none."""
        if answer.status == 200:
            return
        if answer.status in (401, 403):
            raise ConfigError(
                f"{self.url} wants its admin key: set OCTAVO_ADMIN_KEY, or --api-key KEY"
            )
        text = (await answer.text())[:300]
        if answer.status == 404:
            raise ConfigError(f"{self.url} has no dashboard: is it an 'octavo serve'?")
        raise ConfigError(f"{self.url} answered {answer.status}: {text}")

    def _why_unreachable(self, error: Exception) -> str:
        if isinstance(error, TimeoutError | asyncio.TimeoutError):
            return f"no answer from {self.url}"
        cause = getattr(error, "os_error", error)  # aiohttp's own text is long
        if isinstance(cause, ConnectionError) and cause.errno:
            why = os.strerror(cause.errno)  # asyncio says "Connect call failed" of all of them
        else:  # names and certificates have numbers of their own
            why = getattr(cause, "strerror", None) or str(error)
        return f"no server at {self.url}: start one by 'octavo serve', or say --url ({why})"


class Blocks:
    """The picture of a pool, kept up to date from frames."""

    def __init__(self) -> None:
        self.state: list[int] = []
        self.owner: list[int] = []
        self.refs: list[int] = []
        self.fill: list[int] = []
        self.about: dict[str, Any] = {}
        self._next_n: int | None = None

    def take(self, frame: dict[str, Any]) -> bool:
        """One more frame; False if some before it were missed: a whole one is needed."""
        blocks = frame["blocks"]
        if frame["kind"] == "full":
            self.state, self.owner = list(blocks["state"]), list(blocks["owner"])
            self.refs, self.fill = list(blocks["refs"]), list(blocks["fill"])
            self.about = frame["about"]
        elif frame["n"] != self._next_n:
            return False
        else:
            rows = zip(
                blocks["id"], blocks["state"], blocks["owner"], blocks["refs"], blocks["fill"],
                strict=True,
            )  # fmt: skip
            for i, state, owner, refs, fill in rows:
                self.state[i], self.owner[i], self.refs[i], self.fill[i] = state, owner, refs, fill
        self._next_n = frame["n"] + 1
        return True
