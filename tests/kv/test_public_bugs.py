"""Bugs that other engines had with cached prefixes, each with the right answer.

The memories are simulated (`kv_sim`): `Sim.execute` fails when a slot that a sequence has holds
anything but its own prefix, so every test checks contents beside the numbers it names.
"""

from __future__ import annotations

import pytest
from kv_sim import Sim

from octavo.errors import IntegrityError

A, B, C = [1] * 40, [2] * 40, [3] * 40


# -- a block is reused while its old key is still mapped


def test_a_reused_block_is_not_found_under_its_old_prefix() -> None:
    sim = Sim(4, 4)
    assert sim.finish(0, A[:16]) == 0
    assert sim.finish(1, B[:16]) == 0  # takes all four blocks
    assert sim.finish(2, A[:16]) == 0
    assert sim.finish(3, A[:12]) == 11
    sim.drain()


def test_only_what_was_reused_is_lost_and_tails_go_first() -> None:
    sim = Sim(5, 4)
    sim.finish(0, A[:20])
    assert sim.finish(1, B[:4]) == 0  # takes the block of positions 16 to 19
    assert sim.finish(2, A[:20]) == 16
    sim.drain()


def test_a_block_reused_in_the_step_in_which_its_prefix_is_asked_for() -> None:
    """The eviction happens between two admissions of one plan."""
    sim = Sim(4, 4)
    sim.finish(0, A[:16])
    other, again = sim.add(1, B[:8]), sim.add(2, A[:8])
    sim.kv.begin_step()
    sim.start(other)
    assert sim.grow(other, 8)  # takes the tail of A
    assert sim.can_admit(again)
    assert sim.start(again) >= 4  # a copy of the second block has no room
    assert sim.grow(again, 8)
    sim.execute()
    sim.drain()


def test_a_hit_block_is_not_reused_for_the_rest_of_the_same_prompt() -> None:
    """What start found must be out of reach of the allocation that follows."""
    sim = Sim(4, 4)
    sim.finish(0, A[:8])
    seq = sim.add(1, A[:8] + B[:8])
    assert sim.run(seq) == 8
    assert len(set(sim.kv.block_table(1))) == 4
    sim.drain()


# -- a prompt that is an exact multiple of the block size, and fully cached


@pytest.mark.parametrize("still_runs", [False, True])
def test_a_fully_cached_prompt_computes_its_last_token(still_runs: bool) -> None:
    """The last token's KV is written into a copy, never into the cached block."""
    sim = Sim(3, 4)
    first = sim.add(0, A[:8])
    sim.run(first)
    before = list(sim.kv.block_table(0))
    if not still_runs:
        sim.end(first)
    assert sim.run(sim.add(1, A[:8])) == 7
    table = list(sim.kv.block_table(1))
    assert table[0] == before[0]
    assert table[1] not in before
    sim.drain()


def test_a_fully_cached_prompt_without_room_for_a_copy() -> None:
    """It fits into an idle pool, so it runs; what it cannot copy it computes, or takes whole."""
    sim = Sim(2, 4)
    sim.finish(0, A[:8])
    for seq_id in range(1, 4):
        assert sim.finish(seq_id, A[:8]) >= 4
    sim.drain()


def test_a_one_token_prompt_of_one_token_blocks() -> None:
    sim = Sim(3, 1)
    assert sim.finish(0, A[:1]) == 0
    assert sim.finish(1, A[:1]) == 0
    assert sim.finish(2, A[:3]) == 1
    assert sim.finish(3, A[:3]) == 2
    sim.drain()


def test_a_fully_cached_prompt_as_large_as_the_pool() -> None:
    sim = Sim(3, 4)
    for seq_id in range(3):
        assert sim.finish(seq_id, A[:12]) >= (8 if seq_id else 0)
    sim.drain()


# -- prompt logprobs with a cached prefix


