"""Prompts as token ids: from texts, ids, or messages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import Receive

from octavo.engine.remote.renderer import is_template_name
from octavo.errors import InvalidRequestError, RequestCapacityError
from octavo.server.errors import OverloadedError
from octavo.server.openai.collect import while_there
from octavo.server.openai.protocol import (
    ChatMessage,
    CompletionRequest,
    GenerationFields,
    TemplateFields,
    TokenizeRequest,
)
from octavo.server.openai.tools import given, with_arguments

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine
    from octavo.server.state import ServerState

_RESERVED = (
    "messages", "chat_template", "add_generation_prompt", "continue_final_message", "self",
    "tools", "max_tokens",
)  # fmt: skip
_MANY_MESSAGES = 256
_MOST_RENDERED = 64
"""Requests with templates of their own at a time; each may take seconds."""


@dataclass(frozen=True, slots=True)
class PromptIds:
    """One prompt."""

    token_ids: list[int]
    text: str | None
    """None: it came as ids (or was cut), and is to be decoded by who wants its text."""

    def prompt(self, cache_salt: str | None) -> dict[str, Any]:
        """As the engine takes it."""
        found: dict[str, Any] = {"prompt_token_ids": self.token_ids}
        if cache_salt is not None:
            found["cache_salt"] = cache_salt
        return found


async def completion_prompts(
    engine: AsyncEngine, body: CompletionRequest, max_prompts: int | None
) -> list[PromptIds]:
    """The prompt, or each of the list."""
    given = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        prompts: list[Any] = [given]
    else:
        prompts = list(given)
    if max_prompts is not None and len(prompts) > max_prompts:
        raise InvalidRequestError(
            f"prompt holds {len(prompts):,} prompts, more than this server takes at once "
            f"(--max-prompts {max_prompts:,}): send them in several requests",
            parameter="prompt",
        )
    if body.add_special_tokens and not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidRequestError(
            "add_special_tokens has no effect on token ids: put them into the prompt yourself",
            parameter="add_special_tokens",
        )
    add_special = body.add_special_tokens is not False
    most = _most_tokens(engine, body)
    found = []
    for prompt in prompts:
        if isinstance(prompt, str):
            token_ids = await engine.encode(prompt, add_special, max_tokens=most)
            ids = _truncated(engine, body, token_ids, body.max_tokens)
            found.append(PromptIds(ids, prompt if ids is token_ids else None))
        else:
            found.append(PromptIds(_truncated(engine, body, prompt, body.max_tokens), None))
        _check_not_empty(found[-1].token_ids, "prompt")
    return found


async def chat_ids(
    state: ServerState,
    body: TemplateFields | TokenizeRequest,
    messages: Sequence[ChatMessage],
    tools: Sequence[Any] | None = None,
    *,
    receive: Receive,
) -> list[int]:
    """Messages through the chat template. tools: for it, as plain data. Of a request that
    generates no more than can be served; else all of them. receive: tells when the client leaves,
    for which a template of its own is not rendered any more (`ClientGoneError`)."""
    variables = dict(body.chat_template_kwargs or {})
    for name in _RESERVED:
        if name in variables:
            raise InvalidRequestError(
                f"chat_template_kwargs cannot set {name!r}: it is a field of its own",
                parameter="chat_template_kwargs",
            )
    if tools:
        variables["tools"] = tools
    goes_on = body.continue_final_message is True
    generates = body.add_generation_prompt
    if generates is None:
        generates = True
    engine = state.engine
    check_chat(state, len(messages), bool(tools), has_own_template=body.chat_template is not None)
    if len(messages) > _MANY_MESSAGES:
        told = await asyncio.to_thread(_told, messages)
    else:
        told = _told(messages)
    options = {"add_generation_prompt": generates, "continue_final_message": goes_on} | variables
    try:
        most = _most_tokens(engine, body) if isinstance(body, GenerationFields) else None
        token_ids = await _rendered(state, body.chat_template, told, options, most, receive=receive)
    except RecursionError:
        raise InvalidRequestError(
            "messages, tools or chat_template_kwargs are nested too deeply", parameter="messages"
        ) from None
    if body.add_special_tokens:
        before, after = await _ends(engine)
        token_ids = before + token_ids + after
    _check_not_empty(token_ids, "messages")
    return token_ids


def _told(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(index: int, message: ChatMessage) -> dict[str, Any]:
    """As templates expect it: the arguments of calls, which clients send as JSON, as objects."""
    found = given(message)
    calls = found.get("tool_calls")
    if isinstance(calls, list) and message.role == "assistant":
        found["tool_calls"] = [with_arguments(call, index, k) for k, call in enumerate(calls)]
        if not calls:  # templates look whether there are any, or whether the member is there
            del found["tool_calls"]
    return found


async def _ends(engine: AsyncEngine) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and behind a text."""
    bare, whole = await engine.encode("a", False), await engine.encode("a", True)
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def truncated_chat(
    engine: AsyncEngine, body: GenerationFields, token_ids: list[int], max_tokens: int | None
) -> list[int]:
    """The end of a conversation, if it is to be cut."""
    return _truncated(engine, body, token_ids, max_tokens)


