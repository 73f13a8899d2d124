"""Log lines, for people or as JSON objects; no prompt and no key is ever in one unasked."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

from octavo.server.config import ServeConfig

logger = logging.getLogger("octavo.server")
_FIELDS = "octavo_fields"


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, and what the line is about."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, _FIELDS, {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class TextLines(logging.Formatter):
    """Time, level, message, and what the line is about as name=value; never more than a line, so
    that nobody forges one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, with the traceback below it."""
        at = datetime.fromtimestamp(record.created).isoformat(sep=" ", timespec="milliseconds")
        fields = getattr(record, _FIELDS, {})
        told = "".join(f" {name}={_shown(value)}" for name, value in fields.items())
        text = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"{at} {record.levelname:7} {text}{told}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _shown(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and " " not in text and text
    return text if plain else repr(text)


def set_up_logs(config: ServeConfig) -> None:
    """All of this process's loggers, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if config.log_format == "json" else TextLines())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("octavo").setLevel(config.log_level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def log(level: int, message: str, **fields: object) -> None:
    """A line about something."""
    logger.log(level, message, extra={_FIELDS: fields})


def log_prompt(request_id: str, text: str) -> None:
    """For `--log-prompts`."""
    log(logging.INFO, "prompt", request_id=request_id, prompt=text)
