"""A scheduler and a runner around a manager, over simulated memories (`kv_content`).

Copies are executed strictly in the order of the manager's list and before what a plan computes, as
a runner does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kv_content import GARBAGE, FakeDisk, Prefixes

from octavo.errors import CapacityError
from octavo.kv import NO_GROWTH, KVCacheManager, Preempted, SeqDemand
from octavo.kv.lookup import NOBODY_ASKED
from octavo.kv.node import tokens_of_key
from octavo.kv.tree import chain_to
from octavo.plan import PLANS_UNDER_WAY, BlockCopy, CopyKind


@dataclass(eq=False)
class Seq:
    """A sequence as the scheduler and the runner know it."""

    seq_id: int
    request_id: str
    tokens: list[int]
    """All known; the manager holds this very list."""
    limit: int
    salt: str = ""
    max_hit_tokens: int | None = None
    num_computed: int = 0
    runner_table: list[int] = field(default_factory=list)
    is_running: bool = False
    was_preempted: bool = False
    found: int = 0
    """What the last start found."""
    style: int = 0
    """How a machine continues it."""
    must_find: int = 0
    """A lower bound of what the next start finds."""
    is_double: bool = False
    """It computed a block whose content the pool had already."""

    @property
    def todo(self) -> int:
        return len(self.tokens) - self.num_computed

    def demand(self) -> SeqDemand:
        return SeqDemand(
            len(self.tokens),
            self.limit,
            token_ids=self.tokens,
            salt=self.salt,
            resumed=self.was_preempted,
            max_hit_tokens=self.max_hit_tokens,
        )


@dataclass(frozen=True)
class Truncate:
    """The pool shrinks: what lies behind is lost. Stands among the copies, in order."""

    num_blocks: int


@dataclass
class Share:
    """What one sequence does in a plan, with the runner's table of that plan."""

    seq: Seq
    start: int
    end: int
    table: list[int]


@dataclass
class Plan:
    copies: list[BlockCopy | Truncate]
    shares: list[Share]


