"""Lines of the log: each is one line, whatever is in it."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from octavo.engine.remote.log_lines import FIELDS, JsonLines, TextLines


def record(message: str, fields: dict[str, Any] | None = None, fails: bool = False) -> Any:
    error = None
    if fails:
        try:
            raise ValueError("bad\nthing")
        except ValueError:
            error = sys.exc_info()
    made = logging.LogRecord("octavo", logging.WARNING, "f.py", 1, message, None, error)
    made.created = 0.25
    setattr(made, FIELDS, fields or {})
    return made


def test_json() -> None:
    line = JsonLines("engine").format(record("a\n\u20ac", {"path": "\ud800 x", "what": object}))
    assert "\n" not in line and "\u20ac" in line
    assert json.loads(line.encode()) == {
        "time": "1970-01-01T00:00:00.250+00:00", "level": "warning", "process": "engine",
        "logger": "octavo", "message": "a\n\u20ac", "path": "\ud800 x", "what": "<class 'object'>",
    }  # fmt: skip
    failed = JsonLines("server").format(record("a", fails=True))
    found = json.loads(failed)
    assert "\n" not in failed and found["process"] == "server"
    assert found["traceback"].endswith("ValueError: bad\nthing")


def test_text() -> None:
    line = TextLines("engine").format(record("a\r\nb", {"path": "/x", "client": "a b=c"}))
    assert line.endswith(" WARNING [engine] a\\r\\nb path=/x client='a b=c'")
    assert TextLines("server").format(record("a")).endswith(" WARNING a")
    assert TextLines("server").format(record("a", fails=True)).endswith("ValueError: bad\nthing")
