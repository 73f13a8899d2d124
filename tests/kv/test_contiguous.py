"""FasterTransformer's policy: regions, and batches of whole requests."""

from __future__ import annotations

import pytest

from octavo.errors import CapacityError, ConfigError, IntegrityError
from octavo.kv import NO_GROWTH, ContiguousPolicy, Growth, KVCacheManager, SeqDemand
from octavo.plan import BlockCopy


def make(num_blocks: int = 10, **limits: int) -> KVCacheManager:
    """Blocks of 4, regions of 3 blocks for 12 tokens."""
    return KVCacheManager(num_blocks, 4, ContiguousPolicy(12, **limits))


def run(kv: KVCacheManager, seq_id: int, num_tokens: int) -> None:
    assert kv.grow(seq_id, num_tokens, kv.num_committed(seq_id)) is not None
    kv.commit(seq_id, num_tokens)


def test_a_region_is_reserved_at_the_start_and_told_with_the_first_grow() -> None:
    kv = make()
    assert not kv.can_preempt
    assert kv.batches_requests
    assert kv.max_tokens_of_one_sequence == 12
    assert kv.start(0, SeqDemand(5, 12)) == 0
    assert kv.num_free_blocks == 7
    assert kv.grow(0, 5, 0) == Growth((0, 1, 2), None)
    kv.commit(0, 5)
    assert kv.grow(0, 12, 5) is NO_GROWTH
    assert kv.slot(0, 11) == 11


def test_ledger_of_regions() -> None:
    kv = make()
    for seq_id, limit in ((0, 12), (1, 7)):
        kv.start(seq_id, SeqDemand(5, limit), f"r{seq_id}")
        run(kv, seq_id, 5)
    assert kv.ledger().terms() == {
        "tokens": 10, "reserved": 7 + 2, "internal": 5, "external": 4, "cached": 0, "free": 12,
    }  # fmt: skip
    assert kv.can_admit(SeqDemand(5, 12))
    assert not kv.can_admit(SeqDemand(5, 13))
    kv.start(2, SeqDemand(5, 12))
    # The one block behind the three regions is of no use to anybody.
    assert (kv.ledger().external, kv.ledger().free) == (4, 0)
    assert not kv.can_admit(SeqDemand(1, 1))
    assert kv.num_free_blocks == 1
    with pytest.raises(CapacityError, match=r"sequence 3 .* contiguous policy cannot reserve 12"):
        kv.start(3, SeqDemand(1, 12), "r")
    assert not kv.has(3)
    kv.check_integrity()


def test_a_region_that_ends_within_a_block_is_rounded_up() -> None:
    kv = KVCacheManager(10, 4, ContiguousPolicy(10))
    kv.start(0, SeqDemand(5, 7))
    ledger = kv.ledger()
    assert (ledger.reserved, ledger.internal, ledger.rounding) == (7, 3, 2)
    assert (ledger.external, ledger.free) == (4 + 2, 24)
    assert kv.max_tokens_of_one_sequence == 10


def test_a_pool_smaller_than_a_region_is_one_region() -> None:
    kv = make(2)
    assert kv.max_tokens_of_one_sequence == 8
    assert kv.fits_idle(SeqDemand(5, 8))
    assert not kv.fits_idle(SeqDemand(5, 9))
    assert not kv.fits_idle(SeqDemand(5, 8, num_seqs=2))
    kv.start(0, SeqDemand(5, 8))
    assert list(kv.block_table(0)) == [0, 1]


def test_requests_join_in_the_step_in_which_nothing_runs_at_its_start() -> None:
    kv = make()
    kv.begin_step()
    kv.start(0, SeqDemand(5, 12))
    run(kv, 0, 5)
    kv.start(1, SeqDemand(5, 12))  # the same step
    assert kv.can_admit(SeqDemand(5, 12))
    kv.begin_step()
    assert not kv.can_admit(SeqDemand(5, 12))
    assert kv.why_no_room(SeqDemand(5, 12)) == (
        "the batch of 2 that runs takes nobody in until all have ended"
    )
    kv.release(0)
    kv.begin_step()
    assert not kv.can_admit(SeqDemand(5, 12))
    kv.release(1)
    assert kv.can_admit(SeqDemand(5, 12))
    kv.begin_step()
    assert kv.can_admit(SeqDemand(5, 12, num_seqs=3))
    kv.check_integrity()


