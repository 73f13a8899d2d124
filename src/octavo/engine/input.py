"""From what a user sends to what the scheduler takes: validation, tokenizing, resolved ids."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from typing import Any

from octavo.errors import InvalidRequestError, RequestCapacityError
from octavo.request import BeamSearchParams, Request, SamplerParams, SamplingParams
from octavo.text.tokenizer import Tokenizer

Prompt = str | list[int] | dict[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; a dict may hold "cache_salt"
too: only prompts of equal salt share cached prefixes."""
Params = SamplingParams | BeamSearchParams

_KEYS = ("prompt", "prompt_token_ids")
_SALT = "cache_salt"


class InputProcessor:
    """Makes `Request`s. Knows the tokenizer and the model's limits, and nothing of the engine.

    tokenizer: None where prompts are token ids only. vocab_size: ids the model has, padding
    included. eos_token_ids: tokens that end a sequence; the tokenizer's by default. seed: the
    engine's, source of the seeds of requests that bring none: the same accepted requests in the
    same order get the same seeds. capped_by: the flag of the pool that was too small for the
    model's context, where `max_model_len` was not asked for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] | None = None,
        seed: int = 0,
        capped_by: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._capped_by = capped_by
        if eos_token_ids is None:
            eos_token_ids = () if tokenizer is None else tokenizer.eos_token_ids
        # An id the model does not have is never sampled; masking it would hit another row's logits.
        self._eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self._seed = seed
        self._num_seeds = 0

    def limits(self) -> dict[str, Any]:
        """Keyword arguments that make another one for the same engine, in another process."""
        return {
            "vocab_size": self._vocab_size,
            "max_model_len": self._max_model_len,
            "eos_token_ids": sorted(self._eos_token_ids),
            "seed": self._seed,
            "capped_by": self._capped_by,
        }

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params,
        *,
        arrival_s: float = 0.0,
        priority: int = 0,
        client_id: str = "",
        max_kv_share: float | None = None,
    ) -> tuple[Request, str | None]:
        """The request, and the prompt's text (None for token ids).

        Raises `InvalidRequestError`, with `parameter` naming the field, for a prompt or a parameter
        that cannot be used; `RequestCapacityError` for a prompt longer than the context.
        """
        if not isinstance(params, Params):
            raise InvalidRequestError(
                "sampling_params must be SamplingParams or BeamSearchParams, got "
                f"{type(params).__name__}",
                parameter="sampling_params",
            )
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(
                f"request_id must be a string that is not empty, got {request_id!r}",
                parameter="request_id",
            )
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(
                f"priority must be a whole number, got {priority!r}", parameter="priority"
            )
        beam: BeamSearchParams | None = None
        stop_token_ids: Iterable[int] = ()
        if isinstance(params, BeamSearchParams):
            beam, sampler, n = params, _beam_sampler(params), params.beam_width
        else:
            sampler, n = self._sampler(params), params.num_sequences
            stop_token_ids = params.stop_token_ids or ()
        token_ids, text, salt = self.prompt(prompt)
        self._check_length(len(token_ids), params.max_tokens)
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampler=sampler,
            n=n,
            beam=beam,
            cache_salt=salt,
            max_tokens=params.max_tokens,
            eos_token_ids=frozenset() if params.ignore_eos else self._eos_token_ids,
            stop_token_ids=frozenset(stop_token_ids),
            priority=priority,
            arrival_s=arrival_s,
            client_id=client_id,
            max_kv_share=max_kv_share,
        )
        return request, text

    def accepted(self, params: Params) -> None:
        """A request that `process` made was taken: if it brought no seed, it has used one up."""
        if isinstance(params, SamplingParams) and params.seed is None:
            self._num_seeds += 1

    # -- the prompt -------------------------------------------------------------------------------

    def prompt(self, prompt: Prompt) -> tuple[list[int], str | None, str]:
        """(token ids, text if that is what came, cache salt) of a prompt; raises as `process`."""
        prompt, salt = _split_salt(prompt)
        name, value = _named(prompt)
        if isinstance(value, str):
            token_ids, text = self._encoded(value), value
        else:
            token_ids, text = self._checked_ids(value, name), None
        if not token_ids:
            raise InvalidRequestError(
                f"{name} is empty: give at least one token (a model's text may start from "
                '{"prompt_token_ids": [begin-of-sequence id]})',
                parameter=name,
            )
        if len(token_ids) >= self._max_model_len:
            raise RequestCapacityError(
                f"prompt {len(token_ids):,} + 1 output token = {len(token_ids) + 1:,} tokens exceed"
                f" {self._limit()}: shorten the prompt to at most {self._max_model_len - 1:,} "
                f"tokens, or {self._way_out()}",
                parameter=name,
            )
        return token_ids, text, salt

    def _check_length(self, num_prompt: int, max_tokens: int | None) -> None:
        """The scheduler refuses this too, but cannot say by what the context was capped."""
        if self._capped_by is None or max_tokens is None:
            return
        if num_prompt + max_tokens <= self._max_model_len:
            return
        raise RequestCapacityError(
            f"prompt {num_prompt:,} + max_tokens {max_tokens:,} = {num_prompt + max_tokens:,} "
            f"tokens exceed {self._limit()}: shorten the prompt, lower max_tokens to at most "
            f"{self._max_model_len - num_prompt:,}, or {self._way_out()}",
            parameter="max_tokens",
        )

    def _limit(self) -> str:
        text = f"max_model_len {self._max_model_len:,}"
        if self._capped_by is not None:
            text += " (what the KV pool held at the start, as --max-model-len was not set)"
        return text

    def _way_out(self) -> str:
        if self._capped_by is None:
            return "raise --max-model-len"
        return f"start with a larger KV pool: raise {self._capped_by}"

    def _encoded(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "prompt is text but the engine has no tokenizer: pass "
                '{"prompt_token_ids": [...]}, or start without --skip-tokenizer-init',
                parameter="prompt",
            )
        if not text:
            return []
        token_ids = self._tokenizer.encode(text)
        return self._checked_ids(token_ids, "prompt")

    def _checked_ids(self, token_ids: Collection[Any], name: str) -> list[int]:
        """A list of ids of the vocabulary; `name` is the parameter that a refusal names."""
        plain = not token_ids or set(map(type, token_ids)) == {int}
        if plain and (not token_ids or 0 <= min(token_ids) <= max(token_ids) < self._vocab_size):
            return list(token_ids)
        for place, token_id in enumerate(token_ids):
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InvalidRequestError(
                    f"{name} must hold token ids (whole numbers), got {token_id!r} at index "
                    f"{place}",
                    parameter=name,
                )
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    f"{name} holds token id {token_id} at index {place}, but the model's "
                    f"vocabulary ends at {self._vocab_size - 1}: use ids of this model's tokenizer",
                    parameter=name,
                )
        return list(token_ids)

    # -- the parameters ---------------------------------------------------------------------------

    def _sampler(self, params: SamplingParams) -> SamplerParams:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self._checked_ids(getattr(params, name) or (), name)
        if params.stop and self._tokenizer is None:
            raise self._needs_tokenizer("stop", "stop_token_ids")
        masked: frozenset[int] = frozenset()
        if params.min_tokens:
            masked = self._eos_token_ids | frozenset(params.stop_token_ids or ())
        allowed = params.allowed_token_ids
        sampler = SamplerParams(
            temperature=float(params.temperature),
            top_p=float(params.top_p),
            top_k=max(params.top_k, 0),
            min_p=float(params.min_p),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            repetition_penalty=float(params.repetition_penalty),
            seed=self._drawn_seed() if params.seed is None else params.seed,
            logit_bias=tuple((i, float(bias)) for i, bias in (params.logit_bias or {}).items()),
            allowed_token_ids=None if allowed is None else tuple(dict.fromkeys(allowed)),
            bad_words=self._bad_words(params.bad_words or ()),
            min_tokens=params.min_tokens,
            min_tokens_masked_ids=tuple(sorted(masked)),
            num_logprobs=0 if params.logprobs is None and is_ranked(params) else params.logprobs,
            num_prompt_logprobs=params.prompt_logprobs,
        )
        self._check_something_is_left(sampler)
        return sampler

    def _drawn_seed(self) -> int:
        """A seed for a request that brings none; see `accepted`."""
        source = f"{self._seed}:{self._num_seeds}".encode()
        return int.from_bytes(hashlib.blake2b(source, digest_size=8).digest()) >> 1

    def _bad_words(self, words: Collection[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word as a text's start and behind a space, where these differ."""
        if words and self._tokenizer is None:
            raise self._needs_tokenizer("bad_words", "logit_bias of -100")
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip() or word
            at_start = self._word_ids(bare, word)
            found[at_start] = None
            behind_space = self._word_ids(" " + bare, word)
            if behind_space[-len(at_start) :] != at_start:
                found[behind_space] = None
        return tuple(found)

    def _word_ids(self, text: str, word: str) -> tuple[int, ...]:
        assert self._tokenizer is not None
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if not token_ids:
            raise InvalidRequestError(
                f"bad_words: {word!r} has no tokens and cannot be forbidden", parameter="bad_words"
            )
        return tuple(self._checked_ids(token_ids, "bad_words"))

    def _check_something_is_left(self, sampler: SamplerParams) -> None:
        """Refuse masks that contradict each other from the first token on."""
        if sampler.allowed_token_ids is None:
            return
        singles = {word[0] for word in sampler.bad_words if len(word) == 1}
        left = set(sampler.allowed_token_ids) - singles
        if not left:
            raise InvalidRequestError(
                "bad_words forbids every one of allowed_token_ids: nothing could be sampled; "
                "allow more tokens or forbid fewer words",
                parameter="bad_words",
            )
        if not left - set(sampler.min_tokens_masked_ids):
            raise InvalidRequestError(
                f"min_tokens={sampler.min_tokens} keeps out end-of-sequence and stop tokens, and "
                "allowed_token_ids allows only those: nothing could be sampled; allow more tokens "
                "or lower min_tokens to 0",
                parameter="min_tokens",
            )

    def _needs_tokenizer(self, name: str, instead: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{name} is text but the engine has no tokenizer: use {instead}, or start without "
            "--skip-tokenizer-init",
            parameter=name,
        )


