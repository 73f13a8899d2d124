"""`octavo demo memory`: one workload through two memory policies, side by side in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.cli.flags import Hidden, flags, parse
from octavo.cli.lab_flags import MachineFlags, SimFlags
from octavo.config import KVPolicy
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.lab.demo import Stage

_TICK_S = 0.05
"""So often the stages move on."""
_MAX_STAGES = 4
_MAX_SPEED = 100.0
_SLICE_S = 0.25
"""Simulated seconds that a stage plays before others have their turn."""


@flags
@dataclass(frozen=True, kw_only=True)
class DemoMachine(MachineFlags):
    """The machine that is simulated: how large the pool is, and how long steps take."""

    model: str | None = "opt-13b"
    """Shape of the model: a name that octavo knows (opt-13b, llama-3.1-8b, ...), a config.json, or
    its folder."""
    gpu: str | None = "a100-40gb"
    """h200, h100, a100-80gb, a100-40gb, ...: its memory and its speed."""


@flags
@dataclass(frozen=True, kw_only=True)
class DemoEngine(SimFlags):
    """The engine: its limits."""

    kv_policy: Hidden[KVPolicy] = "contiguous"
    """Of which all limits may be said; --policies says what runs."""


@flags
@dataclass(frozen=True, kw_only=True)
class Demo:
    """Play the same requests through several memory policies in real time and show their pools side
    by side in a browser. The scheduler and the memory manager are the live engine's; the model is
    not there, steps take the time that they would. Needs no GPU and no weights. Ctrl-C ends it,
    with a table of what each policy reached.
    """

    policies: tuple[KVPolicy, ...] = ("paged", "orca-max")
    """What to play side by side."""
    workload: str = "sharegpt"
    """Lengths of prompts and outputs: sharegpt or alpaca (synthetic), or a file as of lab compare.
    """
    rate: float = 2.0
    """Requests a second, on average."""
    duration: float = 300.0
    """Simulated seconds in which requests come; those that are there by then are played to their
    ends."""
    speed: float = 1.0
    """Simulated seconds in a second."""
    n: int | None = None
    """Samples of each prompt, which share its blocks under paged."""
    shared_prefix_tokens: int = 0
    """Put a text of so many tokens, the same for all, in front of every prompt."""
    seed: int = 0
    """Of lengths and arrivals."""
    port: int = 8100
    """Where the page is, on this machine; 0 takes a free one."""
    no_browser: bool = False
    """Do not open the page, only say where it is."""
    machine: DemoMachine
    engine: DemoEngine


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Demo, prog, argv)
    _check(args)
    stages = _stages(args)
    with contextlib.closing(_listen(args.port)) as sock:
        port = sock.getsockname()[1]
        url = f"http://127.0.0.1:{port}/dashboard"
        print(f"octavo plays {' and '.join(one.name for one in stages)} at {url}", flush=True)
        print("Ctrl-C ends it", flush=True)
        if not args.no_browser and _has_screen():
            webbrowser.open(url)
        play = _Play(stages, args.speed, args.duration)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(play.run(sock))

    from octavo.lab.demo import table

    print(f"\n{table([stage.reached() for stage in stages], play.now_s)}")
    return 0


def _check(args: Demo) -> None:
    if not 1 <= len(args.policies) <= _MAX_STAGES:
        raise ConfigError(f"--policies takes 1 to {_MAX_STAGES}, got {len(args.policies)}")
    if len(set(args.policies)) < len(args.policies):
        raise ConfigError(f"--policies names one twice: {' '.join(args.policies)}")
    if not 0 < args.speed <= _MAX_SPEED:
        raise ConfigError(f"--speed must be above 0 and at most {_MAX_SPEED:g}, got {args.speed:g}")
    if not 0 <= args.port < 65536:
        raise ConfigError(f"--port must be from 0 to 65535, got {args.port}")
    if args.engine.num_replicas != 1:
        raise ConfigError("--num-replicas does nothing here: each policy has one engine")


def _stages(args: Demo) -> list[Stage]:
    from octavo.lab.compare import config_of
    from octavo.lab.demo import Stage
    from octavo.lab.workload import load_trace, make_workload

    base = args.engine.config(args.machine)
    workload = make_workload(
        load_trace(args.workload, seed=args.seed),
        rate=args.rate,
        duration=args.duration,
        n=args.n,
        shared_prefix_tokens=args.shared_prefix_tokens,
        seed=args.seed,
    )
    model = args.machine.model or "no model"
    stages = []
    for policy in args.policies:
        costs = args.machine.step_costs(
            base.block_size,
            in_one_piece=policy != "paged",
            max_model_len=base.max_model_len,
        )
        stages.append(Stage(config_of(policy, base), costs, workload, model))
    return stages


class _Play:
    """Moves the stages on, and serves the page."""

    def __init__(self, stages: Sequence[Stage], speed: float, duration_s: float) -> None:
        self._stages, self._speed, self._duration_s = stages, speed, duration_s
        self.now_s = 0.0
        """Of the simulation."""

    async def run(self, sock: socket.socket) -> None:
        """Until somebody ends it."""
        import uvicorn

        from octavo.dashboard.app import make_app
        from octavo.dashboard.hub import LocalSource

        sources = [LocalSource(stage, time.monotonic) for stage in self._stages]
        app = make_app(sources, is_leaving=lambda: server.should_exit)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        last_s, is_over = time.monotonic(), False
        try:
            while not serving.done():
                await asyncio.wait((serving,), timeout=_TICK_S)
                now_s = time.monotonic()
                if not is_over:
                    await self._advance(self.now_s + (now_s - last_s) * self._speed)
                    is_over = self._is_over
                    if is_over:
                        print("all requests are answered; the page stays until Ctrl-C", flush=True)
                last_s = now_s
                for source in sources:
                    source.tell()
        finally:
            server.should_exit = True
            await serving

    @property
    def _is_over(self) -> bool:
        return self.now_s >= self._duration_s and all(one.is_over for one in self._stages)

    async def _advance(self, target_s: float) -> None:
        """Play on, and let others have their turn meanwhile."""
        while self.now_s < target_s and not self._is_over:
            self.now_s = min(target_s, self.now_s + _SLICE_S)
            for stage in self._stages:
                stage.advance(self.now_s)
            await asyncio.sleep(0)


def _listen(port: int) -> socket.socket:
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen()  # who comes before the page is served waits
    except OSError as error:
        sock.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(
                f"--port {port} cannot be had: {error.strerror}; choose another (0 takes a free "
                "one)"
            ) from None
        raise
    return sock


def _has_screen() -> bool:
    """Whether a browser would have a window: one in the terminal is of no use."""
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
