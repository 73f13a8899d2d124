"""Buddy allocation: sizes, order, splitting and merging."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import IntegrityError
from octavo.kv.buddy import BuddyAllocator, next_power_of_two


@pytest.mark.parametrize(
    ("num_units", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (128, 128), (129, 256)]
)
def test_chunks_are_the_next_power_of_two(num_units: int, size: int) -> None:
    assert next_power_of_two(num_units) == size


def test_the_arena_is_cut_into_largest_chunks_and_its_tail_into_halves() -> None:
    """983 blocks of 16, sequences of 2,048 tokens: OPT-13B in the paper."""
    buddies = BuddyAllocator(983, 128)
    assert [buddies.take(128) for _ in range(8)] == [*range(0, 896, 128), None]
    assert [buddies.num_idle(size) for size in (256, 128, 65, 64, 16, 3)] == [0, 7, 7, 15, 61, 245]
    # the tail of 87: 64 + 16 + 4 + 2 + 1
    assert [buddies.take(size) for size in (64, 16, 4, 2, 1)] == [896, 960, 976, 980, 982]
    assert buddies.take(1) is None
    assert buddies.largest_free == 0
    buddies.check_integrity()


def test_a_largest_chunk_is_cut_to_a_small_arena() -> None:
    buddies = BuddyAllocator(100, 128)
    assert buddies.max_chunk == 64
    assert not buddies.can_take([65])
    assert buddies.take(65) is None
    assert buddies.num_idle(65) == 0
    assert buddies.take(33) == 0


def test_the_smallest_chunk_that_fits_is_halved_and_merges_again() -> None:
    buddies = BuddyAllocator(24, 16)  # 16 at 0, 8 at 16
    assert buddies.take(3) == 16  # of the 8, not of the 16
    assert buddies.take(3) == 20
    assert buddies.take(2) == 0  # 16 = 2 + 2 + 4 + 8
    assert buddies.take(8) == 8
    assert buddies.take(4) == 4
    assert [buddies.num_too_small(size) for size in (0, 1, 2, 3, 4)] == [0, 0, 0, 2, 2]
    buddies.free(4)
    buddies.free(0)
    assert buddies.largest_free == 8
    assert buddies.num_too_small(9) == 8
    assert not buddies.can_take([16])
    buddies.free(8)
    assert buddies.largest_free == 16
    buddies.free(20)
    assert buddies.can_take([16, 4])
    assert not buddies.can_take([16, 5])
    buddies.free(16)
    buddies.check_integrity()
    assert buddies.take(16) == 0
    assert buddies.take(8) == 16


def test_what_was_not_taken_cannot_be_freed() -> None:
    buddies = BuddyAllocator(8, 8)
    buddies.take(4)
    with pytest.raises(IntegrityError, match="unit 1 was taken"):
        buddies.free(1)
    buddies.free(0)
    with pytest.raises(IntegrityError, match="unit 0 was taken"):
        buddies.free(0)


@given(
    num_units=st.integers(1, 70),
    max_log=st.integers(0, 6),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.floats(0, 0.999)), max_size=60),
    wanted=st.lists(st.integers(1, 20), max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_chunks_never_overlap_and_merge_back_to_the_whole_arena(
    num_units: int, max_log: int, steps: list[tuple[bool, int, float]], wanted: list[int]
) -> None:
    buddies = BuddyAllocator(num_units, 2**max_log)
    taken: dict[int, int] = {}
    for is_take, size, which in steps:
        if is_take:
            could = buddies.can_take([size])
            start = buddies.take(size)
            assert could == (start is not None)
            if start is None:
                assert next_power_of_two(size) > buddies.largest_free
                continue
            assert start % next_power_of_two(size) == 0
            units = set(range(start, start + next_power_of_two(size)))
            for other, other_size in taken.items():
                assert units.isdisjoint(range(other, other + other_size))
            assert max(units) < num_units
            taken[start] = next_power_of_two(size)
        elif taken:
            start = sorted(taken)[int(which * len(taken))]
            del taken[start]
            buddies.free(start)
        buddies.check_integrity()
        assert buddies.num_too_small(2 * num_units) == num_units - sum(taken.values())
    answers = {take_all(buddies, order) for order in set(permutations(wanted))}
    assert answers == {buddies.can_take(wanted)}, "the order of taking matters"
    for start in taken:
        buddies.free(start)
    buddies.check_integrity()
    fresh = BuddyAllocator(num_units, 2**max_log)
    assert (buddies._free, buddies._taken) == (fresh._free, {})


def take_all(buddies: BuddyAllocator, sizes: tuple[int, ...]) -> bool:
    """Whether chunks for all can be taken in this order; takes none for good."""
    starts = []
    for size in sizes:
        start = buddies.take(size)
        if start is None:
            break
        starts.append(start)
    for start in starts:
        buddies.free(start)
    return len(starts) == len(sizes)
