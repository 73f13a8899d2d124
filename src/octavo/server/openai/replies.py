"""What the endpoints answer, for /openapi.json: the answers themselves are written as JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "abort"]
ChatFinishReason = Literal["stop", "length", "abort", "tool_calls"]


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class Error(BaseModel):
    """OpenAI's shape."""

    error: ErrorBody


class PrefixMissBody(BaseModel):
    """Prompt blocks that had to be computed, and why."""

    prompt: int
    first_block: int
    num_blocks: int
    reason: str
    evicted_s_ago: float | None
    diverged_at: int | None


class KVUsage(BaseModel):
    """What a request cost the KV pool (`return_kv_usage`)."""

    peak_blocks: int
    block_seconds: float
    shared_tokens: int
    cached_tokens: int
    resumed_tokens: int
    forked_tokens: int
    misses: list[PrefixMissBody]


class PromptDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int


class UsageBody(BaseModel):
    """Tokens taken and made."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    kv: KVUsage | None = None


class PromptLogprob(BaseModel):
    """Of a token of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class LogprobLists(BaseModel):
    """Parallel lists over the tokens of a choice."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One completion."""

    index: int
    text: str
    logprobs: LogprobLists | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageBody | None


class TokenLogprob(BaseModel):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob):
    """A token that came."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """One entry a token."""

    content: list[ChatTokenLogprob] | None
    refusal: None


class CalledFunction(BaseModel):
    """What the model calls."""

    name: str
    arguments: str
    """JSON."""


class ToolCallBody(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCallBody] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | None = None
    choices: list[ChatChoice]
    usage: UsageBody | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class Model(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(BaseModel):
    """All names."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(BaseModel):
    """The answer of /detokenize."""

    prompt: str


Responses = dict[int | str, dict[str, Any]]


def _errors(**what: str) -> Responses:
    return {int(s[1:]): {"model": Error, "description": text} for s, text in what.items()}


PLAIN = _errors(
    s401="No valid API key.",
    s404="No such model.",
    s429="More than a limit of the key allows; Retry-After says when.",
    s503="Starting, restarting, draining or overloaded; Retry-After says when.",
)
ASKING = PLAIN | _errors(
    s400="The body is no JSON, or a field is unknown, out of range or has no effect; `param` names "
    "it.",
    s413="The body is larger than --max-body-bytes.",
)
GENERATING: Responses = ASKING | {
    200: {
        "description": "The answer; with `stream` the chunks as server-sent events.",
        "content": {"text/event-stream": {}},
    },
    500: {"model": Error, "description": "A step failed; other requests go on."},
}
