"""How a step's attention is cut into pieces, for one model and one backend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.attention import work
from octavo.runner.gpu.layout import MAX_MIXED_TOKENS
from octavo.runner.gpu.steps import HostStep
from octavo.runner.input_batch import Ints

Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Shape:
    """What of model and backend decides how attention is cut up."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_sms: int = 132
    """Multiprocessors of the GPU."""
    window: int = 0
    """Last tokens that every layer attends to; 0: all."""
    fresh_tokens: int = 0
    """Length from which the backend attends to a chunk at position 0 without the pool, in steps
    of more than `MAX_MIXED_TOKENS`; 0: never."""


_SPARE_TILES = 8
_CHUNK_TOKENS = 8
"""A recorded step has tiles for chunks of so many tokens on average, and for some shorter ones:
behind a cached prefix few tokens of a prompt are left. A tile too many is a program that ends at
once."""


class Cutter:
    """Cuts decodes into items and chunks of prompts into tiles."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.tile_tokens = work.prefill_tile_tokens(
            shape.num_heads // shape.num_kv_heads, shape.head_dim
        )
        """Tokens of a chunk that a tile has."""

    def max_items(self, num_decodes: int) -> int:
        """Most pieces that so many decodes are cut into."""
        if not num_decodes:
            return 0
        shape = self.shape
        return work.max_decode_items(num_decodes, shape.num_kv_heads, shape.num_sms)

    def items(self, seq_lens: Ints, num_padding: int = 0) -> tuple[Words, Words]:
        """Pieces of the decodes' contexts, of a step that is filled up by `num_padding` decodes of
        nothing: for each of these an item is left over, which writes zeros."""
        num_seqs = len(seq_lens)
        if not num_seqs:
            return _NO_ITEMS, _NO_STARTS
        most = self.max_items(num_seqs + num_padding) - num_padding
        return work.plan_decode(seq_lens, most, self.shape.window)

    def max_tiles(self, num_tokens: int, num_seqs: int) -> int:
        """Tiles that a recorded step of so many tokens and sequences has room for."""
        most_chunks = min(num_seqs, _SPARE_TILES + num_tokens // _CHUNK_TOKENS)
        return num_tokens // self.tile_tokens + most_chunks

    def num_tiles(self, step: HostStep) -> int:
        """Tiles that the chunks of a step are cut into."""
        return int((-(-step.counts[step.num_decodes :] // self.tile_tokens)).sum())

    def paged_tiles(self, step: HostStep, seq_lens: Ints) -> Words:
        """Tiles of all chunks, those that need nothing from the pool like the others."""
        first = step.num_decodes
        counts, lens = step.counts[first:], seq_lens[first:]
        return work.plan_prefill(counts, lens, first, self.tile_tokens)

    def tiles(self, step: HostStep, seq_lens: Ints) -> tuple[Words, Words]:
        """Tiles of the chunks that look into the pool, and of those that need not.

        The latter only in steps too large to be recorded: those that could be, but do not fit, go
        the way of the recorded ones, whose kernels are compiled.
        """
        first = step.num_decodes
        if first == len(step.rows):
            return NO_TILES, NO_TILES
        if not self.shape.fresh_tokens or len(step.token_ids) <= MAX_MIXED_TOKENS:
            return self.paged_tiles(step, seq_lens), NO_TILES
        counts, lens = step.counts[first:], seq_lens[first:]
        is_fresh = (counts == lens) & (counts >= self.shape.fresh_tokens)
        paged, fresh = np.where(is_fresh, 0, counts), np.where(is_fresh, counts, 0)
        return (
            work.plan_prefill(paged, lens, first, self.tile_tokens),
            work.plan_prefill(fresh, lens, first, self.tile_tokens),
        )


_NO_ITEMS: Words = np.zeros((0, 3), dtype=np.int32)
_NO_STARTS: Words = np.zeros(1, dtype=np.int32)
NO_TILES: Words = np.zeros((0, 2), dtype=np.int32)
