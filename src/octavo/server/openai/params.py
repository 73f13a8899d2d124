"""From a request's fields to `SamplingParams` or `BeamSearchParams`."""

from __future__ import annotations

from typing import Any

from octavo.engine.input import Params
from octavo.errors import InvalidRequestError
from octavo.request import BeamSearchParams, SamplingParams
from octavo.server.openai.protocol import ChatRequest, CompletionRequest, GenerationFields

_PLAIN = (
    "n", "best_of", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "allowed_token_ids", "bad_words",
    "skip_special_tokens", "spaces_between_special_tokens", "prompt_logprobs",
)  # fmt: skip
"""Fields that are `SamplingParams` fields of the same name and meaning."""
_BEAM = (
    "n", "best_of", "temperature", "ignore_eos", "include_stop_str_in_output", "length_penalty",
    "early_stopping",
)  # fmt: skip
_BEAM_ONLY = ("length_penalty", "early_stopping")
_NOT_DECODING = (
    "model", "prompt", "messages", "use_beam_search", "max_tokens", "max_completion_tokens",
    "stream", "stream_options", "echo", "add_special_tokens", "truncate_prompt_tokens", "priority",
    "cache_salt", "return_token_ids", "return_kv_usage", "user", "add_generation_prompt",
    "continue_final_message", "chat_template", "chat_template_kwargs", "response_format",
    "metadata", "safety_identifier", "store", "modalities", "service_tier", "tools",
    "tool_choice", "parallel_tool_calls",
)  # fmt: skip
"""Fields that have their effect with beams as without."""
_NOTHING: dict[str, Any] = {
    "top_p": 1, "top_k": 0, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0,
    "repetition_penalty": 1, "min_tokens": 0, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "logprobs": False, "return_tokens_as_token_ids": False,
}  # fmt: skip
"""Values that ask for nothing: beams may be given them."""
COMPLETION_TOKENS = 16
"""As OpenAI's and vLLM's: the default of `max_tokens` of a completion."""


def params_of(body: CompletionRequest | ChatRequest, *, max_tokens: int | None) -> Params:
    """Raises `InvalidRequestError` naming the field.

    max_tokens: what `max_tokens_of` gave; None for what the context leaves.
    """
    check_stream(body)
    if body.use_beam_search:
        assert max_tokens is not None, "beam search needs a limit"
        return _beam_params(body, max_tokens)
    for name in _BEAM_ONLY:
        if getattr(body, name) is not None:
            raise _refusal(name, "has an effect with use_beam_search only: set that, or leave it")
    values = {name: getattr(body, name) for name in _PLAIN if getattr(body, name) is not None}
    if body.logit_bias is not None:
        values["logit_bias"] = {int(key): bias for key, bias in body.logit_bias.items()}
    values["logprobs"] = num_logprobs(body)
    if body.return_tokens_as_token_ids and values["logprobs"] is None:
        raise _refusal("return_tokens_as_token_ids", "is about logprobs: ask for them, too")
    if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        values["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return SamplingParams(**values, max_tokens=max_tokens)


def max_tokens_of(body: CompletionRequest | ChatRequest) -> int | None:
    """What was asked for; None: what the context leaves. 0 is for an echoed prompt alone."""
    if isinstance(body, CompletionRequest):
        given = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        if given == 0 and not body.echo:
            raise _refusal("max_tokens", "must be at least 1, got 0; 0 is for echo=true")
        return given
    both = body.max_tokens is not None and body.max_completion_tokens is not None
    if both and body.max_tokens != body.max_completion_tokens:
        raise _refusal(
            "max_tokens",
            f"{body.max_tokens} contradicts max_completion_tokens {body.max_completion_tokens}: "
            "give one of the two",
        )
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return body.max_tokens


def num_logprobs(body: CompletionRequest | ChatRequest) -> int | None:
    """Top logprobs a token; None: none at all."""
    if isinstance(body, CompletionRequest):
        return body.logprobs
    if body.top_logprobs is not None and not body.logprobs:
        if body.top_logprobs == 0:
            return None
        raise _refusal("top_logprobs", "needs logprobs: true")
    return (body.top_logprobs or 0) if body.logprobs else None


def check_stream(body: CompletionRequest | ChatRequest) -> None:
    """Refuse what a stream cannot have, and what only a stream can."""
    if not body.stream:
        if body.stream_options is not None:
            raise _refusal("stream_options", "needs stream: true")
        return
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise _refusal("stream_options.continuous_usage_stats", "needs include_usage: true")
    if body.use_beam_search:
        raise _refusal(
            "use_beam_search",
            "cannot be streamed: which beams are best is known at the end; set stream to false",
        )
    if body.best_of is not None and body.best_of > (body.n or 1):
        raise _refusal(
            "best_of",
            f"{body.best_of} above n={body.n or 1} cannot be streamed: which completions are best "
            "is known at the end; set stream to false",
        )
    if body.prompt_logprobs is not None:
        raise _refusal("prompt_logprobs", "cannot be streamed: set stream to false, or use echo")


def _beam_params(body: GenerationFields, max_tokens: int) -> BeamSearchParams:
    for name in type(body).model_fields:
        value = getattr(body, name)
        if name in _BEAM or name in _NOT_DECODING or value is None:
            continue
        if value in ([], {}) or _asks_nothing(name, value):
            continue
        raise _refusal(name, "has no effect on a beam search: leave it out")
    num_best = body.n or 1
    width = num_best if body.best_of is None else body.best_of
    if width < num_best:
        raise _refusal("best_of", f"must be at least n={num_best}, got {width}")
    given = {name: getattr(body, name) for name in _BEAM[2:] if getattr(body, name) is not None}
    return BeamSearchParams(beam_width=width, max_tokens=max(max_tokens, 1), **given)


def _asks_nothing(name: str, value: object) -> bool:
    if name not in _NOTHING or value != _NOTHING[name]:
        return False
    return isinstance(value, bool) == isinstance(_NOTHING[name], bool)  # logprobs 0 is not False


def _refusal(name: str, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} {rule}", parameter=name)
