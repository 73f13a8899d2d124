"""A hypothesis machine over the manager, against a model that writes and reads real contents.

The machine plays scheduler and runner: it keeps the runner's block tables from what `grow`
reports, executes copies before writes as a plan says, writes token values into simulated slots,
and reads every sequence back. A missing copy-on-write, a block reused too early, or a wrong
report all show as a wrong token.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.errors import IntegrityError
from octavo.kv import (
    NO_GROWTH,
    AllocationPolicy,
    KVCacheManager,
    PagedPolicy,
    SeqDemand,
)

SETTINGS = settings(max_examples=60, stateful_step_count=40, derandomize=True, deadline=None)


class Seq:
    """What the model knows of a sequence."""

    def __init__(self, request_id: str, tokens: list[int], limit: int) -> None:
        self.request_id = request_id
        self.tokens = tokens  # all, also those not computed yet
        self.num_computed = 0
        self.limit = limit
        self.runner_table: list[int] = []


class Cost:
    """Naive usage of a request, observed after every call."""

    def __init__(self) -> None:
        self.peak = self.shared = self.blocks = 0
        self.block_seconds = 0.0


class PoolMachine(RuleBasedStateMachine):
    """Random lives of sequences under the paged policy."""

    def make_policy(self, num_blocks: int, block_size: int) -> AllocationPolicy:
        return PagedPolicy()

    @initialize(
        num_blocks=st.one_of(st.integers(3, 12), st.integers(3, 200)),
        block_size=st.one_of(st.integers(1, 5), st.sampled_from([16, 32, 128])),
    )
    def make(self, num_blocks: int, block_size: int) -> None:
        self.policy = self.make_policy(num_blocks, block_size)
        self.kv = KVCacheManager(num_blocks, block_size, self.policy, bytes_per_block=block_size)
        self.bs = block_size
        self.slots = [-1] * self.kv.num_slots
        self.seqs: dict[int, Seq] = {}
        self.dead: dict[int, tuple[str, list[int]]] = {}
        """Ended sequences that keep their blocks: request and blocks."""
        self.costs: dict[str, Cost] = {}
        self.next_id = self.next_token = 0
        self.now = 0.0

    # -- helpers

    def fresh_tokens(self, num: int) -> list[int]:
        self.next_token += num
        return list(range(self.next_token - num, self.next_token))

    def fresh_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.seqs)))

    def observe(self) -> None:
        """Bring the naive costs up to date after a call."""
        for request_id, cost in self.costs.items():
            mine = [i for i, seq in self.seqs.items() if seq.request_id == request_id]
            entries = Counter(b for i in mine for b in self.kv.block_table(i))
            for owner, block_ids in self.dead.values():
                entries.update(block_ids if owner == request_id else ())
            shared = {
                self.kv.slot(i, p)
                for i in mine
                for p in range(self.kv.num_committed(i))
                if entries[self.kv.block_table(i)[p // self.bs]] > 1
            }
            cost.blocks = len(entries)
            cost.peak = max(cost.peak, len(entries))
            cost.shared = max(cost.shared, len(shared))

    def drop(self, seq_id: int) -> None:
        before = list(self.kv.block_table(seq_id))
        self.kv.release(seq_id)
        self.dropped(seq_id, self.seqs.pop(seq_id), before)
        self.observe()
        with pytest.raises(IntegrityError, match=f"sequence {seq_id} "):
            self.kv.release(seq_id)

    def dropped(self, seq_id: int, seq: Seq, block_ids: list[int]) -> None:
        """What it had is free."""

    def demand(self, num_tokens: int, limit: int, data: st.DataObject) -> SeqDemand:
        return SeqDemand(num_tokens, limit)

    def started(self, seq_id: int, demand: SeqDemand) -> None:
        """A sequence was admitted."""

    def forked(self, parent_id: int, child_id: int) -> None:
        """A sequence was forked."""

    def check_admission(self, demand: SeqDemand, keep: int, admitted: bool) -> None:
        needed = -(-demand.num_tokens // self.bs) + keep
        assert admitted == (needed <= self.kv.num_free_blocks)

    def runner_slot(self, seq: Seq, position: int) -> int:
        return seq.runner_table[position // self.bs] * self.bs + position % self.bs

    # -- rules

    @rule(
        num_tokens=st.integers(1, 60), extra=st.integers(0, 40), keep=st.integers(0, 3),
        join=st.booleans(), data=st.data(),
    )  # fmt: skip
    def start(
        self, num_tokens: int, extra: int, keep: int, join: bool, data: st.DataObject
    ) -> None:
        limit = min(num_tokens + extra, self.kv.max_tokens_of_one_sequence)
        num_tokens = min(num_tokens, limit)
        demand = self.demand(num_tokens, limit, data)
        admitted = self.kv.can_admit(demand, keep)
        self.check_admission(demand, keep, admitted)
        if not admitted:
            return
        seq_id = self.fresh_id()
        request_id = f"r{seq_id}"
        if join and self.seqs:
            request_id = self.seqs[self.pick(data)].request_id
        self.costs.setdefault(request_id, Cost())
        assert self.kv.start(seq_id, demand, request_id) == 0
        with pytest.raises(IntegrityError, match=f"sequence {seq_id} has a block table already"):
            self.kv.start(seq_id, demand, request_id)
        self.seqs[seq_id] = Seq(request_id, self.fresh_tokens(num_tokens), limit)
        self.started(seq_id, demand)
        self.observe()
        if data.draw(st.booleans()):  # what was promised holds: the whole prompt fits now
            self.run_step([seq_id], data, whole=True)
            assert seq_id in self.seqs

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        chosen = data.draw(st.permutations(sorted(self.seqs)))
        self.run_step(chosen[: data.draw(st.integers(1, len(chosen)))], data)

    def run_step(self, chosen: list[int], data: st.DataObject, whole: bool = False) -> None:
        """One plan: grow each, then copies in order, then writes."""
        planned: dict[int, int] = {}
        for seq_id in chosen:
            if seq_id not in self.seqs:  # it was a victim
                continue
            seq = self.seqs[seq_id]
            if seq.num_computed == len(seq.tokens):
                if len(seq.tokens) >= seq.limit:
                    continue
                seq.tokens = [*seq.tokens, *self.fresh_tokens(1)]
            todo = len(seq.tokens) - seq.num_computed
            num = todo if whole else data.draw(st.integers(1, todo))
            growth = self.grow_or_preempt(seq_id, seq.num_computed + num, planned)
            if growth is None:
                continue
            seq.runner_table.extend(growth.new_block_ids)
            if growth.replaced is not None:
                index, block_id = growth.replaced
                seq.runner_table[index] = block_id
            planned[seq_id] = num
            again = self.kv.grow(seq_id, seq.num_computed + num, seq.num_computed)
            assert again is NO_GROWTH
        for src, dst, _, _ in self.kv.take_copies():
            for offset in range(self.bs):
                self.slots[dst * self.bs + offset] = self.slots[src * self.bs + offset]
        for seq_id, num in planned.items():
            if seq_id in self.seqs:
                self.write(seq_id, num)
        self.read_back()
        self.kv.begin_step()

    def grow_or_preempt(self, seq_id: int, num_tokens: int, planned: dict[int, int]):
        """Grow; when there is no room release the youngest other sequence and try again."""
        seq = self.seqs[seq_id]
        while True:
            before = (list(self.kv.block_table(seq_id)), self.kv.num_free_blocks)
            growth = self.kv.grow(seq_id, num_tokens, seq.num_computed)
            self.observe()
            if growth is not None:
                return growth
            assert self.kv.can_preempt
            assert (list(self.kv.block_table(seq_id)), self.kv.num_free_blocks) == before
            others = [i for i in self.seqs if i != seq_id]
            if not others:
                needed = -(-num_tokens // self.bs)
                assert needed > self.kv.num_blocks, "alone in the pool and yet no room"
                return None
            planned.pop(others[-1], None)
            self.drop(others[-1])

    def write(self, seq_id: int, num: int) -> None:
        seq = self.seqs[seq_id]
        for position in range(seq.num_computed, seq.num_computed + num):
            slot = self.runner_slot(seq, position)
            assert slot == self.kv.slot(seq_id, position)
            assert self.kv.ref_count(slot // self.bs) == 1, "I2: write to a shared block"
            self.slots[slot] = seq.tokens[position]
        seq.num_computed += num
        self.kv.commit(seq_id, seq.num_computed)

    def read_back(self) -> None:
        for seq_id, seq in self.seqs.items():
            table = self.kv.block_table(seq_id)
            found = [
                self.slots[table[p // self.bs] * self.bs + p % self.bs]
                for p in range(seq.num_computed)
            ]
            assert found == seq.tokens[: seq.num_computed], f"sequence {seq_id}"

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), times=st.integers(1, 3))
    def fork(self, data: st.DataObject, times: int) -> None:
        parent_id = self.pick(data)
        parent = self.seqs[parent_id]
        for _ in range(times):
            if not self.may_fork(parent_id):
                return
            child_id = self.fresh_id()
            if not self.kv.fork(parent_id, child_id):
                assert not self.has_room_to_fork(parent_id)
                return
            child = Seq(parent.request_id, parent.tokens[: parent.num_computed], parent.limit)
            child.num_computed = parent.num_computed
            self.seqs[child_id] = child
            self.forked(parent_id, child_id)
            self.observe()
            assert self.kv.num_committed(child_id) == parent.num_computed

    def may_fork(self, parent_id: int) -> bool:
        return True

    def has_room_to_fork(self, parent_id: int) -> bool:
        return True

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.drop(self.pick(data))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def abort_request(self, data: st.DataObject) -> None:
        request_id = self.seqs[self.pick(data)].request_id
        with pytest.raises(IntegrityError, match=request_id):
            self.kv.close_request(request_id)
        for seq_id in [i for i, seq in self.seqs.items() if seq.request_id == request_id]:
            self.drop(seq_id)
        usage = self.kv.close_request(request_id)
        cost = self.costs.pop(request_id)
        assert usage.peak_blocks == cost.peak
        assert usage.shared_tokens == cost.shared
        assert usage.block_seconds == pytest.approx(cost.block_seconds)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for cost in self.costs.values():
            cost.block_seconds += cost.blocks * seconds
        self.kv.set_time(self.now)

    # -- invariants

    @invariant()
    def integrity(self) -> None:
        self.kv.check_integrity()

    @invariant()
    def conservation(self) -> None:
        """I1, counted without the room's own help."""
        entries = Counter(b for i in self.seqs for b in self.kv.block_table(i))
        entries.update(b for _, block_ids in self.dead.values() for b in block_ids)
        for block_id in range(self.kv.num_blocks):
            assert self.kv.ref_count(block_id) == entries[block_id]
        assert self.kv.num_free_blocks + len(entries) == self.kv.num_blocks

    @invariant()
    def ledger_adds_up(self) -> None:
        """I7, and every term against sets of slots."""
        ledger = self.kv.ledger()
        assert sum(ledger.terms().values()) == self.kv.num_slots
        filled, fillable, allocated, num_entries = set(), set(), set(), 0
        for seq_id, seq in self.seqs.items():
            table = self.kv.block_table(seq_id)
            slots = [b * self.bs + offset for b in table for offset in range(self.bs)]
            filled |= set(slots[: seq.num_computed])
            fillable |= set(slots[: max(seq.limit, seq.num_computed)])
            allocated |= set(slots)
            num_entries += len(table)
        assert ledger.tokens == len(filled)
        assert ledger.reserved == len(fillable - filled)
        assert ledger.internal == len(allocated - fillable - filled)
        assert ledger.external + ledger.free == self.kv.num_slots - len(allocated)
        assert ledger.shared_saved == num_entries * self.bs - len(allocated)
        requests = {seq.request_id for seq in self.seqs.values()}
        parts = [self.kv.request_ledger(request_id) for request_id in requests]
        assert sum(part.tokens for part in parts) == ledger.tokens
        assert sum(part.num_allocated_slots for part in parts) == len(allocated)

    def teardown(self) -> None:
        """I3: when nothing runs, everything is free and nothing is remembered."""
        if not hasattr(self, "kv"):
            return
        for seq_id in list(self.seqs):
            self.drop(seq_id)
        for request_id in self.costs:
            self.kv.close_request(request_id)
        assert self.kv.num_free_blocks == self.kv.num_blocks
        assert self.kv.ledger().tokens == self.kv.ledger().reserved == 0
        self.kv.check_integrity()
        assert not self.kv._tables
        assert not self.kv._deferred
        assert not self.kv._accounts
