"""Log lines of both processes of a server: for people, or JSON objects for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
ProcessName = Literal["server", "engine"]
FIELDS = "octavo_fields"
"""Attribute of a log record: what the line is about, by name."""


class JsonLines(logging.Formatter):
    """One object a line: time, level, process, logger, message, and what the line is about."""

    def __init__(self, process: ProcessName) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        text = json.dumps(line, ensure_ascii=False, default=str)
        return text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair as \\uD800


class TextLines(logging.Formatter):
    """Time, level, message, and what the line is about as name=value; never more than a line, so
    that nobody forges one."""

    def __init__(self, process: ProcessName) -> None:
        super().__init__()
        self._mark = "[engine] " if process == "engine" else ""

    def format(self, record: logging.LogRecord) -> str:
        """The line, with the traceback below it."""
        at = datetime.fromtimestamp(record.created).isoformat(sep=" ", timespec="milliseconds")
        fields = getattr(record, FIELDS, {})
        told = "".join(f" {name}={_shown(value)}" for name, value in fields.items())
        text = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"{at} {record.levelname:7} {self._mark}{text}{told}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _shown(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and " " not in text and text
    return text if plain else repr(text)


def set_up_logging(level: str, form: LogFormat, process: ProcessName) -> None:
    """All of this process's loggers and Python's warnings, to stderr. level: of octavo's; others
    tell what is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process) if form == "json" else TextLines(process))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    logging.getLogger("octavo").setLevel(level)
