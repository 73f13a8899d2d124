"""What the memory room knows, and the questions about it that change nothing."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.errors import CapacityError, ConfigError, IntegrityError
from octavo.kv.cache import PrefixCache
from octavo.kv.group_lookup import num_saved
from octavo.kv.integrity import check_integrity
from octavo.kv.integrity_cache import check_cache
from octavo.kv.ledger import (
    GroupHeld,
    PoolLedger,
    RequestLedger,
    held_by_group,
    pool_ledger,
    request_ledger,
)
from octavo.kv.paged import PagedPolicy
from octavo.kv.pins import Pins
from octavo.kv.policy import AllocationPolicy, RestoreCost, SeqDemand
from octavo.kv.pool import BlockPool
from octavo.kv.settled import LedgerHistory
from octavo.kv.stats import PrefixCacheStats
from octavo.kv.swap import Holds, restore_cost
from octavo.kv.table import BlockTable, TableView
from octavo.kv.tiers import ColdStore, TierLedger, check_tiers
from octavo.kv.usage import RequestAccount
from octavo.outputs import RequestKVUsage


class KVState:
    """The tables over one pool, the tree of what blocks hold, and the accounts of requests."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        policy: AllocationPolicy | None = None,
        bytes_per_block: int = 0,
        *,
        enable_prefix_caching: bool = False,
        num_host_blocks: int = 0,
        disk: ColdStore | None = None,
        max_disk_blocks: int = 0,
    ) -> None:
        """An empty pool of `num_blocks` blocks of `block_size` tokens.

        `policy` must be fresh (it serves one pool); None is paged. `bytes_per_block` is only used
        to express ledgers in bytes. Without `enable_prefix_caching`, and under policies that do not
        share blocks, a block stays as long as a sequence references it or, preempted, waits for it.
        `num_host_blocks` is the size of the host tier; behind it `disk` keeps at most
        `max_disk_blocks`. Raises `CapacityError` for a pool without a block and `ConfigError` for
        a block size below 1, bytes that do not divide by it, and tiers that cannot be used.
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
        self.policy: AllocationPolicy = PagedPolicy() if policy is None else policy
        check_tiers(
            self.policy,
            num_host_blocks=num_host_blocks,
            max_disk_blocks=max_disk_blocks,
            has_disk=disk is not None,
            caches_prefixes=enable_prefix_caching,
        )
        self.block_size = block_size
        self.bytes_per_block = bytes_per_block
        self._pool = BlockPool(num_blocks, block_size)
        self.policy.attach(self._pool)
        self.windows = self.policy.windows
        """By group of layers the window behind which blocks are given back; 0: none."""
        self._cache = PrefixCache(
            self._pool,
            enabled=enable_prefix_caching and self.policy.shares_blocks,
            num_host_blocks=num_host_blocks,
            disk=disk,
            max_disk_blocks=max_disk_blocks,
            bytes_per_block=bytes_per_block,
            needs=self.policy.needs,
        )
        self._holds = Holds(self._cache)
        self._pins = Pins(self._cache)
        self._tables: dict[int, BlockTable] = {}
        self._deferred: dict[int, BlockTable] = {}
        """Released sequences whose blocks the policy holds back until their batch ends."""
        self._accounts: dict[str, RequestAccount] = {}
        self._now_s = 0.0
        self.history: LedgerHistory | None = None
        """Keeps samples of the pool, and settles them; None: nobody looks back."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated: free ones, and cached ones that nobody references."""
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
    def num_holders(self) -> int:
        """Sequences that hold blocks: those with a table, and those that have ended and whose batch
        holds their blocks back."""
        return len(self._tables) + len(self._deferred)

    @property
    def max_tokens_of_one_sequence(self) -> int:
        """Most tokens that one sequence, alone in the pool, can hold under the policy. Pinned
        blocks are not for it."""
        return self.max_tokens_beside_pins(0)

    def max_tokens_beside_pins(self, num_found: int) -> int:
        """The same of one that shares `num_found` pinned blocks."""
        return self.policy.max_tokens_in(self.num_blocks - self._pins.num_blocks + num_found)

    def num_needed(self, num_tokens: int) -> int:
        """Most blocks that a sequence holds at one time until it has so many tokens."""
        return self.policy.num_needed(num_tokens)

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks of the pool that are pinned."""
        return self._pins.num_blocks

    def num_pinned_in(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Pinned blocks that a sequence with this prompt shares when it starts."""
        return self._pins.num_in(token_ids, salt)

    def num_needed_by_forks(self, num_shared: int, num_tokens: int) -> tuple[int, int]:
        """(Blocks that sequences of at most `num_tokens` tokens have together, which were forked
        from one behind its first `num_shared` tokens; blocks that each has besides), at most."""
        return self.policy.num_needed_by_forks(num_shared, num_tokens)

    def num_pinned_of(self, seq_id: int) -> int:
        """Pinned blocks that a running sequence has in its tables, to keep."""
        counts = self._pins.counts
        if not counts:
            return 0
        kept = (part for part in self._table(seq_id).parts() if not part.window)
        return sum(i in counts for part in kept for i in part.block_ids)

    @property
    def can_preempt(self) -> bool:
        """Whether the policy lets running sequences be preempted (False: it reserves space, so
        `grow` up to `max_total_tokens` always succeeds)."""
        return self.policy.can_preempt

    @property
    def batches_requests(self) -> bool:
        """Whether a batch of requests runs to its end before others come in."""
        return self.policy.batches_requests

    def has(self, seq_id: int) -> bool:
        """Whether the sequence has a table."""
        return seq_id in self._tables

    def block_table(self, seq_id: int, group: int = 0) -> Sequence[int]:
        """The sequence's block ids, logical to physical: a read-only view, empty after release.
        -1: nothing is there, as it is behind the window of the group."""
        return TableView(self._table(seq_id).parts()[group].block_ids)

    def slot(self, seq_id: int, position: int, group: int = 0) -> int:
        """The slot of a token: `block_id * block_size + offset in the block`."""
        return self._table(seq_id).parts()[group].slot(position)

    def written_blocks(self, seq_id: int, position: int) -> set[int]:
        """Blocks of all groups that hold tokens from `position` on."""
        first = position // self.block_size
        parts = self._table(seq_id).parts()
        return {i for part in parts for i in part.block_ids[max(first, part.num_dropped) :]}

    def num_committed(self, seq_id: int) -> int:
        """Tokens of the sequence whose KV is in the pool."""
        return self._table(seq_id).num_committed

    def ref_count(self, block_id: int) -> int:
        """Table entries and pins that point at a block; 0 means it is free or cached."""
        return self._pool.ref_count(block_id)

    def is_cached(self, block_id: int) -> bool:
        """Whether nobody references a block, and the prefix cache can find it again."""
        return not self._pool.ref_counts[block_id] and self._pool.nodes[block_id] is not None

    def tables(self) -> list[BlockTable]:
        """All that hold blocks, those of ended members of a batch included: to read only. Where
        layers are in several groups each sequence has several."""
        tables = [*self._tables.values(), *self._deferred.values()]
        return tables if len(self.windows) == 1 else [p for table in tables for p in table.parts()]

    # -- may it be done?

    def can_admit(self, demand: SeqDemand, keep_free: int = 0) -> bool:
        """Whether `start` and `grow` to `demand.num_tokens` would succeed now, and leave
        `keep_free` blocks free. What would be found is taken into account. Changes nothing.

        `keep_free` (the watermark) is taken literally: pass 0 when nothing runs, or a prompt as
        large as the pool waits for ever.
        """
        if self.policy.can_admit(demand, keep_free, 0):
            return True
        if not self.policy.shares_blocks or self._cache.ignores(demand):
            return False
        root_name = self._holds.root_name_of(demand)
        needs = self._cache.needs
        if needs is None:
            num_shared = self._cache.num_shared(demand, root_name)
        else:
            num_shared = num_saved(self._cache, demand, root_name, needs)
        return num_shared > 0 and self.policy.can_admit(demand, keep_free, num_shared)

    def fits_idle(self, demand: SeqDemand) -> bool:
        """Whether all sequences of a demand could run if nothing else did. What else they may find
        and share is not looked at."""
        return self.policy.fits_idle(demand)

    def why_never(self, demand: SeqDemand) -> str:
        """Of a demand that does not fit an idle pool: the arithmetic, for people."""
        return self.policy.why_never(demand)

    def why_no_room(self, demand: SeqDemand) -> str | None:
        """Of a demand that was just refused: why, for people. None: there are too few blocks."""
        return self.policy.why_no_room(demand)

    def restore_cost(self, *seq_ids: int) -> RestoreCost:
        """What it would take to bring running sequences back that are preempted together. What
        others share with them stays where it is, and costs nothing."""
        return restore_cost([self._table(seq_id) for seq_id in seq_ids], self._cache)

    def host_room(self) -> int:
        """Host blocks that a preempted sequence may have now."""
        return self._cache.host.room

    def resize_shortfall(self, num_blocks: int) -> int:
        """Blocks that must be released before `resize` to `num_blocks` can succeed."""
        return max(0, self._pool.num_used - num_blocks)

    def check_size(self, num_blocks: int) -> None:
        """Raise `CapacityError` if the pool cannot be resized so, whoever gives way: less than a
        block, a policy that cannot move blocks, or pins that would have more than half."""
        if num_blocks < 1 or not self.policy.shares_blocks:
            raise CapacityError(
                f"the KV pool of {self.num_blocks:,} blocks cannot be resized to {num_blocks:,}: "
                + (
                    "it needs at least 1"
                    if self.policy.shares_blocks
                    else f"under --kv-policy {self.policy.name} its size is fixed"
                )
            )
        self._pins.check_fits(num_blocks)

    # -- accounts

    def request_usage(self, request_id: str) -> RequestKVUsage:
        """What a request has cost until now; zeros for one that never held a block."""
        account = self._accounts.get(request_id)
        return RequestKVUsage() if account is None else account.usage(self._now_s)

    def account(self, request_id: str) -> RequestAccount | None:
        """What a request that has started and not ended holds; to read only."""
        return self._accounts.get(request_id)

    @property
    def pool(self) -> BlockPool:
        """The blocks themselves; to look at, and to keep a journal of."""
        return self._pool

    def num_blocks_of(self, request_id: str) -> int:
        """Blocks of the pool that a request's sequences reference now, each counted once."""
        account = self._accounts.get(request_id)
        return 0 if account is None else account.num_blocks

    def cache_stats(self) -> PrefixCacheStats:
        """What the prefix cache and the tiers did since the start; a copy."""
        return self._cache.stats.copy()

    def ledger(self) -> PoolLedger:
        """Where every slot of the pool is (paper section 3.1), now. O(sequences)."""
        return pool_ledger(
            self.tables(),
            self._pool,
            self.bytes_per_block,
            self.policy.num_external_blocks,
            self.policy.promises,
            self._pins.counts,
        )

    def keep_history(self, max_samples: int = 4096, spacing_s: float = 0.0) -> LedgerHistory:
        """Settle samples of the ledger from now on: the answer is told when sequences give their
        blocks back, and takes a sample when its owner says so."""
        self.history = LedgerHistory(
            self.ledger, self.tables, max_samples=max_samples, spacing_s=spacing_s
        )
        return self.history

    def host_ledger(self) -> TierLedger:
        """Where every block of the host tier is."""
        host = self._cache.host
        num_held = host.num_blocks - host.room
        return TierLedger(
            num_blocks=host.num_blocks,
            held=num_held,
            cached=host.num_blocks - num_held - host.num_free,
            free=host.num_free,
            bytes_per_block=self.bytes_per_block,
        )

    def disk_ledger(self) -> TierLedger:
        """Where every block of the disk tier is; blocks planned to go there count already."""
        disk = None if self._cache.cold is None else self._cache.cold.disk
        num, most = (0, 0) if disk is None else (len(disk), disk.max_blocks)
        return TierLedger(
            num_blocks=most,
            held=0,
            cached=num,
            free=most - num,
            bytes_per_block=self.bytes_per_block,
        )

    def held_by_group(self) -> list[GroupHeld]:
        """What each group of layers holds of those who run."""
        return held_by_group([table.parts() for table in self._tables.values()], self.windows)

    def request_ledger(self, request_id: str) -> RequestLedger:
        """The same for the blocks of one request; empty for one that holds none."""
        account = self._accounts.get(request_id)
        if account is None:
            return request_ledger((), 0, lambda _: 0, self._pool, self.bytes_per_block)
        return request_ledger(
            account.tables, account.num_blocks, account.entries_of, self._pool, self.bytes_per_block
        )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` naming the first block or sequence that breaks I1, I2 or I7."""
        check_integrity(self.tables(), self._pool, self._pins.counts)
        check_cache(self._cache, self._holds)
        for request_id, account in self._accounts.items():
            account.check_integrity(request_id)
        self._pins.check_integrity()
        self.policy.check_integrity(self.tables())
        self.ledger().check_integrity()
        self.host_ledger().check_integrity()
        self.disk_ledger().check_integrity()

    # -- inside

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
