"""What a user gets back. Names are vLLM's; `kv` is octavo's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, Any, cast

from octavo.request import FinishReason

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability at one position."""

    logprob: float
    rank: int | None = None
    """1 is the most probable token."""
    decoded_token: str | None = None
    """The token's text, when the engine has a tokenizer."""


PositionLogprobs = dict[int, Logprob]
"""By token id: the sampled (or prompt) token and the requested number of most probable ones."""


class _MadeWhenRead:
    """Fields that are made when they are first read."""

    __slots__ = ()

    def _make(self, name: str) -> Any:
        """The value of a field that is not set."""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    if not TYPE_CHECKING:  # it would hide misspelt names

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            value = self._make(name)
            setattr(self, name, value)
            return value

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, and what is pickled, have every field and nothing to make one from."""
        names = [f.name for f in fields(cast("DataclassInstance", self))]
        return type(self), tuple(getattr(self, name) for name in names)


class _CutWhenRead(_MadeWhenRead):
    """Lists that are the beginnings of longer, growing ones."""

    __slots__ = ("_all_logprobs", "_all_token_ids", "_num_logprobs", "_num_tokens")
    _all_token_ids: list[int]
    _all_logprobs: list[PositionLogprobs]
    _num_tokens: int
    _num_logprobs: int

    def _make(self, name: str) -> Any:
        if name == "token_ids":
            return self._all_token_ids[: self._num_tokens]
        if name == "logprobs":
            return self._all_logprobs[: self._num_logprobs]
        return super()._make(name)


class _PromptWhenRead(_MadeWhenRead):
    """The text of a prompt that came as token ids, and the cost of a request of which it is not
    known yet."""

    __slots__ = ("_prompt_text",)
    _prompt_text: Callable[[], str]

    def _make(self, name: str) -> Any:
        if name == "kv":
            return RequestKVUsage()
        return self._prompt_text() if name == "prompt" else super()._make(name)


@dataclass(slots=True)
class CompletionOutput(_CutWhenRead):
    """One of a request's `n` completions."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """Sum of the sampled tokens' logprobs; None unless `logprobs` was asked for."""
    logprobs: list[PositionLogprobs] | None = None
    """One entry a generated token."""
    finish_reason: FinishReason | None = None
    """None while it still runs."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for end-of-sequence and length."""
    score: float | None = None
    """What it was ranked by: of `best_of` the mean logprob a token, of a beam its sum of logprobs
    over the length penalty. None where nothing is ranked."""

    @classmethod
    def so_far(
        cls,
        index: int,
        text: str,
        token_ids: list[int],
        cumulative_logprob: float | None,
        logprobs: list[PositionLogprobs] | None,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        score: float | None,
    ) -> CompletionOutput:
        """With lists that others go on appending to (and do nothing else to): of them it has what
        is in them now. Costs the same whatever their length."""
        output = cls.__new__(cls)
        output.index = index
        output.text = text
        growing: _CutWhenRead = output
        growing._all_token_ids = token_ids
        growing._num_tokens = len(token_ids)
        output.cumulative_logprob = cumulative_logprob
        if logprobs is None:
            output.logprobs = None
        else:
            growing._all_logprobs = logprobs
            growing._num_logprobs = len(logprobs)
        output.finish_reason = finish_reason
        output.stop_reason = stop_reason
        output.score = score
        return output


class MissReason(StrEnum):
    """Why a prompt's block was not found in the prefix cache."""

    NEVER_SEEN = "never seen"
    EVICTED = "evicted"
    DIVERGED = "diverged"
    SHORT = "shorter than a block"
    OTHER_SALT = "other salt"
    NOT_READY = "not ready"
    """An equal prompt was computing it in the same step, or no block was free for a copy of it."""
    NOT_ASKED = "not asked"
    """Prompt logprobs need the prompt computed, or the cache is off."""


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """A run of consecutive prompt blocks that were computed, and the one reason for it."""

    first_block: int
    """Index in the prompt, from 0."""
    num_blocks: int
    reason: MissReason
    evicted_s_ago: float | None = None
    """Seconds since the first of them was evicted (EVICTED)."""
    diverged_at: int | None = None
    """Position of the first token of the prompt that no cached block has (DIVERGED)."""

    def __str__(self) -> str:
        last = self.first_block + self.num_blocks - 1
        where = f"block {last}" if self.num_blocks == 1 else f"blocks {self.first_block}-{last}"
        detail = ""
        if self.evicted_s_ago is not None:
            detail = f" {self.evicted_s_ago:.1f} s ago"
        if self.diverged_at is not None:
            detail = f" at token {self.diverged_at}"
        return f"{where}: {self.reason}{detail}"


