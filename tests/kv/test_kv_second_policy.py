"""A policy that reserves contiguous runs, behind the same manager."""

from __future__ import annotations

import pytest
from kv_support import ContiguousPolicy

from octavo.errors import CapacityError, IntegrityError
from octavo.kv import NO_GROWTH, Growth, KVCacheManager, SeqDemand
from octavo.plan import BlockCopy


def make(num_blocks: int = 10, *, batched: bool = False) -> KVCacheManager:
    """Blocks of 4, runs of 3 blocks: 12 tokens at most."""
    return KVCacheManager(num_blocks, 4, ContiguousPolicy(12, batched=batched))


def test_the_run_is_reserved_at_the_start_and_told_with_the_first_grow() -> None:
    kv = make()
    assert not kv.can_preempt
    assert kv.max_tokens_of_one_sequence == 12
    assert kv.start(0, SeqDemand(5, 12)) == 0
    assert kv.num_free_blocks == 7
    assert kv.grow(0, 5, 0) == Growth((0, 1, 2), None)
    kv.commit(0, 5)
    assert kv.grow(0, 12, 5) is NO_GROWTH
    assert kv.slot(0, 11) == 11


def test_ledger_of_reserved_runs() -> None:
    kv = make()
    for seq_id, limit in ((0, 12), (1, 7)):
        kv.start(seq_id, SeqDemand(5, limit), f"r{seq_id}")
        kv.grow(seq_id, 5, 0)
        kv.commit(seq_id, 5)
    assert kv.ledger().terms() == {
        "tokens": 10, "reserved": 7 + 2, "internal": 5, "external": 4, "cached": 0, "free": 12,
    }  # fmt: skip
    kv.start(2, SeqDemand(5, 12))
    kv.release(1)
    kv.release(0)
    # Blocks 0-5 are two runs, 6-8 the third sequence's; block 9 alone is of no use.
    assert (kv.ledger().external, kv.ledger().free) == (4, 24)
    assert kv.can_admit(SeqDemand(5, 12))
    assert not kv.can_admit(SeqDemand(5, 13))
    kv.check_integrity()


def test_head_of_line_waits_with_free_blocks() -> None:
    kv = make()
    for seq_id in range(3):
        kv.start(seq_id, SeqDemand(1, 12))
    assert not kv.can_admit(SeqDemand(1, 1))
    assert kv.num_free_blocks == 1
    with pytest.raises(CapacityError, match=r"sequence 3 .* contiguous policy cannot reserve 12"):
        kv.start(3, SeqDemand(1, 12), "r")
    assert not kv.has(3)
    kv.check_integrity()


def test_forks_copy() -> None:
    kv = make()
    kv.start(0, SeqDemand(5, 12), "r")
    kv.grow(0, 5, 0)
    kv.commit(0, 5)
    assert kv.fork(0, 1)
    assert kv.take_copies() == [BlockCopy(0, 3), BlockCopy(1, 4)]
    assert kv.num_committed(1) == 5
    assert kv.grow(1, 6, 5) == Growth((3, 4, 5), None)
    assert kv.grow(0, 6, 5) is NO_GROWTH
    kv.fork(0, 2)
    assert not kv.fork(0, 3)
    assert kv.ledger().shared_saved == 0
    assert kv.request_usage("r").shared_tokens == 0
    kv.check_integrity()


def test_a_batch_takes_nobody_in_and_ends_together() -> None:
    kv = make(batched=True)
    kv.set_time(0.0)
    for seq_id in (0, 1):
        assert kv.can_admit(SeqDemand(5, 12))
        kv.start(seq_id, SeqDemand(5, 12), f"r{seq_id}")
    kv.grow(0, 5, 0)
    kv.commit(0, 5)
    assert not kv.can_admit(SeqDemand(5, 12))
    kv.release(0)
    kv.set_time(2.0)
    # The ended sequence keeps its run: its tokens, and nothing that will ever be filled.
    assert kv.num_free_blocks == 4
    assert kv.request_ledger("r0").internal == 7
    assert kv.ledger().terms() == {
        "tokens": 5, "reserved": 12, "internal": 7, "external": 4, "cached": 0, "free": 12,
    }  # fmt: skip
    kv.check_integrity()
    with pytest.raises(IntegrityError, match=r"sequence 0 .* released already"):
        kv.release(0)
    with pytest.raises(IntegrityError, match="sequence 0 has a block table already"):
        kv.start(0, SeqDemand(5, 12))
    kv.release(1)
    assert kv.num_free_blocks == 10
    assert kv.can_admit(SeqDemand(5, 12))
    assert kv.close_request("r0").block_seconds == 6.0
    kv.check_integrity()
