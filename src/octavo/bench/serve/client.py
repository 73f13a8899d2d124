"""One request to a server, and when its parts came back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec

_DATA = b"data:"
_DONE = b"[DONE]"
_NOT_NOW = (429, 503)
_PATIENCE_S = 1.0
"""Before a request is sent again, where the server does not say when; doubled each time."""
_MOST_PATIENCE_S = 60.0


@dataclass(slots=True)
class Timeline:
    """What a client saw of a request. Times are seconds of one monotonic clock, from when it was
    first sent."""

    scheduled_s: float
    """When it should have been sent."""
    sent_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    """When each chunk with text (or with a finish reason, where there was no text at all) came."""
    ended_s: float = 0.0
    num_input: int = 0
    """Tokens of the prompt: the server's count, or what was sent."""
    num_output: int = 0
    """Tokens of the answer, as the server counts them; without a count, chunks."""
    is_counted: bool = False
    """Whether the server told the number of tokens."""
    num_asked: int = 0
    """Tokens that were asked for."""
    num_retries: int = 0
    """How often it was refused for the time being, and sent again."""
    error: str | None = None
    """What went wrong, as a short word; None: nothing."""

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first text."""
        return self.chunk_s[0] - self.sent_s if self.chunk_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first."""
        if not self.chunk_s or self.num_output < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_output - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between chunks."""
        return [b - a for a, b in pairwise(self.chunk_s)]

    @property
    def e2e_s(self) -> float:
        """From sending to the end."""
        return self.ended_s - self.sent_s


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        """Whether there is anything to read."""
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content)))


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class Client:
    """Sends requests to one endpoint over as many connections as it takes."""

    def __init__(
        self,
        url: str,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
        max_retries: int = 0,
    ) -> None:
        """url: the whole of it, up to `/completions`. timeout_s: for one answer. max_retries: how
        often a request that is refused for the time being (429, 503) is sent again."""
        self._url, self._headers, self._timeout_s = url, headers or {}, timeout_s
        self._max_retries = max_retries
        self._decode = msgspec.json.Decoder(_Chunk).decode
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=False),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=30),
            headers=self._headers,
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def stream(self, body: dict[str, Any], line: Timeline) -> Timeline:
        """Send `body` and read the events that come; what went wrong is in the timeline."""
        assert self._session is not None, "the client is not open"
        line.sent_s = time.monotonic()
        try:
            while (wait_s := await self._send(self._session, body, line)) is not None:
                await asyncio.sleep(wait_s)
                line.num_retries += 1
        except TimeoutError:
            line.error = "timeout"
        except (aiohttp.ClientError, ConnectionError, msgspec.DecodeError) as error:
            line.error = type(error).__name__
        except asyncio.CancelledError:
            line.error = "cancelled"
            raise
        finally:
            line.ended_s = time.monotonic()
            if not line.is_counted:
                line.num_output = len(line.chunk_s)
        return line

    async def _send(
        self, session: aiohttp.ClientSession, body: dict[str, Any], line: Timeline
    ) -> float | None:
        """Once; in how many seconds to send it again, None: not."""
        async with session.post(self._url, json=body) as response:
            if response.status == 200:
                await self._read(response.content, line)
                return None
            await response.read()
            if response.status in _NOT_NOW and line.num_retries < self._max_retries:
                return _wait_s(response.headers.get("retry-after"), line.num_retries)
            line.error = f"HTTP {response.status}"
            return None

    async def _read(self, content: aiohttp.StreamReader, line: Timeline) -> None:
        rest, is_done = b"", False  # by the end mark, or a finish reason: some send only that
        async for data in content.iter_any():
            now_s = time.monotonic()
            *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                is_done |= self._take(event, now_s, line)
        if not is_done and line.error is None:
            line.error = "cut off"

    def _take(self, event: bytes, now_s: float, line: Timeline) -> bool:
        """One event; whether it says that the answer is whole."""
        is_whole = False
        for row in event.split(b"\n"):
            if not row.startswith(_DATA):
                continue
            payload = row[len(_DATA) :].strip()
            if payload == _DONE:
                return True
            chunk = self._decode(payload)
            if chunk.error is not None:
                line.error = "error in stream"
            if chunk.usage is not None:
                line.num_input, line.is_counted = chunk.usage.prompt_tokens, True
                line.num_output = chunk.usage.completion_tokens
            is_whole |= any(choice.finish_reason for choice in chunk.choices)
            for choice in chunk.choices:
                if choice.has_text or (choice.finish_reason and not line.chunk_s):
                    line.chunk_s.append(now_s)
                    break
        return is_whole


def _wait_s(retry_after: str | None, num_retries: int) -> float:
    """As the server says, if it says a number of seconds."""
    try:
        wait_s = float(retry_after or "")
    except ValueError:
        wait_s = -1.0
    if not wait_s >= 0:
        wait_s = _PATIENCE_S * 2 ** min(num_retries, 6)
    return min(wait_s, _MOST_PATIENCE_S)
