"""What /v1/responses answers, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from octavo.server.openai.replies import KVUsage, TokenLogprob


class OutputLogprob(TokenLogprob):
    """A token that came."""

    top_logprobs: list[TokenLogprob]


class OutputText(BaseModel):
    """What the model said."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[OutputLogprob]


class OutputMessage(BaseModel):
    """The one output item."""

    id: str
    type: Literal["message"]
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class InputDetails(BaseModel):
    """Of the input's tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(BaseModel):
    """Of the output's tokens."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Tokens taken and made."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    kv: KVUsage | None = None


class IncompleteDetails(BaseModel):
    """Why it ended early."""

    reason: Literal["max_output_tokens"]


class ResponseBody(BaseModel):
    """The answer of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: IncompleteDetails | None
    output: list[OutputMessage]
    usage: ResponseUsage
    model: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    temperature: float
    top_p: float
    top_logprobs: int
    store: bool
    background: bool
    parallel_tool_calls: bool
    tool_choice: str
    tools: list[Any]
    truncation: Literal["disabled"]
    text: dict[str, Any]
