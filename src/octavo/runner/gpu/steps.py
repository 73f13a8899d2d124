"""One step, as arrays on the host and as tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.attention.base import AttentionWork
from octavo.runner.gpu.layout import MAX_MIXED_TOKENS
from octavo.runner.input_batch import Ints
from octavo.util import cdiv

NUM_BUFFERS = 3
"""Of what each step has for itself: two may be under way while a third is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStep:
    """A step as arrays. The `num_decodes` sequences that compute one token come first."""

    rows: Ints
    """[num_seqs] table rows."""
    starts: Ints
    """[num_seqs] positions of the first tokens."""
    counts: Ints
    """[num_seqs] numbers of tokens."""
    token_ids: Ints
    """[num_tokens]; -1: the device knows it."""
    num_decodes: int
    last_rows: Ints
    """[num_samples] token whose logits are needed, in the plan's order."""
    sample_rows: Ints
    """[num_samples] table rows of the same sequences."""
    sample_positions: Ints
    """[num_samples] positions of the tokens that they sample."""
    seq_ids: list[int]
    """[num_samples] the same sequences."""
    prompt_lens: Ints
    """[num_seqs]; only where rope depends on them."""

    @property
    def only_decodes(self) -> bool:
        """Whether every sequence computes one token and samples the next."""
        return self.num_decodes == len(self.rows) == len(self.last_rows)

    def positions(self) -> Ints:
        """[num_tokens]"""
        if self.num_decodes == len(self.rows):
            return self.starts
        # Position of a token = its index in the batch, shifted by where its sequence starts.
        shift = np.repeat(self.starts - self.counts.cumsum() + self.counts, self.counts)
        positions: Ints = np.arange(len(self.token_ids)) + shift
        return positions

    def rope_inputs(self) -> tuple[Tensor, Tensor]:
        """[num_tokens] int64 each: positions, and the prompt lengths of the tokens' sequences."""
        prompt_lens = np.repeat(self.prompt_lens, self.counts)
        return torch.from_numpy(self.positions()), torch.from_numpy(prompt_lens)


NONE: Ints = np.zeros(0, dtype=np.int64)
NO_STEP = HostStep(
    rows=NONE,
    starts=NONE,
    counts=NONE,
    token_ids=NONE,
    num_decodes=0,
    last_rows=NONE,
    sample_rows=NONE,
    sample_positions=NONE,
    seq_ids=[],
    prompt_lens=NONE,
)
"""A step of nothing: in a recorded step all is padding."""


def scratch_step(num_decodes: int, chunks: list[int]) -> HostStep:
    """A step of no sequence's, all of whose rows are row 0 of the tables, and none of whose tokens
    is kept. num_decodes: decodes in it; chunks: lengths of the prompts."""
    counts = np.array([1] * num_decodes + chunks, dtype=np.int64)
    num_seqs = len(counts)
    zeros = np.zeros(num_seqs, dtype=np.int64)
    return HostStep(
        rows=zeros,
        starts=zeros,
        counts=counts,
        token_ids=np.zeros(int(counts.sum()), dtype=np.int64),
        num_decodes=num_decodes,
        last_rows=counts.cumsum() - 1,
        sample_rows=np.full(num_seqs, -1, dtype=np.int64),
        sample_positions=counts,
        seq_ids=list(range(-num_seqs, 0)),
        prompt_lens=counts,
    )


FIRST_STEPS = ((1, [100]), (0, [24]), (0, [64]), (0, [500]), (4, [24, 24]))
"""Steps like those that a user meets first: decodes, and lengths of prompts."""
FIRST_EAGER_STEPS = 2
"""Of them, those that serve where the others' kernels are compiled for recorded steps already."""


def large_steps(fresh_tokens: int, longest: int) -> tuple[tuple[int, list[int]], ...]:
    """Steps that are never recorded, of prompts of which those of `fresh_tokens` do not look into
    the pool: few of their tiles beside many of others, and the other way round. Kernels of few
    and of many programs are compiled apart."""
    if not fresh_tokens or longest < fresh_tokens:
        return ()
    num_tokens, few = MAX_MIXED_TOKENS + 1, 24
    rest, many = num_tokens - fresh_tokens, num_tokens - few
    return (
        (0, [fresh_tokens, *_even(rest, cdiv(rest, fresh_tokens - 1))]),
        (0, [few, *_even(many, cdiv(many, longest))]),
    )


def _even(total: int, num: int) -> list[int]:
    return [total // num + (i < total % num) for i in range(num)]


def longest_chunks(num_tokens: int, most: int, longest: int) -> list[int]:
    """Lengths of the fewest prompts, at most `most`, that have `num_tokens` together, and one each
    besides; fewer tokens where prompts cannot be so long."""
    chunks: list[int] = []
    while num_tokens > 0 and longest > 1 and len(chunks) < most:
        chunks.append(min(num_tokens, longest - 1) + 1)
        num_tokens -= chunks[-1] - 1
    return chunks


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The same on the device, in fixed places; shapes as in `ForwardContext`, but that there are
    slots for each group of layers: [num_groups, num_tokens]."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    table_rows: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    last_rows: Tensor
    """[num_samples] int32"""
    sample_rows: Tensor
    """[num_samples] int32: table rows, -1 for padding."""
    work: AttentionWork
    changes: tuple[Tensor, Tensor]
    """int32 [num_changes]: flat places in the tables, and what goes there."""
    token_words: tuple[Tensor, Tensor, Tensor]
    """int32 [num_tokens]: ids, positions and slots as they were uploaded; slots one group after
    the other."""