@dataclass(slots=True)
class RequestKVUsage:
    """What a request cost the KV pool, and what it found there."""

    peak_blocks: int = 0
    """Most physical blocks its sequences referenced at one time."""
    block_seconds: float = 0.0
    """Integral over time of the blocks referenced."""
    shared_tokens: int = 0
    """Most tokens at one time whose KV it held together with another sequence (for the first group
    of layers, where others keep a window only)."""
    cached_tokens: int = 0
    """Prompt tokens whose KV another request had left or was holding when it first started."""
    resumed_tokens: int = 0
    """Tokens whose KV it found again after preemptions instead of computing it again."""
    forked_tokens: int = 0
    """Tokens whose KV its sequences took over from each other, by forking or, when one starts
    later than its siblings, by finding it."""
    misses: tuple[PrefixMiss, ...] = ()
    """Why the other blocks of the prompt had to be computed, in order."""


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, in seconds of the engine's monotonic clock."""

    arrival_s: float = 0.0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_generation_tokens: int = 0

    def copy(self) -> RequestMetrics:
        """The same times; quicker than `dataclasses.replace`, as every output of a step has one."""
        new = RequestMetrics.__new__(RequestMetrics)
        new.arrival_s = self.arrival_s
        new.first_scheduled_s = self.first_scheduled_s
        new.first_token_s = self.first_token_s
        new.last_token_s = self.last_token_s
        new.finished_s = self.finished_s
        new.num_preemptions = self.num_preemptions
        new.num_generation_tokens = self.num_generation_tokens
        return new

    @property
    def queue_s(self) -> float | None:
        """Seconds from arrival until it first ran."""
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finished_s is None else self.finished_s - self.arrival_s


class OutputKind(Enum):
    """What a `RequestOutput` holds, and when there is one."""

    CUMULATIVE = auto()
    """After each step that added something: all of it so far, all `n` completions. Lists are copied
    when they are first read, so that an output that nobody looks at costs the same at any length.
    """
    DELTA = auto()
    """After each step that added something: what is new, of the completions that have news.
    Prompt logprobs come with the first. `cumulative_logprob` stays a total."""
    FINAL_ONLY = auto()
    """Once, when the request has ended."""


@dataclass(slots=True)
class RequestOutput(_PromptWhenRead):
    """The state of a request after a step, or its end."""

    request_id: str
    prompt: str | None
    """None when the prompt came as token ids and there is no tokenizer."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    """One entry a prompt token, the first None; None unless asked for."""
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found (in the pool, on the host or on disk) and not computed."""
    kv: RequestKVUsage = field(default_factory=RequestKVUsage)

    def prompt_when_read(self, text: Callable[[], str]) -> None:
        """The prompt's text is to be made by `text` when it is first read."""
        del self.prompt
        self._prompt_text = text

    @classmethod
    def of_news(
        cls,
        request_id: str,
        prompt: str | None,
        prompt_text: Callable[[], str] | None,
        prompt_token_ids: list[int],
        outputs: list[CompletionOutput],
        metrics: RequestMetrics,
    ) -> RequestOutput:
        """Of a request that goes on and whose cost is not known: as quick as it can be made, as
        every token of a stream has one. prompt_text: makes `prompt` when it is first read."""
        output = cls.__new__(cls)
        output.request_id = request_id
        if prompt_text is None:
            output.prompt = prompt
        else:
            output._prompt_text = prompt_text
        output.prompt_token_ids = prompt_token_ids
        output.prompt_logprobs = None
        output.outputs = outputs
        output.finished = False
        output.metrics = metrics
        output.num_cached_tokens = 0
        return output


@dataclass(slots=True)
class BeamSearchSequence:
    """One finished beam.

    Names are vLLM's, and so are `tokens` (prompt and output, the end-of-sequence token too). Unlike
    vLLM's, `text` is the output's alone, there are no `logprobs` of single tokens, and `score` is
    told.
    """

    tokens: list[int]
    """Prompt and output, with the end-of-sequence or stop token that ended it."""
    text: str | None
    """Text of the output, without the prompt; None without a tokenizer."""
    cum_logprob: float
    """Sum of the output's logprobs."""
    score: float
    """`cum_logprob` over the length penalty: what beams are ranked by."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]
    request_id: str = ""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    kv: RequestKVUsage = field(default_factory=RequestKVUsage)
