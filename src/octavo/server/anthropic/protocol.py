"""What clients send to /v1/messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from octavo.server.openai.protocol import Label, NoTools, RequestBody, Text, Words

_INT64 = 2**63 - 1
_TEXT = {"type": "string"}
_BLOCKS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "type": {"enum": ["text"]},
            "text": _TEXT,
            "cache_control": {"anyOf": [{"enum": [{"type": "ephemeral"}]}, {"type": "null"}]},
        },
        "required": ["type", "text"],
        "additionalProperties": False,
    },
}
_SYSTEM = {"anyOf": [_TEXT, _BLOCKS, {"type": "null"}]}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["user", "assistant"]},
            "content": {"anyOf": [_TEXT, _BLOCKS]},
        },
        "required": ["role", "content"],
        "additionalProperties": False,
    },
}


class Metadata(RequestBody):
    """Who asks."""

    user_id: Label | None = Field(
        None, description="Noted in the server's request log (--log-requests); decides nothing."
    )


class CacheControl(RequestBody):
    """Of a whole request."""

    type: Literal["ephemeral"]


class NoToolChoice(RequestBody):
    """The only choice."""

    type: Literal["none"]


class ConversationFields(RequestBody):
    """What becomes the prompt."""

    model: str | None = Field(None, description="The served model's name; any other is a 404.")
    messages: Annotated[Any, WithJsonSchema(_MESSAGES)] = Field(
        description="The conversation so far: texts, or lists of text blocks. Of one role in a row "
        "they are one message; if the last is the assistant's, the answer goes on with it."
    )
    system: Annotated[Any, WithJsonSchema(_SYSTEM)] = Field(
        None, description="A system message before the others: text or text blocks."
    )
    tools: NoTools | None = Field(None, description="There are none.")
    tool_choice: NoToolChoice | None = Field(None, description="As there are no tools.")
    cache_control: CacheControl | None = Field(
        None, description="Asks for what is done anyway: equal prefixes are found in the cache."
    )


class CountTokensRequest(ConversationFields):
    """The body of /v1/messages/count_tokens."""


class MessagesRequest(ConversationFields):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=1, le=_INT64, description="Most tokens to generate.")
    stop_sequences: Words | None = Field(None, description="Strings that end the text.")
    stream: bool | None = Field(None, description="Answer by server-sent events.")
    temperature: float | None = Field(None, ge=0, description="1; 0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling; 1 is all.")
    top_k: int | None = Field(
        None, ge=0, le=_INT64, description="The most probable tokens only; 0 is all."
    )
    metadata: Metadata | None = Field(None, description="Who asks.")
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="There is one.")
    seed: int | None = Field(None, ge=-(2**63), le=_INT64, description="Fixes the random stream.")
    ignore_eos: bool | None = Field(None, description="Go on after end-of-sequence.")
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="Smaller runs earlier; needs such a policy."
    )
    cache_salt: Text | None = Field(None, description="Share prefixes only with equal salts.")
    return_kv_usage: bool | None = Field(
        None, description="What the request cost the KV pool, as usage.kv."
    )
