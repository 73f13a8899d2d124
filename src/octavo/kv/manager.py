"""The face of the memory room: block tables by sequence, over one pool, under one policy."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.errors import CapacityError, ConfigError, IntegrityError
from octavo.kv.integrity import check_integrity
from octavo.kv.ledger import PoolLedger, RequestLedger, pool_ledger, request_ledger
from octavo.kv.paged import PagedPolicy
from octavo.kv.policy import NO_GROWTH, AllocationPolicy, Growth, SeqDemand
from octavo.kv.pool import BlockPool
from octavo.kv.table import BlockTable, TableView
from octavo.kv.usage import RequestAccount
from octavo.outputs import RequestKVUsage
from octavo.plan import BlockCopy


class KVCacheManager:
    """Gives sequences their blocks and accounts for every slot (paper section 4).

    It holds block ids and token counts only: no tensors, no tokens, no clock. Sequences are the
    scheduler's numbers, each used once between `start` (or `fork`) and `release`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        policy: AllocationPolicy | None = None,
        bytes_per_block: int = 0,
    ) -> None:
        """An empty pool of `num_blocks` blocks of `block_size` tokens.

        `policy` must be fresh (it serves one pool); None is paged. `bytes_per_block` is only used
        to express the ledger in bytes. Raises `CapacityError` for a pool without a block and
        `ConfigError` for a block size below 1 or bytes that do not divide by it.
        """
        if block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {block_size}: --block-size")
        if num_blocks < 1:
            raise CapacityError(
                f"the KV pool needs at least 1 block of {block_size} tokens, got {num_blocks}; "
                "raise --num-gpu-blocks-override or --kv-cache-memory-bytes"
            )
        if bytes_per_block < 0 or bytes_per_block % block_size:
            raise ConfigError(
                f"bytes_per_block={bytes_per_block} is not a multiple of block_size={block_size}"
            )
        self.block_size = block_size
        self.bytes_per_block = bytes_per_block
        self.policy: AllocationPolicy = PagedPolicy() if policy is None else policy
        self._pool = BlockPool(num_blocks, block_size)
        self.policy.attach(self._pool)
        self._tables: dict[int, BlockTable] = {}
        self._deferred: dict[int, BlockTable] = {}
        """Released sequences whose blocks the policy holds back until their batch ends."""
        self._accounts: dict[str, RequestAccount] = {}
        self._now_s = 0.0

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody references."""
        return self._pool.num_free

    @property
    def num_slots(self) -> int:
        """Tokens the pool can hold."""
        return self._pool.num_blocks * self.block_size

    @property
    def num_sequences(self) -> int:
        """Sequences with a table."""
        return len(self._tables)

    @property
    def max_tokens_of_one_sequence(self) -> int:
        """Most tokens that one sequence, alone in the pool, can hold under the policy."""
        return self.policy.max_tokens_of_one_sequence

    @property
    def can_preempt(self) -> bool:
        """Whether the policy lets running sequences be preempted (False: it reserves space, so
        `grow` up to `max_total_tokens` always succeeds)."""
        return self.policy.can_preempt

    def set_time(self, now_s: float) -> None:
        """Tell the time that block-seconds count in; it must not run backwards."""
        if now_s < self._now_s:
            raise IntegrityError(f"time runs backwards: {now_s} s after {self._now_s} s")
        self._now_s = now_s

    # -- the life of a sequence

    def can_admit(self, demand: SeqDemand, keep_free: int = 0) -> bool:
        """Whether `start` and `grow` to `demand.num_tokens` would succeed now, and leave
        `keep_free` blocks free.

        `keep_free` (the watermark) is taken literally: pass 0 when nothing runs, or a prompt as
        large as the pool waits for ever.
        """
        return self.policy.can_admit(demand, keep_free)

    def start(self, seq_id: int, demand: SeqDemand, request_id: str | None = None) -> int:
        """Register a sequence; returns how many of its first tokens have their KV in the pool.

        That is 0 unless the policy finds prefixes: computing starts there. What the policy
        reserves or finds reaches the runner with the first `grow`. `request_id` collects the
        usage of all sequences of a request, also over preemptions, until `close_request`; None
        keeps no usage. Raises `IntegrityError` for an id in use, and `CapacityError` when the
        policy has no room (ask `can_admit` first); then nothing has changed.
        """
        self._check_unused(seq_id)
        if request_id is None:
            account = RequestAccount("", self.block_size, self._now_s)
        else:
            account = self._accounts.get(request_id) or RequestAccount(
                request_id, self.block_size, self._now_s
            )
        table = BlockTable(seq_id, demand, self.block_size, account)
        if not self.policy.start(table):
            raise CapacityError(
                f"sequence {seq_id} was started without room: the {self.policy.name} policy "
                f"cannot reserve {demand.max_total_tokens} tokens with {self.num_free_blocks} of "
                f"{self.num_blocks} blocks free"
            )
        self._tables[seq_id] = table
        if request_id is not None:
            self._accounts[request_id] = account
        account.open(table, self._now_s)
        return table.num_committed

    def grow(self, seq_id: int, num_tokens: int, num_computed: int) -> Growth | None:
        """Make room for `num_tokens` tokens in all, of which those from position `num_computed`
        on will be written by the coming step.

        Returns what the plan must say: blocks to append, and at most one copy-on-write, of the
        block that holds `num_computed` if it has other owners (paper section 4.4). `NO_GROWTH`
        (that very object) when nothing changes. None when it does not fit now; then nothing has
        changed.
        """
        try:
            table = self._tables[seq_id]
        except KeyError:
            raise self._unknown(seq_id) from None
        # BlockTable.is_ready, written out: asked of every sequence in every step.
        if num_tokens <= table.capacity and num_computed >= table.exclusive_from:
            return NO_GROWTH
        return self._grow(table, num_tokens, num_computed)

    def commit(self, seq_id: int, num_tokens: int) -> None:
        """Say that the KV of the first `num_tokens` tokens is in the pool, or will be once the
        planned step ran. What the ledger counts, and what a later `fork` hands on."""
        try:
            table = self._tables[seq_id]
        except KeyError:
            raise self._unknown(seq_id) from None
        if not 0 <= num_tokens <= table.capacity:
            raise IntegrityError(
                f"sequence {seq_id} cannot have {num_tokens} tokens in the pool: its table has "
                f"{table.capacity} slots"
            )
        table.num_committed = num_tokens

    def fork(self, parent_id: int, child_id: int) -> tuple[BlockCopy, ...] | None:
        """Start `child_id` with the committed tokens of its parent, under the same request.

        Paged: the child shares the blocks, nothing is copied, and the answer is `()`; whoever
        writes first into the shared partial block gets a copy by `grow`. Policies that cannot
        share answer the copies that the next plan must do before it writes; None when there is no
        room (nothing has changed). The child's whole table comes with its first `grow`. Not to be
        followed by a `grow` of the child in the plan in which the parent's tokens are computed:
        copies come before computing.
        """
        parent = self._table(parent_id)
        self._check_unused(child_id)
        child = BlockTable(child_id, parent.demand, self.block_size, parent.account)
        copies = self.policy.fork(parent, child)
        if copies is None:
            return None
        self._tables[child_id] = child
        parent.account.open(child, self._now_s)
        return copies

    def release(self, seq_id: int) -> None:
        """Drop a sequence's table and its blocks: it ended, was aborted or preempted.

        Raises `IntegrityError` for an id that is unknown or was released already.
        """
        table = self._table(seq_id)
        del self._tables[seq_id]
        table.max_total_tokens = table.num_committed
        self._deferred[seq_id] = table
        for done in self.policy.release(table):
            del self._deferred[done.seq_id]
            done.account.close(done, self._now_s)
            done.clear()

    # -- questions

    def has(self, seq_id: int) -> bool:
        """Whether the sequence has a table."""
        return seq_id in self._tables

    def block_table(self, seq_id: int) -> Sequence[int]:
        """The sequence's block ids, logical to physical: a read-only view, empty after release."""
        return TableView(self._table(seq_id).block_ids)

    def slot(self, seq_id: int, position: int) -> int:
        """The slot of a token: `block_id * block_size + offset in the block`."""
        return self._table(seq_id).slot(position)

    def num_committed(self, seq_id: int) -> int:
        """Tokens of the sequence whose KV is in the pool."""
        return self._table(seq_id).num_committed

    def ref_count(self, block_id: int) -> int:
        """Table entries that point at a block; 0 means it is free."""
        return self._pool.ref_count(block_id)

    def request_usage(self, request_id: str) -> RequestKVUsage:
        """What a request has cost until now; zeros for one that never held a block."""
        account = self._accounts.get(request_id)
        return RequestKVUsage() if account is None else account.usage(self._now_s)

    def close_request(self, request_id: str) -> RequestKVUsage:
        """The final usage of a request, which is forgotten, so that its id may come again.

        Zeros for one that never started. Refused while it has sequences.
        """
        account = self._accounts.get(request_id)
        if account is None:
            return RequestKVUsage()
        running = [table.seq_id for table in account.tables if table.seq_id in self._tables]
        if running:
            raise IntegrityError(f"request {request_id!r} still has the sequences {running}")
        del self._accounts[request_id]
        return account.usage(self._now_s)

    def ledger(self) -> PoolLedger:
        """Where every slot of the pool is (paper section 3.1), now. O(sequences), plus the
        blocks of those that share."""
        num_external = self.policy.num_external_blocks
        return pool_ledger(self._all_tables(), self._pool, self.bytes_per_block, num_external)

    def request_ledger(self, request_id: str) -> RequestLedger:
        """The same for the blocks of one request; empty for one that holds none."""
        account = self._accounts.get(request_id)
        tables = [] if account is None else account.tables
        return request_ledger(tables, self._pool, self.bytes_per_block)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` naming the first block or sequence that breaks I1, I2 or I7."""
        check_integrity(self._all_tables(), self._pool)
        for request_id, account in self._accounts.items():
            account.check_integrity(request_id)
        self.ledger().check_integrity()

    # -- inside

    def _grow(self, table: BlockTable, num_tokens: int, num_computed: int) -> Growth | None:
        if not 0 <= num_computed <= num_tokens:
            raise IntegrityError(
                f"sequence {table.seq_id} cannot grow to {num_tokens} tokens with {num_computed} "
                "of them computed"
            )
        num_before = len(table.block_ids)
        growth = self.policy.grow(table, num_tokens, num_computed)
        if growth is None or growth is NO_GROWTH:
            return growth
        account = table.account
        account.settle(self._now_s)
        if growth.copy is not None:
            account.remove((growth.copy.src,))
            account.add((growth.copy.dst,))
        account.add(table.block_ids[num_before:])
        return growth

    def _all_tables(self) -> list[BlockTable]:
        return [*self._tables.values(), *self._deferred.values()]

    def _table(self, seq_id: int) -> BlockTable:
        table = self._tables.get(seq_id)
        if table is None:
            raise self._unknown(seq_id)
        return table

    def _unknown(self, seq_id: int) -> IntegrityError:
        return IntegrityError(
            f"sequence {seq_id} has no block table: it was never started, or is released already"
        )

    def _check_unused(self, seq_id: int) -> None:
        if seq_id in self._tables or seq_id in self._deferred:
            raise IntegrityError(f"sequence {seq_id} has a block table already")
