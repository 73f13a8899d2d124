"""A memory whose slots know what they hold, for managers with groups of layers and windows.

A slot holds (group, salt, tokens up to and with its own): a sequence may read it for a position
exactly when that is its own. Plans are carried out late, as by a runner that is behind.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from group_disk import GroupDisk, Slot

from octavo.errors import CapacityError
from octavo.kv import NO_GROWTH, KVCacheManager, PagedPolicy, SeqDemand
from octavo.kv.needs import num_behind
from octavo.plan import BlockCopy, CopyKind

Memory = dict[int, list[Slot]]


@dataclass(eq=False)
class Seq:
    """A sequence as scheduler and runner know it."""

    seq_id: int
    request_id: str
    tokens: list[int]
    limit: int
    salt: str = ""
    num_computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    """The runner's, by group: what was given back stays in them."""
    is_running: bool = False
    has_run: bool = False
    must_find: int = 0
    is_double: bool = False
    """A block of it is found in another one, which may go first."""

    def demand(self) -> SeqDemand:
        return SeqDemand(
            len(self.tokens), self.limit, token_ids=self.tokens, salt=self.salt,
            resumed=self.has_run,
        )  # fmt: skip


@dataclass
class Share:
    seq: Seq
    start: int
    end: int
    tables: list[list[int]]
    tokens: tuple[int, ...]