def _truncated(
    engine: AsyncEngine, body: GenerationFields, token_ids: list[int], max_tokens: int | None
) -> list[int]:
    keep = body.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens must be -1 or at least 1, got 0: nothing would be left",
            parameter="truncate_prompt_tokens",
        )
    if keep < 0:
        keep = max(engine.info.max_model_len - max(max_tokens or 1, 1), 1)
    return token_ids if len(token_ids) <= keep else token_ids[-keep:]


def _most_tokens(engine: AsyncEngine, body: GenerationFields) -> int | None:
    """Of a prompt that can be served; None: any number, as it is truncated."""
    return engine.info.max_model_len if body.truncate_prompt_tokens is None else None


async def _rendered(
    state: ServerState,
    source: str | None,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    max_tokens: int | None,
    *,
    receive: Receive,
) -> list[int]:
    """Through the server's template, or one that a request has brought."""
    engine, renderer = state.engine, state.renderer
    if source is None:
        return await engine.chat_prompt(
            messages, chat_template=state.chat_template, max_tokens=max_tokens, **options
        )
    if renderer is None:
        raise InvalidRequestError(
            "chat_template: this server does not run its clients' templates: leave it out, or "
            "start the server with --trust-request-chat-template, or with --chat-template FILE",
            parameter="chat_template",
        )
    if is_template_name(source):
        return await engine.chat_prompt(
            messages, chat_template=source, max_tokens=max_tokens, **options
        )
    if renderer.num_asking >= _MOST_RENDERED:
        raise OverloadedError(
            f"{renderer.num_asking} requests with a chat_template wait for it to be rendered: come "
            "again", retry_after_s=1.0,
        )  # fmt: skip
    assert engine.tokenizer is not None, "refused when the server started"
    special_tokens = engine.tokenizer.special_tokens
    rendering = renderer.render(source, messages, special_tokens, options)
    text = await while_there(receive, rendering)
    return await engine.encode(text, False, max_tokens=max_tokens)


def check_chat(
    state: ServerState,
    num_messages: int,
    has_tools: bool = False,
    *,
    has_own_template: bool = False,
) -> None:
    """Refuse a conversation that cannot fit, and one for a model that has no template for it.

    has_own_template: the request brings one.
    """
    most, tokenizer = state.engine.info.max_model_len, state.engine.tokenizer
    if num_messages > most:  # a template writes a token of each, and more
        raise RequestCapacityError(
            f"{num_messages:,} messages exceed max_model_len {most:,} tokens: send fewer",
            parameter="messages",
        )
    if state.chat_template is not None or has_own_template or tokenizer is None:
        return
    if tokenizer.chat_template is None and not (has_tools and tokenizer.chat_templates):
        raise InvalidRequestError(
            "the model has no chat template: send a plain prompt to /v1/completions, or start the "
            "server with --chat-template FILE",
            parameter="messages",
        )


def _check_not_empty(token_ids: list[int], name: str) -> None:
    if not token_ids:
        raise InvalidRequestError(
            f"{name} has no tokens: give at least one (or the id of begin-of-sequence)",
            parameter=name,
        )


def check_fits(
    engine: AsyncEngine,
    num_prompt: int,
    max_tokens: int | None,
    name: str,
    limit_name: str = "max_tokens",
) -> None:
    """Raises what the scheduler would say later, once the response has begun to be waited for."""
    limit = engine.info.max_model_len
    wanted = 1 if max_tokens is None else max_tokens
    if num_prompt + wanted <= limit:
        return
    raise RequestCapacityError(
        f"prompt {num_prompt:,} + {wanted:,} output tokens = {num_prompt + wanted:,} tokens exceed "
        f"max_model_len {limit:,}: shorten the prompt, or lower {limit_name} to at most "
        f"{max(limit - num_prompt, 0):,}",
        parameter=name if num_prompt >= limit else limit_name,
    )
