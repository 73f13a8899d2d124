"""Fields that nobody knows, or that octavo knows and does not have: never ignored in silence."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from octavo.errors import InvalidRequestError

IGNORED_HEADER = "X-Octavo-Ignored"
_TOOLS = "tools are for /v1/chat/completions"
_OLD_TOOLS = "use tools and tool_choice of /v1/chat/completions"
_STORE = "nothing is stored: send the whole conversation in input"
_WHY = {
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "parallel_tool_calls": _TOOLS,
    "functions": _OLD_TOOLS,
    "function_call": _OLD_TOOLS,
    "audio": "the models here speak text",
    "prediction": "predicted outputs are not supported",
    "web_search_options": "there is no web search",
    "reasoning_effort": "set what the model's template knows with chat_template_kwargs",
    "verbosity": "ask for it in a message",
    "suffix": "inserting is not supported: put what follows into the prompt",
    "prompt_cache_key": "equal prefixes are found by themselves; keep them apart with cache_salt",
    "guided_json": "structured output is not supported",
    "guided_regex": "structured output is not supported",
    "guided_choice": "structured output is not supported",
    "guided_grammar": "structured output is not supported",
    "structured_outputs": "structured output is not supported",
    "documents": "put them into a message, or into chat_template_kwargs",
    "previous_response_id": _STORE,
    "conversation": _STORE,
    "prompt": "there are no stored prompts: send the text in input and instructions",
    "reasoning": "set what the model's template knows, through /v1/chat/completions",
    "thinking": "set what the model's template knows, through /v1/chat/completions",
    "max_tool_calls": _TOOLS,
    "context_management": "what does not fit is refused: send fewer messages",
    "mcp_servers": _TOOLS,
    "container": _TOOLS,
    "output_config": "structured output is not supported",
    "output_format": "structured output is not supported",
    "stop": "this API has none: use /v1/chat/completions",
}
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none",),
    "function_call": ("none",),
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
}
"""Values that ask for nothing, besides null."""
_PART = ("type", "text")
_NO_PART_VALUES: tuple[Any, ...] = (None, [], {"type": "ephemeral"})
"""`annotations: []` comes back from answers; `cache_control` asks for what is done anyway."""
_MAX_NAME = 80
"""Characters of a name that are looked at and told."""
_MAX_NAMED = 32
"""Names in the header."""


def ignored_fields(body: BaseModel, *, is_lenient: bool) -> dict[str, str]:
    """Response headers that name what is ignored, empty when nothing is.

    Raises `InvalidRequestError` naming every unknown field and the nearest known one; under
    `is_lenient` (`--compat lenient`) those are ignored.
    """
    found = list(_unknown(body, ""))
    if not found:
        return {}
    if is_lenient:
        return ignored_header([path for path, _, _ in found])
    told = "; ".join(_told(path, name, owner) for path, name, owner in found[:10])
    more = f"; and {len(found) - 10} more" if len(found) > 10 else ""
    raise InvalidRequestError(
        f"{told}{more} (a server started with --compat lenient ignores them)",
        parameter=found[0][0],
    )


def ignored_header(paths: Sequence[str]) -> dict[str, str]:
    """Names what is ignored, if anything is."""
    names = [*map(_header_text, paths[:_MAX_NAMED])]
    if len(paths) > _MAX_NAMED:
        names.append(f"and {len(paths) - _MAX_NAMED} more")
    return {IGNORED_HEADER: ", ".join(names)} if paths else {}


def _unknown(body: BaseModel, prefix: str) -> Iterator[tuple[str, str, BaseModel]]:
    for name, value in (body.model_extra or {}).items():
        asks_nothing = value is None or value in _HARMLESS.get(name, ())
        if name not in _WHY or not asks_nothing:
            yield f"{prefix}{name}", name, body
    for name in type(body).model_fields:
        child = getattr(body, name)
        if name == "messages" and isinstance(child, list):
            yield from _unknown_of_parts(child, body)
        is_closed = isinstance(child, BaseModel) and child.model_config.get("json_schema_extra")
        if is_closed:
            yield from _unknown(child, f"{prefix}{name}.")


def _unknown_of_parts(
    messages: Sequence[BaseModel], body: BaseModel
) -> Iterator[tuple[str, str, BaseModel]]:
    """Members of messages are for the template; of their parts it is given the text alone."""
    for i, message in enumerate(messages):
        content = getattr(message, "content", None)
        for k, part in enumerate(content if isinstance(content, list) else ()):
            for name, value in part.items() if isinstance(part, dict) else ():
                is_text = part.get("type") in ("text", "input_text", "output_text")
                if is_text and name not in _PART and value not in _NO_PART_VALUES:
                    yield f"messages.{i}.content.{k}.{name}", name, body


def _told(path: str, name: str, owner: BaseModel) -> str:
    why = _WHY.get(name)
    if why is not None:
        return f"{path}: {why}"
    near = difflib.get_close_matches(name[:_MAX_NAME], type(owner).model_fields, n=1)
    hint = f", did you mean {near[0]}?" if near else ""
    return f"unknown field {path!r:.80}{hint}"


def _header_text(path: str) -> str:
    """Without what could not stand in a header."""
    return "".join(c for c in path[:_MAX_NAME] if c.isascii() and c.isprintable() and c != ",")
