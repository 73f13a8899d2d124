"""Random lives of sequences under policies that reserve runs of blocks and copy at a fork."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from kv_machine import SETTINGS, PoolMachine, Seq

from octavo.kv import (
    AllocationPolicy,
    ContiguousPolicy,
    OrcaPolicy,
    SeqDemand,
)


@dataclass(eq=False)
class Family:
    """Sequences of one demand: who started, who lives, and how many runs are promised."""

    demand: SeqDemand
    carrier: int
    num_promised: int
    live: set[int] = field(default_factory=set)
    is_told: bool = False
    """Whether nobody is forked but those who are promised a run."""


class ReservingMachine(PoolMachine):
    """The same lives under policies that reserve runs of blocks and copy at a fork."""

    max_seq_tokens = 60

    def asked(self, demand: SeqDemand) -> int:
        """Tokens to be reserved (paper, section 6.1)."""
        raise NotImplementedError

    def run_len(self, demand: SeqDemand) -> int:
        raise NotImplementedError

    def next_power(self, num: int) -> int:
        power = 1
        while power < num:
            power *= 2
        return power

    def demand(self, num_tokens: int, limit: int, data: st.DataObject) -> SeqDemand:
        """`limit` is how long it gets, and may be all that is known or not."""
        slack = data.draw(st.sampled_from([0, 0, 7]))
        most = min(limit + slack, self.kv.max_tokens_of_one_sequence)
        expected = limit if slack or data.draw(st.booleans()) else None
        forks_again = data.draw(st.booleans())
        num_seqs = data.draw(st.sampled_from([1, 1, 2, 3]))
        return SeqDemand(
            num_tokens, most, expected, num_seqs=num_seqs, forks_again=forks_again and num_seqs > 1
        )

    @initialize()
    def no_families(self) -> None:
        self.families: dict[int, Family] = {}

    def check_admission(self, demand: SeqDemand, keep: int, admitted: bool) -> None:
        if not self.seqs:
            assert admitted == self.kv.fits_idle(demand)
        if admitted:
            assert demand.num_seqs * self.run_len(demand) <= self.kv.num_free_blocks

    def started(self, seq_id: int, demand: SeqDemand) -> None:
        self.families[seq_id] = Family(demand, seq_id, demand.num_seqs - 1, {seq_id})
        self.check_run(seq_id)

    def forked(self, parent_id: int, child_id: int) -> None:
        family = self.families[child_id] = self.families[parent_id]
        family.num_promised = max(0, family.num_promised - 1)
        family.live.add(child_id)
        self.check_run(child_id)

    def check_run(self, seq_id: int) -> None:
        """It is consecutive and as long as it must be."""
        table = list(self.kv.block_table(seq_id))
        assert len(table) == self.run_len(self.families[seq_id].demand)
        assert table == list(range(table[0], table[0] + len(table)))

    def may_fork(self, parent_id: int) -> bool:
        family = self.families[parent_id]
        return not family.is_told or family.num_promised > 0

    def has_room_to_fork(self, parent_id: int) -> bool:
        return self.families[parent_id].num_promised > 0

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def expect_fewer_forks(self, data: st.DataObject) -> None:
        seq_id = self.pick(data)
        family = self.families[seq_id]
        if family.demand.forks_again:
            return
        num_before = family.num_promised
        family.num_promised = data.draw(st.integers(0, num_before))
        family.is_told = True
        self.kv.expect_forks(seq_id, family.num_promised)
        self.not_promised(family, num_before - family.num_promised)

    def not_promised(self, family: Family, num_runs: int) -> None:
        """Runs that nobody will take."""

    def dropped(self, seq_id: int, seq: Seq, block_ids: list[int]) -> None:
        family = self.families.pop(seq_id)
        family.live.remove(seq_id)
        if family.live and family.demand.forks_again:
            family.num_promised += 1
        elif not family.live or seq_id == family.carrier:
            family.num_promised = 0

    @invariant()
    def ledger_adds_up(self) -> None:
        """I7, and every term by its definition."""
        tokens = reserved = internal = rounding = allocated = 0
        runs = [
            (self.families[i].demand, seq.num_computed, self.families[i].demand.max_total_tokens)
            for i, seq in self.seqs.items()
        ]
        for family in dict.fromkeys(self.families.values()):
            runs += [(family.demand, 0, family.demand.max_total_tokens)] * family.num_promised
        for demand, filled, most in runs + self.held_back():
            asked = max(filled, self.asked(demand))
            last = max(filled, min(most, asked))
            tokens += filled
            reserved += last - filled
            internal += asked - last
            rounding += self.run_len(demand) * self.bs - asked
            allocated += self.run_len(demand) * self.bs
        ledger = self.kv.ledger()
        assert (ledger.tokens, ledger.reserved) == (tokens, reserved)
        assert (ledger.internal, ledger.rounding) == (internal, rounding)
        assert ledger.external + ledger.free == self.kv.num_slots - allocated + rounding
        assert sum(ledger.terms().values()) == self.kv.num_slots
        assert ledger.shared_saved == 0
        requests = {seq.request_id for seq in self.seqs.values()}
        parts = [self.kv.request_ledger(request_id) for request_id in requests]
        assert sum(part.tokens for part in parts) == ledger.tokens
        for part in parts:
            slots = part.tokens + part.reserved + part.internal + part.rounding
            assert slots == part.num_allocated_slots

    def held_back(self) -> list[tuple[SeqDemand, int, int]]:
        """Runs of ended sequences: (demand, tokens, most tokens)."""
        return []


class OrcaMachine(ReservingMachine):
    """Chunks from the buddy allocator."""

    estimate = "max"

    def make_policy(self, num_blocks: int, block_size: int) -> AllocationPolicy:
        return OrcaPolicy(self.max_seq_tokens, self.estimate)

    def asked(self, demand: SeqDemand) -> int:
        chunk = self.next_power(-(-self.max_seq_tokens // self.bs))
        while chunk > self.kv.num_blocks:
            chunk //= 2
        most = min(self.max_seq_tokens, chunk * self.bs)
        output = (demand.expected_total_tokens or demand.max_total_tokens) - demand.num_tokens
        output = max(1, output)
        if self.estimate == "max":
            return most
        if self.estimate == "pow2":
            output = self.next_power(output)
        return min(demand.num_tokens + output, most)

    def run_len(self, demand: SeqDemand) -> int:
        return self.next_power(-(-self.asked(demand) // self.bs))


class Pow2Machine(OrcaMachine):
    """Reserved by the next power of two of the true output."""

    estimate = "pow2"


class OracleMachine(OrcaMachine):
    """Reserved by the true output."""

    estimate = "oracle"


class ContiguousMachine(ReservingMachine):
    """Regions, and batches that nobody joins."""

    def make_policy(self, num_blocks: int, block_size: int) -> AllocationPolicy:
        return ContiguousPolicy(self.max_seq_tokens, max_batch=4)

    @initialize()
    def no_batch(self) -> None:
        self.num_joined = 0
        self.ended: list[SeqDemand] = []
        """Of runs that nobody uses and that are held back."""

    def asked(self, demand: SeqDemand) -> int:
        return min(self.max_seq_tokens, self.kv.num_slots)

    def run_len(self, demand: SeqDemand) -> int:
        return -(-self.asked(demand) // self.bs)

    def check_admission(self, demand: SeqDemand, keep: int, admitted: bool) -> None:
        num_taken = len(self.seqs) + len(self.ended)
        num_taken += sum(f.num_promised for f in dict.fromkeys(self.families.values()))
        num_regions = self.kv.num_blocks // self.run_len(demand)
        has_room = num_taken + demand.num_seqs <= num_regions
        assert admitted == (has_room and self.is_open and self.num_joined < 4)

    @property
    def is_open(self) -> bool:
        return not self.has_run

    has_run = False
    """Whether a step has begun since the batch had its first member."""

    def run_step(self, chosen: list[int], data: st.DataObject, whole: bool = False) -> None:
        super().run_step(chosen, data, whole)
        self.has_run = bool(self.seqs)

    def started(self, seq_id: int, demand: SeqDemand) -> None:
        super().started(seq_id, demand)
        self.num_joined += 1

    def dropped(self, seq_id: int, seq: Seq, block_ids: list[int]) -> None:
        family = self.families[seq_id]
        if family.demand.forks_again and len(family.live) > 1:
            super().dropped(seq_id, seq, block_ids)
            return
        num_promised = family.num_promised
        super().dropped(seq_id, seq, block_ids)
        self.dead[seq_id] = (seq.request_id, block_ids)
        self.ended.append(family.demand)
        family.num_promised = num_promised
        if not family.live:  # nobody will take what was promised
            self.ended += [family.demand] * num_promised
        if not self.seqs:
            self.dead.clear()
            self.ended.clear()
            self.num_joined, self.has_run = 0, False

    def not_promised(self, family: Family, num_runs: int) -> None:
        self.ended += [family.demand] * num_runs

    def held_back(self) -> list[tuple[SeqDemand, int, int]]:
        return [(demand, 0, 0) for demand in self.ended]


TestOrcaMaxMachine = OrcaMachine.TestCase
TestOrcaMaxMachine.settings = settings(SETTINGS, max_examples=25)
TestOrcaPow2Machine = Pow2Machine.TestCase
TestOrcaPow2Machine.settings = settings(SETTINGS, max_examples=25)
TestOrcaOracleMachine = OracleMachine.TestCase
TestOrcaOracleMachine.settings = settings(SETTINGS, max_examples=25)
TestContiguousMachine = ContiguousMachine.TestCase
TestContiguousMachine.settings = settings(SETTINGS, max_examples=40)
