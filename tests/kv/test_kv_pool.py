"""The free list's exact orders, and the pool's refusals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import IntegrityError
from octavo.kv import BlockPool
from octavo.kv.free_list import FreeList


def test_free_list_starts_in_order_of_ids() -> None:
    free = FreeList(5)
    assert list(free) == [0, 1, 2, 3, 4]
    assert free.pop_front(2) == [0, 1]
    assert list(free) == [2, 3, 4]
    assert len(free) == 3
    assert 1 not in free
    assert 2 in free


def test_free_list_takes_at_both_ends_and_in_the_middle() -> None:
    free = FreeList(6)
    assert free.pop_front(6) == [0, 1, 2, 3, 4, 5]
    assert list(free) == []
    free.push_back(3)
    free.push_back(5)
    free.push_front([0, 1])
    assert list(free) == [1, 0, 3, 5]
    free.remove(3)
    assert list(free) == [1, 0, 5]
    free.remove(5)
    free.push_back(4)
    free.remove(1)
    assert list(free) == [0, 4]
    assert free.pop_front(2) == [0, 4]
    assert free.pop_front(0) == []


def test_free_list_asserts_membership() -> None:
    free = FreeList(2)
    with pytest.raises(AssertionError, match="block 1 is free already"):
        free.push_front([1])
    with pytest.raises(AssertionError, match="block 0 is free already"):
        free.push_back(0)
    free.pop_front(1)
    with pytest.raises(AssertionError, match="block 0 is not free"):
        free.remove(0)
    with pytest.raises(AssertionError, match="2 blocks of 1"):
        free.pop_front(2)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from("pfbr"), st.integers(0, 11))))
def test_free_list_equals_a_plain_list(num_blocks: int, moves: list[tuple[str, int]]) -> None:
    free, plain = FreeList(num_blocks), list(range(num_blocks))
    for move, number in moves:
        block_id = number % num_blocks
        if move == "p":
            num = min(number, len(plain))
            assert free.pop_front(num) == plain[:num]
            del plain[:num]
        elif move == "r" and block_id in plain:
            free.remove(block_id)
            plain.remove(block_id)
        elif move == "f" and block_id not in plain:
            free.push_front([block_id])
            plain.insert(0, block_id)
        elif move == "b" and block_id not in plain:
            free.push_back(block_id)
            plain.append(block_id)
        assert list(free) == plain
        assert len(free) == len(plain)
        assert [b for b in range(num_blocks) if b in free] == sorted(plain)


def test_pool_reuses_the_tail_of_what_was_freed_last() -> None:
    pool = BlockPool(6, 16)
    first = pool.allocate(3)
    second = pool.allocate(2)
    assert (first, second) == ([0, 1, 2], [3, 4])
    pool.release(first)
    assert pool.free_block_ids() == [2, 1, 0, 5]
    pool.release(second)
    assert pool.free_block_ids() == [4, 3, 2, 1, 0, 5]
    assert pool.allocate(3) == [4, 3, 2]


def test_pool_frees_a_shared_block_with_its_last_owner() -> None:
    pool = BlockPool(4, 16)
    block_ids = pool.allocate(2)
    pool.share(block_ids)
    assert [pool.ref_count(b) for b in range(4)] == [2, 2, 0, 0]
    assert (pool.num_used, pool.num_free) == (2, 2)
    pool.release([1])
    pool.release(block_ids)
    assert pool.free_block_ids() == [1, 2, 3]
    assert pool.ref_count(0) == 1
    pool.release([0])
    assert pool.free_block_ids() == [0, 1, 2, 3]


def test_pool_takes_the_very_blocks_it_is_asked_for() -> None:
    pool = BlockPool(5, 16)
    pool.take([3, 1])
    assert pool.free_block_ids() == [0, 2, 4]
    with pytest.raises(IntegrityError, match="block 3 is taken twice"):
        pool.take([3])


@pytest.mark.parametrize("block_id", [-1, 4, 400])
def test_pool_refuses_ids_that_do_not_exist(block_id: int) -> None:
    pool = BlockPool(4, 16)
    pool.allocate(4)
    for method in (pool.release, pool.share, pool.take):
        with pytest.raises(IntegrityError, match=rf"block {block_id} does not exist.*0 to 3"):
            method([block_id])
    with pytest.raises(IntegrityError, match=f"block {block_id} does not exist"):
        pool.ref_count(block_id)


def test_pool_refuses_double_free_and_keeps_the_rest() -> None:
    pool = BlockPool(4, 16)
    block_ids = pool.allocate(2)
    with pytest.raises(IntegrityError, match="block 3 is freed twice"):
        pool.release([*block_ids, 3])
    assert pool.free_block_ids() == [1, 0, 2, 3]
    with pytest.raises(IntegrityError, match="block 0 is freed twice"):
        pool.release([0])
    with pytest.raises(IntegrityError, match="block 0 is free and cannot be shared"):
        pool.share([0])
    with pytest.raises(IntegrityError, match="5 blocks were taken with 4 of 4 free"):
        pool.allocate(5)
