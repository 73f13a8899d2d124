"""ShareGPT files: conversations of `from` and `value` (or `role` and `content`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from octavo.lab.rows import BadLine

_HUMAN = ("human", "user")
_MODEL = ("gpt", "assistant", "chatgpt", "bing", "bard")
_LISTS = ("conversations", "conversation", "messages")


def is_conversation(value: object) -> bool:
    """Whether a JSON value looks like a conversation."""
    return isinstance(value, dict) and any(isinstance(value.get(name), list) for name in _LISTS)


def read_conversations(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[str, Any]]:
    """(where, conversation or what is wrong) from one JSON list, or from one object a line.

    Raises `BadLine` where the list cannot be read.
    """
    number, first = next(lines)
    if not first.lstrip().startswith("["):
        yield f"line {number}", _parsed(first)
        for number, line in lines:
            yield f"line {number}", _parsed(line)
        return
    text = "".join([first, *(line for _, line in lines)])
    try:
        conversations = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"is no JSON: {error}") from None
    for index, conversation in enumerate(conversations, 1):
        yield f"conversation {index}", conversation


def first_round(conversation: object) -> tuple[str, str] | None:
    """The first prompt and its answer; None where it does not begin with them (after a system
    message). Raises `BadLine` for what is no conversation."""
    turns: Any = None
    if isinstance(conversation, dict):
        turns = next((conversation[name] for name in _LISTS if name in conversation), None)
    if not isinstance(turns, list):
        raise BadLine(f"must be an object with a list of conversations, got {conversation!r:.60}")
    said = [_turn(turn) for turn in turns[:3]]
    if said and said[0][0] == "system":
        del said[0]
    if len(said) < 2 or said[0][0] not in _HUMAN or said[1][0] not in _MODEL:
        return None
    return said[0][1], said[1][1]


def _turn(turn: object) -> tuple[str, str]:
    """(who, text)."""
    if isinstance(turn, dict):
        who, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if isinstance(who, str) and isinstance(text, str):
            return who, text
    raise BadLine(f"a message must have the texts from and value, got {turn!r:.60}")


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadLine(f"is no JSON: {error}")
