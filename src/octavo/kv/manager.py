"""The face of the memory room: block tables by sequence, over one pool, under one policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.errors import CapacityError, IntegrityError
from octavo.kv.group_lookup import root_of_group
from octavo.kv.pins import Pin
from octavo.kv.policy import NO_GROWTH, Growth, GrowthDemand, Preempted, SeqDemand
from octavo.kv.runs import advance, most_steps
from octavo.kv.state import KVState
from octavo.kv.swap import own_blocks
from octavo.kv.table import BlockTable
from octavo.kv.usage import RequestAccount
from octavo.outputs import RequestKVUsage
from octavo.plan import BlockCopy


class KVCacheManager(KVState):
    """Gives sequences their blocks and accounts for every slot (paper section 4).

    It holds block ids, token counts and, for what can be found again, token ids: no tensors, no
    clock. Sequences are the scheduler's numbers, each used once between `start` (or `fork`) and
    `release` or `preempt`. Questions that change nothing are `KVState`'s.

    A step is planned between `begin_step` and `take_copies`. Copies between memories are collected
    in one list, in the order in which they must be done, before the step computes anything.
    """

    # -- steps

    def set_time(self, now_s: float) -> None:
        """Tell the time that block-seconds count in; it must not run backwards."""
        if now_s < self._now_s:
            raise IntegrityError(f"time runs backwards: {now_s} s after {self._now_s} s")
        self._now_s = self._cache.now_s = now_s

    def begin_step(self) -> None:
        """A new step is being planned: to be called before anything is asked for it. What earlier
        steps compute is there when the copies of this one are done."""
        self._cache.step += 1
        self.policy.begin_step()
        if self._cache.needs is not None:
            for table in self._tables.values():
                self._drop_behind(table)

    def take_copies(self) -> list[BlockCopy]:
        """The copies that the next plan must do, in this order, before it computes anything."""
        copies, self._pool.copies = self._pool.copies, []
        self._cache.plan += 1
        return copies

    def most_quiet_steps(self, seq_ids: Iterable[int]) -> int:
        """How many steps could be taken now, at least, in which each of these sequences computes
        one token, so that blocks that hold nothing of worth are all that they take: no copies, and
        nothing that is kept in another memory instead. None where layers have windows, or are in
        groups: blocks are given back on the way."""
        if self._cache.needs is not None:
            return 0
        pool = self._pool
        has_tiers = self._cache.host.num_blocks > 0
        num_free = pool.num_free - pool.num_cached if has_tiers else pool.num_free
        return 0 if pool.copies else most_steps([self._tables[i] for i in seq_ids], pool, num_free)

    def advance(self, seq_ids: Iterable[int], times: Sequence[float]) -> None:
        """Take that many quiet steps, which begin at these times: the same as `begin_step`,
        `set_time`, for each sequence in this order `grow` and `commit` of one token more, and
        `take_copies`, for each of them."""
        self.policy.begin_step()
        tables = [self._tables[i] for i in seq_ids]
        advance(tables, times, self._pool, self._cache, self._grow, self.set_time)

    # -- the life of a sequence

    def start(self, seq_id: int, demand: SeqDemand, request_id: str | None = None) -> int:
        """Register a sequence; returns how many of its first tokens have their KV in the pool, or
        will have once the copies are done.

        Computing starts there. What the policy reserves or the prefix cache finds reaches the
        runner with the first `grow`. `request_id` collects the usage of all sequences of a request,
        also over preemptions, until `close_request`; None keeps no usage. Raises `IntegrityError`
        for an id in use, and `CapacityError` when the policy has no room (ask `can_admit` first);
        then nothing has changed.
        """
        self._check_unused(seq_id)
        if request_id is None:
            account = RequestAccount("", self.block_size, self._now_s)
        else:
            account = self._accounts.get(request_id) or RequestAccount(
                request_id, self.block_size, self._now_s
            )
        table = BlockTable(seq_id, demand, self.block_size, account, self.windows)
        if not self.policy.start(table):
            raise CapacityError(
                f"sequence {seq_id} was started without room: the {self.policy.name} policy "
                f"cannot reserve {demand.max_total_tokens} tokens with {self.num_free_blocks} of "
                f"{self.num_blocks} blocks free"
            )
        if self.policy.shares_blocks:
            owner = f"#{seq_id}" if request_id is None else request_id
            root_name = self._cache.root_name(demand.salt, owner)
            for part in table.parts():
                part.root_name = root_of_group(root_name, part.group)
            self._cache.open(table)
            self._holds.drop(seq_id)
        self._tables[seq_id] = table
        if request_id is not None:
            self._accounts[request_id] = account
        for part in table.parts():
            account.open(part, self._now_s)
        return table.num_committed

    def grow(self, seq_id: int, num_tokens: int, num_computed: int) -> Growth | None:
        """Make room for `num_tokens` tokens in all, of which those from position `num_computed`
        on will be written by the coming step.

        Returns what the plan must say of the sequence: blocks to append, and at most one entry
        replaced by a copy, of the block that holds `num_computed` if it has other owners (paper
        section 4.4; the copy itself comes with `take_copies`). `NO_GROWTH` (that very object) when
        the plan need not say anything. None when it does not fit now; then nothing has changed.
        """
        try:
            table = self._tables[seq_id]
        except KeyError:
            raise self._unknown(seq_id) from None
        # BlockTable.is_ready, written out: asked of every sequence in every step.
        if num_tokens <= table.capacity and num_computed >= table.exclusive_from:
            return NO_GROWTH
        return self._grow(table, num_tokens, num_computed)

    def can_grow_all(self, demands: Iterable[tuple[int, int, int]]) -> bool:
        """Whether `grow(seq_id, num_tokens, num_computed)` would succeed now for all of these, one
        after the other."""
        return self.policy.can_grow_all(
            [GrowthDemand(self._table(seq_id), end, start) for seq_id, end, start in demands]
        )

    def commit(self, seq_id: int, num_tokens: int) -> None:
        """Say that the KV of the first `num_tokens` tokens is in the pool, or will be once the
        planned step ran. What the ledger counts, what a later `fork` hands on, and what others may
        find from now on. `SeqDemand.token_ids` must have these tokens by now."""
        try:
            table = self._tables[seq_id]
        except KeyError:
            raise self._unknown(seq_id) from None
        if not table.num_committed <= num_tokens <= table.capacity:
            raise IntegrityError(
                f"sequence {seq_id} cannot have {num_tokens} tokens in the pool: it has "
                f"{table.num_committed}, which others may have found, and its table has "
                f"{table.capacity} slots"
            )
        table.num_committed = num_tokens
        if table.others:
            for part in table.others:
                part.num_committed = num_tokens
        if num_tokens >= table.next_register:
            self._cache.register(table)

    def fork(self, parent_id: int, child_id: int, token_ids: Sequence[int] = ()) -> bool:
        """Start `child_id` with the committed tokens of its parent, under the same request.

        Paged: the child shares the blocks, nothing is copied, and whoever writes first into the
        shared partial block gets a copy by `grow`. Policies that cannot share copy; False when
        there is no room for that (nothing has changed). The child's whole table comes with its
        first `grow`. Not to be followed by a `grow` of the child in the plan in which the parent's
        tokens are computed: copies come before computing.

        `token_ids` is the child's own, growing list, which begins with the parent's committed
        tokens; without it nothing that the child computes is found again, not even by itself.
        """
        parent = self._table(parent_id)
        self._check_unused(child_id)
        child = BlockTable(child_id, parent.demand, self.block_size, parent.account, self.windows)
        for part in child.parts():
            part.token_ids = token_ids
        if not self.policy.fork(parent, child):
            return False
        if self.policy.shares_blocks:
            self._cache.forked(parent, child)
        self._tables[child_id] = child
        for part in child.parts():
            parent.account.open(part, self._now_s)
        return True

    def expect_forks(self, seq_id: int, num_forks: int) -> None:
        """Say that at most so many sequences will still be forked from this one, which started for
        several (`SeqDemand.num_seqs`) that do not fork again: others get what they will not need.
        """
        self.policy.expect_forks(self._table(seq_id), num_forks)

    def release(self, seq_id: int) -> None:
        """Drop a sequence's table and its blocks: it ended or was aborted. The prefix cache keeps
        them while there is room.

        Raises `IntegrityError` for an id that is unknown or was released already.
        """
        table = self._table(seq_id)
        for part in table.parts():
            if self._cache.enabled:
                self._cache.register_tail(part)
            if self.history is not None:
                self.history.settle(part, part.num_wanted)
        self._give_back(table)

    def preempt(self, seq_id: int, to_host: bool) -> Preempted:
        """Take all blocks from a running sequence, which will `start` again under the same id. Not
        for one that has grown in the step that is being planned.

        `to_host` moves what only it has to host memory, as far as there is room, where it waits
        until the sequence starts or `drop_hold`; else its blocks are left to the prefix cache.
        """
        table = self._table(seq_id)
        num_free = self.num_free_blocks
        self._holds.note(table)
        if self.history is not None:
            for part in table.parts():
                self.history.settle(part, part.num_committed)
        if not (to_host and self.policy.shares_blocks):
            tokens_lost = sum(num for _, _, num in own_blocks(table, self._cache))
            if self._cache.enabled:
                for part in table.parts():
                    self._cache.register_tail(part, is_old=True)
            self._give_back(table)
            return Preempted(self.num_free_blocks - num_free, 0, tokens_lost)
        tokens_moved, tokens_lost, block_ids = self._holds.move_out(table)
        self._give_back(table)
        for block_id in block_ids:
            if self._pool.nodes[block_id] is not None:
                self._pool.demote(block_id)  # it has a copy: it goes before others that have none
        return Preempted(self.num_free_blocks - num_free, tokens_moved, tokens_lost)

    def drop_hold(self, seq_id: int) -> None:
        """A preempted sequence will not start again: what waits for it on the host may go.
        Harmless for one for which nothing waits."""
        self._holds.drop(seq_id)

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
        self._holds.close(request_id)
        return account.usage(self._now_s)

    # -- what is kept, and how much

    def pin(self, token_ids: Sequence[int], salt: str = "") -> Pin:
        """Keep the whole blocks of a prefix in the pool, as far as they are there now, until
        `unpin`. Without the prefix cache that is none.

        Raises `CapacityError`, with the arithmetic, for more than half of the pool.
        """
        return self._pins.pin(token_ids, salt)

    def unpin(self, pin_id: int) -> None:
        """Let go of a pinned prefix: its blocks are cached like others. Raises
        `InvalidRequestError` for an id that is not pinned."""
        self._pins.unpin(pin_id)

    def resize(self, num_blocks: int) -> list[tuple[int, int]]:
        """Change the size of the pool while sequences run, between two steps.

        Returns the (old, new) ids of blocks that move, all at once, in every table; their copies
        are among the coming ones, to be done before the memory behind the new end is given up.
        Cached blocks are evicted, the least recently used first. Raises `CapacityError` when more
        blocks are referenced (`resize_shortfall`), and as `check_size` does; then nothing has
        changed.
        """
        self.check_size(num_blocks)
        shortfall = self.resize_shortfall(num_blocks)
        if shortfall:
            raise CapacityError(
                f"the KV pool cannot shrink from {self.num_blocks:,} to {num_blocks:,} blocks: "
                f"{self._pool.num_used:,} are in use, {self._pins.num_blocks:,} of them pinned; "
                f"{shortfall:,} must be released first"
            )
        if num_blocks >= self.num_blocks:
            self._pool.grow(num_blocks)
            moves: dict[int, int] = {}
        else:
            moves = self._pool.shrink(num_blocks)
        if moves:
            tables = self.tables()
            for table in tables:
                table.block_ids[:] = [moves.get(i, i) for i in table.block_ids]
            for account in {id(table.account): table.account for table in tables}.values():
                account.rename(moves)
            self._pins.rename(moves)
        self._cache.pool_was_resized()
        return list(moves.items())

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that nobody references or waits for, in all tiers; returns how
        many blocks of the pool that freed. Pinned prefixes stay."""
        return self._cache.drop_unused()

    def reset_cache(self, num_plans: int = 1) -> None:
        """After a failed step: forget all that blocks are said to hold. Nothing that is in the
        pool or on the host now is found again, holds are gone, and pins are left with no blocks.
        Copies that no plan has taken are dropped: end the sequences that have grown in the step
        that was being planned. The disk keeps what it had before the last `num_plans` plans, which
        were not carried out."""
        self._holds.clear()
        self._cache.drop_all(num_plans)
        self._pins.let_go()
        for table in self._tables.values():
            self._cache.stop_registering(table)

    def flush_to_disk(self) -> int:
        """Before the end: plan copies to disk of the cached blocks that are not there, as many as
        it keeps; returns how many. To be called when every plan was executed."""
        return 0 if self._cache.cold is None else self._cache.cold.flush()

    # -- inside

    def _grow(self, table: BlockTable, num_tokens: int, num_computed: int) -> Growth | None:
        if not 0 <= num_computed <= num_tokens:
            raise IntegrityError(
                f"sequence {table.seq_id} cannot grow to {num_tokens} tokens with {num_computed} "
                "of them computed"
            )
        num_before = len(table.block_ids)  # of each of its parts
        account = table.account
        account.settle(self._now_s)
        growth = self.policy.grow(table, num_tokens, num_computed)
        if growth is not None and growth is not NO_GROWTH:
            for part in table.parts():
                account.add(part.block_ids[num_before:], part.group)
        return growth

    def _drop_behind(self, table: BlockTable) -> None:
        """Give back what is behind the windows of a sequence, now that a new step begins: steps
        under way may still read it, but whoever gets it writes later."""
        for part in table.parts():
            num_behind = part.num_behind(part.num_committed)
            if num_behind > part.num_dropped:
                block_ids = part.drop(num_behind)
                part.account.settle(self._now_s)
                part.account.remove(block_ids, part.group)
                self._pool.release(block_ids)

    def _give_back(self, table: BlockTable) -> None:
        del self._tables[table.seq_id]
        self._deferred[table.seq_id] = table
        for done in self.policy.release(table):
            del self._deferred[done.seq_id]
            for part in done.parts():
                done.account.close(part, self._now_s)
            done.clear()
        table.end()