def check_streamable(params: Params) -> None:
    """Raise `InvalidRequestError` for what has no outputs before its last one."""
    if is_ranked(params):
        is_beam = isinstance(params, BeamSearchParams)
        raise InvalidRequestError(
            f"{'beam search' if is_beam else 'best_of'} cannot be streamed: which completions are "
            "returned is known at the end; ask for the final output only",
            parameter="beam_width" if is_beam else "best_of",
        )


def is_ranked(params: Params) -> bool:
    """Whether completions are compared at the end, so that none can be shown before."""
    return isinstance(params, BeamSearchParams) or params.num_sequences > params.n


def _beam_sampler(beam: BeamSearchParams) -> SamplerParams:
    """Beams draw nothing by chance: only the temperature has a say in their logprobs."""
    return SamplerParams(temperature=float(beam.temperature))


def _split_salt(prompt: Prompt) -> tuple[Prompt, str]:
    if not isinstance(prompt, dict) or _SALT not in prompt:
        return prompt, ""
    salt = prompt[_SALT]
    if not isinstance(salt, str) or not salt:
        raise InvalidRequestError(
            f"{_SALT} must be a string that is not empty, got {salt!r:.80}", parameter=_SALT
        )
    return {key: value for key, value in prompt.items() if key != _SALT}, salt