class GroupSim:
    """A manager, its memories, and the plans that are under way."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: tuple[int, ...],
        *,
        max_chunk: int,
        caching: bool = True,
        num_host_blocks: int = 0,
        max_disk_blocks: int = 0,
    ) -> None:
        self.bs, self.windows, self.max_chunk, self.caching = (
            block_size, windows, max_chunk, caching
        )  # fmt: skip
        self.num_host_blocks, self.max_disk_blocks = num_host_blocks, max_disk_blocks
        self.disk = GroupDisk()
        self.most_fetched: int | None = None
        """How many disk blocks a step may read, if not what the manager says."""
        self.next_id = 0
        self.num_given_back = 0
        """Blocks, of all sequences."""
        self.boot(num_blocks)

    def boot(self, num_blocks: int) -> None:
        """A new process over the same disk."""
        self.disk.reopen()
        more: dict[str, Any] = {}
        if self.max_disk_blocks:
            more = {"disk": self.disk, "max_disk_blocks": self.max_disk_blocks}
        self.kv = KVCacheManager(
            num_blocks, self.bs, PagedPolicy(self.windows, self.max_chunk), 2 * self.bs,
            enable_prefix_caching=self.caching, num_host_blocks=self.num_host_blocks, **more,
        )  # fmt: skip
        cold = self.kv._cache.cold
        if cold is not None and self.most_fetched is not None:
            cold._most_fetched = self.most_fetched
        self.seqs: dict[int, Seq] = {}
        self.pool: Memory = {}
        self.host: Memory = {}
        self.shares: list[Share] = []
        self.under_way: deque[tuple[list[BlockCopy], list[Share]]] = deque()

    def reboot(self) -> None:
        """The process ends in order, and another one begins."""
        for seq in list(self.seqs.values()):
            self.end(seq)
        self.plan()
        self.execute()
        self.kv.flush_to_disk()
        self.plan()
        self.execute()
        self.boot(self.kv.num_blocks)

    # -- what a scheduler does

    def add(self, tokens: list[int], limit: int, salt: str = "", request_id: str = "") -> Seq:
        seq = Seq(self.next_id, request_id or f"r{self.next_id}", list(tokens), limit, salt)
        self.next_id += 1
        self.seqs[seq.seq_id] = seq
        return seq

    def begin_step(self) -> None:
        before = {id(t): t.num_dropped for t in self.kv.tables()}
        self.kv.begin_step()
        for table in self.kv.tables():
            behind = num_behind(table.num_committed, table.window, self.bs)
            assert table.num_dropped == behind, "held behind the window, or given back too early"
            self.num_given_back += behind - before[id(table)]

    def start(self, seq: Seq) -> int:
        found = self.kv.start(seq.seq_id, seq.demand(), seq.request_id)
        assert 0 <= found < len(seq.tokens)
        assert found == self.kv.num_committed(seq.seq_id)
        if not self.caching and not seq.has_run:
            relatives = [s for s in self.seqs.values() if s.request_id == seq.request_id]
            assert not found or len(relatives) > 1, "the cache is off"
        assert found >= min(seq.must_find, len(seq.tokens) - 1), f"{found} of {seq.must_find}"
        seq.num_computed, seq.must_find = found, 0
        seq.tables = [[] for _ in self.windows]
        seq.is_running = seq.has_run = True
        seq.is_double = found > 0
        return found

    def grow(self, seq: Seq, end: int) -> bool:
        """Put tokens up to `end` into the plan; False: no room, and nothing has changed."""
        kv, start = self.kv, seq.num_computed
        before = self._picture()
        growth = kv.grow(seq.seq_id, end, start)
        if growth is None:
            assert self._picture() == before, "a refused growth has changed something"
            return False
        new = (growth.new_block_ids, *growth.group_block_ids)
        if growth.new_block_ids:
            assert len(new) == len(self.windows) and len(set(map(len, new))) == 1
            for table, block_ids in zip(seq.tables, new, strict=True):
                table.extend(block_ids)
        else:
            assert not growth.group_block_ids
        if growth.replaced is not None:
            seq.tables[0][growth.replaced[0]] = growth.replaced[1]
        for group, index, block_id in growth.group_replaced:
            seq.tables[group][index] = block_id
        for group, table in enumerate(seq.tables):
            own = list(kv.block_table(seq.seq_id, group))
            assert len(table) == len(own)
            assert all(a == b for a, b in zip(table, own, strict=True) if b >= 0), "tables differ"
            for index in range(start // self.bs, -(-end // self.bs)):
                assert kv.ref_count(table[index]) == 1, "I2: a write to a shared block"
        assert kv.grow(seq.seq_id, end, start) is NO_GROWTH
        tables = [list(table) for table in seq.tables]
        self.shares.append(Share(seq, start, end, tables, tuple(seq.tokens[:end])))
        kv.commit(seq.seq_id, end)
        seq.num_computed = end
        for part in kv._tables[seq.seq_id].parts():
            node, index = part.last_node, part.num_registered - 1
            while node is not None and node.parent is not None and index >= part.num_dropped:
                seq.is_double |= node.block_id not in (-1, part.block_ids[index])
                node, index = node.parent, index - 1
        return True

    def fork(self, parent: Seq, token: int) -> Seq:
        tokens = [*parent.tokens[: parent.num_computed], token]
        child = self.add(tokens, parent.limit, parent.salt, parent.request_id)
        assert self.kv.fork(parent.seq_id, child.seq_id, child.tokens)
        child.num_computed, child.is_running, child.has_run = parent.num_computed, True, True
        child.tables = [[] for _ in self.windows]
        child.is_double = parent.is_double = True
        return child

    def end(self, seq: Seq) -> None:
        if seq.is_running:
            self.kv.release(seq.seq_id)
        elif seq.has_run:
            self.kv.drop_hold(seq.seq_id)
        del self.seqs[seq.seq_id]
        if all(s.request_id != seq.request_id for s in self.seqs.values()):
            self.kv.close_request(seq.request_id)

    def preempt(self, seq: Seq, to_host: bool) -> None:
        kv = self.kv
        free, cost = kv.num_free_blocks, kv.restore_cost(seq.seq_id)
        parts = kv._tables[seq.seq_id].parts()
        is_alone = all(kv.ref_count(i) == 1 for part in parts for i in part.held)
        is_alone &= all(part.held for part in parts)  # a window of 1 looks at nothing before
        has_room = cost.num_blocks <= kv.host_room()
        taken = kv.preempt(seq.seq_id, to_host)
        assert taken.num_blocks == kv.num_free_blocks - free
        # The last token is computed again if no other follows, and looks back further.
        has_next = seq.num_computed < len(seq.tokens)
        is_sure = to_host and is_alone and has_room and has_next
        is_sure &= not (seq.is_double or self.shares or taken.tokens_lost)
        seq.must_find = seq.num_computed if is_sure else 0
        seq.is_running, seq.num_computed = False, 0
        seq.tables = []

    def plan(self) -> None:
        """What was grown since the last plan is one."""
        self.under_way.append((self.kv.take_copies(), self.shares))
        self.shares = []

    def resize(self, num_blocks: int) -> None:
        if self.kv.resize_shortfall(num_blocks) or 2 * self.kv.num_pinned_blocks > num_blocks:
            return
        moved = dict(self.kv.resize(num_blocks))
        self.plan()
        for seq in self.seqs.values():
            seq.tables = [[moved.get(i, i) for i in table] for table in seq.tables]

    # -- what a runner does

    def execute(self, num_left: int = 0) -> None:
        while len(self.under_way) > num_left:
            copies, shares = self.under_way.popleft()
            for copy in copies:
                self._copy(copy)
            for share in shares:  # of each layer all is written before anything is read
                self._write(share)
            for share in shares:
                self._check_reads(share)

    def _copy(self, copy: BlockCopy) -> None:
        kind, nothing = copy.kind, [None] * self.bs
        if kind is CopyKind.TO_DISK:
            self.disk.write(copy.dst, copy.label, list(self.host[copy.src]))
        elif kind is CopyKind.FROM_DISK:
            self.pool[copy.dst] = list(self.disk.memory[copy.src])
        else:
            source = self.host if kind is CopyKind.FROM_HOST else self.pool
            target = self.host if kind is CopyKind.TO_HOST else self.pool
            target[copy.dst] = list(source.get(copy.src, nothing))

    def _check_reads(self, share: Share) -> None:
        for group, (window, table) in enumerate(zip(self.windows, share.tables, strict=True)):
            first = max(0, share.start - window + 1) if window else 0
            for position in range(first, share.end):
                block_id = table[position // self.bs]
                assert block_id >= 0, f"position {position} of group {group} was given back"
                held = self.pool[block_id][position % self.bs]
                right = (group, share.seq.salt, share.tokens[: position + 1])
                assert held == right, f"{position} of group {group} holds {held}, not {right}"

    def _write(self, share: Share) -> None:
        for group, table in enumerate(share.tables):
            for position in range(share.start, share.end):
                block = self.pool.setdefault(table[position // self.bs], [None] * self.bs)
                block[position % self.bs] = (group, share.seq.salt, share.tokens[: position + 1])

    # -- what is true at any time

    def check(self) -> None:
        self.kv.check_integrity()

    def drain(self) -> None:
        self.execute()
        for seq in list(self.seqs.values()):
            self.end(seq)
        self.check()
        assert self.kv.num_free_blocks == self.kv.num_blocks - self.kv.num_pinned_blocks
        assert self.kv.host_room() == self.kv.host_ledger().num_blocks

    def _picture(self) -> object:
        kv = self.kv
        tables = [(t.seq_id, list(t.block_ids), t.num_reported) for t in kv.tables()]
        return tables, kv.num_free_blocks, list(kv.pool.copies), list(kv.pool.ref_counts)


class Player:
    """Random episodes: what a scheduler might do, drawn from a seed."""

    def __init__(
        self, seed: int, *, has_disk: bool = False, sim: type[GroupSim] | None = None
    ) -> None:
        self.rng = rng = random.Random(seed)
        bs = rng.choice((1, 2, 4))
        window = lambda: rng.choice((1, 2, 3, 5, 8, 9, 13))  # noqa: E731
        windows = rng.choice(
            ((window(),), (0, window()), (0, 0, window()), (0, window(), window()), (0, 0),
             (window(), window()))
        )  # fmt: skip
        max_chunk = rng.choice((1, 3, 8))
        num_blocks = len(windows) * rng.randint(5, 24)
        self.sim = (sim or GroupSim)(
            num_blocks, bs, windows, max_chunk=max_chunk, caching=rng.random() < 0.7,
            num_host_blocks=rng.choice((0, 6, 40)),
        )  # fmt: skip
        self.pins: list[int] = []
        self.has_disk = has_disk
        if has_disk:
            self._add_disk()

    def _add_disk(self) -> None:
        sim, rng = self.sim, self.rng
        sim.caching, sim.num_host_blocks = True, rng.choice((1, 3, 10))
        sim.max_disk_blocks = rng.choice((1, 30, 300, 300))
        sim.most_fetched = rng.choice((None, None, 1, 6))
        sim.boot(sim.kv.num_blocks)

    def play(self, num_steps: int) -> GroupSim:
        for _ in range(num_steps):
            self._event()
            self._step()
            self.sim.check()
        for pin_id in self.pins:
            self.sim.kv.unpin(pin_id)
        self.sim.drain()
        return self.sim

    @property
    def running(self) -> list[Seq]:
        return [seq for seq in self.sim.seqs.values() if seq.is_running]

    def _pattern(self, length: int) -> list[int]:
        style = self.rng.randint(0, 2)
        cut = self.rng.randint(0, length) if self.rng.random() < 0.3 else length
        return [style if p < cut else 9 + p % 2 for p in range(length)]

    def _event(self) -> None:
        sim, rng = self.sim, self.rng
        if self.has_disk and rng.random() < 0.1:
            self._meddle()
        most = min(sim.kv.max_tokens_of_one_sequence, 60)
        what = rng.random()
        if what < 0.45 and len(sim.seqs) < 6 and most > 1:
            limit = rng.randint(2, most)
            sim.add(self._pattern(rng.randint(1, limit - 1)), limit, rng.choice(("", "s")))
        elif what < 0.55 and self.running:
            sim.end(rng.choice(self.running))
        elif what < 0.62 and self.running and len(sim.seqs) < 8:
            parent = rng.choice(self.running)
            if 0 < parent.num_computed < parent.limit:
                for _ in range(rng.randint(1, 2)):
                    sim.fork(parent, rng.randint(0, 2))
        elif what < 0.72 and self.running:
            sim.preempt(rng.choice(self.running), rng.random() < 0.6)
        elif what < 0.75:
            sim.kv.reset_prefix_cache()
            for seq in sim.seqs.values():
                seq.is_double, seq.must_find = True, 0
        elif what < 0.79:
            before = sim.kv.num_blocks
            sim.resize(max(1, before + rng.randint(-4, 4)))
            if any(s.limit > sim.kv.max_tokens_of_one_sequence for s in sim.seqs.values()):
                sim.resize(before)
        elif what < 0.82 and sim.caching and not self.pins:
            seq = rng.choice([*sim.seqs.values(), None])
            if seq is not None and 4 * len(seq.tokens) < sim.kv.num_blocks:
                self._pin(seq)
        elif self.pins:
            sim.kv.unpin(self.pins.pop())

    def _meddle(self) -> None:
        """The disk loses something, or the process ends."""
        sim, rng = self.sim, self.rng
        what = rng.random()
        if what < 0.3:
            sim.disk.damaged |= {i for i in sim.disk.files if rng.random() < 0.3}
        elif what < 0.5:
            sim.disk.num_to_drop += rng.randint(1, 3)
        else:
            while self.pins:
                sim.kv.unpin(self.pins.pop())
            sim.reboot()

    def _pin(self, seq: Seq) -> None:
        try:
            pin = self.sim.kv.pin(seq.tokens, seq.salt)
        except CapacityError:
            return
        self.pins.append(pin.pin_id)
        if any(s.limit > self.sim.kv.max_tokens_of_one_sequence for s in self.sim.seqs.values()):
            self.sim.kv.unpin(self.pins.pop())

    def _step(self) -> None:
        sim, rng = self.sim, self.rng
        sim.begin_step()
        served: list[Seq] = []
        for seq in self.running:
            if seq.is_running and rng.random() < 0.9:
                self._serve(seq, served)
        for seq in [s for s in sim.seqs.values() if not s.is_running]:
            keep = rng.randint(0, 1) if self.running else 0
            if not sim.kv.can_admit(seq.demand(), keep):
                if not self.running and not self.pins:
                    raise AssertionError("an idle pool refuses what fits it")
                continue
            sim.start(seq)
            end = min(len(seq.tokens), seq.num_computed + sim.max_chunk)
            assert sim.grow(seq, end), "admitted without room"
            served.append(seq)
            if rng.random() < 0.3:
                self._run_prompt(seq)
                break
        sim.plan()
        sim.execute(rng.randint(0, 2))

    def _serve(self, seq: Seq, served: list[Seq]) -> None:
        sim, rng = self.sim, self.rng
        if seq.num_computed == len(seq.tokens):
            if len(seq.tokens) >= seq.limit:
                sim.end(seq)
                return
            seq.tokens.append(rng.randint(0, 2))
        left = len(seq.tokens) - seq.num_computed
        end = seq.num_computed + min(left, rng.randint(1, sim.max_chunk))
        together = [(seq.seq_id, end, seq.num_computed)]
        promised = sim.kv.can_grow_all(together)
        while not sim.grow(seq, end):
            assert not promised
            victims = [s for s in self.running if s is not seq and s not in served]
            if not victims:
                assert len(self.running) > 1 or self.pins, "alone in the pool, and no room"
                sim.preempt(seq, rng.random() < 0.5)
                return
            sim.preempt(victims[-1], rng.random() < 0.5)
            promised = False
        served.append(seq)

    def _run_prompt(self, seq: Seq) -> None:
        """What was admitted can compute all of its prompt, if nobody else takes anything."""
        sim = self.sim
        while seq.num_computed < len(seq.tokens):
            sim.plan()
            sim.begin_step()
            end = min(len(seq.tokens), seq.num_computed + sim.max_chunk)
            assert sim.grow(seq, end), "admitted, and then no room"
