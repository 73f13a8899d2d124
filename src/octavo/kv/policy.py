"""The protocol behind which allocation policies live, and the values it exchanges.

The manager keeps the block tables, the pool keeps the blocks, and the policy decides which block
goes where and when: on demand (paged), or as a run of consecutive blocks reserved in advance
(the systems before paging). Scheduler and runner see neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from octavo.kv.pool import BlockPool
from octavo.kv.table import BlockTable
from octavo.plan import BlockCopy


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


class Growth(NamedTuple):
    """What `grow` changed, in the terms of `plan.SeqPlan`."""

    new_block_ids: tuple[int, ...]
    """Blocks the runner does not know yet, to be appended to the sequence's table."""
    replaced: tuple[int, int] | None
    """Copy-on-write: (index in the table, new block id) of an entry the runner knows already."""
    copy: BlockCopy | None
    """The copy to be done before the step writes anything."""


NO_GROWTH = Growth((), None, None)
"""The shared answer of a `grow` that changed nothing."""


class AllocationPolicy(Protocol):
    """Decides how sequences get blocks. One object serves one pool.

    A method that can fail for lack of room changes nothing when it does.
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
    def max_tokens_of_one_sequence(self) -> int:
        """Most tokens one sequence can hold when it is alone in the pool."""
        ...

    @property
    def num_external_blocks(self) -> int:
        """Free blocks that cannot be allocated (external fragmentation)."""
        ...

    def attach(self, pool: BlockPool) -> None:
        """Take charge of an empty pool. Called once, by the manager."""
        ...

    def can_admit(self, demand: SeqDemand, keep_free: int) -> bool:
        """Whether `start` and `grow` to `demand.num_tokens` would succeed now and leave
        `keep_free` blocks free. Admission by batches is decided here too."""
        ...

    def start(self, table: BlockTable) -> bool:
        """Reserve or find what a new sequence has from the beginning: append blocks to its empty
        table, and set `num_committed` where they hold its first tokens. False: no room."""
        ...

    def grow(self, table: BlockTable, num_tokens: int, num_computed: int) -> Growth | None:
        """Make room for `num_tokens` tokens; own alone every block from position `num_computed`
        on. Only called when `BlockTable.is_ready` says no. None: no room now."""
        ...

    def fork(self, parent: BlockTable, child: BlockTable) -> tuple[BlockCopy, ...] | None:
        """Give the empty `child` the committed tokens of `parent`: by sharing blocks (no copies)
        or by copying them. None: no room now."""
        ...

    def release(self, table: BlockTable) -> Sequence[BlockTable]:
        """The sequence is over. Returns the tables whose blocks this call gave back to the pool:
        `(table,)`, or nothing and later all of a batch when its last sequence ends."""
        ...
