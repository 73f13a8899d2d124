"""The ledger over time, settled in hindsight, against remembering everything."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest

from octavo.config import KVPolicy
from octavo.kv import (
    BlockTable,
    KVCacheManager,
    LedgerHistory,
    LedgerSample,
    MeanLedger,
    PoolLedger,
    SeqDemand,
    make_policy,
)
from octavo.kv.ledger import TERMS


class Life:
    """Random sequences in a pool; some go on for longer than others, and some are preempted."""

    def __init__(self, policy: KVPolicy, num_blocks: int = 60, seed: int = 0) -> None:
        limits = {"max_padded_tokens": 60} if policy == "contiguous" else {}
        self.kv = KVCacheManager(
            num_blocks, 4, make_policy(policy, max_seq_tokens=64, **limits)  # type: ignore[arg-type]
        )  # fmt: skip
        self.random = random.Random(seed)
        self.ends: dict[int, int] = {}
        """By sequence: with how many tokens it ends, the last of which is not computed."""
        self.tokens: dict[int, list[int]] = {}
        self.next_id = 0

    def step(self) -> None:
        kv = self.kv
        kv.begin_step()
        for seq_id, end in list(self.ends.items()):
            tokens = self.tokens[seq_id]
            if len(tokens) == end or not self.run(seq_id, len(tokens)):
                self.drop(seq_id)
            else:
                tokens.append(1)
        while self.random.random() < 0.5:
            num_prompt = self.random.randint(1, 20)
            most = num_prompt + self.random.randint(1, 30)
            tokens = [0] * num_prompt
            demand = SeqDemand(num_prompt, most, token_ids=tokens)
            if not kv.can_admit(demand):
                break
            kv.start(self.next_id, demand)
            self.ends[self.next_id] = self.random.randint(num_prompt + 1, most)
            self.tokens[self.next_id] = tokens
            assert self.run(self.next_id, num_prompt)
            tokens.append(1)
            self.next_id += 1

    def run(self, seq_id: int, num_tokens: int) -> bool:
        if self.kv.grow(seq_id, num_tokens, self.kv.num_committed(seq_id)) is None:
            return False
        self.kv.commit(seq_id, num_tokens)
        return True

    def drop(self, seq_id: int) -> None:
        del self.ends[seq_id]
        self.kv.release(seq_id)


@dataclass(frozen=True)
class Seen:
    """One table at one time."""

    table: BlockTable
    num_filled: int
    num_asked: int
    """Slots that were set aside on purpose."""


class Memory:
    """Everything that was seen, and how many tokens each sequence had when it ended."""

    def __init__(self, life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kv = kv = life.kv
        self.tokens = life.tokens
        self.seen: dict[float, tuple[PoolLedger, list[Seen]]] = {}
        self.final: dict[BlockTable, int] = {}
        give_back = kv._give_back

        def noting(table: BlockTable) -> None:
            self.final[table] = len(life.tokens[table.seq_id])
            give_back(table)

        monkeypatch.setattr(kv, "_give_back", noting)

    def look(self, now_s: float) -> None:
        tables = [
            Seen(table, table.num_committed, min(table.num_asked, 4 * len(table.block_ids)))
            for table in self.kv._tables.values()
        ]
        self.seen[now_s] = self.kv.ledger(), tables

    def settled(self, now_s: float) -> tuple[int, int, int]:
        """(reserved, internal, undecided) by the definition: prompt and true
        output, less what is filled; and what else was set aside. Live ones: as far as they may."""
        ledger, tables = self.seen[now_s]
        held = ledger.internal - sum(
            max(0, one.num_asked - max(one.num_filled, one.table.demand.max_total_tokens))
            for one in tables
        )
        """Of ended members of a batch."""
        reserved = undecided = 0
        internal = held
        for one in tables:
            until = self.final.get(one.table, one.table.demand.max_total_tokens)
            last = max(one.num_filled, min(until, one.num_asked))
            reserved += last - one.num_filled
            internal += one.num_asked - last
            if one.table not in self.final:
                undecided += max(0, last - len(self.tokens[one.table.seq_id]))
        return reserved, internal, undecided


@pytest.mark.parametrize("policy", ["paged", "contiguous", "orca-max", "orca-pow2", "orca-oracle"])
@pytest.mark.parametrize("max_samples", [2, 7, 32, 1000])
def test_settled_is_what_remembering_everything_tells(
    policy: KVPolicy, max_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(policy)
    history = life.kv.keep_history(max_samples)
    memory = Memory(life, monkeypatch)
    num_moved = num_undecided = 0
    for step in range(260):
        now_s = step * 0.5
        life.step()
        if history.is_due(now_s):
            history.sample(now_s, num_waiting=step)
            memory.look(now_s)
        if step % 13 == 0 or step > 250:
            for sample in history.samples():
                ledger, tables = memory.seen[sample.time_s]
                found = sample.reserved, sample.internal, sample.undecided
                assert found == memory.settled(sample.time_s), sample
                assert sum(sample[3:9]) == life.kv.num_slots
                assert (sample.tokens, sample.external) == (ledger.tokens, ledger.external)
                assert sample.num_waiting == 2 * sample.time_s
                assert sample.num_running >= len(tables)
                num_moved += sample.internal - ledger.internal
                num_undecided += sample.undecided
    assert num_moved > 0
    assert num_undecided > 0
    assert len(history) <= max_samples
    for seq_id in list(life.ends):
        life.drop(seq_id)
    assert all(sample.undecided == 0 for sample in history.samples())
    assert not history._open


def test_every_second_sample_goes_and_the_spacing_doubles() -> None:
    kv = KVCacheManager(8, 4)
    history = kv.keep_history(max_samples=4, spacing_s=1.0)
    due = []
    for tick in range(60):
        if history.is_due(tick / 4):
            history.sample(tick / 4)
            due.append(tick / 4)
    assert due == [0, 1, 2, 3, 4, 6, 8, 12]
    assert history.spacing_s == 4.0
    assert [sample.time_s for sample in history.samples()] == [0, 4, 8, 12]


def test_samples_that_are_far_apart_are_thinned_evenly() -> None:
    """A spacing below the time from one sample to the next grows at once."""
    history = KVCacheManager(8, 4).keep_history(max_samples=8)
    for tick in range(1000):
        if history.is_due(tick * 10.0):
            history.sample(tick * 10.0)
    times = [sample.time_s for sample in history.samples()]
    gaps = [b - a for a, b in pairwise(times)]
    assert max(gaps) <= 2 * min(gaps)


def test_means_weigh_samples_by_how_long_they_hold() -> None:
    kv = KVCacheManager(10, 4)
    history = kv.keep_history()
    assert history.mean() is None
    history.sample(0.0)
    kv.start(0, SeqDemand(8, 100))
    kv.grow(0, 8, 0)
    kv.commit(0, 8)
    history.sample(6.0, num_waiting=3)
    kv.grow(0, 9, 8)
    kv.commit(0, 9)
    history.sample(8.0)
    mean = history.mean()
    assert mean is not None
    assert mean.seconds == 8.0
    assert mean.tokens == pytest.approx(2 / 8 * 8)  # nothing for 6 s, 8 tokens for 2 s
    assert mean.num_waiting == pytest.approx(3 / 4)
    later = history.mean(7.0, 12.0)
    assert later is not None
    assert later.tokens == pytest.approx((8 * 1 + 9 * 4) / 5)
    assert later.reserved == pytest.approx((0 * 1 + 3 * 4) / 5)
    assert later.undecided == later.reserved
    kv.release(0)
    later = history.mean(7.0, 12.0)
    assert later is not None
    assert (later.reserved, later.undecided) == (0.0, 0.0)
    assert later.internal == pytest.approx(3 * 4 / 5)
    at_one_time = history.mean(8.0)
    assert at_one_time is not None
    assert (at_one_time.seconds, at_one_time.tokens) == (0.0, 9.0)
    assert history.mean(-5.0, -1.0) is None


def test_a_shared_last_block_is_settled_once() -> None:
    """Two owners of a block with two free slots: they count as reserved once, and so they are
    internal once when both end."""
    kv = KVCacheManager(10, 4)
    history = kv.keep_history()
    kv.start(0, SeqDemand(6, 100))
    kv.grow(0, 6, 0)
    kv.commit(0, 6)
    kv.fork(0, 1)
    history.sample(0.0)
    (sample,) = history.samples()
    assert (sample.tokens, sample.reserved, sample.undecided, sample.saved) == (6, 2, 2, 8)
    kv.release(1)
    kv.release(0)
    (sample,) = history.samples()
    assert (sample.reserved, sample.internal, sample.undecided) == (0, 2, 0)


def test_a_preempted_sequence_leaves_what_it_had_not_filled() -> None:
    kv = KVCacheManager(10, 4)
    history = kv.keep_history()
    tokens = list(range(6))
    for now_s in (0.0, 1.0):
        kv.start(0, SeqDemand(6, 100, token_ids=tokens))
        kv.grow(0, 6, 0)
        kv.commit(0, 6)
        history.sample(now_s)
        kv.preempt(0, to_host=False)
    assert [(s.reserved, s.internal) for s in history.samples()] == [(0, 2), (0, 2)]


@pytest.mark.parametrize(("leave", "expected"), [("release", (3, 8)), ("preempt", (2, 9))])
def test_the_last_token_had_its_slot_though_it_is_never_computed(
    leave: str, expected: tuple[int, int]
) -> None:
    """A prompt of 5 and 3 tokens, of which 2 are computed, in a run of 16. At its end prompt and
    true output were reserved; who is preempted leaves the slot of its last token unused."""
    kv = KVCacheManager(10, 4, make_policy("orca-oracle", max_seq_tokens=16))
    history = kv.keep_history()
    tokens = list(range(5))
    kv.start(0, SeqDemand(5, 16, token_ids=tokens))
    kv.grow(0, 5, 0)
    kv.commit(0, 5)
    history.sample(0.0)
    for num in (6, 7):
        tokens.append(1)
        kv.commit(0, num)
    tokens.append(1)
    (sample,) = history.samples()
    assert (sample.reserved, sample.internal, sample.undecided) == (11, 0, 8)
    if leave == "release":
        kv.release(0)
    else:
        kv.preempt(0, to_host=False)
    (sample,) = history.samples()
    assert (sample.reserved, sample.internal, sample.undecided) == (*expected, 0)


def test_a_prompt_that_is_aborted_halfway_had_no_use_for_the_rest() -> None:
    kv = KVCacheManager(10, 4)
    history = kv.keep_history()
    kv.start(0, SeqDemand(9, 16, token_ids=list(range(9))))
    kv.grow(0, 5, 0)
    kv.commit(0, 5)
    history.sample(0.0)
    kv.release(0)
    (sample,) = history.samples()
    assert (sample.tokens, sample.reserved, sample.internal) == (5, 0, 3)


def test_samples_have_the_terms_of_the_ledger() -> None:
    assert LedgerSample._fields[3:9] == TERMS
    assert set(TERMS) < set(MeanLedger._fields)
    assert tuple(KVCacheManager(2, 4).ledger().terms()) == TERMS


def test_without_a_history_nothing_is_kept() -> None:
    kv = KVCacheManager(10, 4)
    assert kv.history is None
    assert isinstance(kv.keep_history(), LedgerHistory)
    assert kv.history is not None


def test_a_sequence_that_ends_before_it_fills_what_it_took_twice() -> None:
    kv = KVCacheManager(10, 4)
    history = kv.keep_history()
    kv.start(0, SeqDemand(8, 100))
    for now_s in (0.0, 1.0, 2.0):
        kv.grow(0, 4 + 4 * int(now_s), 0)
        history.sample(now_s)
    kv.release(0)
    assert [(s.reserved, s.internal) for s in history.samples()] == [(0, 4), (0, 8), (0, 12)]
