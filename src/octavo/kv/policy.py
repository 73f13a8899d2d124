"""The protocol behind which allocation policies live, and the values it exchanges.

The manager keeps the block tables, the pool keeps the blocks, and the policy decides which block
goes where and when: on demand (paged), or as a run of consecutive blocks reserved in advance
(the systems before paging). Scheduler and runner see neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from octavo.kv.needs import BlockNeeds
from octavo.kv.pool import BlockPool
from octavo.kv.table import BlockTable


@dataclass(frozen=True, slots=True)
class SeqDemand:
    """What a sequence brings and what it may come to need."""

    num_tokens: int
    """Tokens known now (the prompt; after a preemption also what was generated), >= 1."""
    max_total_tokens: int
    """Most tokens it can ever hold: the ledger's border between reserved and internal, and what
    a policy that reserves in advance must provide."""
    expected_total_tokens: int | None = None
    """The true final length where it is known (traces); only an oracle policy looks at it."""
    token_ids: Sequence[int] = ()
    """The sequence's own, growing list of tokens, for policies that find equal prefixes."""
    salt: str = ""
    """Prefixes are shared only between sequences of equal salt."""
    resumed: bool = False
    """It ran before and was preempted: what is found counts as its own."""
    max_hit_tokens: int | None = None
    """Most tokens that may be found instead of computed (prompt logprobs need the rest computed);
    None: all but the last, whose logits are needed."""
    num_seqs: int = 1
    """Sequences of that size that will run: it, and those that will be forked from it. A policy
    that reserves in advance admits all of them or none."""
    is_only: bool = False
    """Whether its request never has another sequence: without a prefix cache and host memory nobody
    will look for its blocks."""
    forks_again: bool = False
    """Whether sequences of it that end are replaced by forks of the others (beams): what one had
    stays the request's."""

    @property
    def num_output(self) -> int:
        """Tokens that each sequence will generate, where that is known, else at most; >= 1."""
        total = self.expected_total_tokens
        return max(1, (self.max_total_tokens if total is None else total) - self.num_tokens)


class Growth(NamedTuple):
    """What `grow` changed, in the terms of `plan.SeqPlan`."""

    new_block_ids: tuple[int, ...]
    """Blocks the runner does not know yet, to be appended to the sequence's table."""
    replaced: tuple[int, int] | None
    """Copy-on-write: (index in the table, new block id) of an entry the runner knows already."""
    group_block_ids: tuple[tuple[int, ...], ...] = ()
    """The same as `new_block_ids` for each further group of layers; -1: nothing."""
    group_replaced: tuple[tuple[int, int, int], ...] = ()
    """The same as `replaced` for those: (group, index, block id)."""


NO_GROWTH = Growth((), None)
"""The shared answer of a `grow` that changed nothing."""


class GrowthDemand(NamedTuple):
    """What one sequence of a group will ask of `grow`."""

    table: BlockTable
    num_tokens: int
    num_computed: int


class Preempted(NamedTuple):
    """What a preempted sequence lost, and what was kept of it."""

    num_blocks: int
    """Blocks of the pool that became allocatable."""
    tokens_moved: int
    """Token states that were copied to host memory by this preemption, and wait there for it. What
    is there already is not counted, nor what others have in the pool: that moves when they go."""
    tokens_lost: int
    """Token states that nothing holds for it: a cache may still have them when it starts again."""


class RestoreCost(NamedTuple):
    """What it would take to bring sequences back after a preemption."""

    num_tokens: int
    """Token states to compute again, if nothing is moved and no cache keeps them."""
    num_blocks: int
    """Blocks to move out, and in again, if they are moved: those that only they reference."""


class Promise(NamedTuple):
    """Free blocks that a request's forks will get, and nobody else."""

    num_runs: int
    run_len: int
    """Blocks of each run."""
    num_asked: int
    """Tokens that each is set aside for; slots behind are rounding."""
    max_total_tokens: int
    """Most tokens that each may come to hold."""

    @property
    def num_blocks(self) -> int:
        """Blocks of all runs."""
        return self.num_runs * self.run_len


