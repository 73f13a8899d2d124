"""Prompts are equal exactly as far as the trace says, and cost little."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from octavo.lab.prompts import PromptMaker
from octavo.lab.trace import TraceRequest


def common(a: list[int], b: list[int]) -> int:
    """Leading tokens that are equal."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b)))  # noqa: B905


def test_a_prompt_is_its_prefix_then_its_blocks_then_its_own() -> None:
    maker = PromptMaker(block_tokens=4)
    request = TraceRequest(
        num_input=13, num_output=1, prefix="sys", prefix_tokens=3, hash_ids=(5, 6)
    )
    ids = maker.make(request, 0)
    assert [len(list(run)) for _, run in itertools.groupby(ids)] == [3, 4, 4, 2]
    assert maker.make(request, 0) == ids
    assert common(ids, maker.make(request, 1)) == 11


def test_equal_ids_are_equal_tokens_and_others_share_none() -> None:
    maker = PromptMaker(block_tokens=16)

    def made(index: int, *hash_ids: int, num_input: int = 40) -> list[int]:
        request = TraceRequest(num_input=num_input, num_output=1, hash_ids=hash_ids)
        return maker.make(request, index)

    assert common(made(0, 1, 2), made(1, 1, 2)) == 32
    assert common(made(0, 1, 2), made(1, 1, 3)) == 16
    assert common(made(0, 1, 2), made(1, 3, 2)) == 0
    assert common(made(0, 1, 2, 9), made(1, 1, 2, 9)) == 40  # the last block in part
    assert len(made(0, 1, 2, 9)) == 40
    assert common(made(0), made(1)) == 0
    assert not set(made(0)) & set(made(1, 0, 1, 2))


def test_named_prefixes_are_shared_as_far_as_both_reach() -> None:
    maker = PromptMaker()
    long = TraceRequest(num_input=50, num_output=1, prefix="sys", prefix_tokens=40)
    short = TraceRequest(num_input=50, num_output=1, prefix="sys", prefix_tokens=20)
    other = TraceRequest(num_input=50, num_output=1, prefix="sys2", prefix_tokens=40)
    whole = TraceRequest(num_input=10, num_output=1, prefix="sys", prefix_tokens=40)
    assert common(maker.make(long, 0), maker.make(short, 1)) == 20
    assert common(maker.make(long, 0), maker.make(other, 1)) == 0
    assert maker.make(whole, 2) == maker.make(long, 0)[:10]
    assert PromptMaker().make(long, 0) == maker.make(long, 0)


def test_contents_are_left_out_where_they_do_not_matter() -> None:
    maker = PromptMaker(block_tokens=4, unique=False)
    request = TraceRequest(num_input=9, num_output=1, hash_ids=(1, 2))
    assert maker.make(request, 3) == [0] * 9


@given(
    st.integers(1, 100), st.lists(st.integers(0, 2**64), max_size=6), st.integers(0, 10**9),
    st.integers(1, 32),
)  # fmt: skip
def test_lengths_and_signs(num_input: int, ids: list[int], index: int, block_tokens: int) -> None:
    request = TraceRequest(
        num_input=num_input, num_output=1, hash_ids=tuple(ids), prefix="p", prefix_tokens=7
    )
    made = PromptMaker(block_tokens).make(request, index)
    assert len(made) == num_input
    assert all(type(token) is int and token >= 0 for token in made)