def test_a_batch_is_limited_by_requests_and_by_padding() -> None:
    kv = make(max_batch=2)
    for seq_id in (0, 1):
        kv.start(seq_id, SeqDemand(5, 12))
    assert kv.why_no_room(SeqDemand(5, 12)) == "the batch has its 2 requests"
    assert not kv.can_admit(SeqDemand(5, 12))

    kv = make(max_padded_tokens=11)
    assert kv.max_tokens_of_one_sequence == 11
    assert not kv.fits_idle(SeqDemand(5, 12))
    kv.start(0, SeqDemand(7, 9))  # 7 + 2
    assert kv.can_admit(SeqDemand(2, 6))  # 7 + 4 = 11
    assert not kv.can_admit(SeqDemand(2, 7))  # 7 + 5
    assert kv.can_admit(SeqDemand(2, 7, 6))  # as is known: 7 + 4
    assert not kv.can_admit(SeqDemand(10, 11))  # 10 + 2
    assert kv.why_no_room(SeqDemand(2, 7)) == (
        "the batch would be padded to 7 + 5 = 12 tokens, more than 11"
    )
    kv.start(1, SeqDemand(2, 6))
    assert not kv.can_admit(SeqDemand(8, 9))  # 8 + 4
    for seq_id in (0, 1):
        kv.release(seq_id)
    assert kv.can_admit(SeqDemand(8, 11)), "the next batch begins anew"


def test_a_batch_ends_together() -> None:
    kv = make()
    kv.set_time(0.0)
    for seq_id in (0, 1):
        kv.start(seq_id, SeqDemand(5, 12), f"r{seq_id}")
    run(kv, 0, 5)
    kv.release(0)
    kv.set_time(2.0)
    # The ended sequence keeps its region: nobody needs its tokens, and nothing will be filled.
    assert kv.num_free_blocks == 4
    assert kv.request_ledger("r0").internal == 12
    assert kv.ledger().terms() == {
        "tokens": 0, "reserved": 12, "internal": 12, "external": 4, "cached": 0, "free": 12,
    }  # fmt: skip
    kv.check_integrity()
    with pytest.raises(IntegrityError, match=r"sequence 0 .* released already"):
        kv.release(0)
    with pytest.raises(IntegrityError, match="sequence 0 has a block table already"):
        kv.start(0, SeqDemand(5, 12))
    kv.release(1)
    assert kv.num_free_blocks == 10
    assert kv.close_request("r0").block_seconds == 6.0
    kv.check_integrity()


def test_forks_copy_and_beams_hand_their_regions_on() -> None:
    kv = make(13)
    kv.start(0, SeqDemand(5, 12, num_seqs=2, forks_again=True), "r")
    kv.start(1, SeqDemand(5, 12), "other")
    run(kv, 0, 5)
    kv.begin_step()
    assert kv.fork(0, 2)
    assert kv.take_copies() == [BlockCopy(0, 3), BlockCopy(1, 4)]
    assert kv.num_committed(2) == 5
    kv.release(0)
    assert kv.fork(2, 3)
    assert list(kv.block_table(3)) == [0, 1, 2]
    kv.release(3)
    kv.release(2)
    # The search is over, and its two regions wait for the batch: one of them in no table.
    ledger = kv.ledger()
    assert (ledger.tokens, ledger.internal, ledger.free) == (0, 24, 12)
    assert ledger.num_physical_blocks == 6
    kv.check_integrity()
    kv.release(1)
    assert kv.num_free_blocks == 13
    assert kv.can_admit(SeqDemand(1, 12, num_seqs=4))
    kv.check_integrity()


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="region_tokens must be at least 1, got 0"):
        ContiguousPolicy(0)
    with pytest.raises(ConfigError, match="max_batch must be at least 1, got 0"):
        ContiguousPolicy(4, max_batch=0)
    with pytest.raises(ConfigError, match="max_padded_tokens must be at least 1, got -1"):
        ContiguousPolicy(4, max_padded_tokens=-1)