@pytest.mark.parametrize(("max_hit_tokens", "found"), [(0, 0), (4, 4), (6, 6), (8, 8), (100, 9)])
def test_no_more_is_found_than_may_be(max_hit_tokens: int, found: int) -> None:
    sim = Sim(12, 4)
    sim.finish(0, A[:10])
    seq = sim.add(1, A[:10], max_hit_tokens=max_hit_tokens)
    assert sim.run(seq) == found
    assert sim.finish(2, A[:10]) == 9  # the cache is as good as before
    sim.end(seq)
    assert sim.finish(3, A[:10]) == 9
    sim.drain()


# -- two equal prompts in one step


@pytest.mark.parametrize(("length", "found"), [(10, 8), (8, 4), (4, 0), (3, 0)])
def test_two_equal_prompts_in_one_step_share_whole_blocks(length: int, found: int) -> None:
    """Whole blocks are written before they are read; a partial hit would copy nothing yet."""
    sim = Sim(12, 4)
    first, second = sim.add(0, A[:length]), sim.add(1, A[:length])
    sim.kv.begin_step()
    for seq in (first, second):
        sim.start(seq)
        assert sim.grow(seq, length)
    assert (first.found, second.found) == (0, found)
    sim.execute()
    first.tokens += B[:6]
    second.tokens += C[:6]
    for seq in (first, second):
        sim.run(seq)
    sim.check_counts()
    sim.drain()


def test_the_first_of_two_equal_prompts_ends_first() -> None:
    sim = Sim(6, 4)
    first, second = sim.add(0, A[:9]), sim.add(1, A[:9])
    sim.kv.begin_step()
    for seq in (first, second):
        sim.start(seq)
        assert sim.grow(seq, 9)
    sim.execute()
    sim.end(first)
    sim.finish(2, B[:12])  # what the first left is used again; what is shared is not
    second.tokens += C[:1]
    sim.run(second)
    sim.drain()


def test_tokens_that_are_taken_back_are_not_found_under_the_new_ones() -> None:
    """A sequence that drops computed tokens for others (rejected drafts) is refused."""
    sim = Sim(12, 4)
    seq = sim.add(0, A[:8])
    sim.run(seq)
    with pytest.raises(IntegrityError, match=r"cannot have 6 tokens .* it has 8"):
        sim.kv.commit(0, 6)
    sim.end(seq)
    sim.drain()


# -- colliding hashes

WRAP = 2**61 - 1
"""CPython hashes whole numbers modulo this prime, so that tuples of t and t + WRAP collide."""


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ([1, 2, 3, 4], [1 + WRAP, 2, 3, 4]),
        ([1, 2, 3, 4], [1, 2, 3, 4 + WRAP]),
        ([0, 0, 0, 0], [WRAP, WRAP, WRAP, WRAP]),
        ([5, -1, 5, 5], [5, -2, 5, 5]),
    ],
)
def test_colliding_tokens_are_never_taken_for_each_other(mine: list[int], other: list[int]) -> None:
    """First blocks, later ones, partial ones: same hash, different tokens."""
    assert hash(tuple(mine)) == hash(tuple(other))
    assert mine != other
    same = next(i for i in range(4) if mine[i] != other[i])
    sim = Sim(32, 4, num_host_blocks=4, max_disk_blocks=4)
    sim.finish(0, mine * 3)
    assert sim.finish(1, other * 3) == same
    assert sim.finish(2, mine + other * 2) == 4 + same
    assert sim.finish(3, mine * 3) == 11
    assert sim.finish(4, other * 3) == 11
    sim.drain()


def test_a_salt_separates_what_is_equal() -> None:
    sim = Sim(16, 4)
    sim.finish(0, A[:8])
    assert sim.finish(1, A[:8], salt="x") == 0
    assert sim.finish(2, A[:8], salt="x") == 7
    assert sim.finish(3, A[:8]) == 7
    sim.drain()
