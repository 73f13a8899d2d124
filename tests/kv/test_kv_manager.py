"""The manager's contract with the scheduler, in exact block ids."""

from __future__ import annotations

import pytest

from octavo.errors import CapacityError, ConfigError, IntegrityError
from octavo.kv import NO_GROWTH, Growth, KVCacheManager, SeqDemand
from octavo.plan import BlockCopy


def make(num_blocks: int = 8, block_size: int = 4) -> KVCacheManager:
    return KVCacheManager(num_blocks, block_size)


def run(kv: KVCacheManager, seq_id: int, num_tokens: int) -> Growth | None:
    """Grow from what is committed and commit."""
    growth = kv.grow(seq_id, num_tokens, kv.num_committed(seq_id))
    if growth is not None:
        kv.commit(seq_id, num_tokens)
    return growth


def started(num_blocks: int = 8, block_size: int = 4, *prompts: int) -> KVCacheManager:
    """Sequences 0, 1, ... with these prompt lengths computed."""
    kv = make(num_blocks, block_size)
    for seq_id, num_tokens in enumerate(prompts):
        kv.start(seq_id, SeqDemand(num_tokens, 1000), f"r{seq_id}")
        assert run(kv, seq_id, num_tokens) is not None
    return kv


def test_grows_by_a_block_when_the_last_is_full() -> None:
    kv = make()
    kv.start(7, SeqDemand(6, 100))
    assert kv.block_table(7) == []
    assert kv.grow(7, 6, 0) == Growth((0, 1), None)
    kv.commit(7, 6)
    assert kv.grow(7, 7, 6) is NO_GROWTH
    assert kv.grow(7, 8, 7) is NO_GROWTH
    assert kv.grow(7, 9, 8) == Growth((2,), None)
    assert kv.block_table(7) == [0, 1, 2]
    assert [kv.slot(7, p) for p in (0, 5, 8)] == [0, 5, 8]
    assert (kv.num_blocks, kv.num_free_blocks, kv.num_slots) == (8, 5, 32)


