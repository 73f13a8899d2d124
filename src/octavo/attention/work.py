"""How a step's attention is cut into pieces of about equal size, on the host, before its launch.

Kernels with a fixed number of splits a sequence leave the GPU idle behind the longest one. Here a
long context becomes many items and a short one stays whole, out of one budget for the step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

ITEM_GRANULE = 32
"""Items begin at multiples of this, so that with blocks that divide it no block is cut."""
_MIN_ITEM_TOKENS = 64
"""Shorter items cost more to merge than they save."""
_MAX_WAVES = 4
"""Programs a multiprocessor for large batches: enough that none idles long at the end."""


def max_decode_items(num_seqs: int, num_kv_heads: int, num_sms: int = 132) -> int:
    """Length of the item list for up to num_seqs decodes: each may be whole, and the rest cuts them
    into about 2 (one sequence) to 4 programs a multiprocessor, a program being an item and KV head.
    """
    waves = min(_MAX_WAVES, 2 + num_seqs // 8)
    return num_seqs + max(1, -(-waves * num_sms // num_kv_heads))


def plan_decode(
    seq_lens: ArrayLike, max_items: int, window: int = 0, min_tokens: int = _MIN_ITEM_TOKENS
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Cuts the contexts of sequences that compute one token each.

    With n sequences, an item has at most about total / (max_items - n) tokens (twice that for
    middling n), or min_tokens: so they always fit. A sequence's items are of one length but for the
    last, and stand together. The sequences with the longest items come first, so that the last
    programs to start are short.

    Args:
        seq_lens: int [n], context lengths.
        max_items: at least n, see `max_decode_items`.
        window: last tokens that every layer attends to; 0 for all, or where layers differ.
        min_tokens: fewest tokens that a context is cut into.

    Returns: items int32 [num_items, 3]: (sequence, first token, end), in the order to start them;
        and item_start int32 [n + 1]: where each sequence's items begin, then num_items. Every
        sequence has an item, one of length 0 an empty one.
    """
    lens = np.asarray(seq_lens, dtype=np.int64)
    num_seqs = len(lens)
    assert num_seqs <= max_items, (num_seqs, max_items)
    begin = np.zeros_like(lens)
    if window:
        begin = np.maximum(lens - window, 0) // ITEM_GRANULE * ITEM_GRANULE
    spans = lens - begin
    longest = int(spans.max(initial=1))
    spare = max_items - num_seqs
    if spare <= 3 * num_seqs < 6 * spare:
        # Whole contexts all but fill the GPU: merging costs more than cutting all of them saves.
        spare = -(-spare // 2)
    target = -(-int(spans.sum()) // spare) if spare else longest
    size = -(-max(target, min_tokens) // ITEM_GRANULE) * ITEM_GRANULE
    counts = np.maximum(-(-spans // size), 1)
    pieces = -(-spans // (counts * ITEM_GRANULE)) * ITEM_GRANULE
    order = np.argsort(-np.minimum(pieces, spans), kind="stable")

    counts = counts[order]
    ends = np.cumsum(counts)
    item_start = np.empty(num_seqs + 1, dtype=np.int32)
    item_start[order] = ends - counts
    item_start[num_seqs] = num_items = int(ends[-1]) if num_seqs else 0
    items = np.empty((num_items, 3), dtype=np.int32)
    items[:, 0] = sequence = np.repeat(order, counts)
    piece = pieces[sequence]
    first = begin[sequence] + (np.arange(num_items) - item_start[sequence]) * piece
    items[:, 1] = first
    items[:, 2] = np.minimum(first + piece, lens[sequence])
    return items, item_start


def prefill_tile_tokens(group_size: int, head_dim: int) -> int:
    """Tokens in a tile of a prompt's chunk: with the group's query heads, at most 128 rows of a
    product (64 of small heads). `ops.gpu.prefill_attention.prefill_shape` cuts alike."""
    return max(1, (64 if head_dim <= 64 and group_size <= 64 else 128) // group_size)


def plan_prefill(
    query_lens: ArrayLike, seq_lens: ArrayLike, first_seq: int, tile_tokens: int
) -> NDArray[np.int32]:
    """Cuts chunks of prompts into tiles; those that look back furthest come first.

    Args:
        query_lens: int [n], tokens of each chunk; 0 where it needs no tile.
        seq_lens: int [n], context lengths, the chunk included.
        first_seq: the first chunk's number in the step; the others follow.
        tile_tokens: see `prefill_tile_tokens`.

    Returns: int32 [num_tiles, 2]: (sequence's number in the step, the tile's first token within
        the chunk).
    """
    queries = np.asarray(query_lens, dtype=np.int64)
    lens = np.asarray(seq_lens, dtype=np.int64)
    counts = -(-queries // tile_tokens)
    chunk = np.repeat(np.arange(len(queries)), counts)
    before = np.cumsum(counts) - counts
    first = (np.arange(len(chunk)) - before[chunk]) * tile_tokens
    reach = lens[chunk] - queries[chunk] + np.minimum(first + tile_tokens, queries[chunk])
    tiles = np.stack((chunk + first_seq, first), axis=1, dtype=np.int32, casting="unsafe")
    return tiles[np.argsort(-reach, kind="stable")]
