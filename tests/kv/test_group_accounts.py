"""What ledgers, accounts and the settled history say of groups, against counting all of it.

Nothing is taken from the manager but the block ids of its tables: how far each block is filled
follows from the sequences' own lengths, what a request cost from looking after every single thing
that happens, and what was internal all along from remembering every slot of every sample.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from group_sim import GroupSim, Player, Seq

from octavo.outputs import RequestKVUsage


@dataclass
class Counted:
    """Of one pool or request, in slots."""

    tokens: int = 0
    reserved: int = 0
    internal: int = 0
    num_blocks: int = 0
    num_entries: int = 0
    shared_tokens: int = 0
    """In blocks of the first group that two entries point at."""


@dataclass
class Cost:
    """Of one request, so far."""

    peak_blocks: int = 0
    block_seconds: float = 0.0
    shared_tokens: int = 0
    cached_tokens: int = 0
    resumed_tokens: int = 0
    forked_tokens: int = 0


@dataclass(eq=False)
class Open:
    """Unfilled slots `first .. end - 1` of one group of a running sequence, in one sample; those
    that another owner of the same block tells of are left out."""

    first: int
    end: int


@dataclass(eq=False)
class Life:
    """A sequence from a start to its end or preemption."""

    opens: list[list[Open]] = field(default_factory=list)
    """By sample."""
    num_wanted: int | None = None
    """Slots that were of use; None: it runs."""


class BookedSim(GroupSim):
    """Keeps books of its own."""

    def boot(self, num_blocks: int) -> None:
        super().boot(num_blocks)
        self.costs: dict[str, Cost] = defaultdict(Cost)
        self.lives: dict[int, Life] = {}
        self.ended: list[Life] = []
        self.now_s = 0.0
        self.clock = random.Random(num_blocks)
        self.history = self.kv.keep_history()
        self.live: list[Counted] = []
        """By sample: the pool as it was seen."""
        self.num_shared = self.num_reserved = self.num_moved = 0

    # -- everything that happens

    def begin_step(self) -> None:
        later_s = self.clock.choice((0.0, 0.5, 3.0))
        for request_id in {seq.request_id for seq in self.seqs.values()}:
            count = self.count([s for s in self.running if s.request_id == request_id])
            self.costs[request_id].block_seconds += count.num_blocks * later_s
        self.now_s += later_s
        self.kv.set_time(self.now_s)
        super().begin_step()
        self.note()

    def start(self, seq: Seq) -> int:
        has_run, found = seq.has_run, super().start(seq)
        cost = self.costs[seq.request_id]
        if has_run:
            cost.resumed_tokens += found
        else:
            cost.cached_tokens += found
        self.lives[seq.seq_id] = Life()
        self.note()
        return found

    def grow(self, seq: Seq, end: int) -> bool:
        has_grown = super().grow(seq, end)
        self.note()
        return has_grown

    def fork(self, parent: Seq, token: int) -> Seq:
        child = super().fork(parent, token)
        self.costs[child.request_id].forked_tokens += parent.num_computed
        self.lives[child.seq_id] = Life()
        self.note()
        return child

    def end(self, seq: Seq) -> None:
        usage = self.kv.request_usage(seq.request_id)
        is_last = [s.request_id for s in self.seqs.values()].count(seq.request_id) == 1
        if seq.is_running:
            num = seq.num_computed
            self.gone(seq, num + (len(seq.tokens) == num + 1))
        super().end(seq)
        if is_last:
            cost = self.costs.pop(seq.request_id)
            assert usage == RequestKVUsage(*vars(cost).values(), usage.misses)

    def preempt(self, seq: Seq, to_host: bool) -> None:
        self.gone(seq, seq.num_computed)
        super().preempt(seq, to_host)

    def gone(self, seq: Seq, num_wanted: int) -> None:
        life = self.lives.pop(seq.seq_id)
        life.num_wanted = num_wanted
        self.ended.append(life)

    # -- counting

    @property
    def running(self) -> list[Seq]:
        return [seq for seq in self.seqs.values() if seq.is_running]

    def entries(self, seq: Seq) -> list[tuple[int, int, int]]:
        """(group, index, block) of all that is not given back."""
        return [
            (group, index, block_id)
            for group in range(len(self.windows))
            for index, block_id in enumerate(self.kv.block_table(seq.seq_id, group))
            if block_id >= 0
        ]

    def most(self, seq: Seq) -> int:
        """Slots of a table that hold a token, or may."""
        capacity = len(self.kv.block_table(seq.seq_id)) * self.bs
        return max(seq.num_computed, min(seq.limit, capacity))

    def count(self, seqs: list[Seq]) -> Counted:
        filled: dict[int, int] = defaultdict(int)
        fillable: dict[int, int] = defaultdict(int)
        owners: dict[int, list[int]] = defaultdict(list)
        for seq in seqs:
            for group, index, block_id in self.entries(seq):
                start = index * self.bs
                owners[block_id].append(group)
                for slots, end in ((filled, seq.num_computed), (fillable, self.most(seq))):
                    num = max(0, min(end - start, self.bs))
                    slots[block_id] = max(slots[block_id], num)
        tokens, most = sum(filled.values()), sum(fillable.values())
        shared = (i for i, groups in owners.items() if groups[0] == 0 and len(groups) > 1)
        return Counted(
            tokens, most - tokens, len(owners) * self.bs - most, len(owners),
            sum(map(len, owners.values())), sum(filled[i] for i in shared),
        )  # fmt: skip

    def note(self) -> None:
        """Look at every request, after every single change."""
        for request_id in {seq.request_id for seq in self.seqs.values()}:
            cost = self.costs[request_id]
            count = self.count([s for s in self.running if s.request_id == request_id])
            cost.peak_blocks = max(cost.peak_blocks, count.num_blocks)
            cost.shared_tokens = max(cost.shared_tokens, count.shared_tokens)
            self.num_shared += count.shared_tokens > 0

    # -- comparing

    def check(self) -> None:
        super().check()
        kv, pool = self.kv, self.count(self.running)
        ledger = kv.ledger()
        found = ledger.tokens, ledger.reserved, ledger.internal, ledger.num_physical_blocks
        assert found == (pool.tokens, pool.reserved, pool.internal, pool.num_blocks)
        assert ledger.num_logical_blocks == pool.num_entries
        held = {i for seq in self.running for _, _, i in self.entries(seq)}
        kept = sum(
            i not in held and (kv.ref_count(i) > 0 or kv.is_cached(i)) for i in range(kv.num_blocks)
        )
        assert ledger.cached == kept * self.bs
        assert ledger.free == (kv.num_blocks - pool.num_blocks - kept) * self.bs
        by_group = kv.held_by_group()
        for group, of_group in enumerate(by_group):
            entries = [e for seq in self.running for e in self.entries(seq) if e[0] == group]
            assert of_group.num_blocks == len({block_id for _, _, block_id in entries})
            total = sum(seq.num_computed for seq in self.running)
            assert of_group.num_tokens + of_group.num_behind == total
        for request_id in {seq.request_id for seq in self.seqs.values()}:
            count = self.count([s for s in self.running if s.request_id == request_id])
            own = kv.request_ledger(request_id)
            assert (own.tokens, own.reserved, own.internal) == (
                count.tokens, count.reserved, count.internal,
            )  # fmt: skip
            assert own.num_physical_blocks == count.num_blocks == kv.num_blocks_of(request_id)
            assert own.num_logical_blocks == count.num_entries
        self.sample(pool)

    def sample(self, pool: Counted) -> None:
        self.history.sample(self.now_s)
        self.live.append(pool)
        self.num_reserved += pool.reserved
        told: set[int] = set()
        for seq in self.running:
            opens: list[Open] = []
            for group in range(len(self.windows)):
                table = self.kv.block_table(seq.seq_id, group)
                first, end = seq.num_computed, self.most(seq)
                index, offset = divmod(first, self.bs)
                if offset:
                    if table[index] in told:
                        first = (index + 1) * self.bs
                    told.add(table[index])
                opens.append(Open(first, max(first, end)))
            life = self.lives[seq.seq_id]
            life.opens += [[] for _ in range(len(self.live) - 1 - len(life.opens))]
            life.opens.append(opens)

    def check_history(self) -> None:
        samples = self.history.samples()
        assert len(samples) == len(self.live)
        for index, (sample, live) in enumerate(zip(samples, self.live, strict=True)):
            moved = undecided = 0
            for life in (*self.ended, *self.lives.values()):
                for one in life.opens[index] if index < len(life.opens) else ():
                    if life.num_wanted is not None:
                        moved += max(0, one.end - max(one.first, life.num_wanted))
            for seq in self.running:
                life, num = self.lives[seq.seq_id], seq.num_computed
                num += len(seq.tokens) == num + 1
                for one in life.opens[index] if index < len(life.opens) else ():
                    undecided += max(0, one.end - max(one.first, num))
            assert sample.tokens == live.tokens
            assert sample.reserved == live.reserved - moved
            assert sample.internal == live.internal + moved
            assert sample.undecided == undecided
            self.num_moved += moved


@pytest.mark.parametrize("first_seed", [0, 12, 24])
def test_everything_adds_up_as_counted(first_seed: int) -> None:
    """Growth, windows, hits, forks, preemptions of both kinds, pins, resizes."""
    given_back = shared = moved = 0
    for seed in range(first_seed, first_seed + 12):
        player = Player(seed, sim=BookedSim)
        sim = player.sim
        assert isinstance(sim, BookedSim)
        try:
            for _ in range(2):
                for _ in range(18):
                    player._event()
                    player._step()
                    sim.check()
                sim.check_history()
            player.play(1)
            sim.check_history()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        given_back += sim.num_given_back
        shared += sim.num_shared
        moved += sim.num_moved
    assert min(given_back, shared, moved) > 50, "this test shows little"
