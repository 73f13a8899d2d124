"""How families of models write the calls of tools. Names are those of vLLM's --tool-call-parser.

A parser takes text as it comes. What is said beside calls comes out as soon as it is certain that
it is no part of one; a call comes out whole, when its last bracket is there. What looks like a call
and turns out to be none, or is cut, is text like any other: nothing is lost.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import string
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn

from octavo.server.tools.json_text import JsonText

ParserName = Literal["hermes", "llama3_json", "mistral"]
_NAME = re.compile(r"[\w.-]{1,256}")
_SIGNS = string.ascii_letters + string.digits
_PIECE = 4096
"""Characters looked at at a time: a step copies what is left of them, and there may be a step for
every few characters."""


class ToolCall(NamedTuple):
    """One call. arguments: JSON, as OpenAI's clients expect it."""

    name: str
    arguments: str


class Parsed(NamedTuple):
    """What a piece of text yielded."""

    content: str
    calls: list[ToolCall]


class ToolParser:
    """Base of all: text, in which calls are JSON objects behind a mark.

    White space before a call, and between two, is not content.
    """

    opening: str
    """What a call, or a list of them, begins with."""
    reads_special_tokens = False
    """Whether marks are special tokens, which the text must then show."""

    def __init__(self) -> None:
        self._held = ""
        """Not looked at yet, or too little to tell what it is."""
        self._step: Callable[[], bool] = self._in_text
        """Takes from what is held; False: more has to come."""
        self._json: JsonText | None = None
        self._space: list[str] = []
        """White space that is content if no call follows."""
        self._raw: list[str] = []
        """Of the call that is being read, what came before its object: content if it is none."""
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._has_calls = False

    def push(self, text: str) -> Parsed:
        """More text."""
        for start in range(0, len(text), _PIECE):
            self._held += text[start : start + _PIECE]
            while self._held and self._step():
                pass
        return self._taken()

    def new_id(self) -> str:
        """Of a call, as the family's templates take it back."""
        return f"chatcmpl-tool-{uuid.uuid4().hex}"

    def finish(self) -> Parsed:
        """No more will come."""
        cut = "" if self._json is None else self._json.text
        rest = "".join((*self._space, *self._raw, cut, self._held))
        if not (self._has_calls and rest.isspace()):
            self._content.append(rest)
        return self._taken()

    def _taken(self) -> Parsed:
        parsed = Parsed("".join(self._content), self._calls)
        self._content, self._calls = [], []
        return parsed

    # -- states

    def _in_text(self) -> bool:
        """Until a call is opened."""
        held = self._held
        at = held.find(self.opening)
        end = at if at >= 0 else len(held) - _num_held(held, self.opening)
        said = held[:end].rstrip()
        if said:
            self._content += (*self._space, said)
            self._space.clear()
        if len(said) < end:
            self._space.append(held[len(said) : end])
        if at < 0:
            self._held = held[end:]
            return False
        self._raw, self._space = [*self._space, self.opening], []
        self._held = held[end + len(self.opening) :]
        self._step = self._opened
        return True

    def _opened(self) -> bool:
        """Behind the mark."""
        bare = self._without_space()
        if not bare:
            return False
        if bare[0] != "{":
            self._no_call()
            return True
        return self._begin_json(0)

    def _in_json(self) -> bool:
        """Inside an object."""
        assert self._json is not None
        end = self._json.feed(self._held)
        if end is None:
            self._held = ""
            return False
        self._held = self._held[end:]
        text, self._json = self._json.text, None
        self._take(text)
        return True

    def _take(self, text: str) -> None:
        """An object is whole."""
        call = call_of(text)
        if call is None:
            self._no_call(text)
            return
        self._add(call)
        self._step = self._closing

    def _closing(self) -> bool:
        """Behind an object."""
        raise NotImplementedError

    # -- helpers

    def _add(self, call: ToolCall) -> None:
        self._calls.append(call)
        self._has_calls, self._raw = True, []

    def _no_call(self, more: str = "") -> None:
        """What was opened is none."""
        self._content += (*self._raw, more)
        self._raw = []
        self._step = self._in_text

    def _begin_json(self, num_before: int) -> bool:
        """The next sign but so many is an object's."""
        self._raw.append(self._held[:num_before])
        self._held = self._held[num_before:]
        self._json, self._step = JsonText(), self._in_json
        return True

    def _without_space(self) -> str:
        """What is held, but for white space at its beginning, which is of the call."""
        held = self._held
        self._held = bare = held.lstrip()
        if len(bare) < len(held):
            self._raw.append(held[: len(held) - len(bare)])
        return bare

    def _skip(self, signs: str) -> str:
        """What follows white space and `signs`, which are dropped where a call was read."""
        self._held = self._held.lstrip(" \t\r\n" + signs)
        return self._held


