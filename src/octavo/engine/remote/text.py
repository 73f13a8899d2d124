"""The side of an engine that knows text: tokenizer and chat templates, without torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.tokenizers import tokenizer_of
from octavo.errors import InvalidRequestError
from octavo.text.chat import ChatTemplate
from octavo.text.chat import chat_template as find_template
from octavo.text.tokenizer import Tokenizer

_LONG_TEXT = 8_192
"""Characters from which on tokenizing is worth another thread: some 2 ms."""


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

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        encode = partial(self._needed().encode, text, add_special_tokens)
        return await asyncio.to_thread(encode) if len(text) > _LONG_TEXT else encode()

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
        **variables: Any,
    ) -> list[int]:
        """A conversation as token ids."""
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
        is_short = len(messages) < 64 and not has_tools  # each may be a megabyte of small objects
        text = render() if is_short else await asyncio.to_thread(render)
        # The template writes the special tokens itself; adding them again would double them.
        return await self.encode(text, add_special_tokens=False)

    def _template(self, source: str | None) -> ChatTemplate:
        template = self._templates.get(source)
        if template is None:
            template = find_template(self._needed(), source)
            own = self._templates.get(None)
            self._templates = {source: template} if own is None else {None: own, source: template}
        return template