class Sim:
    """A manager with simulated memories, and what a scheduler and a runner do with it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caching: bool = True,
        num_host_blocks: int = 0,
        max_disk_blocks: int = 0,
    ) -> None:
        self.bs = block_size
        self.caching = caching
        self.num_host_blocks = num_host_blocks
        self.max_disk_blocks = max_disk_blocks
        self.prefixes = Prefixes()
        self.disk = FakeDisk(self.prefixes)
        self.seqs: dict[int, Seq] = {}
        self.salts: dict[str, str] = {}
        """By request: the last one's."""
        self.pin_sizes: dict[int, int] = {}
        self.most_fetched: int | None = None
        """How many disk blocks a step may read, if not what the manager says."""
        self.boot(num_blocks)

    def boot(self, num_blocks: int) -> None:
        """A new process over the same disk."""
        self.pool: dict[int, list[int]] = {}
        self.host: dict[int, list[int]] = {}
        self.disk.reopen()
        tiers: dict[str, Any] = {"num_host_blocks": self.num_host_blocks}
        if self.max_disk_blocks:
            tiers |= {"disk": self.disk, "max_disk_blocks": self.max_disk_blocks}
        self.kv = KVCacheManager(
            num_blocks, self.bs, None, self.bs, enable_prefix_caching=self.caching, **tiers
        )
        cold = self.kv._cache.cold
        if cold is not None and self.most_fetched is not None:
            cold._most_fetched = self.most_fetched
        self.ordered: list[BlockCopy | Truncate] = []
        self.shares: list[Share] = []
        self.under_way: deque[Plan] = deque()

    # -- what a scheduler does

    def add(self, seq_id: int, tokens: Sequence[int], **more: Any) -> Seq:
        """A sequence that waits."""
        more.setdefault("request_id", f"r{seq_id}")
        more.setdefault("limit", len(tokens) + 1000)
        seq = self.seqs[seq_id] = Seq(seq_id=seq_id, tokens=list(tokens), **more)
        self.salts[seq.request_id] = seq.salt
        return seq

    def can_admit(self, seq: Seq, keep_free: int = 0) -> bool:
        """Whether it would fit now. What is remembered of an earlier question changes nothing."""
        cache = self.kv._cache
        answer = self.kv.can_admit(seq.demand(), keep_free)
        asked, cache._asked = cache._asked, NOBODY_ASKED
        assert self.kv.can_admit(seq.demand(), keep_free) == answer
        cache._asked = asked
        return answer

    def start(self, seq: Seq) -> int:
        """Start it; what was found."""
        before = self.kv.cache_stats()
        found = self.kv.start(seq.seq_id, seq.demand(), seq.request_id)
        after = self.kv.cache_stats()
        if self.caching:
            whose = ("hit_tokens", "resumed_tokens", "forked_tokens")
            assert sum(getattr(after, name) - getattr(before, name) for name in whose) == found
        assert 0 <= found < len(seq.tokens), f"{found} of {len(seq.tokens)} tokens found"
        if seq.max_hit_tokens is not None:
            assert found <= seq.max_hit_tokens
        assert self.kv.num_committed(seq.seq_id) == found
        seq.num_computed = seq.found = found
        seq.runner_table = []
        seq.is_running, seq.is_double = True, False
        return found

    def grow(self, seq: Seq, end: int) -> bool:
        """Put its tokens up to `end` into the plan; False: no room, and nothing has changed."""
        kv, start = self.kv, seq.num_computed
        before = (list(kv.block_table(seq.seq_id)), kv.num_free_blocks)
        growth = kv.grow(seq.seq_id, end, start)
        if growth is None:
            assert (list(kv.block_table(seq.seq_id)), kv.num_free_blocks) == before
            return False
        seq.runner_table.extend(growth.new_block_ids)
        if growth.replaced is not None:
            index, block_id = growth.replaced
            seq.runner_table[index] = block_id
        assert seq.runner_table == list(kv.block_table(seq.seq_id)), "the runner's table differs"
        for index in range(start // self.bs, -(-end // self.bs)):
            assert kv.ref_count(seq.runner_table[index]) == 1, "I2: write to a shared block"
        assert kv.grow(seq.seq_id, end, start) is NO_GROWTH
        self.shares.append(Share(seq, start, end, list(seq.runner_table)))
        seq.num_computed = end
        kv.commit(seq.seq_id, end)
        self._note_known(seq, start // self.bs)
        return True

    def _note_known(self, seq: Seq, first: int) -> None:
        """A block that it computes is found in another one, which may be used for something else
        before this plan is carried out."""
        table = self.kv._tables[seq.seq_id]
        nodes = chain_to(table.last_node, table.num_registered)
        pairs = zip(nodes, table.block_ids, strict=False)
        if any(node.block_id not in (-1, own) for node, own in list(pairs)[first:]):
            seq.is_double = True

    def run(self, seq: Seq, end: int | None = None) -> int:
        """One whole step for one sequence, from its start on if need be; what start found."""
        self.kv.begin_step()
        if not seq.is_running:
            assert self.can_admit(seq)
            self.start(seq)
        assert self.grow(seq, len(seq.tokens) if end is None else end)
        self.execute()
        return seq.found

    def finish(self, seq_id: int, tokens: Sequence[int], **more: Any) -> int:
        """A sequence that runs its prompt and ends; what its start found."""
        seq = self.add(seq_id, tokens, **more)
        found = self.run(seq)
        self.end(seq)
        return found

    def fork(self, parent: Seq, child_id: int, token_ids: Sequence[int] = ()) -> Seq:
        """A child of what the parent has computed, going on with `token_ids`."""
        tokens = [*parent.tokens[: parent.num_computed], *token_ids]
        child = self.add(
            child_id, tokens, request_id=parent.request_id, salt=parent.salt, limit=parent.limit
        )
        assert self.kv.fork(parent.seq_id, child_id, child.tokens)
        assert self.kv.num_committed(child_id) == parent.num_computed
        child.num_computed = parent.num_computed
        child.is_running = True
        child.is_double = parent.is_double or bool(self.under_way)
        return child

    def end(self, seq: Seq) -> None:
        """It finished or was aborted, wherever it is."""
        if seq.is_running:
            self.kv.release(seq.seq_id)
        elif seq.was_preempted:
            self.kv.drop_hold(seq.seq_id)
        seq.is_running = False
        del self.seqs[seq.seq_id]
        if all(other.request_id != seq.request_id for other in self.seqs.values()):
            self.kv.close_request(seq.request_id)

    def preempt(self, seq: Seq, to_host: bool) -> Preempted:
        """Take its blocks; it waits to start again."""
        kv = self.kv
        free, room, committed = kv.num_free_blocks, kv.host_room(), seq.num_computed
        is_alone = all(kv.ref_count(block_id) == 1 for block_id in kv.block_table(seq.seq_id))
        moved = kv.preempt(seq.seq_id, to_host)
        assert moved.num_blocks == kv.num_free_blocks - free
        assert 0 <= moved.tokens_moved <= committed
        assert 0 <= moved.tokens_lost <= committed - moved.tokens_moved
        assert 0 <= room - kv.host_room() <= -(-committed // self.bs)
        if not to_host:
            assert moved.tokens_moved == 0
        assert not kv.has(seq.seq_id)
        seq.must_find = 0
        if to_host and is_alone and not moved.tokens_lost and not seq.is_double:
            seq.must_find = committed
        seq.is_running, seq.was_preempted = False, True
        seq.num_computed = 0
        seq.runner_table = []
        return moved

    def resize(self, num_blocks: int) -> bool:
        """Change the pool's size; False: too many blocks are in use or pinned, and nothing has
        changed."""
        kv = self.kv
        old, free = kv.num_blocks, kv.num_free_blocks
        shortfall = kv.resize_shortfall(num_blocks)
        assert shortfall == max(0, old - free - num_blocks)
        if shortfall or 2 * kv.num_pinned_blocks > num_blocks:
            tables = {i: list(kv.block_table(i)) for i, s in self.seqs.items() if s.is_running}
            try:
                kv.resize(num_blocks)
            except CapacityError:
                assert (kv.num_blocks, kv.num_free_blocks) == (old, free)
                assert tables == {i: list(kv.block_table(i)) for i in tables}
                return False
            raise AssertionError(f"{shortfall} blocks too many, and yet the pool was resized")
        moved = dict(kv.resize(num_blocks))
        assert kv.num_blocks == num_blocks
        self.ordered += kv.take_copies()
        self.ordered.append(Truncate(num_blocks))
        for seq in self.seqs.values():
            seq.runner_table = [moved.get(block_id, block_id) for block_id in seq.runner_table]
            if seq.is_running:
                table = list(kv.block_table(seq.seq_id))
                assert seq.runner_table == table[: len(seq.runner_table)]
                assert all(block_id < num_blocks for block_id in table)
        return True

    # -- what a runner does

    def plan(self) -> Plan:
        """The plan of what was grown since the last one, on its way to the runner."""
        plan = Plan([*self.ordered, *self.kv.take_copies()], self.shares)
        self.ordered, self.shares = [], []
        self.under_way.append(plan)
        return plan

    def execute(self) -> None:
        """Make a plan, and carry out all that are under way."""
        self.plan()
        self.catch_up()
        self.check_tables()

    def catch_up(self, num_left: int = 0) -> None:
        """Carry out plans, the oldest first, until `num_left` are under way."""
        while len(self.under_way) > num_left:
            plan = self.under_way.popleft()
            self.copy(plan.copies)
            self.compute(plan.shares)

    def wait_for_disk(self) -> None:
        """Until what is on its way there has arrived."""
        for _ in range(PLANS_UNDER_WAY):
            self.execute()

    def copy(self, copies: Iterable[BlockCopy | Truncate]) -> None:
        """Carry out copies in their order."""
        for copy in copies:
            if isinstance(copy, Truncate):
                self.pool = {i: held for i, held in self.pool.items() if i < copy.num_blocks}
            elif copy.kind is CopyKind.WITHIN:
                self.pool[copy.dst] = list(self._block(self.pool, copy.src))
            elif copy.kind is CopyKind.TO_HOST:
                assert 0 <= copy.dst < self.num_host_blocks
                self.host[copy.dst] = list(self._block(self.pool, copy.src))
            elif copy.kind is CopyKind.FROM_HOST:
                assert 0 <= copy.src < self.num_host_blocks
                self.pool[copy.dst] = list(self._block(self.host, copy.src))
            elif copy.kind is CopyKind.TO_DISK:
                self.disk.write(copy.dst, copy.label, self._block(self.host, copy.src))
            else:
                assert copy.src in self.disk.memory, f"disk block {copy.src} was not fetched"
                self.pool[copy.dst] = list(self.disk.memory[copy.src])

    def compute(self, shares: Iterable[Share]) -> None:
        """All writes of a step, then all reads."""
        shares = list(shares)
        numbers = {id(share): self.numbers(share.seq, share.end) for share in shares}
        written: Counter[tuple[int, int]] = Counter()
        for share in shares:
            for position in range(share.start, share.end):
                index, offset = divmod(position, self.bs)
                block_id = share.table[index]
                written[block_id, offset] += 1
                block = self.pool.setdefault(block_id, [GARBAGE] * self.bs)
                block[offset] = numbers[id(share)][position]
        assert not written or max(written.values()) == 1, "a slot is written twice in a step"
        for share in shares:
            self._note_doubles(share)
            self._check(share.seq, share.table, numbers[id(share)])

    def _note_doubles(self, share: Share) -> None:
        """A block whose content another one has may not be the one that is found later."""
        for index in range(share.start // self.bs, share.end // self.bs):
            block_id = share.table[index]
            content = self.pool[block_id]
            if any(held == content and i != block_id for i, held in self.pool.items()):
                share.seq.is_double = True

    def numbers(self, seq: Seq, end: int) -> list[int]:
        """What the sequence's first `end` slots must hold."""
        return self.prefixes.of(seq.salt, seq.tokens[:end])

    # -- what must hold

    def host_terms(self) -> tuple[int, int, int]:
        """Host blocks: held, cached, free."""
        ledger = self.kv.host_ledger()
        return ledger.held, ledger.cached, ledger.free

    def check_tables(self) -> None:
        """Every running sequence has all that it believes to have; only right behind a plan."""
        assert not self.under_way
        for seq in self.seqs.values():
            if seq.is_running:
                table = list(self.kv.block_table(seq.seq_id))
                num_tokens = self.kv.num_committed(seq.seq_id)
                assert num_tokens == seq.num_computed
                self._check(seq, table, self.numbers(seq, num_tokens))

    def reset(self) -> None:
        """After a failed step."""
        self.kv.reset_cache()
        self.pin_sizes = dict.fromkeys(self.pin_sizes, 0)

    def check_counts(self) -> None:
        """I1, I3 and I7 without the room's own help, and with it."""
        kv = self.kv
        kv.check_integrity()
        running = [seq.seq_id for seq in self.seqs.values() if seq.is_running]
        entries = Counter(block_id for i in running for block_id in kv.block_table(i))
        counts = [kv.ref_count(block_id) for block_id in range(kv.num_blocks)]
        assert all(counts[block_id] >= num for block_id, num in entries.items())
        assert sum(counts) == entries.total() + sum(self.pin_sizes.values())
        assert kv.num_free_blocks == counts.count(0)
        ledger = kv.ledger()
        terms = ledger.terms()
        assert sum(terms.values()) == kv.num_blocks * self.bs
        assert min(terms.values()) >= 0
        assert 0 <= kv.host_room() <= self.num_host_blocks

    def check_nodes(self) -> None:
        """White box, only right behind a plan: what the prefix tree says of each block is true, so
        that nothing wrong can be found, and it can be found at all."""
        pool = self.kv._pool
        nodes = {id(node): node for node in pool.nodes if node is not None}
        host = self.kv._cache.host
        nodes |= {id(node): node for node in host.nodes if node is not None}
        for node in nodes.values():
            path, salt = self._path(node)
            want = self.prefixes.of(salt, path)[-node.num_tokens :]
            if node.block_id >= 0:
                assert pool.nodes[node.block_id] is node
                have = self._block(self.pool, node.block_id)[: len(want)]
                assert have == want, f"block {node.block_id} is registered for {path}"
            if node.host_id >= 0:
                have = self._block(self.host, node.host_id)[: len(want)]
                assert have == want, f"host block {node.host_id} is registered for {path}"
            if node.disk_id in self.disk.files:
                assert self.disk.files[node.disk_id][1] == want

    def _path(self, node: Any) -> tuple[list[int], str]:
        """A node's tokens from the first on, and their salt."""
        keys = []
        while node.parent is not None:
            assert node.parent.children.get(node.key) is node, "a node is cut off from the tree"
            keys.append(node.key)
            node = node.parent
        assert hasattr(node, "name"), "a node is cut off from the tree"
        salt, request_id = node.name
        if request_id:
            salt = self.salts[request_id]
        return [token for key in reversed(keys) for token in tokens_of_key(key)], salt

    def _check(self, seq: Seq, table: Sequence[int], numbers: Sequence[int]) -> None:
        for index in range(-(-len(numbers) // self.bs)):
            want = list(numbers[index * self.bs : (index + 1) * self.bs])
            have = self._block(self.pool, table[index])[: len(want)]
            if have != want:
                offset = next(i for i in range(len(want)) if have[i] != want[i])
                raise AssertionError(
                    f"sequence {seq.seq_id}, position {index * self.bs + offset}, block "
                    f"{table[index]}: holds {self.prefixes.name(have[offset])}, expected "
                    f"{self.prefixes.name(want[offset])}"
                )

    def _block(self, memory: dict[int, list[int]], block_id: int) -> list[int]:
        return memory.get(block_id) or [GARBAGE] * self.bs

    def drain(self) -> None:
        """I3: end everything; nothing is left but the cache."""
        for seq in list(self.seqs.values()):
            self.end(seq)
        for pin_id in list(self.pin_sizes):
            self.kv.unpin(pin_id)
            del self.pin_sizes[pin_id]
        self.check_counts()
        kv = self.kv
        assert kv.num_free_blocks == kv.num_blocks
        assert kv.num_sequences == 0
        assert kv.ledger().tokens == kv.ledger().reserved == kv.ledger().internal == 0
        assert kv.host_room() == self.num_host_blocks, "a hold without a holder"
        if not self.caching:
            assert kv.ledger().terms()["free"] == kv.num_blocks * self.bs
