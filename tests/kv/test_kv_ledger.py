"""What the ledger calls each slot, what requests cost, and how full paged blocks are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from octavo.errors import IntegrityError
from octavo.kv import KVCacheManager, SeqDemand
from octavo.outputs import RequestKVUsage


def run(kv: KVCacheManager, seq_id: int, num_tokens: int) -> bool:
    if kv.grow(seq_id, num_tokens, kv.num_committed(seq_id)) is None:
        return False
    kv.commit(seq_id, num_tokens)
    return True


def test_terms_of_sequences_that_will_and_will_not_fill_their_block() -> None:
    kv = KVCacheManager(10, 8, bytes_per_block=800)
    kv.start(0, SeqDemand(5, 100), "long")
    run(kv, 0, 5)
    kv.start(1, SeqDemand(9, 12), "short")
    run(kv, 1, 9)
    ledger = kv.ledger()
    assert ledger.terms() == {
        "tokens": 14, "reserved": 3 + 3, "internal": 4, "external": 0, "cached": 0, "free": 56,
    }  # fmt: skip
    assert (ledger.num_slots, ledger.num_bytes) == (80, 8000)
    assert sum(map(ledger.bytes_of, ledger.terms().values())) == ledger.num_bytes
    assert ledger.blocks_of(ledger.free) == 7
    assert ledger.used_ratio == 14 / 24
    short = kv.request_ledger("short")
    assert (short.tokens, short.reserved, short.internal) == (9, 3, 4)
    assert (short.num_physical_blocks, short.bytes_of(short.tokens)) == (2, 900)
    assert kv.request_ledger("unknown").num_allocated_slots == 0
    text = str(ledger)
    assert "10 blocks x 8 tokens = 80 slots" in text
    assert "tokens" in text
    assert "17.5%" in text


def test_grown_but_not_committed_slots_are_reserved() -> None:
    kv = KVCacheManager(10, 8)
    kv.start(0, SeqDemand(10, 100))
    kv.grow(0, 10, 0)
    assert (kv.ledger().tokens, kv.ledger().reserved) == (0, 16)


def test_shared_blocks_count_once_and_their_saving_is_told() -> None:
    kv = KVCacheManager(10, 4)
    kv.start(0, SeqDemand(10, 100), "r")
    run(kv, 0, 10)
    kv.fork(0, 1)
    kv.fork(0, 2)
    ledger = kv.ledger()
    assert (ledger.tokens, ledger.reserved) == (10, 2)
    assert (ledger.num_physical_blocks, ledger.num_logical_blocks) == (3, 9)
    assert (ledger.shared_saved, ledger.shared_saved_blocks) == (24, 6)
    assert ledger.shared_saved_ratio == pytest.approx(2 / 3)
    for seq_id in (0, 1, 2):
        run(kv, seq_id, 11)
    ledger = kv.ledger()
    assert (ledger.tokens, ledger.num_physical_blocks) == (8 + 3 * 3, 5)
    for seq_id in (0, 1):
        kv.release(seq_id)
    assert kv.ledger().shared_saved == 0
    assert kv.request_ledger("r").tokens == 11


@pytest.mark.parametrize("order", [(10, 9, 5), (5, 9, 10), (9, 10, 5)])
def test_a_shared_block_is_as_full_as_its_fullest_owner_says(order: tuple[int, ...]) -> None:
    """Owners may differ in what they fill and in how far they may grow."""
    kv = KVCacheManager(10, 4)
    kv.start(0, SeqDemand(10, 100))
    run(kv, 0, 10)
    for child_id in (1, 2):
        kv.fork(0, child_id)
    for seq_id, num_tokens in enumerate(order):
        kv._tables[seq_id].num_committed = num_tokens
        kv._tables[seq_id].max_total_tokens = num_tokens + 1
    ledger = kv.ledger()
    assert (ledger.tokens, ledger.reserved, ledger.internal) == (10, 1, 1)


def test_a_ledger_that_does_not_add_up_is_refused() -> None:
    ledger = KVCacheManager(10, 4).ledger()
    ledger.check_integrity()
    with pytest.raises(IntegrityError, match=r"tokens 1 \+ .* = 41 slots, expected 40"):
        replace(ledger, tokens=1).check_integrity()
    with pytest.raises(IntegrityError, match="does not add up"):
        replace(ledger, external=-4, free=44).check_integrity()


def test_block_seconds_and_peak_survive_a_preemption() -> None:
    kv = KVCacheManager(10, 4)
    kv.set_time(100.0)
    kv.start(0, SeqDemand(8, 100), "r")
    run(kv, 0, 8)  # 2 blocks for 3 s
    kv.set_time(103.0)
    run(kv, 0, 9)  # 3 blocks for 1 s
    kv.set_time(104.0)
    kv.release(0)
    kv.set_time(150.0)
    kv.start(1, SeqDemand(4, 100), "r")
    run(kv, 1, 4)  # 1 block for 2 s, asked in between
    kv.set_time(151.0)
    assert kv.request_usage("r") == RequestKVUsage(3, 10.0, 0)
    kv.set_time(152.0)
    kv.release(1)
    kv.set_time(200.0)
    assert kv.close_request("r") == RequestKVUsage(3, 11.0, 0)
    assert kv.request_usage("r") == kv.close_request("r") == RequestKVUsage()


def test_shared_tokens_are_the_most_held_together() -> None:
    kv = KVCacheManager(20, 4)
    kv.start(0, SeqDemand(10, 100), "r")
    run(kv, 0, 10)
    kv.fork(0, 1)
    assert kv.request_usage("r").shared_tokens == 10
    run(kv, 1, 11)
    run(kv, 0, 13)
    kv.fork(0, 2)  # 8 with sequence 1, and now 5 more with sequence 2
    assert kv.request_usage("r").shared_tokens == 13
    assert kv.request_usage("r").peak_blocks == 5
    for seq_id in (0, 1, 2):
        kv.release(seq_id)
    assert kv.close_request("r").shared_tokens == 13


def test_a_request_id_comes_again_after_its_end() -> None:
    kv = KVCacheManager(10, 4)
    kv.start(0, SeqDemand(8, 8), "r")
    run(kv, 0, 8)
    with pytest.raises(IntegrityError, match=r"request 'r' still has the sequences \[0\]"):
        kv.close_request("r")
    kv.release(0)
    kv.close_request("r")
    kv.start(1, SeqDemand(4, 8), "r")
    run(kv, 1, 4)
    assert kv.request_usage("r").peak_blocks == 1


def test_time_does_not_run_backwards() -> None:
    kv = KVCacheManager(10, 4)
    kv.set_time(5.0)
    kv.set_time(5.0)
    with pytest.raises(IntegrityError, match=r"4\.0 s after 5\.0 s"):
        kv.set_time(4.0)


class SaturatedRun:
    """A queue that is never empty, in front of a pool: the paper's overload (Fig. 2)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.kv = KVCacheManager(num_blocks, block_size)
        self.random = random.Random(0)
        self.running: dict[int, tuple[int, int]] = {}  # by sequence: tokens, final length
        self.waiting = [self.draw()]
        self.next_id = 0

    def draw(self) -> tuple[int, int]:
        """A request by ShareGPT's means: 161 in, 338 out, lognormal."""
        num_in = min(1024, 1 + int(self.random.lognormvariate(4.43, 1.15)))
        num_out = min(1024, 1 + int(self.random.lognormvariate(5.5, 0.95)))
        return num_in, num_in + num_out

    def step(self) -> None:
        for seq_id in list(self.running):
            self.advance(seq_id)
        keep_free = self.kv.num_blocks // 100
        while self.kv.can_admit(SeqDemand(*self.waiting[-1]), keep_free):
            num_tokens, total = self.waiting.pop()
            self.kv.start(self.next_id, SeqDemand(num_tokens, total))
            assert run(self.kv, self.next_id, num_tokens)
            self.running[self.next_id] = (num_tokens, total)
            self.next_id += 1
            self.waiting = self.waiting or [self.draw()]

    def advance(self, seq_id: int) -> None:
        """One more token; without room the last come goes back to the head of the queue."""
        while seq_id in self.running:
            num_tokens, total = self.running[seq_id]
            if run(self.kv, seq_id, num_tokens + 1):
                self.running[seq_id] = (num_tokens + 1, total)
                if num_tokens + 1 == total:
                    self.end(seq_id)
                return
            victim = max(self.running)
            self.waiting.append(self.running[victim])
            self.end(victim)

    def end(self, seq_id: int) -> None:
        self.kv.release(seq_id)
        del self.running[seq_id]


def test_saturated_blocks_of_16_are_96_percent_full() -> None:
    lab = SaturatedRun(983, 16)
    ratios, batch = [], []
    for step in range(1200):
        lab.step()
        if step >= 300 and step % 10 == 0:
            ledger = lab.kv.ledger()
            ledger.check_integrity()
            assert ledger.external == 0
            ratios.append(ledger.used_ratio)
            batch.append(len(lab.running))
    assert sum(batch) / len(batch) > 25, "the run was not saturated"
    assert sum(ratios) / len(ratios) >= 0.96
    assert min(ratios) >= 0.96
    lab.kv.check_integrity()
