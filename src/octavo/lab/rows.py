"""One line of a trace as a request: what columns are called, and what may stand in them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from octavo.lab.trace import TraceRequest

_ALIASES: dict[str, str] = {
    "input": (
        "input_tokens input_length input_len input_toks num_input_tokens prompt_tokens prompt_len "
        "prompt_length num_prompt_tokens num_prefill_tokens ContextTokens request_tokens"
    ),
    "output": (
        "output_tokens output_length output_len output_toks num_output_tokens completion_tokens "
        "num_decode_tokens GeneratedTokens response_tokens response_length"
    ),
    "arrival": "arrival_s arrival_time arrived_at arrival timestamp req_time time",
    "arrival_ms": "arrival_ms timestamp_ms arrival_time_ms",
    "arrival_ns": "arrival_ns timestamp_ns arrival_time_ns",
    "session": "session session_id chat_id conversation_id",
    "think": "think_s think_time",
    "think_ms": "delay think_ms",
    "client": "client client_id user tenant",
    "priority": "priority",
    "n": "n",
    "beam": "beam_width",
    "prefix": "prefix",
    "prefix_tokens": "prefix_tokens",
    "hash_ids": "hash_ids",
    "parent": "parent_row",
    "shared": "shared_tokens",
}
MAX_TOKENS = 10**9
"""Of a prompt, or of an output."""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_FIELDS = {_plain(alias): field for field, names in _ALIASES.items() for alias in names.split()}


class BadLine(Exception):
    """A line, or a header, that cannot be used; the message says what is wrong with it."""


class Columns:
    """What the columns of a CSV file, or the keys of a JSON line, mean. Others are ignored."""

    def __init__(self, names: Iterable[str], time_unit_s: float = 1.0) -> None:
        """time_unit_s: what a number in a time column without a unit in its name means.

        Raises `BadLine` where there are no lengths.
        """
        self._names: dict[str, str] = {}
        for name in names:
            field = _FIELDS.get(_plain(str(name)))
            if field is not None:
                self._names.setdefault(field, name)
        missing = [f"{kind}_tokens" for kind in ("input", "output") if kind not in self._names]
        if missing:
            raise BadLine(
                f"has no {' and no '.join(missing)} (nor another usual name for it) among: "
                f"{', '.join(map(str, names)):.200}"
            )
        if _plain(str(self._names.get("arrival", ""))) == "arrivals":
            time_unit_s = 1.0  # arrival_s says it
        units = {"arrival": time_unit_s, "arrival_ms": 1e-3, "arrival_ns": 1e-9}
        self._time = next(
            ((self._names[f], unit) for f, unit in units.items() if f in self._names), None
        )
        pauses = {"think": 1.0, "think_ms": 1e-3}
        self._think = next(
            ((self._names[f], unit) for f, unit in pauses.items() if f in self._names), None
        )

    @property
    def has_parents(self) -> bool:
        """Whether lines say whose prompt theirs begins with, and how far."""
        return "parent" in self._names and "shared" in self._names

    def request(self, values: Mapping[str, Any]) -> TraceRequest:
        """The request of a line. Raises `BadLine`."""
        num_input = self._int(values, "input", least=1, most=MAX_TOKENS)
        num_output = self._int(values, "output", least=1, most=MAX_TOKENS)
        arrival_s = think_s = None
        if self._time is not None:
            arrival_s = self._seconds(values, *self._time, required=True)
        if self._think is not None:
            think_s = self._seconds(values, *self._think, required=False)
        prefix = self._text(values, "prefix")
        prefix_tokens = self._int(values, "prefix_tokens", 0, least=0, most=num_input)
        return TraceRequest(
            num_input=num_input,
            num_output=num_output,
            arrival_s=arrival_s,
            hash_ids=self._hash_ids(values),
            n=self._int(values, "n", 1, least=1, most=1024),
            beam_width=self._int(values, "beam", 0, least=0, most=64),
            priority=self._int(values, "priority", 0, least=-(2**31), most=2**31),
            prefix=prefix,
            prefix_tokens=prefix_tokens,
            session=self._text(values, "session"),
            think_s=think_s,
            client=self._text(values, "client"),
        )

    def parent(self, values: Mapping[str, Any]) -> tuple[int, int]:
        """(data line whose prompt this one begins with, from 0, or -1; tokens of it)."""
        return (
            self._int(values, "parent", -1, least=-1, most=2**31),
            self._int(values, "shared", 0, least=0, most=MAX_TOKENS),
        )

    def _int(
        self,
        values: Mapping[str, Any],
        field: str,
        default: int | None = None,
        *,
        least: int,
        most: int,
    ) -> int:
        name = self._names.get(field)
        value = None if name is None else values.get(name)
        if value is None or value == "":
            if default is None:
                raise BadLine(f"{name} is missing")
            return default
        number = _whole(value)
        if number is None:
            raise BadLine(f"{name} must be a whole number, got {value!r:.60}")
        if not least <= number <= most:
            limit = f"at least {least}" if number < least else f"at most {most:,}"
            raise BadLine(f"{name} must be {limit}, got {number}")
        return number

    def _seconds(
        self, values: Mapping[str, Any], name: str, unit_s: float, *, required: bool
    ) -> float | None:
        value = values.get(name)
        if value is None or value == "":
            if required:
                raise BadLine(f"{name} is missing")
            return None
        try:
            seconds = float(value) * unit_s
        except (TypeError, ValueError):
            seconds = _date_s(value, name)
        if isinstance(value, bool) or not (math.isfinite(seconds) and seconds >= 0):
            raise BadLine(f"{name} must be a time of at least 0, got {value!r:.60}")
        return seconds

    def _text(self, values: Mapping[str, Any], field: str) -> str:
        name = self._names.get(field)
        value = None if name is None else values.get(name)
        return "" if value is None else str(value)

    def _hash_ids(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        name = self._names.get("hash_ids")
        ids = None if name is None else values.get(name)
        if not ids:
            return ()
        if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in ids):
            raise BadLine(f"{name} must be a list of whole numbers from 0, got {ids!r:.60}")
        return tuple(ids)


def _whole(value: object) -> int | None:
    """`12`, `12.0`, "12" and "12.0" as 12; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return int(value) if not isinstance(value, float) else _exact(value)
    except ValueError:
        pass
    try:
        return _exact(float(value))
    except ValueError:
        return None


def _exact(value: float) -> int | None:
    return int(value) if value.is_integer() else None


def _date_s(value: object, name: str) -> float:
    """`2023-11-16 18:17:03.9799600` as seconds since 1970 (a date without a zone is UTC's)."""
    try:
        date = datetime.fromisoformat(str(value).strip())
    except ValueError:
        raise BadLine(f"{name} must be seconds or a date and time, got {value!r:.60}") from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
