"""The child process with the engine, as its parent sees it: two sockets, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable

import zmq

from octavo.engine.remote import wire
from octavo.engine.remote.log_lines import LogFormat

logger = logging.getLogger("octavo")

_TURN_S = 0.002
"""Messages are taken for so long at a time, then others get their turn: some are heavy."""
_GRACE_S = 10.0
"""A child that was told to stop may take so long."""


class EngineProcess:
    """Starts the child. `on_message` is called in the event loop for each message, `on_exit` once,
    when the process has ended, with what its end looked like."""

    def __init__(
        self,
        on_message: Callable[[wire.FromEngine], None],
        on_exit: Callable[[str], None],
        log_level: str = "WARNING",
        log_format: LogFormat = "text",
    ) -> None:
        self._on_message, self._on_exit = on_message, on_exit
        self._log_flags = log_level, log_format
        self._folder = tempfile.mkdtemp(prefix="octavo-")
        self._context = zmq.Context()
        self._to_engine, self._from_engine = (self._socket(k) for k in (zmq.PUSH, zmq.PULL))
        self._encode = wire.encoder().encode
        self._decode = wire.decoder_of_front().decode
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._is_closed = self._is_connected = False
        self._is_planned = False
        self.end = ""
        """How the process ended; empty while it runs."""

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        """This side connects where it sends: a bound socket without a peer would block."""
        socket = self._context.socket(kind)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            socket.setsockopt(option, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        if kind == zmq.PUSH:
            socket.connect(f"ipc://{self._folder}/in")
        else:
            socket.bind(f"ipc://{self._folder}/out")
        return socket

    @property
    def _descriptor(self) -> int:
        """Becomes readable when a message has come."""
        descriptor = self._from_engine.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        return descriptor

    @property
    def pid(self) -> int:
        """0 before it is started."""
        return 0 if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process; it waits for `wire.Start`."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "octavo.engine.remote.worker",
            f"ipc://{self._folder}/in", f"ipc://{self._folder}/out", str(os.getpid()),
            *self._log_flags,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        loop.add_reader(self._descriptor, self._read)
        self._waiting = loop.create_task(self._wait(self._process))

    def send(self, message: wire.ToEngine) -> None:
        """Never waits. What is sent to a process that has ended is lost."""
        if not self._is_closed:
            with contextlib.suppress(zmq.Again):
                self._to_engine.send(self._encode(message), zmq.NOBLOCK)

    @property
    def has_more(self) -> bool:
        """Whether another message has come that was not taken yet."""
        if self._is_closed:
            return False
        events = self._from_engine.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return bool(events & zmq.POLLIN)

    def _read(self) -> None:
        """Take what is there. The descriptor tells of news only once, so all has to be taken, or
        this has to come again."""
        until_s = time.monotonic() + _TURN_S
        while not self._is_closed:
            try:
                message = self._from_engine.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not self._is_connected:  # both ways: it speaks when it was spoken to
                self._is_connected = True
                self._remove_folder()  # nothing is left on disk, however this process ends
            try:
                self._on_message(self._decode(message))
            except Exception:  # what follows must be taken all the same
                logger.exception("a message of the engine's process was not understood")
            if time.monotonic() >= until_s:
                asyncio.get_running_loop().call_soon(self._read)
                return

    async def _wait(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        while not self._is_closed and self._from_engine.poll(0):
            self._read()  # what it said last
        self.end = _end_of(status)
        if not self._is_planned:
            self._on_exit(self.end)

    def dump_stacks(self) -> None:
        """Have it write to stderr what each of its threads is doing."""
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End it at once; `on_exit` follows."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def close(self) -> None:
        """Tell it to stop, see to it that it does, and let go of sockets and folder. `on_exit` is
        not called any more."""
        self._is_planned = True
        if self._waiting is not None and not self._waiting.done():
            self.send(wire.Stop())
            done, _ = await asyncio.wait({self._waiting}, timeout=_GRACE_S)
            if not done:
                self.kill()
                await self._waiting
        if self._is_closed:
            return
        self._is_closed = True
        if self._process is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
        self._context.destroy(linger=0)
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _end_of(status: int) -> str:
    if status >= 0:
        return f"the engine's process ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"the engine's process was ended by {name}{hint}"
