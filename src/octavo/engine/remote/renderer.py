"""Renders chat templates of strangers, in processes that end where these go too far."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from octavo.engine.remote.render_worker import HEAD, Job, Rendered
from octavo.errors import EngineDeadError, InvalidRequestError
from octavo.text.chat import NAME

_MOST_AT_ONCE = 2
_MAX_WALL_S = 20.0
"""Where the machine is too busy to give a process its share."""
_ENVIRONMENT = (
    "PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL",
    "TZ",
)  # fmt: skip
"""What a process is given of this one's: no keys."""


def is_template_name(source: str) -> bool:
    """Whether a chat template is one of the model's, by name; as Jinja it would be a constant."""
    return NAME.fullmatch(source) is not None


class Renderer:
    """Starts processes when they are needed, and keeps those that did nothing wrong.

    max_chars: longest text that a template may write. max_cpu_s: processor time that it may take; a
    thousand messages take a hundredth of the default.
    """

    def __init__(self, max_chars: int, max_cpu_s: float = 2.0) -> None:
        self._max_chars, self._max_cpu_s = max_chars, max_cpu_s
        self._turns = asyncio.Semaphore(_MOST_AT_ONCE)
        self._idle: list[asyncio.subprocess.Process] = []
        self._busy: set[asyncio.subprocess.Process] = set()
        self._is_closed = False
        self.num_asking = 0
        """Templates that are rendered, or wait for it."""

    async def render(
        self,
        source: str,
        messages: Sequence[dict[str, Any]],
        special_tokens: Mapping[str, str],
        options: Mapping[str, Any],
    ) -> str:
        """The prompt's text, as `ChatTemplate.render` writes it.

        source: Jinja. options: more of its arguments, by any name. Raises `InvalidRequestError` for
        a template that cannot be compiled, that refuses the messages, or that takes too much, and
        `EngineDeadError` once this is closed.
        """
        job = Job(
            source=source, special_tokens=dict(special_tokens), max_chars=self._max_chars,
            max_cpu_s=self._max_cpu_s, messages=list(messages), options=dict(options),
        )  # fmt: skip
        self.num_asking += 1
        try:
            async with self._turns:
                found = await self._ask(json.dumps(job).encode())
        finally:
            self.num_asking -= 1
        if found["error"] is not None:
            raise InvalidRequestError(found["error"], parameter=found["parameter"])
        return found["text"]

    async def _ask(self, job: bytes) -> Rendered:
        if self._is_closed:
            raise EngineDeadError("the server is shutting down")
        process = self._kept() or await _start()
        assert process.stdin is not None and process.stdout is not None
        self._busy.add(process)
        try:
            async with asyncio.timeout(_MAX_WALL_S):
                process.stdin.write(HEAD.pack(len(job)) + job)
                await process.stdin.drain()
                (size,) = HEAD.unpack(await process.stdout.readexactly(HEAD.size))
                answer = await process.stdout.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            status = await _end(process)
            if self._is_closed:
                raise EngineDeadError("the server is shutting down") from None
            raise self._too_much(status, isinstance(error, TimeoutError)) from None
        except BaseException:  # nobody waits any more; what it is doing is worth nothing
            _kill(process)
            raise
        finally:
            self._busy.discard(process)
        self._idle.append(process)
        return cast("Rendered", json.loads(answer))

    def _too_much(self, status: int, is_late: bool) -> InvalidRequestError:
        limit = f"takes more than {self._max_cpu_s:g} s of processor time"
        if is_late:
            limit = f"is not rendered after {_MAX_WALL_S:g} s"
        elif status != -signal.SIGPROF:
            limit += ", or breaks the renderer otherwise"
        return InvalidRequestError(f"the chat template {limit}", parameter="chat_template")

    def _kept(self) -> asyncio.subprocess.Process | None:
        """One that waits for work, if there is any."""
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        return None

    async def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._is_closed = True
        for process in (*self._idle, *self._busy):
            _kill(process)
            await process.wait()
        self._idle.clear()


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "octavo.engine.remote.render_worker",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,  # a traceback would hold what a client wrote
        env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        start_new_session=True,
    )  # fmt: skip


async def _end(process: asyncio.subprocess.Process) -> int:
    """Its status: its own, if it has ended already."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            return await process.wait()
    _kill(process)
    return await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