class AllocationPolicy(Protocol):
    """Decides how sequences get blocks. One object serves one pool.

    A method that can fail for lack of room changes nothing when it does. Copies that must be done
    before the next step writes anything go to `BlockPool.copies`, in their order.
    """

    @property
    def name(self) -> str:
        """The value of `--kv-policy` that selects it."""
        ...

    @property
    def can_preempt(self) -> bool:
        """Whether sequences may be preempted: False when space is reserved in advance, so that
        a started sequence never lacks room and blocks taken away might not come back."""
        ...

    @property
    def shares_blocks(self) -> bool:
        """Whether a table's blocks may lie anywhere and have other owners. Then the manager finds
        prefixes, moves blocks to host memory and back, and resizes the pool; the policy need not
        know. False: blocks are the policy's alone."""
        ...

    @property
    def batches_requests(self) -> bool:
        """Whether a batch of requests runs to its end before others come in. Then all that fit
        join in one step, though their tokens may have to wait for later ones."""
        ...

    @property
    def windows(self) -> tuple[int, ...]:
        """By group of layers (`octavo.kv_groups`) the window behind which blocks are given back;
        `(0,)`: one group, which keeps all. Others only if it `shares_blocks`."""
        ...

    @property
    def needs(self) -> BlockNeeds | None:
        """What its groups need of the pool that it is attached to; None: `windows` is `(0,)`."""
        ...

    def max_tokens_in(self, num_blocks: int) -> int:
        """Most tokens that one sequence can hold that has so many blocks of the pool for itself."""
        ...

    @property
    def max_tokens_of_one_sequence(self) -> int:
        """Most tokens one sequence can hold when it is alone in the pool."""
        ...

    def num_needed(self, num_tokens: int) -> int:
        """Most blocks that a sequence holds at one time until it has so many tokens."""
        ...

    def num_needed_by_forks(self, num_shared: int, num_tokens: int) -> tuple[int, int]:
        """Of sequences of at most `num_tokens` tokens that were forked from one behind its first
        `num_shared`: (blocks that they have together, blocks that each has besides), at most."""
        ...

    def most_blocks(self, num_tokens: int) -> int:
        """Most entries that the table of a sequence of at most so many tokens can have: what
        rounding adds to a region is in the table."""
        ...

    @property
    def num_external_blocks(self) -> int:
        """Free blocks that are promised to nobody and cannot be allocated: they lie in pieces too
        small for what was refused last (external fragmentation)."""
        ...

    @property
    def external_runs(self) -> Sequence[range]:
        """Which blocks `num_external_blocks` counts, in runs that do not overlap."""
        ...

    @property
    def promises(self) -> Sequence[Promise]:
        """Free blocks that are set aside for forks."""
        ...

    @property
    def promised_runs(self) -> Sequence[tuple[int, range]]:
        """Which blocks those are: for each run a sequence of its family, and the blocks."""
        ...

    def attach(self, pool: BlockPool) -> None:
        """Take charge of an empty pool. Called once, by the manager."""
        ...

    def begin_step(self) -> None:
        """A new step is being planned."""
        ...

    def fits_idle(self, demand: SeqDemand) -> bool:
        """Whether an idle pool could hold all sequences of a demand to their ends. What it could
        not is refused at once: it would wait for ever (invariant I5)."""
        ...

    def why_never(self, demand: SeqDemand) -> str:
        """Of a demand that does not fit an idle pool: the arithmetic, for people."""
        ...

    def why_no_room(self, demand: SeqDemand) -> str | None:
        """Of a demand that was just refused: why, for people. None: there are too few free blocks
        for its known tokens."""
        ...

    def can_admit(self, demand: SeqDemand, keep_free: int, num_shared: int) -> bool:
        """Whether `start` and `grow` to `demand.num_tokens` would succeed now and leave
        `keep_free` blocks free. Admission by batches is decided here too. `num_shared` blocks of it
        are referenced by others, who share them (0 unless `shares_blocks`). A policy that reserves
        answers for `demand.num_seqs` sequences, and need keep nothing free."""
        ...

    def start(self, table: BlockTable) -> bool:
        """Reserve or find what a new sequence has from the beginning: append blocks to its empty
        table, and set `num_committed` where they hold its first tokens. False: no room."""
        ...

    def grow(self, table: BlockTable, num_tokens: int, num_computed: int) -> Growth | None:
        """Make room for `num_tokens` tokens; own alone every block from position `num_computed`
        on. Only called when `BlockTable.is_ready` says no. None: no room now."""
        ...

    def can_grow_all(self, demands: Sequence[GrowthDemand]) -> bool:
        """Whether `grow` would succeed now for all of them, one after the other in this order."""
        ...

    def fork(self, parent: BlockTable, child: BlockTable) -> bool:
        """Give the empty `child` the committed tokens of `parent`: by sharing blocks or by copying
        them. False: no room now."""
        ...

    def expect_forks(self, table: BlockTable, num_forks: int) -> None:
        """At most so many sequences will still be forked from this one and those forked from it:
        what is promised beyond that need not be kept. Not for those that fork again."""
        ...

    def release(self, table: BlockTable) -> Sequence[BlockTable]:
        """The sequence is over. Returns the tables whose blocks this call gave back to the pool:
        `(table,)`, or nothing and later all of a batch when its last sequence ends."""
        ...

    def check_integrity(self, tables: Sequence[BlockTable]) -> None:
        """Raise `IntegrityError` unless what it keeps agrees with these tables, which are all that
        hold blocks, those held back included."""
        ...
