"""Runs a server: listens, loads the model, serves, drains, ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import resource
import signal
import socket
import ssl
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine, EngineOptions, EngineState
from octavo.engine.remote.renderer import is_template_name
from octavo.errors import ConfigError, InvalidRequestError
from octavo.server.app import create_app
from octavo.server.config import ServeConfig
from octavo.server.connection import Connection
from octavo.server.errors import AbortedError
from octavo.server.keys import KeyRing, load_keys
from octavo.server.logs import set_up_logs
from octavo.server.metrics import Metrics
from octavo.server.routers import routers
from octavo.server.state import ServerState
from octavo.server.tracing import Tracer
from octavo.util import flag_name

if TYPE_CHECKING:
    from octavo.engine.models import RichProgress

logger = logging.getLogger("octavo.server")
_BACKLOG = 4096
_KEEP_ALIVE_S = 75
_FLUSH_S = 5.0
"""For the last words of aborted requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What only tests and benchmarks change."""

    options: EngineOptions = field(default_factory=EngineOptions)
    """`step_timeout_s` and `max_restarts` are the configuration's."""
    on_ready: Callable[[ServerState, str], None] | None = None
    """Called with the server's URL when it takes requests."""
    progress: RichProgress | None = None


def serve(
    engine: EngineConfig,
    config: ServeConfig,
    *,
    environ: Mapping[str, str] | None = None,
    hooks: Hooks | None = None,
) -> int:
    """Serve until a signal ends it; the exit status.

    0: all requests were answered. 1: some were cut off by `shutdown_timeout_s`. 128 + signal: a
    second signal stopped it at once. Raises `ConfigError`, before the model is loaded, for what
    cannot be listened on, and what loading the model raises.
    """
    import uvloop

    keys = load_keys(config, os.environ if environ is None else environ)
    _check_exposure(config, keys)
    template = _template(config)
    if engine.skip_tokenizer_init:
        for name in ("chat_template", "trust_request_chat_template"):
            if getattr(config, name):
                raise ConfigError(
                    f"{flag_name(name)} has no effect with --skip-tokenizer-init: drop one"
                )
    with contextlib.closing(_listen(config)) as sock:
        set_up_logs(config)
        if not (config.is_loopback or keys.has_keys):
            logger.warning("there is no API key: anyone who can reach %s can use it", config.host)
        _raise_file_limit()
        hooks = Hooks() if hooks is None else hooks
        main = _main(engine, config, keys, template, sock, hooks)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main)


def _check_exposure(config: ServeConfig, keys: KeyRing) -> None:
    if not (config.is_loopback or keys.has_keys or config.insecure):
        raise ConfigError(
            f"--host {config.host} can be reached from other machines, and there is no API key: "
            "set OCTAVO_API_KEY or --api-key-file, or add --insecure"
        )


def _template(config: ServeConfig) -> str | None:
    if config.chat_template is None:
        return None
    try:
        return Path(config.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError) and is_template_name(config.chat_template):
            return config.chat_template  # the name of one of the model's: known when it is loaded
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(
            f"--chat-template {config.chat_template} cannot be read: {reason}"
        ) from None


def _listen(config: ServeConfig) -> socket.socket:
    """A socket that listens already, so that nobody else takes the port while the model loads."""
    if config.uds is not None:
        return _listen_unix(config.uds)
    where = f"{config.host}:{config.port}"
    try:
        found = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"--host {config.host} is no address: {error.strerror}") from None
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"{where} is in use by another program, perhaps another server: choose another "
                "--port (0 takes a free one)"
            ) from None
        raise ConfigError(f"cannot listen on {where}: {error.strerror}") from None
    return sock


def _listen_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    raise OSError(errno.EADDRINUSE, "a server listens there already")
            os.unlink(path)  # left by one that is gone
        sock.bind(path)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror or error}") from None
    return sock


def _raise_file_limit() -> None:
    """Each connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Http(uvicorn.Server):
    """Leaves signals to others."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None."""
        yield


