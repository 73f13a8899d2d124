"""A sequence (one token stream), the group that a request's sequences form, and their news."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from octavo.outputs import RequestKVUsage, RequestMetrics
from octavo.plan import TokenLogprobs
from octavo.request import FinishReason, Request

if TYPE_CHECKING:
    from octavo.sched.groups import BeamSearch


class SequenceStatus(Enum):
    """Where a sequence is on its way."""

    UNBORN = auto()
    """One of several samples, whose prompt another one computes."""
    WAITING = auto()
    """In line, without blocks: not admitted yet, or preempted."""
    RUNNING = auto()
    """Admitted: it has a block table and a seat."""
    ENDED = auto()
    """Finished or aborted."""


class SeqUpdate(NamedTuple):
    """What a sequence gained in a step, and whether it ended."""

    request_id: str
    sample_index: int
    """Which of the request's `n` samples it is; under beam search the rank, 0 is the best."""
    seq_id: int
    token_ids: tuple[int, ...]
    """New tokens; a stop token is among them. Of a beam, which comes when the search is over, all
    that were generated."""
    logprobs: tuple[TokenLogprobs, ...]
    """One for each new token if the request asked for `logprobs`, else empty."""
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """Of the prompt tokens reached in this step, if the request asked for them."""
    finish_reason: FinishReason | None
    """None while it runs."""
    stop_reason: int | str | None
    """The stop token's id; None for end-of-sequence and length."""
    cum_logprob: float | None = None
    """Of a beam: the sum of its tokens' logprobs."""
    score: float | None = None
    """Of a beam: `cum_logprob` over the length penalty. A beam that was never found, because the
    vocabulary is too small for so many, has no tokens and minus infinity."""


@dataclass(slots=True)
class RequestStats:
    """What a request went through and cost, kept up to date until it has ended."""

    metrics: RequestMetrics
    kv: RequestKVUsage = field(default_factory=RequestKVUsage)
    """Set when the request ends; until then ask the KV manager."""
    num_computed_tokens: int = 0
    """Tokens run through the model, those computed again after a preemption included."""
    num_seqs: int = 1
    """Samples, or beams."""


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """A request in the scheduler: what its sequences have in common.

    Several samples: one of them, the carrier, runs the prompt for as many of the others as there
    are seats. They are forked from it in the plan that computes the prompt's last chunk, each draws
    its first token there, and they share its blocks from when that is known.
    """

    request: Request
    max_total_tokens: int
    """Most tokens, prompt and output, of each sequence."""
    stats: RequestStats
    sequences: list[Sequence] = field(default_factory=list)
    """By sample index; ended ones stay. Of a beam search only the first one; see `search`."""
    num_unfinished: int = 0
    stop_ids: frozenset[int] = frozenset()
    """Every token that may end a sequence."""
    told_at_end: bool = False
    """Whether a sequence's tokens are news only when it has ended."""
    is_family: bool = False
    """Whether it may have several sequences: samples or beams."""
    carrier: Sequence | None = None
    """Who runs the prompt for unborn ones."""
    unborn: dict[int, Sequence] = field(default_factory=dict)
    """By id, in order of sample indices: those that no plan has named."""
    expected: dict[int, Sequence] = field(default_factory=dict)
    """By id: those forked in a plan whose result is not here, without blocks yet."""
    has_begun: bool = False
    """Whether one of its sequences has ever run."""
    num_charged_tokens: int = 0
    """Prompt tokens that were computed when it began: what its client is charged for them."""
    has_forked: bool = False
    """Whether the whole prompt was computed by a carrier, so that its logprobs are known."""
    search: BeamSearch | None = None
    """Under beam search: its beams."""
    ahead_until: int = 0
    """A sequence of fewer known tokens may be planned while its next one is being sampled: of at
    most 10 tokens, one of up to 8, as then there is a tenth to draw from the ninth. 0 where tokens
    can only be drawn by who knows those before."""

    def __post_init__(self) -> None:
        self.stop_ids = self.request.eos_token_ids | self.request.stop_token_ids
        self.told_at_end = self.request.told_at_end
        sampler = self.request.sampler
        assert not self.told_at_end or sampler.num_logprobs is sampler.num_prompt_logprobs is None
        self.is_family = self.request.n > 1 or self.request.beam is not None
        if self.request.beam is None and not self.request.sampler.needs_past:
            self.ahead_until = self.max_total_tokens - 1  # the next but one is a token of it too

    @property
    def num_reserved_seats(self) -> int:
        """Seats that are kept for sequences of this request that do not run yet."""
        if self.search is not None:
            return self.search.num_reserved_seats
        reserved = len(self.expected)
        if self.carrier is not None:
            reserved += min(self.carrier.num_reserved, len(self.unborn))
        return reserved


@dataclass(slots=True, eq=False)
class Sequence:
    """One token stream and how far it has come. Counts are in tokens."""

    seq_id: int
    group: SequenceGroup
    sample_index: int
    place: tuple[int, int, int]
    """Its place in line, unique and never changed: smaller is served first, preempted last."""
    token_ids: list[int]
    """The prompt and what was generated: tokens that exist. Empty for the unborn."""
    search: BeamSearch | None = None
    """The search that it is a beam of."""
    num_computed_tokens: int = 0
    """Tokens whose KV is in the pool once every step planned so far has run."""
    num_answered: int = 0
    """The most that `num_computed_tokens` ever was before a preemption."""
    num_pending: int = 0
    """Tokens being sampled: planned, the result not yet here. 2 at most, where plans are made
    ahead, else 1. The KV of all of them but the last is computed on the way."""
    status: SequenceStatus = SequenceStatus.WAITING
    known_to_runner: bool = False
    """Whether a plan has named it, so that the runner must be told to forget it."""
    has_table_there: bool = False
    """Whether the runner has blocks of it, so that it must be told when they are taken away."""
    has_run: bool = False
    """Whether it held blocks, or should have: what it finds when it starts is its own."""
    num_reserved: int = 0
    """Of a running carrier: seats it holds for those who will be forked from it."""
    parent: Sequence | None = None
    """Of the expected: from whom they are forked."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def output_ids(self) -> list[int]:
        """Tokens sampled so far."""
        return self.token_ids[len(self.group.request.prompt_token_ids) :]

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - len(self.group.request.prompt_token_ids)

    @property
    def may_go_ahead(self) -> bool:
        """Whether its token that is being sampled may be computed, unseen, in the next plan: its
        KV, and the draw of the next. It may turn out to have ended before; never by length."""
        group = self.group
        return (
            self.num_pending == 1 and len(self.token_ids) < group.ahead_until and not group.expected
        )

    def news(
        self,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> SeqUpdate:
        """What it gained, with the state it is in now. All its tokens, where these are told at the
        end."""
        if self.group.told_at_end:
            token_ids = tuple(self.output_ids)
        update = (
            self.group.request.request_id,
            self.sample_index,
            self.seq_id,
            token_ids,
            logprobs,
            prompt_logprobs,
            self.finish_reason,
            self.stop_reason,
            None,
            None,
        )
        return tuple.__new__(SeqUpdate, update)  # SeqUpdate(*update), at half the time
