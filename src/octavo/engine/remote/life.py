"""An engine's process from its start to its end: restarts, the watchdog, questions and answers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import msgspec

import octavo.errors
from octavo.arch import ModelArch
from octavo.config import EngineConfig
from octavo.engine.remote import wire
from octavo.engine.remote.frames import FrameHub
from octavo.engine.remote.options import EngineInfo, EngineOptions, EngineState
from octavo.engine.remote.process import EngineProcess
from octavo.errors import EngineDeadError, InvalidRequestError, OctavoError
from octavo.events import EngineEvent

if TYPE_CHECKING:
    from octavo.weights.progress import Progress

logger = logging.getLogger("octavo")

_LONGEST_BACKOFF_S = 60.0


class EngineLife:
    """Starts the engine's process, restarts it when it ends, and asks it what is not a request."""

    def __init__(self, config: EngineConfig, *, options: EngineOptions | None = None) -> None:
        self._config = config
        self._options = EngineOptions() if options is None else options
        self.state = EngineState.STARTING
        self.why_not_ready: str | None = "the model is being loaded"
        self.num_restarts = 0
        self.on_state: Callable[[EngineState], None] | None = None
        """Called when the state has changed."""
        self._info: EngineInfo | None = None
        self._process: EngineProcess | None = None
        self._progress: Progress | None = None
        self._ready: asyncio.Future[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._num_in_a_row = 0
        self._heard_s = time.monotonic()
        self._last_words = ""
        """Of the process, why it ends."""
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._hub = FrameHub(lambda hz: self._send(wire.Watch(hz)))
        self._handlers: dict[type, Callable[[Any], None]] = {
            wire.Ready: self._take_ready,
            wire.Loading: self._take_loading,
            wire.Failed: self._take_failed,
            wire.Answer: self._take_answer,
            wire.Frame: lambda m: self._hub.put(m.json, m.is_full),
        }

    # -- life

    async def start(self, progress: Progress | None = None) -> None:
        """Start the process and wait until it is ready. Raises what building the engine raised:
        `ConfigError`, `ModelError`, `CapacityError`; `EngineDeadError` if the process ended."""
        self._progress = progress
        try:
            await self._start_process()
        except BaseException as error:
            self._set_state(EngineState.DEAD, str(error))
            await self.close()
            raise
        self._watchdog = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Abort what runs and end the process. Closing twice is fine."""
        self._set_state(EngineState.DEAD, "the server is shutting down")
        for task in (self._watchdog, self._keeper):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._watchdog = self._keeper = None
        self._lose_all(EngineDeadError("the engine was closed"))
        process, self._process = self._process, None
        if process is not None:
            await process.close()
        self._hub.close()

    @property
    def info(self) -> EngineInfo:
        """What was decided. Raises `EngineDeadError` before the engine was ready for the first
        time."""
        if self._info is None:
            raise EngineDeadError(f"the engine is not ready: {self.why_not_ready}")
        return self._info

    async def _start_process(self) -> None:
        options = self._options
        process = EngineProcess(
            self._take, self._process_ended, options.log_level, options.log_format
        )
        self._process = process
        self._ready = asyncio.get_running_loop().create_future()
        self._last_words = ""
        await process.start()
        process.send(wire.Start(dataclasses.asdict(self._config), options.build))
        self._heard_s = time.monotonic()
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), options.start_timeout_s)
        except TimeoutError:
            process.dump_stacks()
            raise EngineDeadError(
                f"the engine was not ready within {options.start_timeout_s:g} s"
            ) from None
        await self._load_text()
        if process.end:
            raise EngineDeadError(process.end)
        self._set_state(EngineState.READY, None)

    async def _load_text(self) -> None:
        """What this process needs to take requests. The process says it is ready."""

    def _set_state(self, state: EngineState, why: str | None) -> None:
        is_new = state is not self.state
        self.state, self.why_not_ready = state, why
        if is_new and self.on_state is not None:
            self.on_state(state)

    def _process_ended(self, how: str) -> None:
        """Nobody asked it to."""
        if self._last_words:
            how = f"{how}: {self._last_words}"
        self._fail_start(EngineDeadError(how))
        if self.state is EngineState.READY:
            self._keeper = asyncio.create_task(self._restart(how))

    def _fail_start(self, error: BaseException) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)

    async def _restart(self, how: str) -> None:
        """Answer those who wait, and start another process until one is ready."""
        while True:
            options, number = self._options, self._num_in_a_row
            wait_s = min(options.restart_backoff_s * 2**number, _LONGEST_BACKOFF_S)
            if number >= options.max_restarts:
                why = f"{how}; it was restarted {number} times in a row: given up"
                self._set_state(EngineState.DEAD, why)
            else:
                why = f"{how}; it is started again in {wait_s:g} s"
                self._set_state(EngineState.RESTARTING, why)
            logger.error("%s", why)
            self._lose_all(EngineDeadError(why))
            if self._process is not None:
                await self._process.close()  # `close` does it if it interrupts this
                self._process = None
            if self.state is EngineState.DEAD:
                return
            await asyncio.sleep(wait_s)
            self._num_in_a_row += 1
            self.num_restarts += 1
            self.why_not_ready = f"{how}; it is being started again"
            try:
                await self._start_process()
            except (OctavoError, OSError) as error:
                how = f"starting the engine again failed: {error}"
            else:
                self._hub.restart()
                logger.warning("the engine is ready again")
                return

    def _lose_all(self, error: OctavoError) -> None:
        """Nobody will answer those who wait."""
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(error)

    async def _watch(self) -> None:
        """A process that has work and says nothing for too long is wedged."""
        limit_s = self._options.step_timeout_s
        pause_s = min(1.0, limit_s / 4)
        while True:
            asleep_s = time.monotonic()
            await asyncio.sleep(pause_s)
            late_s = time.monotonic() - asleep_s - pause_s
            if late_s > pause_s:  # this process was held up: what was said is still unread
                self._heard_s += late_s
                continue
            silent_s = time.monotonic() - self._heard_s
            process = self._process
            if self.state is EngineState.READY and process is not None and silent_s > limit_s:
                logger.error("the engine has said nothing for %.1f s: it is ended", silent_s)
                process.dump_stacks()
                await asyncio.sleep(0.2)
                process.kill()
                self._heard_s = time.monotonic()

    def _check_ready(self) -> None:
        if self.state is not EngineState.READY:
            raise EngineDeadError(f"the engine is {self.state}: {self.why_not_ready}")

    def _send(self, message: wire.ToEngine) -> None:
        if self._process is not None:
            self._process.send(message)

    # -- questions

    async def memory_report(self) -> dict[str, Any]:
        """`MemoryReport.as_dict()`, and its text as `text`."""
        report: dict[str, Any] = await self._ask("memory_report")
        return report

    async def events(self, request_id: str | None = None) -> list[EngineEvent]:
        """As `LLM.events`."""
        found = await self._ask("events", request_id)
        return msgspec.convert(found, list[EngineEvent])

    async def resize_kv_cache(self, num_bytes: int) -> int:
        """As `LLM.resize_kv_cache`."""
        return int(await self._ask("resize_kv_cache", num_bytes))

    async def reset_prefix_cache(self) -> int:
        """As `LLM.reset_prefix_cache`."""
        return int(await self._ask("reset_prefix_cache"))

    async def set_log_level(self, level: str) -> None:
        """Of the engine's process: DEBUG, INFO, WARNING, ERROR, CRITICAL."""
        await self._ask("set_log_level", level)

    async def block_info(self, block_id: int) -> dict[str, Any]:
        """Who holds a block, where in their tables, and which tokens are in it."""
        info: dict[str, Any] = await self._ask("block_info", block_id)
        return info

    def frames(self, hz: float = 4.0) -> AsyncIterator[bytes]:
        """Pictures of the pool as JSON, the first one full; made only while somebody listens, as
        often as the most eager listener wants."""
        return self._hub.listen(hz)

    async def _ask(self, name: str, *args: Any) -> Any:
        self._check_ready()
        self._num_calls += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[self._num_calls] = future
        self._send(wire.Call(self._num_calls, name, list(args)))
        return await future

    # -- messages

    def _take(self, message: wire.FromEngine) -> None:
        if self._process is None:
            return  # it is being closed, and nobody waits for what it still says
        self._heard_s = time.monotonic()
        self._handlers[type(message)](message)

    def _take_ready(self, message: wire.Ready) -> None:
        about = dict(message.about)
        self._limits = about.pop("inputs")
        config = EngineConfig.from_kwargs(**about.pop("config"))
        arch = msgspec.convert(about.pop("arch"), ModelArch)
        assert config.max_model_len is not None and self._process is not None
        self._info = EngineInfo(
            config=config,
            arch=arch,
            max_model_len=config.max_model_len,
            pid=self._process.pid,
            **about,
        )
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def _take_loading(self, message: wire.Loading) -> None:
        progress = self._progress
        if progress is None:
            return
        if message.what == "start":
            progress.start(message.text, message.num_bytes)
        elif message.what == "update":
            progress.update(message.num_bytes or 0)
        else:
            progress.finish()

    def _take_failed(self, message: wire.Failed) -> None:
        self._last_words = message.text
        self._fail_start(error_of(message.kind, message.text))

    def _take_answer(self, message: wire.Answer) -> None:
        future = self._calls.pop(message.call_id, None)
        if future is None or future.done():
            return
        if message.kind is None:
            future.set_result(message.value)
        else:
            future.set_exception(error_of(message.kind, message.text, message.parameter))


def error_of(kind: str, text: str, parameter: str | None = None) -> OctavoError:
    """An error that was raised in the other process."""
    found = getattr(octavo.errors, kind, None)
    if not (isinstance(found, type) and issubclass(found, OctavoError)):
        return EngineDeadError(text)
    if issubclass(found, InvalidRequestError):
        return found(text, parameter=parameter)
    return found(text)