class HermesParser(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2 Pro, Qwen 2.5 and 3."""

    opening = "<tool_call>"
    reads_special_tokens = True  # of some models they are
    _ending = "</tool_call>"

    def _closing(self) -> bool:
        bare = self._skip("")
        if len(bare) < len(self._ending) and self._ending.startswith(bare):
            return False
        if bare.startswith(self._ending):
            self._held = bare[len(self._ending) :]
        self._step = self._in_text
        return True


class LlamaParser(ToolParser):
    """`{"name": ..., "parameters": {...}}` and nothing before it; several with `;` between them:
    Llama 3.1 to 3.3."""

    opening = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._step = self._at_start

    def _at_start(self) -> bool:
        bare = self._without_space()
        if len(bare) < len(self.opening) and self.opening.startswith(bare):
            return False
        self._step = self._opened
        if bare.startswith(self.opening):
            self._raw.append(self.opening)
            self._held = bare[len(self.opening) :]
        return True

    def _closing(self) -> bool:
        bare = self._skip(";")
        if bare.startswith("{"):
            return self._begin_json(0)
        if bare:
            self._step = self._in_text
        return bool(bare)


class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and `[TOOL_CALLS]name{...}` or
    `[TOOL_CALLS]name[ARGS]{...}` of later models."""

    opening = "[TOOL_CALLS]"
    reads_special_tokens = True
    _head = re.compile(r"([\w.-]{1,256}+)\s*+(?:\[CALL_ID\]\s*+\w*+\s*+)?+(?:\[ARGS\]\s*+)?+")
    _most_head = 400

    def __init__(self) -> None:
        super().__init__()
        self._name: str | None = None

    def new_id(self) -> str:
        return "".join(secrets.choice(_SIGNS) for _ in range(9))  # templates refuse any other

    def _opened(self) -> bool:
        bare = self._without_space()
        if not bare:
            return False
        if bare[0] == "[":
            self._raw.append("[")
            self._held, self._step = bare[1:], self._in_list
            return True
        brace = bare.find("{", 0, self._most_head)
        if brace < 0 and len(bare) < self._most_head:
            return False
        head = self._head.fullmatch(bare[: max(brace, 0)])
        if head is None:
            self._no_call()
            return True
        self._name = head[1]
        return self._begin_json(brace)

    def _in_list(self) -> bool:
        # until a call was read it may turn out to be none
        bare = self._without_space() if self._raw else self._skip(",")
        if not bare:
            return False
        if bare[0] == "{":
            return self._begin_json(0)
        if bare[0] == "]" and not self._raw:
            self._held, self._step = bare[1:], self._in_text
            return True
        self._no_call()
        return True

    def _take(self, text: str) -> None:
        name, self._name = self._name, None
        if name is None:
            super()._take(text)
        elif (arguments := _object_of(text)) is None:
            self._no_call(text)
        else:
            self._add(ToolCall(name, _json_of(arguments)))
            self._step = self._in_text

    def _closing(self) -> bool:
        self._step = self._in_list
        return True


PARSERS: Mapping[ParserName, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": LlamaParser,
    "mistral": MistralParser,
}


def call_of(text: str) -> ToolCall | None:
    """A call as an object with a name and arguments; None: it is something else."""
    value = _object_of(text)
    name = None if value is None else value.get("name")
    if value is None or not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    given = (value[key] for key in ("arguments", "parameters") if value.get(key) is not None)
    arguments: Any = next(given, {})
    if isinstance(arguments, str):  # some models write JSON into the JSON
        arguments = _object_of(arguments)
    return ToolCall(name, _json_of(arguments)) if isinstance(arguments, dict) else None


def _object_of(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_number)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _number(word: str) -> float:
    return float(word) if math.isfinite(float(word)) else _no_number(word)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _json_of(value: dict[str, Any]) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if text.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in text):
        return text
    return json.dumps(value)  # half a surrogate pair, which no answer can hold


def _num_held(text: str, mark: str) -> int:
    """How many characters at the end of `text` could be the beginning of `mark`."""
    for num in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:num]):
            return num
    return 0
