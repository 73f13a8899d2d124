"""What the scheduler tells the runner, and what the runner answers: plain data, no torch.

A `StepPlan` is one iteration. It is a difference: the runner keeps per sequence its token ids, its
block table and its sampling state, and a plan says only what changed. A plan can be printed,
recorded, replayed, and sent to another process.

Per-sequence entries are named tuples: a step builds hundreds of them, and a tuple is the cheapest
immutable record Python has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from octavo.request import SamplerParams

PLANS_UNDER_WAY = 4
"""So many plans may at most have been made that are not carried out yet. A block that one of them
writes to disk is not asked for before, and one that was fetched for a plan is kept so long."""


class CopyKind(Enum):
    """Between which memories a block is copied."""

    WITHIN = auto()
    """Pool block to pool block."""
    TO_HOST = auto()
    """Pool block to host block."""
    FROM_HOST = auto()
    """Host block to pool block."""
    TO_DISK = auto()
    """Host block to disk block; the copy has a `label`."""
    FROM_DISK = auto()
    """Disk block, fetched and verified while the step was planned, to pool block."""


class BlockLabel(NamedTuple):
    """What a stored block holds, in terms that outlive the process."""

    digest: bytes
    """Hash of the salt and of all tokens up to the block's end."""
    parent: bytes
    """The digest of the block before it; of the first block, the hash of the salt alone."""
    token_ids: tuple[int, ...]
    """The tokens whose KV it holds: a whole block of them."""


class BlockCopy(NamedTuple):
    """Copy one whole block, over all layers, before this step computes anything."""

    src: int
    """Block to read."""
    dst: int
    """Block to write."""
    kind: CopyKind = CopyKind.WITHIN
    label: BlockLabel | None = None
    """Of a block on its way to disk."""


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


class SeqFork(NamedTuple):
    """A sequence that begins as another one's copy: tokens and sampling state."""

    parent_id: int
    """A sequence that the runner knows (or has met in this plan's `new_seqs` or earlier forks)."""
    child_id: int
    """The new sequence."""
    num_tokens: int
    """How many of the parent's tokens it takes over."""
    sampler: SamplerParams
    """How to sample its tokens."""
    sample_index: int
    """Which of the request's samples it is."""


class BeamDraw(NamedTuple):
    """The beams of one request, which together choose their continuations.

    Their `SeqPlan`s have `sample=True`, but no token is sampled: `StepResult.beams` has the
    candidates, and what the scheduler makes of them comes as `forks` and `appends` of a later plan.
    """

    seq_ids: tuple[int, ...]
    """The beams that are in this step, by beam index."""
    scores: tuple[float, ...]
    """Sum of logprobs of each beam so far (float32 values)."""
    num_candidates: int
    """How many of the best continuations over all beams and tokens are wanted."""


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
    group_block_ids: tuple[tuple[int, ...], ...] = ()
    """Where layers are in several groups (`octavo.kv_groups`): the same as `new_block_ids`, which
    are the first group's, for each further one. -1: an entry that holds nothing and is never read.
    Empty: none."""
    group_replaced: tuple[tuple[int, int, int], ...] = ()
    """The same as `replaced` for further groups: (group, index in its table, new block id)."""


class StepCounts(NamedTuple):
    """What of a step decides how long it takes; sums over its sequences."""

    num_prefill_tokens: int
    """Tokens of shares of more than one, or that do not sample: prompts, and what is computed
    again."""
    prefill_context: int
    """Pairs of such a token and one before it or itself: the work of their attention."""
    num_decodes: int
    """Sequences that compute their last token only."""
    decode_context: int
    """Tokens whose K and V the decodes read: the sum of their lengths."""
    num_samples: int
    """Tokens that are drawn."""
    num_prompts: int
    """Sequences that the prefill tokens belong to."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration, in the order in which the runner must act on its parts.

    A plan without `seqs` is carried out too: it only brings memory and tables up to date.
    """

    step_id: int
    """Counts up from 0; the result carries it back."""
    new_seqs: list[NewSeq] = field(default_factory=list)
    """Sequences that appear in `seqs` for the first time."""
    forks: list[SeqFork] = field(default_factory=list)
    """Sequences that begin as copies, in this order. They have no blocks yet."""
    appends: list[tuple[int, int]] = field(default_factory=list)
    """(sequence, token) that the scheduler chose (beams); the runner did not sample them."""
    finished: list[int] = field(default_factory=list)
    """Sequences to forget: they ended or were aborted since the last plan."""
    preempted: list[int] = field(default_factory=list)
    """Sequences that lost all their blocks; their tokens and sampling state stay."""
    moved: list[tuple[int, int]] = field(default_factory=list)
    """(old, new) block ids, to be replaced in every block table, all at once (the pool shrinks)."""
    copies: list[BlockCopy] = field(default_factory=list)
    """Block copies, to be done in this order before any block is written."""
    seqs: list[SeqPlan] = field(default_factory=list)
    """What runs. A sequence appears at most once."""
    extra_draws: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Sequence of `seqs` with `sample=True` -> further sequences, forked from it in this plan, that
    each draw a token of their own from the same logits (parallel sampling's first token)."""
    beams: list[BeamDraw] = field(default_factory=list)
    """Requests that decode by beam search in this step."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum([seq.num_tokens for seq in self.seqs])

    @property
    def num_host_copies(self) -> int:
        """Blocks that are moved to or from host memory or disk."""
        return sum(c.kind is not CopyKind.WITHIN for c in self.copies) if self.copies else 0

    def counts(self) -> StepCounts:
        """What is in it."""
        tokens = pairs = decodes = context = samples = prompts = 0
        for _, start, num_tokens, _, _, sample, _, _ in self.seqs:
            samples += sample
            if num_tokens == 1 and sample:
                decodes += 1
                context += start + 1
            else:
                prompts += 1
                tokens += num_tokens
                pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2
        if self.extra_draws:
            samples += sum(len(others) for others in self.extra_draws.values())
        return StepCounts(tokens, pairs, decodes, context, samples, prompts)


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


class BeamCandidate(NamedTuple):
    """One continuation of one beam."""

    beam: int
    """Index in `BeamDraw.seq_ids`."""
    token_id: int
    score: float
    """The beam's score plus the token's logprob, in float32."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The runner's answer to one plan."""

    step_id: int
    sampled: list[SeqResult]
    """One entry for each sequence that drew a token: in the plan's order, each followed by its
    `extra_draws`; beams are not among them."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By sequence: logprobs of the prompt tokens whose predecessors were computed in this step.
    Over all steps a prompt of length L yields L - 1 entries (its first token has none), once."""
    beams: list[list[BeamCandidate]] = field(default_factory=list)
    """For each `BeamDraw` its best continuations, best first; among equal scores the lower beam,
    then the lower token id."""
    copy_s: float = 0.0
    """Seconds that moving blocks to and from host memory took; other copies are not in it."""
    num_host_copies: int = 0
    """Blocks that were moved to or from host memory."""
    compute_s: float = 0.0
    """Seconds from the end of the copies to the last token drawn; 0 for a plan without `seqs`."""
