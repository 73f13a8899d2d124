"""Cutting a step's attention into pieces: every token once, within the budget, longest first."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.attention.work import (
    ITEM_GRANULE,
    max_decode_items,
    plan_decode,
    plan_prefill,
    prefill_tile_tokens,
)

LENS = st.lists(st.integers(0, 5000), min_size=1, max_size=40)


@given(LENS, st.integers(0, 300), st.sampled_from([0, 1, 100, 2000]))
def test_items_cover_every_attended_token_once(lens: list[int], spare: int, window: int) -> None:
    items, starts = plan_decode(lens, len(lens) + spare, window)
    assert items.dtype == starts.dtype == np.int32
    assert len(items) <= len(lens) + spare and starts[-1] == len(items)
    assert starts.shape == (len(lens) + 1,)
    seen = 0
    for seq, length in enumerate(lens):
        first = starts[seq]
        own = [item for item in items[first:].tolist() if item[0] == seq]
        assert items[first : first + len(own), 0].tolist() == [seq] * len(own), "not together"
        seen += len(own)
        low = max(0, length - window) if window else 0
        assert own[0][1] <= low < own[0][1] + ITEM_GRANULE
        assert own[-1][2] == length
        assert all(a[2] == b[1] for a, b in pairwise(own))
        assert all(item[1] % ITEM_GRANULE == 0 for item in own)
        sizes = [end - start for _, start, end in own]
        assert length == 0 or min(sizes) > 0
        # What kernels rely on to know how many items a sequence has.
        assert set(sizes[:-1]) <= {sizes[0]} and sizes[-1] <= sizes[0]
    assert seen == len(items)


def test_equal_contexts_fill_the_gpu_in_equal_pieces() -> None:
    for num_seqs, length, pieces in ((1, 4096, 32), (16, 1024, 4), (32, 1024, 1), (256, 1024, 1)):
        items, _ = plan_decode([length] * num_seqs, max_decode_items(num_seqs, 8))
        assert len(items) == num_seqs * pieces
        assert set((items[:, 2] - items[:, 1]).tolist()) == {length // pieces}


def test_a_long_context_among_short_ones_is_cut_and_comes_first() -> None:
    items, starts = plan_decode([40, 10_000, 30, 500], max_decode_items(4, 8))
    sizes = items[:, 2] - items[:, 1]
    assert items[0, 0] == 1 and starts[1] == 0
    assert (items[:, 0] == 1).sum() > 20
    firsts = [int(sizes[start]) for start in starts[:-1]]
    order = np.argsort(starts[:-1])
    assert [firsts[i] for i in order] == sorted(firsts, reverse=True)


def test_without_room_to_spare_nothing_is_cut() -> None:
    items, starts = plan_decode([5, 9000], 2)
    assert sorted(items.tolist()) == [[0, 0, 5], [1, 0, 9000]]
    assert starts.tolist() == [1, 0, 2]


def test_no_sequences() -> None:
    items, starts = plan_decode([], 4)
    assert items.shape == (0, 3) and starts.tolist() == [0]


def test_more_sequences_than_items_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        plan_decode([1, 2, 3], 2)


def test_max_items_grow_with_the_batch_and_shrink_with_the_heads() -> None:
    numbers = [max_decode_items(n, 8) for n in range(1, 300)]
    assert numbers == sorted(numbers)
    assert max_decode_items(1, 3) > max_decode_items(1, 8) > 1
    assert max_decode_items(7, 10_000) >= 8


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 500)), min_size=1, max_size=12),
    st.sampled_from([1, 16, 32]),
)
def test_tiles_cover_every_chunk_the_furthest_first(
    chunks: list[tuple[int, int]], tile: int
) -> None:
    queries = [query for query, _ in chunks]
    lens = [query + before for query, before in chunks]
    tiles = plan_prefill(queries, lens, 5, tile)
    assert tiles.dtype == np.int32 and tiles.shape[1:] == (2,)
    wanted = [(5 + i, t) for i, query in enumerate(queries) for t in range(0, query, tile)]
    assert sorted(map(tuple, tiles.tolist())) == wanted
    reach = [
        lens[seq - 5] - queries[seq - 5] + min(first + tile, queries[seq - 5])
        for seq, first in tiles.tolist()
    ]
    assert reach == sorted(reach, reverse=True)


def test_a_tile_has_as_many_tokens_as_fit_its_rows() -> None:
    for group in (1, 3, 4, 8, 71, 200):
        tokens = prefill_tile_tokens(group, 128)
        assert tokens == 1 or tokens * group <= 128 < (tokens + 1) * group
