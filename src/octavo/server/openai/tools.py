"""Tools of a chat: what a request may ask for, and calls in the shapes that clients know."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from octavo.errors import InvalidRequestError
from octavo.server.openai.protocol import ChatRequest
from octavo.server.tools.parsers import PARSERS, Parsed, ParserName, ToolCall

if TYPE_CHECKING:
    from octavo.server.config import ServeConfig


def parser_name_of(config: ServeConfig, body: ChatRequest) -> ParserName | None:
    """How calls are to be found in the answers to a request; None: they are not looked for.

    Raises `InvalidRequestError` for what has no effect, or cannot have the one it is to have.
    """
    if not body.tools:
        for name in ("tool_choice", "parallel_tool_calls"):
            if getattr(body, name) not in (None, "none"):
                raise InvalidRequestError(f"{name} is about tools: give some", parameter=name)
        return None
    if body.tool_choice == "none":
        if body.parallel_tool_calls is not None:
            raise InvalidRequestError(
                "parallel_tool_calls has no effect with tool_choice 'none': leave it out",
                parameter="parallel_tool_calls",
            )
        return None
    parser = config.tool_call_parser
    if parser is None:
        raise InvalidRequestError(
            "tools with tool_choice 'auto' (the default) need a server that was started with "
            "--enable-auto-tool-choice and --tool-call-parser; with 'none' they are told to the "
            "model and its answer is text",
            parameter="tool_choice",
        )
    if PARSERS[parser].reads_special_tokens:
        if body.skip_special_tokens:
            raise InvalidRequestError(
                f"skip_special_tokens must not be true with tools: the parser {parser} finds calls "
                "by them",
                parameter="skip_special_tokens",
            )
        body.skip_special_tokens = False
    return parser


def told_tools(body: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools for the template."""
    if not body.tools:
        return None
    return [given(tool) | {"function": given(tool.function)} for tool in body.tools]


def given(body: BaseModel) -> dict[str, Any]:
    """The members that were sent, as they are: a copy of all that is inside of them may take
    seconds."""
    return {name: value for name, value in body if name in body.model_fields_set}


class CallFinder:
    """Finds the calls in one choice. only_first: drop all others."""

    def __init__(self, name: ParserName, *, only_first: bool) -> None:
        self._parser = PARSERS[name]()
        self._only_first = only_first
        self.num_calls = 0

    def push(self, text: str, *, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """(What is content, the calls that are whole now) of more text."""
        content, calls = self._parser.push(text)
        if is_last:
            rest: Parsed = self._parser.finish()
            content, calls = content + rest.content, calls + rest.calls
        if self._only_first:
            calls = calls[: 1 - self.num_calls] if self.num_calls < 1 else []
        self.num_calls += len(calls)
        return content, [self._shape(call) for call in calls]

    def _shape(self, call: ToolCall) -> dict[str, Any]:
        return {"id": self._parser.new_id(), "type": "function", "function": call._asdict()}

    def finish_reason(self, engines: str | None) -> str | None:
        """Instead of the engine's."""
        return "tool_calls" if self.num_calls and engines == "stop" else engines


def with_arguments(call: Any, message: int, number: int) -> Any:
    """A call of an earlier answer, its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    where = f"messages.{message}.tool_calls.{number}"
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where} must have a function with a name", parameter="messages")
    given = function.get("arguments")
    try:
        arguments = (json.loads(given) if given else {}) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{where}.function.arguments is no JSON: {error}", parameter="messages"
        ) from None
    if arguments is not None and not isinstance(arguments, dict):
        raise InvalidRequestError(
            f"{where}.function.arguments must be an object, as JSON", parameter="messages"
        )
    return {**call, "function": {**function, "arguments": arguments or {}}}
