"""What policies have in common that reserve a run of consecutive blocks for each sequence."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from octavo.errors import IntegrityError
from octavo.kv.policy import Growth, GrowthDemand, Promise, SeqDemand
from octavo.kv.pool import BlockPool
from octavo.kv.table import BlockTable
from octavo.plan import BlockCopy
from octavo.util import cdiv


class Arena(Protocol):
    """The pool's blocks as runs of consecutive ones."""

    @property
    def largest_free(self) -> int:
        """Blocks in the largest run that can be taken."""
        ...

    def take(self, num_units: int) -> int | None:
        """The first block of a run for so many; None when there is none."""
        ...

    def free(self, start: int) -> None:
        """Give a run back."""
        ...

    def can_take(self, sizes: Iterable[int]) -> bool:
        """Whether runs for all of these can be taken now."""
        ...

    def num_idle(self, num_units: int) -> int:
        """How many such runs there are when nothing is taken."""
        ...

    def num_too_small(self, num_units: int) -> int:
        """Free blocks in runs too small for so many."""
        ...

    def too_small(self, num_units: int) -> list[range]:
        """Those runs."""
        ...

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless runs and free blocks are the pool, each block once."""
        ...


@dataclass(slots=True, eq=False)
class Family:
    """Sequences that were admitted together: the first one, and those forked from it."""

    carrier_id: int
    demand: SeqDemand
    num_asked: int
    """Tokens that are set aside on purpose for each."""
    run_len: int
    """Blocks of each."""
    spares: list[int] = field(default_factory=list)
    """First blocks of the runs that are promised to forks; of an ended family, those that go when
    its batch ends."""
    num_live: int = 0
    max_forks: int = sys.maxsize
    """Sequences that may still be forked from them, at most: other spares are of no use."""

    @property
    def promises(self) -> list[Promise]:
        """Its spare runs: those that forks may still take, and those that nobody will fill."""
        num_wanted = min(len(self.spares), self.max_forks) if self.num_live else 0
        parts = (
            (num_wanted, self.demand.max_total_tokens),
            (len(self.spares) - num_wanted, 0),
        )
        return [Promise(num, self.run_len, self.num_asked, most) for num, most in parts if num]


class ReservingPolicy:
    """Each sequence has one run of consecutive blocks from its start to its end.

    Runs for all sequences of a request are set aside when its first one starts, so that a fork, or
    growing, never lacks room. Nothing is shared: a fork copies. Subclasses say how long runs are,
    and who may come in.
    """

    name: str
    can_preempt = False
    shares_blocks = False
    batches_requests = False
    windows: tuple[int, ...] = (0,)
    needs = None

    _pool: BlockPool
    _arena: Arena

    def __init__(self) -> None:
        self._families: dict[int, Family] = {}
        """By sequence, those ended included whose run is held back."""
        self._refused = 0
        """Blocks of the run that was refused last; 0: nobody was, in this step."""
        self._least_asked = 0
        """Blocks of the smallest run that is ever asked for, if that is known."""

    # -- what a subclass says

    def _num_asked(self, demand: SeqDemand) -> int:
        """Tokens to set aside for each sequence of a demand; at least its first ones."""
        raise NotImplementedError

    def _run_len(self, num_asked: int) -> int:
        """Blocks of the run for so many tokens."""
        raise NotImplementedError

    @property
    def max_tokens_of_one_sequence(self) -> int:
        """See `AllocationPolicy`."""
        raise NotImplementedError

    def max_tokens_in(self, num_blocks: int) -> int:
        """As many as blocks have slots, and a run may have."""
        return min(num_blocks * self._pool.block_size, self.max_tokens_of_one_sequence)

    def num_needed(self, num_tokens: int) -> int:
        """Those that are filled."""
        return cdiv(num_tokens, self._pool.block_size)

    def num_needed_by_forks(self, num_shared: int, num_tokens: int) -> tuple[int, int]:
        """They share nothing."""
        return 0, self.num_needed(num_tokens)

    def most_blocks(self, num_tokens: int) -> int:
        """A run for all of them."""
        return self._run_len(num_tokens)

    # -- may it be done?

    def begin_step(self) -> None:
        """What was refused before is refused again, or wants nothing any more."""
        self._refused = 0

    @property
    def num_external_blocks(self) -> int:
        """Free blocks in runs too small for what was refused last. In an idle pool nobody waits."""
        return self._arena.num_too_small(self._least_useful)

    @property
    def external_runs(self) -> list[range]:
        """Where those are."""
        return self._arena.too_small(self._least_useful)

    @property
    def _least_useful(self) -> int:
        """Blocks of the shortest run that is of use now."""
        return max(self._refused if self._families else 0, self._least_asked)

    @property
    def promises(self) -> list[Promise]:
        """Runs that forks will get."""
        families = dict.fromkeys(self._families.values())
        return [promise for family in families if family.spares for promise in family.promises]

    @property
    def promised_runs(self) -> list[tuple[int, range]]:
        """Where those are."""
        members = {family: seq_id for seq_id, family in self._families.items() if family.spares}
        return [
            (seq_id, range(start, start + family.run_len))
            for family, seq_id in members.items()
            for start in family.spares
        ]

    def fits_idle(self, demand: SeqDemand) -> bool:
        """Whether an idle pool has a run for each of its sequences."""
        if demand.max_total_tokens > self.max_tokens_of_one_sequence:
            return False
        return demand.num_seqs <= self._arena.num_idle(self._run_len(self._num_asked(demand)))

    def can_admit(self, demand: SeqDemand, keep_free: int, num_shared: int) -> bool:
        """Whether there is a run for each of its sequences. Nothing is kept free: those who run
        have all they will need."""
        if demand.max_total_tokens > self.max_tokens_of_one_sequence:
            return False
        run_len = self._run_len(self._num_asked(demand))
        is_room = self._arena.can_take([run_len] * demand.num_seqs)
        self._refused = 0 if is_room else run_len
        return is_room

    def why_never(self, demand: SeqDemand) -> str:
        """Of a demand that does not fit an idle pool."""
        num_asked = self._num_asked(demand)
        run_len = self._run_len(num_asked)
        num_runs = self._arena.num_idle(run_len)
        return (
            f"--kv-policy {self.name} reserves {num_asked:,} tokens for each of "
            f"{demand.num_seqs:,} sequences, which share nothing: {demand.num_seqs:,} runs of "
            f"{run_len:,} blocks exceed the {num_runs:,} that the KV pool of "
            f"{self._pool.num_blocks:,} blocks has"
        )

    def why_no_room(self, demand: SeqDemand) -> str | None:
        """Of a demand that was just refused."""
        num_asked = self._num_asked(demand)
        run_len = self._run_len(num_asked)
        runs = f"a run of {run_len:,} blocks" + (
            f" for each of its {demand.num_seqs:,} sequences" if demand.num_seqs > 1 else ""
        )
        return (
            f"--kv-policy {self.name} reserves {num_asked:,} tokens, {runs}; "
            f"{self._num_unpromised:,} blocks are free, in runs of at most "
            f"{self._arena.largest_free:,}"
        )

    @property
    def _num_unpromised(self) -> int:
        return self._pool.num_free - sum(one.num_blocks for one in self.promises)

    # -- the life of a sequence

    def start(self, table: BlockTable) -> bool:
        """Take its run, and those that are promised to its forks."""
        demand = table.demand
        if not self.can_admit(demand, 0, 0):
            return False
        num_asked = self._num_asked(demand)
        family = Family(table.seq_id, demand, num_asked, self._run_len(num_asked))
        for _ in range(demand.num_seqs):
            start = self._arena.take(family.run_len)
            assert start is not None, f"no run of {family.run_len} blocks, which was there just now"
            family.spares.append(start)
        family.spares.reverse()
        self._give_run(table, family)
        return True

    def grow(self, table: BlockTable, num_tokens: int, num_computed: int) -> Growth | None:
        """Its run has room for all it will have; tell the runner where it is."""
        if num_tokens > table.capacity:
            return None
        table.exclusive_from = 0
        return Growth(table.report(), None)

    def can_grow_all(self, demands: Sequence[GrowthDemand]) -> bool:
        """Whether they stay within their runs."""
        return all(num_tokens <= table.capacity for table, num_tokens, _ in demands)

    def fork(self, parent: BlockTable, child: BlockTable) -> bool:
        """Copy the committed tokens into the child's own run."""
        family = self._families[parent.seq_id]
        if not family.spares:
            start = self._arena.take(family.run_len)
            if start is None:
                return False
            family.spares.append(start)
        self._give_run(child, family)
        family.max_forks = max(0, family.max_forks - 1)
        child.num_committed = parent.num_committed
        num_copied = cdiv(parent.num_committed, self._pool.block_size)
        pairs = zip(parent.block_ids[:num_copied], child.block_ids, strict=False)
        self._pool.copies += [BlockCopy(src, dst) for src, dst in pairs]
        return True

    def expect_forks(self, table: BlockTable, num_forks: int) -> None:
        """Give back what is promised to others."""
        family = self._families[table.seq_id]
        family.max_forks = num_forks
        while len(family.spares) > num_forks:
            self._arena.free(family.spares.pop(0))

    def release(self, table: BlockTable) -> Sequence[BlockTable]:
        """Give its run back: to its family if that forks again, else to everybody; and what is
        promised but will not be needed."""
        family = self._families.pop(table.seq_id)
        family.num_live -= 1
        self._pool.release(table.block_ids)
        family.spares.append(table.block_ids[0])
        is_over = not family.num_live
        if not is_over and family.demand.forks_again:
            return (table,)
        if is_over or table.seq_id == family.carrier_id:
            self._free_spares(family)
        else:
            self._arena.free(family.spares.pop())
        return (table,)

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Raise `IntegrityError` unless runs are consecutive, and taken once."""
        self._arena.check_integrity()
        num_taken = 0
        for table in tables:
            start = table.block_ids[0]
            if table.block_ids != list(range(start, start + len(table.block_ids))):
                raise IntegrityError(f"sequence {table.seq_id} has a run with gaps: {table!r}")
            num_taken += 1
            if table.seq_id not in self._families:
                raise IntegrityError(f"sequence {table.seq_id} has a run that nobody gave it")
        if num_taken != len(self._families):
            raise IntegrityError(f"{num_taken} runs are in use, expected {len(self._families)}")

    def _give_run(self, table: BlockTable, family: Family) -> None:
        start = family.spares.pop()
        block_ids = range(start, start + family.run_len)
        self._pool.take(block_ids)
        table.append(block_ids)
        table.num_asked = family.num_asked
        family.num_live += 1
        self._families[table.seq_id] = family

    def _free_spares(self, family: Family) -> None:
        for start in family.spares:
            self._arena.free(start)
        family.spares.clear()
