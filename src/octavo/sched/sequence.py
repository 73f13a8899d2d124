"""A sequence (one token stream), the group that a request's sequences form, and their news."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from octavo.outputs import RequestKVUsage, RequestMetrics
from octavo.plan import TokenLogprobs
from octavo.request import FinishReason, Request


class SequenceStatus(Enum):
    """Where a sequence is on its way."""

    WAITING = auto()
    """Holds no blocks: not admitted yet, or preempted."""
    RUNNING = auto()
    """Admitted: it has a block table and is served in every step."""
    ENDED = auto()
    """Finished or aborted."""


class SeqUpdate(NamedTuple):
    """What a sequence gained in a step, and whether it ended."""

    request_id: str
    sample_index: int
    """Which of the request's `n` samples it is."""
    seq_id: int
    token_ids: tuple[int, ...]
    """New tokens; a stop token is among them."""
    logprobs: tuple[TokenLogprobs, ...]
    """One for each new token if the request asked for `logprobs`, else empty."""
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """Of the prompt tokens reached in this step, if the request asked for them."""
    finish_reason: FinishReason | None
    """None while it runs."""
    stop_reason: int | str | None
    """The stop token's id; None for end-of-sequence and length."""


@dataclass(slots=True)
class RequestStats:
    """What a request went through and cost, kept up to date until it has ended."""

    metrics: RequestMetrics
    kv: RequestKVUsage = field(default_factory=RequestKVUsage)
    """Set when the request ends; until then ask the KV manager."""
    num_computed_tokens: int = 0
    """Tokens run through the model, those computed again after a preemption included."""


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request in the scheduler: what its sequences have in common."""

    request: Request
    max_total_tokens: int
    """Most tokens, prompt and output, of each sequence."""
    stats: RequestStats
    sequences: list[Sequence] = field(default_factory=list)
    """By sample index; ended ones stay."""
    num_unfinished: int = 0
    stop_ids: frozenset[int] = frozenset()
    """Every token that may end a sequence."""

    def __post_init__(self) -> None:
        self.stop_ids = self.request.eos_token_ids | self.request.stop_token_ids


@dataclass(slots=True, eq=False)
class Sequence:
    """One token stream and how far it has come. Counts are in tokens."""

    seq_id: int
    group: SequenceGroup
    sample_index: int
    place: tuple[int, int, int]
    """Its place in line, unique and never changed: smaller is served first, preempted last."""
    token_ids: list[int]
    """The prompt and what was sampled: tokens that exist."""
    num_computed_tokens: int = 0
    """Tokens whose KV is in the pool once every step planned so far has run."""
    num_pending: int = 0
    """Tokens being sampled: planned, the result not yet here."""
    status: SequenceStatus = SequenceStatus.WAITING
    known_to_runner: bool = False
    """Whether a plan has named it, so that the runner must be told to forget it."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - len(self.group.request.prompt_token_ids)

    def news(
        self,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> SeqUpdate:
        """What it gained, with the state it is in now."""
        update = (
            self.group.request.request_id,
            self.sample_index,
            self.seq_id,
            token_ids,
            logprobs,
            prompt_logprobs,
            self.finish_reason,
            self.stop_reason,
        )
        return tuple.__new__(SeqUpdate, update)  # SeqUpdate(*update), at half the time
