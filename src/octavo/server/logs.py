"""The server's log; no prompt and no key is ever in it unasked."""

from __future__ import annotations

import logging

from octavo.engine.remote.log_lines import FIELDS, set_up_logging
from octavo.server.config import ServeConfig

logger = logging.getLogger("octavo.server")


def set_up_logs(config: ServeConfig) -> None:
    """Of this process; the engine's is told with its options."""
    set_up_logging(config.log_level.upper(), config.log_format, "server")


def log(level: int, message: str, **fields: object) -> None:
    """A line about something."""
    logger.log(level, message, extra={FIELDS: fields})


def log_prompt(request_id: str, text: str) -> None:
    """For `--log-prompts`."""
    log(logging.INFO, "prompt", request_id=request_id, prompt=text)
