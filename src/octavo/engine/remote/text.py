"""The side of an engine that knows text: tokenizer and chat templates, without torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.tokenizers import tokenizer_of
from octavo.errors import InvalidRequestError, RequestCapacityError
from octavo.text.chat import ChatTemplate
from octavo.text.chat import chat_template as find_template
from octavo.text.tokenizer import LONG_TEXT, Tokenizer

_CHARS_A_TOKEN = 16
"""Few texts have so many, on average."""
_FEW_MESSAGES = 64
_PLAIN = frozenset(("role", "content"))


class TextSide:
    """Of one model. tokenizer: None where prompts are token ids only."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._templates: dict[str | None, ChatTemplate] = {}
        """The model's own as None; of others the last one."""

    @classmethod
    def load(cls, config: EngineConfig) -> TextSide:
        """Raises `ModelError` for a model without a usable tokenizer."""
        return cls(tokenizer_of(config))

    def _needed(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(
                "text needs a tokenizer, and skip_tokenizer_init left it out: send token ids",
                parameter="prompt",
            )
        return self.tokenizer

    async def encode(
        self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of a text. max_tokens: raise `RequestCapacityError` if it is sure to have more,
        which its beginning tells: all of it may take minutes. (Of those just above it all are
        cut, and the scheduler refuses them with their number.)"""
        encode = self._needed().encode
        if len(text) <= LONG_TEXT:
            return encode(text, add_special_tokens)
        size = _CHARS_A_TOKEN * (max_tokens or 0)
        if max_tokens is not None and size < len(text) // 2:
            num = len(await asyncio.to_thread(encode, text[:size], False))
            if num > 2 * max_tokens:  # where it is cut off a few may be other ones
                raise RequestCapacityError(
                    f"the first {size:,} of {len(text):,} characters alone are {num:,} tokens and "
                    f"exceed max_model_len {max_tokens:,}: shorten the prompt",
                    parameter="prompt",
                )
        return await asyncio.to_thread(encode, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of token ids."""
        return self._needed().decode(token_ids, skip_special_tokens)

    async def chat_prompt(
        self,
        messages: Sequence[Any],
        *,
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        max_tokens: int | None,
        **variables: Any,
    ) -> list[int]:
        """A conversation as token ids. max_tokens: as of `encode`."""
        has_tools = bool(variables.get("tools"))
        if has_tools and "tool_use" in self._needed().chat_templates:
            chat_template = chat_template or "tool_use"
        template = self._template(chat_template)
        if has_tools and not template.knows_tools:
            raise InvalidRequestError(
                "the model's chat template knows no tools: leave them out, or describe them in a "
                "message",
                parameter="tools",
            )
        render = partial(
            template.render,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        is_short = not variables and _is_short(messages)
        text = render() if is_short else await asyncio.to_thread(render)
        # The template writes the special tokens itself; adding them again would double them.
        return await self.encode(text, add_special_tokens=False, max_tokens=max_tokens)

    def _template(self, source: str | None) -> ChatTemplate:
        template = self._templates.get(source)
        if template is None:
            template = find_template(self._needed(), source)
            own = self._templates.get(None)
            self._templates = {source: template} if own is None else {None: own, source: template}
        return template


def _is_short(messages: Sequence[Any]) -> bool:
    """Whether they are few plain texts: anything else may be a megabyte of small objects."""
    return len(messages) < _FEW_MESSAGES and all(
        isinstance(message, dict)
        and message.keys() <= _PLAIN
        and isinstance(message.get("content"), str | None)
        for message in messages
    )
