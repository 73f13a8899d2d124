"""Starting an engine for a command, with a bar on stderr while a model is fetched."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.config import EngineConfig


def start_engine(config: EngineConfig) -> LLM:
    """The engine for `config`; the caller closes it. Raises as `LLM` does."""
    note(f"loading {config.model} ...")
    from octavo import LLM
    from octavo.engine.models import RichProgress

    with RichProgress() as progress:
        return LLM(config=config, progress=progress)


def with_model(config: EngineConfig, named: str | None) -> EngineConfig:
    """The configuration with the model that a command was given as an argument, not by --model.

    Raises `ConfigError` where it was given both ways.
    """
    if named is None:
        return config
    if config.model != type(config)().model:
        raise ConfigError("the model is given twice: as an argument, or with --model")
    return dataclasses.replace(config, model=named)


def note(text: str, end: str = "\n") -> None:
    """A remark for a person at a terminal, on stderr; nothing in a pipe."""
    if sys.stderr.isatty():
        print(f"\033[2m{text}\033[0m", file=sys.stderr, end=end, flush=True)