async def _main(
    engine_config: EngineConfig,
    config: ServeConfig,
    keys: KeyRing,
    template: str | None,
    sock: socket.socket,
    hooks: Hooks,
) -> int:
    options = dataclasses.replace(
        hooks.options,
        step_timeout_s=config.step_timeout_s,
        max_restarts=config.max_restarts,
        log_level=config.log_level.upper(),
        log_format=config.log_format,
    )
    engine = AsyncEngine(engine_config, options=options)
    names = config.served_model_name or (engine_config.model,)
    endpoint = config.otlp_traces_endpoint
    tracer = None if endpoint is None else Tracer.to(endpoint, names[0])
    metrics = Metrics(names[0], lambda: engine.stats)
    state = ServerState(
        config, engine, keys, model_names=names, chat_template=template, metrics=metrics,
        tracer=tracer,
    )  # fmt: skip
    http = _Http(
        uvicorn.Config(
            create_app(state, routers(config)),
            loop="none", http=Connection, ws="none", lifespan="off",
            log_config=None, access_log=False, server_header=False, backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=int(_FLUSH_S),
            ssl_keyfile=config.ssl_keyfile, ssl_certfile=config.ssl_certfile,
            ssl_ca_certs=config.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED,
            proxy_headers=False,
        )
    )  # fmt: skip
    _load(http.config, config)
    ending = _Ending(state, http)
    engine.on_state = partial(_tell_state, state)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.signalled, number)
    serving = loop.create_task(http.serve([sock]))
    starting = loop.create_task(_start(state, hooks))
    try:
        ended = loop.create_task(ending.wait())
        await asyncio.wait({starting, ended}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            url = url_of(config, sock)
            if hooks.on_ready is not None and not ended.done():
                hooks.on_ready(state, url)
        return await ended
    finally:
        starting.cancel()
        with contextlib.suppress(BaseException):
            await starting
        if state.renderer is not None:
            await state.renderer.close()
        await engine.close()
        http.should_exit = True
        await serving
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        if config.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(config.uds)


def _tell_state(state: ServerState, new: EngineState) -> None:
    state.metrics.engine_up(new is EngineState.READY)
    if new is EngineState.RESTARTING:
        state.metrics.engine_restarted()


def _load(http: uvicorn.Config, config: ServeConfig) -> None:
    try:
        http.load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile} and --ssl-keyfile {config.ssl_keyfile} cannot "
            f"be used: {error}"
        ) from None


async def _start(state: ServerState, hooks: Hooks) -> None:
    await state.engine.start(hooks.progress)
    if state.chat_template is not None:
        message = [{"role": "user", "content": "Hello"}]
        try:
            await state.engine.chat_prompt(message, chat_template=state.chat_template)
        except InvalidRequestError as error:
            if error.parameter == "chat_template":  # else it wants other messages
                path = state.config.chat_template
                raise ConfigError(f"--chat-template {path}: {error}") from None
    state.life.serve()


def url_of(config: ServeConfig, sock: socket.socket) -> str:
    """Where the server is to be found."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "https" if config.is_tls else "http"
    return f"{scheme}://{host}:{sock.getsockname()[1]}{config.root_path}"


class _Ending:
    """From the first signal to the exit status."""

    def __init__(self, state: ServerState, http: _Http) -> None:
        self._state, self._http = state, http
        self._first, self._second = asyncio.Event(), asyncio.Event()
        self._number = 0

    def signalled(self, number: int) -> None:
        """SIGTERM or SIGINT."""
        self._number = number
        if self._first.is_set():
            self._second.set()
            return
        self._state.life.stop()
        self._first.set()

    async def wait(self) -> int:
        """Until the server may go; its exit status."""
        await self._first.wait()
        state = self._state
        timeout_s = state.config.shutdown_timeout_s
        if state.calls:
            logger.warning(
                "stopping: %d requests under way may take %g s to finish; a second signal stops "
                "at once", len(state.calls), timeout_s,
            )  # fmt: skip
        if await self._drained(timeout_s):
            return 0
        if self._second.is_set():
            self._http.force_exit = True
            return 128 + self._number
        num_cut = len(state.calls)
        reason = AbortedError(
            f"the server is shutting down, and the answer was not complete within {timeout_s:g} s "
            "(--shutdown-timeout-s)"
        )
        for call in list(state.calls.values()):
            call.abort(reason)
        logger.warning("stopping: %d requests were cut off", num_cut)
        await asyncio.sleep(0.1)  # their last words
        return 1

    async def _drained(self, timeout_s: float) -> bool:
        """Whether all requests have ended before the time or a second signal came."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while self._state.calls and not self._second.is_set():
            left_s = until_s - loop.time()
            if left_s <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._second.wait(), min(0.05, left_s))
        return not self._state.calls
