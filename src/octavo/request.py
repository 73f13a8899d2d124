"""What a user sends: `SamplingParams` (vLLM's names and defaults) and the engine's `Request`."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal

from octavo.errors import InvalidRequestError

MAX_LOGPROBS = 50
"""Most top logprobs a request may ask for at one position."""
MAX_N = 16_384
"""Most completions of one prompt: each is a sequence in memory from the first moment on."""
MAX_BEAM_WIDTH = 64
"""Most beams of a request: every step looks at width times a few candidates on the host."""
_MAX_INT = 2**63 - 1


class FinishReason(StrEnum):
    """Why a sequence ended; the values are OpenAI's, plus `abort`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is decoded. Names and defaults are vLLM's.

    Raises `InvalidRequestError`, naming the field, for a value out of range or of the wrong type.
    """

    n: int = 1
    """Number of completions for the prompt."""
    best_of: int | None = None
    """Generate this many completions and return the `n` with the highest mean logprob a token; at
    least `n`. They cannot be streamed."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already generated; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as many times as it was generated; -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides (multiplies) positive (negative) logits of tokens in prompt or output; 1e-6 to 1e6.
    """
    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this; above 0, at most 1."""
    top_k: int = 0
    """Sample from this many most probable tokens; 0 or -1 means all."""
    min_p: float = 0.0
    """Drop tokens less probable than this times the most probable one; 0 to 1."""
    seed: int | None = None
    """Fixes the random stream: the same seed gives the same tokens whatever else runs."""
    stop: str | list[str] | None = None
    """Strings that end the output; not part of it unless `include_stop_str_in_output`."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the output, besides end-of-sequence."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    max_tokens: int | None = 16
    """Most tokens to generate; None means up to the context length."""
    min_tokens: int = 0
    """End-of-sequence and `stop_token_ids` cannot be sampled before this many tokens."""
    logprobs: int | None = None
    """Return this many top logprobs per generated token, besides the sampled token's own."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    detokenize: bool = True
    """Whether to make text; False leaves `CompletionOutput.text` empty."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put a space between adjacent special tokens in the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string (or stop token's text) in the text."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these tokens; -100 to 100."""
    allowed_token_ids: list[int] | None = None
    """Only these tokens can be sampled."""
    bad_words: list[str] | None = None
    """Words whose last token cannot be sampled where it would complete the word."""

    def __post_init__(self) -> None:
        for name, low, high, low_open in (
            ("presence_penalty", -2.0, 2.0, False),
            ("frequency_penalty", -2.0, 2.0, False),
            ("repetition_penalty", 1e-6, 1e6, False),
            ("temperature", 0.0, math.inf, False),
            ("top_p", 0.0, 1.0, True),
            ("min_p", 0.0, 1.0, False),
        ):
            self._check_number(name, low, high, low_open)
        for name, minimum, maximum in (
            ("n", 1, MAX_N),
            ("best_of", 1, MAX_N),
            ("top_k", -1, _MAX_INT),
            ("min_tokens", 0, _MAX_INT),
            ("max_tokens", 1, _MAX_INT),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
            ("seed", -(2**63), _MAX_INT),
        ):
            self._check_int(name, minimum, maximum)
        for name in (
            "ignore_eos", "detokenize", "skip_special_tokens",
            "spaces_between_special_tokens", "include_stop_str_in_output",
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise self._refusal(name, "must be True or False")
        self._check_lists()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise self._refusal("min_tokens", f"must be at most max_tokens={self.max_tokens}")
        if self.best_of is not None and self.best_of < self.n:
            raise self._refusal("best_of", f"must be at least n={self.n}")
        if self.stop and not self.detokenize:
            raise self._refusal("stop", "needs detokenize=True: stop strings are found in text")

    @property
    def num_sequences(self) -> int:
        """Completions that are generated: `best_of`, or `n`."""
        return self.n if self.best_of is None else self.best_of

    def _refusal(self, name: str, rule: str) -> InvalidRequestError:
        value = getattr(self, name)
        if isinstance(value, int) and value.bit_length() > 256:
            value = f"a number of {value.bit_length()} bits"
        return InvalidRequestError(f"{name} {rule}, got {value!r:.200}", parameter=name)

    def _check_number(self, name: str, low: float, high: float, low_open: bool) -> None:
        value = getattr(self, name)
        bracket = "above" if low_open else "at least"
        limit = f"{bracket} {low:g}" + ("" if math.isinf(high) else f" and at most {high:g}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or value != value:
            raise self._refusal(name, f"must be a number {limit}")
        # comparisons only: a whole number too large for a float must be refused as well
        finite = abs(value) <= sys.float_info.max
        if not finite or value < low or value > high or (low_open and value == low):
            raise self._refusal(name, f"must be finite, {limit}")

    def _check_int(self, name: str, minimum: int, maximum: int) -> None:
        value = getattr(self, name)
        if value is None and name not in ("n", "top_k", "min_tokens"):
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._refusal(name, "must be a whole number")
        if not minimum <= value <= maximum:
            upper = "" if maximum == _MAX_INT else f" and at most {maximum}"
            raise self._refusal(name, f"must be at least {minimum}{upper}")

    def _check_lists(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", [self.stop])
        for name in ("stop", "bad_words"):
            words = getattr(self, name)
            if words is None:
                continue
            if not isinstance(words, list | tuple) or not all(isinstance(w, str) for w in words):
                raise self._refusal(name, "must be a list of strings")
            if any(not word for word in words):
                raise self._refusal(name, "must not hold an empty string")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids is None:
                continue
            if not isinstance(ids, list | tuple) or not all(_is_token_id(i) for i in ids):
                raise self._refusal(name, "must be a list of token ids (whole numbers from 0)")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise self._refusal("allowed_token_ids", "must not be empty: nothing could be sampled")
        if self.logit_bias is not None:
            self._check_logit_bias()

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, dict):
            raise self._refusal("logit_bias", "must map token ids to numbers")
        for token_id, bias in self.logit_bias.items():
            number = isinstance(bias, int | float) and not isinstance(bias, bool)
            if not _is_token_id(token_id) or not number or not -100 <= bias <= 100:
                raise self._refusal("logit_bias", "must map token ids to numbers in -100..100")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """Build from a mapping; an unknown key is refused by name (invariant I6)."""
        known = {f.name for f in fields(cls)}
        for key in values:
            if key not in known:
                raise InvalidRequestError(
                    f"unknown sampling parameter {key!r}; known are: {', '.join(sorted(known))}",
                    parameter=key,
                )
        return cls(**values)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How a request is decoded by beam search. Names are vLLM's; rules are transformers'.

    Raises `InvalidRequestError`, naming the field, for a value out of range or of the wrong type.
    """

    beam_width: int
    """Beams that are kept, and completions that are returned; 1 to 64."""
    max_tokens: int
    """Most tokens to generate."""
    ignore_eos: bool = False
    """End-of-sequence does not end a beam."""
    temperature: float = 0.0
    """Logits are divided by it before the logprobs are taken; 0 leaves them as they are."""
    length_penalty: float = 1.0
    """A finished beam's score is its sum of logprobs divided by its length to this power."""
    early_stopping: bool | Literal["never"] = False
    """True: stop once `beam_width` beams have finished. False: stop when by a heuristic no better
    one is likely. "never": stop when no better one is possible."""
    include_stop_str_in_output: bool = False
    """Keep the end-of-sequence token's text in the text."""

    def __post_init__(self) -> None:
        for name, low, high in (("beam_width", 1, MAX_BEAM_WIDTH), ("max_tokens", 1, _MAX_INT)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise self._refusal(name, f"must be a whole number from {low} to {high}")
        for name, least in (("temperature", 0.0), ("length_penalty", -sys.float_info.max)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not least <= value <= sys.float_info.max:
                at_least = " of at least 0" if least == 0 else ""
                raise self._refusal(name, f"must be a finite number{at_least}")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise self._refusal(name, "must be True or False")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise self._refusal("early_stopping", "must be True, False or 'never'")

    def _refusal(self, name: str, rule: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{name} {rule}, got {getattr(self, name)!r:.200}", parameter=name
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerParams:
    """What the runner needs to sample: numbers and token ids only, nothing about text."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """Always set: drawn from the engine's seed where the user gave none."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Each a sequence of token ids whose last may not follow the others."""
    min_tokens: int = 0
    min_tokens_masked_ids: tuple[int, ...] = ()
    """Token ids that cannot be sampled before `min_tokens` (end-of-sequence and stop tokens)."""
    num_logprobs: int | None = None
    """None: no logprobs. 0: the sampled token's only."""
    num_prompt_logprobs: int | None = None

    @property
    def needs_past(self) -> bool:
        """Whether a token depends on which tokens were sampled before it by more than the model:
        it cannot be drawn while its predecessor is not known on the host."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or any(len(word) > 1 for word in self.bad_words)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A validated request as the scheduler takes it: token ids and limits, no text."""

    request_id: str
    """Unique among the requests in the engine."""
    prompt_token_ids: list[int]
    """At least one token."""
    sampler: SamplerParams = field(default_factory=SamplerParams)
    n: int = 1
    """Sequences to generate; under beam search the beam width."""
    beam: BeamSearchParams | None = None
    """Decode by beam search."""
    cache_salt: str = ""
    """Prefixes are shared only between requests of equal salt (a tenant, an adapter)."""
    max_tokens: int | None = None
    """Most tokens to generate per sequence; None: until the context or the pool is full."""
    expected_output_tokens: int | None = None
    """Tokens that each sequence will generate, where that is known in advance (a trace, or an exact
    length); only policies that reserve in advance look at it. Too small a number ends the sequence
    by length where its reservation is full."""
    eos_token_ids: frozenset[int] = frozenset()
    """Tokens that end a sequence with `stop_reason` None; empty under `ignore_eos`."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end a sequence with themselves as `stop_reason`."""
    priority: int = 0
    """Smaller runs earlier under the priority queue."""
    arrival_s: float = 0.0
    """When it came, in the clock of `Scheduler.schedule(now)`."""
    client_id: str = ""
    """Who sent it: whom the fair queue charges, and whose blocks `max_kv_share` counts."""
    max_kv_share: float | None = None
    """Share of the pool, above 0 and at most 1, that the client's sequences may hold together when
    one more is admitted; who holds nothing is admitted in any case. None: any."""
    told_at_end: bool = False
    """Nobody looks at the tokens of a sequence before it has ended: they are told then, all at
    once. Not for requests that want logprobs."""
