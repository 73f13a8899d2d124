"""What the scheduler tells the runner, and what the runner answers: plain data, no torch.

A `StepPlan` is one iteration. It is a difference: the runner keeps per sequence its token ids, its
block table and its sampling state, and a plan says only what changed. A plan can be printed,
recorded, replayed, and sent to another process.

Per-sequence entries are named tuples: a step builds hundreds of them, and a tuple is the cheapest
immutable record Python has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.request import SamplerParams


class BlockCopy(NamedTuple):
    """Copy one whole block, over all layers, before this step computes anything."""

    src: int
    """Block id to read."""
    dst: int
    """Block id to write; its only owner is the sequence that made the copy necessary."""


@dataclass(frozen=True, slots=True)
class NewSeq:
    """A sequence the runner has not seen before."""

    seq_id: int
    """The scheduler's number for the sequence; never used twice."""
    token_ids: list[int]
    """The tokens known so far, length >= 1: the prompt."""
    sampler: SamplerParams
    """How to sample its tokens."""
    sample_index: int = 0
    """Which of the request's `n` samples this is; with the seed it fixes the random stream."""


class SeqPlan(NamedTuple):
    """One sequence's share of a step."""

    seq_id: int
    start: int
    """Position of the first token to compute: tokens before it have their KV in the pool."""
    num_tokens: int
    """How many tokens to compute, >= 1: positions `start .. start + num_tokens - 1`."""
    new_block_ids: tuple[int, ...]
    """Blocks to append to the sequence's block table before computing."""
    replaced: tuple[int, int] | None
    """Copy-on-write: (index in the block table, new block id) to set before computing."""
    sample: bool
    """Whether a token is sampled from the last position (False inside a prompt)."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration, in the order in which the runner must act on its parts."""

    step_id: int
    """Counts up from 0; the result carries it back."""
    finished: list[int] = field(default_factory=list)
    """Sequences to forget: they ended or were aborted since the last plan."""
    preempted: list[int] = field(default_factory=list)
    """Sequences that lost all their blocks; their tokens and sampling state stay."""
    new_seqs: list[NewSeq] = field(default_factory=list)
    """Sequences that appear in `seqs` for the first time."""
    copies: list[BlockCopy] = field(default_factory=list)
    """Block copies, to be done in this order before any block is written."""
    seqs: list[SeqPlan] = field(default_factory=list)
    """What runs. A sequence appears at most once."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(seq.num_tokens for seq in self.seqs)


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position, from the model's unmodified distribution."""

    token_id: int
    """The token that was sampled (or, for a prompt, the token that stands there)."""
    logprob: float
    """Its natural-log probability."""
    rank: int
    """1 + the number of tokens that are strictly more probable."""
    top: tuple[tuple[int, float], ...]
    """The requested number of most probable (token id, logprob) pairs, best first."""


class SeqResult(NamedTuple):
    """What one sequence gained in a step."""

    seq_id: int
    token_id: int
    """The sampled token."""
    logprobs: TokenLogprobs | None
    """Present when the request asked for `logprobs`."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The runner's answer to one plan."""

    step_id: int
    sampled: list[SeqResult]
    """One entry for each `SeqPlan` with `sample=True`, in the plan's order."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By sequence: logprobs of the prompt tokens whose predecessors were computed in this step.
    Over all steps a prompt of length L yields L - 1 entries (its first token has none), once."""
