"""What is told to, and of, an engine in its own process."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from octavo.arch import ModelArch
from octavo.config import EngineConfig
from octavo.engine.remote.log_lines import LogFormat


class EngineState(StrEnum):
    """Whether an engine takes requests."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """Its process has ended and another one is (or will be) started."""
    DEAD = "dead"
    """Closed, or given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the engine's process is looked after."""

    step_timeout_s: float = 300.0
    """So long may it be silent with work to do; then it is wedged: its stacks are written to stderr
    and it is ended."""
    start_timeout_s: float | None = None
    """So long may building take; None: any time."""
    max_restarts: int = 5
    """So many times in a row, without a request answered in between, is it started again."""
    restart_backoff_s: float = 1.0
    """Before it is started again; doubled each time in a row, at most 60."""
    build: str = "octavo.engine.build:build_engine"
    """`module:function` that makes a `BuiltEngine` of a configuration and a progress, there."""
    log_level: str = "WARNING"
    log_format: LogFormat = "text"
    """Of its lines on stderr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What was decided when the engine was built."""

    config: EngineConfig
    """Nothing is left to be chosen."""
    arch: ModelArch
    plan: dict[str, Any]
    """The fields of the `MemoryPlan`."""
    num_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    no_prefix_caching: str | None
    """Why prefixes are not kept; None: they are."""
    pid: int
    """Of the engine's process."""