def _named(prompt: Prompt) -> tuple[str, Any]:
    """(parameter name, text or list of ids) of a prompt in any of its forms."""
    if isinstance(prompt, str):
        return "prompt", prompt
    if isinstance(prompt, list | tuple):
        return "prompt_token_ids", prompt
    if not isinstance(prompt, dict):
        raise InvalidRequestError(
            "prompt must be text, a list of token ids, or a dict with one of "
            f"{' and '.join(map(repr, _KEYS))}, got {type(prompt).__name__}",
            parameter="prompt",
        )
    for key in prompt:
        if key not in _KEYS:
            raise InvalidRequestError(
                f"unknown key {key!r} in the prompt; known are: {', '.join((*_KEYS, _SALT))}",
                parameter=str(key),
            )
    if len(prompt) != 1:
        raise InvalidRequestError(
            f"the prompt must have exactly one of {', '.join(_KEYS)}, got {len(prompt)} of them",
            parameter="prompt",
        )
    name, value = next(iter(prompt.items()))
    if name == "prompt" and not isinstance(value, str):
        raise InvalidRequestError(
            f"prompt must be text, got {type(value).__name__}; token ids go into prompt_token_ids",
            parameter="prompt",
        )
    if name == "prompt_token_ids" and not isinstance(value, list | tuple):
        raise InvalidRequestError(
            f"prompt_token_ids must be a list of token ids, got {type(value).__name__}",
            parameter="prompt_token_ids",
        )
    return name, value
