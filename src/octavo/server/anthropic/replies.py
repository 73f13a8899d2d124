"""What Anthropic's endpoints answer, for /openapi.json."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from octavo.server.openai import replies
from octavo.server.openai.replies import KVUsage

StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


class TextBlock(BaseModel):
    """What the model said."""

    type: Literal["text"]
    text: str
    citations: None


class MessageUsage(BaseModel):
    """Tokens taken and made. input_tokens: those of the prompt that were not in the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    service_tier: Literal["standard"]
    kv: KVUsage | None = None


class MessageBody(BaseModel):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock]
    stop_reason: StopReason
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class ErrorBody(BaseModel):
    """What went wrong."""

    type: str
    message: str


class Error(BaseModel):
    """Anthropic's shape."""

    type: Literal["error"]
    error: ErrorBody


def _shaped(described: replies.Responses) -> replies.Responses:
    return {
        status: answer | ({"model": Error} if "model" in answer else {})
        for status, answer in described.items()
    }


ASKING = _shaped(replies.ASKING)
GENERATING = _shaped(replies.GENERATING)