@pytest.mark.parametrize("block_size", [1, 2, 16, 128])
@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_blocks_at_the_edges_of_a_block(block_size: int, delta: int) -> None:
    num_tokens = max(1, 2 * block_size + delta)
    kv = started(8, block_size, num_tokens)
    assert len(kv.block_table(0)) == -(-num_tokens // block_size)
    ledger = kv.ledger()
    assert ledger.tokens == num_tokens
    assert ledger.reserved == len(kv.block_table(0)) * block_size - num_tokens


def test_a_released_sequence_gives_its_tail_first() -> None:
    kv = started(8, 4, 12, 4)
    kv.release(0)
    kv.start(2, SeqDemand(16, 16))
    assert kv.grow(2, 16, 0) == Growth((2, 1, 0, 4), None)


def test_grow_is_all_or_nothing() -> None:
    kv = started(4, 4, 8)
    assert kv.grow(0, 17, 8) is None
    assert kv.block_table(0) == [0, 1]
    assert kv.num_free_blocks == 2
    assert kv.grow(0, 16, 8) == Growth((2, 3), None)
    kv.check_integrity()


def test_fork_shares_and_copies_only_the_partial_block() -> None:
    kv = started(8, 4, 10)
    assert kv.fork(0, 1)
    assert kv.take_copies() == []
    assert kv.block_table(1) == [0, 1, 2]
    assert [kv.ref_count(b) for b in range(4)] == [2, 2, 2, 0]
    # The child writes first: its runner has no table yet, so the new block comes with the rest.
    assert run(kv, 1, 11) == Growth((0, 1, 3), None)
    assert kv.take_copies() == [BlockCopy(2, 3)]
    assert [kv.ref_count(b) for b in range(4)] == [2, 2, 1, 1]
    # Now the parent is alone with its block, and writes in place.
    assert run(kv, 0, 11) is NO_GROWTH
    assert kv.num_free_blocks == 4
    kv.check_integrity()


def test_the_parent_copies_when_it_writes_first() -> None:
    kv = started(8, 4, 10)
    kv.fork(0, 1)
    assert run(kv, 0, 11) == Growth((), (2, 3))
    assert kv.take_copies() == [BlockCopy(2, 3)]
    assert kv.block_table(0) == [0, 1, 3]
    assert kv.grow(1, 11, 10) == Growth((0, 1, 2), None)


def test_three_owners_make_two_copies() -> None:
    kv = started(8, 4, 6)
    kv.fork(0, 1)
    kv.fork(0, 2)
    for seq_id in range(3):
        run(kv, seq_id, 7)
    assert kv.take_copies() == [BlockCopy(1, 2), BlockCopy(1, 3)]


def test_full_blocks_are_never_copied() -> None:
    kv = started(8, 4, 8)
    kv.fork(0, 1)
    assert run(kv, 0, 9) == Growth((2,), None)
    assert run(kv, 1, 9) == Growth((0, 1, 3), None)
    assert kv.ledger().shared_saved_blocks == 2


def test_copy_and_growth_together_are_all_or_nothing() -> None:
    kv = started(3, 4, 6)
    kv.fork(0, 1)
    assert kv.grow(1, 9, 6) is None  # a copy and a block, with one block free
    assert kv.block_table(1) == [0, 1]
    assert kv.ref_count(1) == 2
    assert kv.grow(1, 7, 6) == Growth((0, 2), None)
    assert kv.take_copies() == [BlockCopy(1, 2)]


def test_fork_leaves_out_blocks_without_committed_tokens() -> None:
    kv = make()
    kv.start(0, SeqDemand(12, 100))
    kv.grow(0, 12, 0)
    kv.commit(0, 5)
    kv.fork(0, 1)
    assert kv.block_table(1) == [0, 1]
    assert run(kv, 0, 12) == Growth((), (1, 3))
    assert kv.take_copies() == [BlockCopy(1, 3)]
    assert kv.grow(1, 6, 5) == Growth((0, 1), None)


def test_a_fork_before_any_token_shares_nothing() -> None:
    kv = make()
    kv.start(0, SeqDemand(4, 100))
    kv.fork(0, 1)
    assert kv.block_table(1) == []
    assert kv.grow(1, 4, 0) == Growth((0,), None)
    kv.check_integrity()


def test_rewriting_several_shared_blocks_is_refused() -> None:
    kv = started(8, 4, 10)
    kv.fork(0, 1)
    with pytest.raises(IntegrityError, match=r"sequence 0 would rewrite 3 shared blocks"):
        kv.grow(0, 11, 2)


def test_rewriting_the_last_token_of_a_shared_full_block_copies_it() -> None:
    kv = started(8, 4, 8)
    kv.fork(0, 1)
    assert kv.grow(1, 8, 7) == Growth((0, 2), None)
    assert kv.take_copies() == [BlockCopy(1, 2)]


def test_can_admit_keeps_the_watermark() -> None:
    kv = started(8, 4, 8)
    assert kv.can_admit(SeqDemand(24, 1000))
    assert not kv.can_admit(SeqDemand(25, 1000))
    assert kv.can_admit(SeqDemand(20, 1000), keep_free=1)
    assert not kv.can_admit(SeqDemand(24, 1000), keep_free=1)
    assert kv.max_tokens_of_one_sequence == 32
    assert kv.can_preempt


def test_release_of_one_owner_keeps_the_other() -> None:
    kv = started(8, 4, 10)
    kv.fork(0, 1)
    view = kv.block_table(0)
    kv.release(0)
    assert view == []
    assert kv.block_table(1) == [0, 1, 2]
    assert kv.num_free_blocks == 5
    assert run(kv, 1, 11) == Growth((0, 1, 2), None)


def test_unknown_ended_and_repeated_ids_are_named() -> None:
    kv = started(8, 4, 4)
    for call in (
        lambda: kv.grow(9, 1, 0), lambda: kv.commit(9, 1), lambda: kv.release(9),
        lambda: kv.fork(9, 10), lambda: kv.block_table(9), lambda: kv.slot(9, 0),
    ):  # fmt: skip
        with pytest.raises(IntegrityError, match="sequence 9 has no block table"):
            call()
    with pytest.raises(IntegrityError, match="sequence 0 has a block table already"):
        kv.start(0, SeqDemand(1, 1))
    with pytest.raises(IntegrityError, match="sequence 0 has a block table already"):
        kv.fork(0, 0)
    kv.release(0)
    with pytest.raises(IntegrityError, match=r"sequence 0 .* released already"):
        kv.release(0)
    kv.start(0, SeqDemand(1, 1))


def test_positions_and_counts_out_of_range_are_refused() -> None:
    kv = started(8, 4, 6)
    for position in (-1, 8):
        with pytest.raises(IntegrityError, match=f"sequence 0 has no slot for position {position}"):
            kv.slot(0, position)
    for num_tokens in (-1, 9):
        with pytest.raises(IntegrityError, match=rf"sequence 0 cannot have {num_tokens} tokens"):
            kv.commit(0, num_tokens)
    with pytest.raises(IntegrityError, match="grow to 9 tokens with 10"):
        kv.grow(0, 9, 10)


def test_the_view_cannot_be_written() -> None:
    view = started(8, 4, 8).block_table(0)
    assert (len(view), view[1], view[-1], view[:1], list(view)) == (2, 1, 1, [0], [0, 1])
    with pytest.raises(TypeError):
        view[0] = 5  # type: ignore[index]


def test_constructor_refusals_say_the_flag() -> None:
    with pytest.raises(CapacityError, match="--kv-cache-memory-bytes"):
        KVCacheManager(0, 16)
    with pytest.raises(ConfigError, match="--block-size"):
        KVCacheManager(4, 0)
    with pytest.raises(ConfigError, match="bytes_per_block=33 is not a multiple"):
        KVCacheManager(4, 16, bytes_per_block=33)


def test_the_same_calls_give_the_same_blocks() -> None:
    def play() -> list[list[int]]:
        kv = started(16, 4, 9, 5, 13)
        kv.fork(0, 5)
        for seq_id in (5, 1, 0):
            run(kv, seq_id, kv.num_committed(seq_id) + 3)
        kv.release(2)
        kv.start(9, SeqDemand(20, 20))
        run(kv, 9, 20)
        return [list(kv.block_table(seq_id)) for seq_id in (0, 1, 5, 9)]

    assert play() == play()
