"""Where a step's inputs lie in the one buffer that is uploaded."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.ops.gpu.launch import ALIGNMENT
from octavo.util import cdiv

_ALIGNED_WORDS = ALIGNMENT // 4
MAX_MIXED_TOKENS = 2048
"""Larger steps with chunks of prompts are not recorded: the GPU takes longer for them than Python
for their launches."""


class Room(NamedTuple):
    """What a recorded step has room for; steps are filled up to it."""

    num_tokens: int
    mixed: bool
    """Whether there may be chunks of prompts; else every sequence decodes, and samples."""


class Sizes(NamedTuple):
    """How much of everything a step has."""

    num_seqs: int
    num_tokens: int
    num_decodes: int
    """Sequences that compute one token; they come first. In a mixed room, the most of them."""
    num_items: int
    """Pieces of the decodes' contexts, padding included."""
    num_tiles: int
    num_fresh: int
    """Tiles of chunks that need nothing from the pool."""
    num_samples: int
    num_changes: int
    """Changes of the block tables, padding included."""
    mixed: bool = False
    """Whether it is a mixed room."""
    num_groups: int = 1
    """Groups of layers: each has slots of its own."""


class Layout:
    """Sections of int32 words, by name, one behind the other: a step is one copy."""

    __slots__ = ("num_words", "sizes", "spans")

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        words = {
            "rows": sizes.num_seqs,
            "seq_lens": sizes.num_seqs,
            "query_start": sizes.num_seqs + 1,
            "decode_lens": sizes.num_decodes if sizes.mixed else 0,
            "items": 3 * sizes.num_items,
            "item_start": sizes.num_decodes + 1,
            "tiles": 2 * sizes.num_tiles,
            "fresh": 2 * sizes.num_fresh,
            "last_rows": sizes.num_samples,
            "sample_rows": sizes.num_samples,
            "token_ids": sizes.num_tokens,
            "positions": sizes.num_tokens,
            "slots": sizes.num_groups * sizes.num_tokens,
            "where": sizes.num_changes,
            "what": sizes.num_changes,
        }
        self.spans: dict[str, slice] = {}
        """Section -> its words."""
        start = 0
        for name, num in words.items():
            self.spans[name] = slice(start, start + num)
            start += cdiv(num, _ALIGNED_WORDS) * _ALIGNED_WORDS
        self.num_words = start


class Writer:
    """Fills the sections of a buffer; what is left of a section is padding."""

    __slots__ = ("spans", "words")

    def __init__(self, words: NDArray[np.int32], layout: Layout) -> None:
        self.words, self.spans = words, layout.spans

    def __call__(self, name: str, values: NDArray[Any] | list[int], padding: int) -> None:
        span, num = self.spans[name], len(values)
        start, stop = span.start, span.stop
        if num:
            self.words[start : start + num] = values
        if start + num < stop:
            self.words[start + num : stop] = padding
