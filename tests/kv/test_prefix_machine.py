"""A hypothesis machine that tries to make the memory room serve wrong KV.

It plays scheduler and runner over simulated memories (`kv_sim`): prompts that overlap heavily,
forks, beams, preemptions to host and back, aborts, pins, resizes, failed steps, a disk that loses
and damages blocks, restarts. After every plan each slot that a sequence believes to have holds
precisely its own prefix; I1, I2, I3 and I7 hold all the time; `can_admit` and `can_grow_all` keep
what they promise.

`OCTAVO_MACHINE_EXAMPLES=2000 pytest tests/kv/test_prefix_machine.py` looks for longer, and at other
examples each time.
"""

from __future__ import annotations

import os
import sys

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_sim import Seq, Sim

from octavo.errors import CapacityError
from octavo.kv import KVCacheManager

EXAMPLES = os.environ.get("OCTAVO_MACHINE_EXAMPLES")
SETTINGS = settings(
    max_examples=int(EXAMPLES or 40),
    stateful_step_count=50,
    derandomize=EXAMPLES is None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
MAX_LIVE = 9


def pattern(style: int, position: int) -> int:
    """Four endless texts that agree now and then, so that prompts diverge anywhere in a block."""
    return (0, position % 2, position // 3 % 2, 1)[style]


class PrefixMachine(RuleBasedStateMachine):
    """Everything on: a cache, a host tier of some size, sometimes a disk."""

    caching = True
    max_host_blocks = 10
    max_disk_blocks = 0
    pool_sizes = st.one_of(
        st.integers(3, 8), st.integers(3, 8), st.integers(3, 30), st.integers(3, 200)
    )

    @initialize(data=st.data(), block_size=st.integers(1, 8), is_calm=st.booleans())
    def make(self, data: st.DataObject, block_size: int, is_calm: bool) -> None:
        """`is_calm`: nobody meddles, so that more comes to its end."""
        self.is_calm = is_calm
        num_disk = data.draw(st.integers(1, self.max_disk_blocks)) if self.max_disk_blocks else 0
        self.sim = Sim(
            data.draw(self.pool_sizes),
            block_size,
            caching=self.caching,
            num_host_blocks=data.draw(st.integers(1 if num_disk else 0, self.max_host_blocks)),
            max_disk_blocks=num_disk,
        )
        self.next_id = 0
        self.pins: dict[int, tuple[str, list[int], int]] = {}
        self.was_reset = False

    # -- helpers

    @property
    def kv(self) -> KVCacheManager:
        return self.sim.kv

    @property
    def running(self) -> list[Seq]:
        return [seq for seq in self.sim.seqs.values() if seq.is_running]

    @property
    def waiting(self) -> list[Seq]:
        return [seq for seq in self.sim.seqs.values() if not seq.is_running]

    def fresh_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def pick(self, data: st.DataObject, seqs: list[Seq]) -> Seq:
        return seqs[data.draw(st.integers(0, len(seqs) - 1))]

    def extend(self, seq: Seq, num: int) -> None:
        """The tokens it samples."""
        for _ in range(num):
            seq.tokens.append(pattern(seq.style, len(seq.tokens)))

    # -- requests come

    @precondition(lambda self: len(self.sim.seqs) < MAX_LIVE)
    @rule(data=st.data(), salt=st.sampled_from(["", "", "", "x"]), times=st.integers(1, 3))
    def ask(self, data: st.DataObject, salt: str, times: int) -> None:
        """A prompt, or two equal ones and one that is shorter."""
        max_hit = data.draw(st.sampled_from([None, None, None, 0, 5]))
        self.prompts(data, salt, times, max_hit)

    @precondition(lambda self: len(self.sim.seqs) < MAX_LIVE)
    @rule(data=st.data(), times=st.integers(1, 3))
    def ask_plainly(self, data: st.DataObject, times: int) -> None:
        """The same without anything special: more overlap."""
        self.prompts(data, "", times, None)

    def prompts(self, data: st.DataObject, salt: str, times: int, max_hit: int | None) -> None:
        """They diverge anywhere, and exact multiples of the block size are frequent."""
        bs, most = self.sim.bs, self.kv.max_tokens_of_one_sequence
        length = data.draw(st.integers(0, 5)) * bs + data.draw(st.integers(0, bs - 1))
        length = min(max(1, length), most)
        if length < 1:
            return  # pins have it all
        style, then = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
        until = length if style == then else data.draw(st.integers(0, length))
        tokens = [pattern(style if p < until else then, p) for p in range(length)]
        limit = min(length + data.draw(st.integers(0, 20)), most)
        for number in range(times):
            self.sim.add(
                self.fresh_id(), tokens[: max(1, length - number // 2)], salt=salt,
                max_hit_tokens=max_hit, style=then, limit=limit,
            )  # fmt: skip

    # -- steps

    @precondition(lambda self: self.sim.seqs)
    @rule(data=st.data(), num_plans=st.integers(1, 8))
    def steps(self, data: st.DataObject, num_plans: int) -> None:
        for _ in range(num_plans):
            self.plan(data)
            self.sim.catch_up()
            self.sim.check_tables()
            self.sim.check_nodes()

    @precondition(lambda self: self.sim.seqs)
    @rule(data=st.data(), num_late=st.integers(0, 2), num_idle=st.sampled_from([0, 0, 0, 5]))
    def late_step(self, data: st.DataObject, num_late: int, num_idle: int) -> None:
        """The runner is behind by some plans; or nothing can run, and copies wait for a plan."""
        for _ in range(num_idle):
            self.kv.begin_step()
        self.plan(data)
        self.sim.catch_up(num_late)

    def plan(self, data: st.DataObject) -> None:
        """One plan, as a scheduler makes it."""
        self.kv.begin_step()
        num_reads = self.sim.disk.num_reads
        served: set[int] = set()
        if data.draw(st.integers(0, 3)) == 3:
            self.serve_together(data, served)
        self.serve_running(data, served)
        self.admit(data)
        if self.sim.most_fetched is not None:
            assert self.sim.disk.num_reads - num_reads <= self.sim.most_fetched
        self.sim.plan()

    def next_end(self, seq: Seq, data: st.DataObject) -> int | None:
        """Up to where it computes in this step; None when its end is reached."""
        if not seq.todo:
            if len(seq.tokens) >= seq.limit:
                return None
            self.extend(seq, 1)
        if seq.todo == 1 or data.draw(st.booleans()):
            return len(seq.tokens)
        return seq.num_computed + data.draw(st.integers(1, seq.todo))

    def serve_together(self, data: st.DataObject, served: set[int]) -> None:
        """A beam group: all or none."""
        ends = {}
        for seq in self.running[: data.draw(st.integers(1, 4))]:
            end = self.next_end(seq, data)
            if end is not None:
                ends[seq.seq_id] = end
        order = data.draw(st.permutations(sorted(ends)))
        seqs = self.sim.seqs
        demands = [(i, ends[i], seqs[i].num_computed) for i in order]
        promised = self.kv.can_grow_all(demands)
        grown = [self.sim.grow(seqs[i], ends[i]) for i in order]
        assert all(grown) == promised, f"can_grow_all said {promised}, grow did {grown}"
        served.update(i for i, done in zip(order, grown, strict=True) if done)

    def serve_running(self, data: st.DataObject, served: set[int]) -> None:
        running = self.running
        skip = data.draw(st.integers(0, 3))
        if data.draw(st.booleans()):
            running.reverse()
        for number, seq in enumerate(running):
            if not seq.is_running or seq.seq_id in served or (skip and number % 3 == skip - 1):
                continue
            end = self.next_end(seq, data)
            while end is not None and not self.sim.grow(seq, end):
                victims = [s for s in self.running if s.seq_id not in served and s is not seq]
                if not victims:
                    self.check_alone(seq, end)
                    self.sim.preempt(seq, data.draw(st.booleans()))
                    break
                self.sim.preempt(victims[-1], data.draw(st.booleans()))
            if seq.is_running and end is not None:
                served.add(seq.seq_id)

    def check_alone(self, seq: Seq, end: int) -> None:
        """I5: a sequence that is alone has all that is not pinned."""
        if len(self.running) == 1:
            assert end > self.kv.max_tokens_of_one_sequence, "alone in the pool and yet no room"

    def admit(self, data: st.DataObject) -> None:
        for seq in self.waiting[: data.draw(st.integers(0, 4))]:
            keep_free = data.draw(st.integers(0, 2))
            if not self.start(seq, keep_free):
                continue
            whole = data.draw(st.booleans())
            end = len(seq.tokens) if whole else seq.num_computed + (seq.todo + 1) // 2
            assert self.sim.grow(seq, end), "admitted without room"
            assert self.kv.num_free_blocks >= keep_free, "the watermark was not kept"

    def start(self, seq: Seq, keep_free: int) -> bool:
        """Admit a sequence if it fits: everything it was promised is tried out."""
        kv, num_tokens = self.kv, len(seq.tokens)
        needed = -(-num_tokens // self.sim.bs)
        free = kv.num_free_blocks
        admitted = self.sim.can_admit(seq, keep_free)
        assert kv.num_free_blocks == free
        if not admitted:
            assert needed + keep_free > free, "refused, though it fits without any hit"
            if not self.running and not keep_free:
                assert num_tokens > kv.max_tokens_of_one_sequence, "an idle pool refuses"
            return False
        assert self.sim.can_admit(seq, keep_free), "asking changes the answer"
        is_first = all(s is seq or s.request_id != seq.request_id for s in self.sim.seqs.values())
        found = self.sim.start(seq)
        if not self.caching and is_first and not seq.was_preempted:
            assert found == 0, "the cache is off"
        if seq.max_hit_tokens is None:
            self.check_must_find(seq, found)
        if is_first and not seq.was_preempted:
            self.check_misses(seq, found, needed)
        seq.must_find = 0
        return True

    def check_misses(self, seq: Seq, found: int, num_blocks: int) -> None:
        """Blocks that had to be computed have one reason, in order; no others have one."""
        misses = self.kv.request_usage(seq.request_id).misses
        explained = [m.first_block + i for m in misses for i in range(m.num_blocks)]
        assert explained == sorted(set(explained))
        assert set(explained) <= set(range(found // self.sim.bs, num_blocks)), misses
        if self.caching and found == len(seq.tokens) - 1:
            assert not explained

    def check_must_find(self, seq: Seq, found: int) -> None:
        most = len(seq.tokens) - 1
        least = seq.must_find if seq.must_find <= most else most // self.sim.bs * self.sim.bs
        assert found >= least, f"{found} found of {seq.must_find} tokens that wait on the host"
        for salt, tokens, num_tokens in self.pins.values():
            if salt == seq.salt and self.caching and not self.was_reset:
                same = next(
                    (p for p in range(min(num_tokens, most)) if tokens[p] != seq.tokens[p]),
                    min(num_tokens, most),
                )
                assert found >= same // self.sim.bs * self.sim.bs, "a pinned prefix was missed"

    @precondition(lambda self: self.running and not self.is_calm)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """The runner dies in the middle: some copies are done, what it computed is nonsense."""
        sim = self.sim
        sim.catch_up()
        self.plan(data)
        plan = sim.under_way.pop()
        idle = [s for s in self.running if all(share.seq is not s for share in plan.shares)]
        if idle and data.draw(st.booleans()):
            sim.preempt(self.pick(data, idle), to_host=True)
        has_moved = any(not hasattr(copy, "kind") for copy in plan.copies)
        sim.copy(plan.copies[: data.draw(st.integers(0, len(plan.copies)))])
        for share in plan.shares:
            for position in range(share.start, share.end):
                block = share.table[position // sim.bs]
                sim.pool.setdefault(block, [-1] * sim.bs)[position % sim.bs] = -1
        lost = self.running if has_moved else [share.seq for share in plan.shares]
        reset_first = data.draw(st.booleans())
        if reset_first:
            sim.reset()
        for seq in lost:
            sim.end(seq)
        if not reset_first:
            sim.reset()
        self.was_reset = True
        for seq in sim.seqs.values():
            seq.must_find = 0
            seq.is_double = True
        self.sim.check_counts()

    # -- sequences branch and end

    @precondition(lambda self: self.running and len(self.sim.seqs) < MAX_LIVE)
    @rule(data=st.data(), times=st.integers(1, 3))
    def fork(self, data: st.DataObject, times: int) -> None:
        """Parallel samples."""
        parent = self.pick(data, self.running)
        for _ in range(times):
            self.branch(parent, data.draw(st.integers(0, 3)))

    def branch(self, parent: Seq, style: int) -> None:
        child = self.sim.fork(parent, self.fresh_id())
        child.style = style
        self.extend(child, 1)

    @precondition(lambda self: self.running and len(self.sim.seqs) < MAX_LIVE)
    @rule(data=st.data(), num_ended=st.integers(0, 2), takes_over=st.booleans())
    def beams(self, data: st.DataObject, num_ended: int, takes_over: bool) -> None:
        """Some end, and others branch, in one update; the last owner may be the parent."""
        for _ in range(min(num_ended, len(self.running) - 1)):
            self.sim.end(self.pick(data, self.running))
        parent = self.pick(data, self.running)
        self.branch(parent, data.draw(st.integers(0, 3)))
        if takes_over:
            self.sim.end(parent)

    @precondition(lambda self: len(self.sim.seqs) > 2 and not self.is_calm)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """At any moment: while it waits, is held on the host, runs, or a plan is under way."""
        self.sim.end(self.pick(data, list(self.sim.seqs.values())))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), to_host=st.booleans())
    def preempt(self, data: st.DataObject, to_host: bool) -> None:
        seq = self.pick(data, self.running)
        cost = self.kv.restore_cost(seq.seq_id)
        own = [self.kv.ref_count(block_id) == 1 for block_id in self.kv.block_table(seq.seq_id)]
        held = [min(self.sim.bs, seq.num_computed - i * self.sim.bs) for i in range(len(own))]
        mine = [num for num, is_own in zip(held, own, strict=True) if is_own and num > 0]
        assert (cost.num_tokens, cost.num_blocks) == (sum(mine), len(mine))
        self.sim.preempt(seq, to_host)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """What just ended is found: all whole blocks, as far as it is not the last token."""
        sim = self.sim
        seq = self.pick(data, self.running)
        tokens, is_exact = seq.tokens[: seq.num_computed], not seq.is_double
        salt = seq.salt
        sim.end(seq)
        if not tokens or not self.caching:
            return
        again = sim.add(self.fresh_id(), tokens, salt=salt, style=seq.style)
        again.limit = max(seq.limit, len(tokens))
        self.kv.begin_step()
        if self.start(again, 0):
            whole = (len(tokens) - 1) // sim.bs * sim.bs
            if is_exact and not sim.under_way:
                assert again.found >= whole, f"{again.found} found of {whole} left just now"
            assert sim.grow(again, len(tokens))
            sim.execute()

    # -- what people do

    @precondition(lambda self: not self.is_calm)
    @rule(
        data=st.data(),
        what=st.sampled_from(["pin", "unpin", "pin", "resize", "resize to", "reset"]),
    )
    def manage(self, data: st.DataObject, what: str) -> None:
        """Between steps."""
        if what == "pin":
            self.pin(data, data.draw(st.integers(1, 4)))
            if data.draw(st.booleans()):
                self.sim.resize(max(1, self.kv.num_blocks - 1))
        elif what == "unpin" and self.pins:
            self.unpin(data.draw(st.sampled_from(sorted(self.pins))))
        elif what == "resize":
            self.sim.resize(max(1, self.kv.num_blocks + data.draw(st.integers(-3, 2))))
        elif what == "resize to":  # and back: in a large pool the pressure is gone
            before = self.kv.num_blocks
            self.sim.resize(data.draw(self.pool_sizes))
            self.sim.execute()
            self.sim.resize(before)
        elif what == "reset":
            self.reset_prefix_cache()

    def pin(self, data: st.DataObject, num_blocks: int) -> None:
        if self.sim.seqs and data.draw(st.booleans()):
            seq = self.pick(data, list(self.sim.seqs.values()))
            tokens, salt = list(seq.tokens), seq.salt
        else:
            style = data.draw(st.integers(0, 3))
            tokens, salt = [pattern(style, p) for p in range(num_blocks * self.sim.bs)], ""
        before = sum(self.sim.pin_sizes.values())
        try:
            pin = self.kv.pin(tokens, salt)
        except CapacityError:
            most = before + len(tokens) // self.sim.bs
            assert 2 * most > self.kv.num_blocks, "a pin was refused that leaves half of the pool"
            return
        assert 2 * self.kv.max_tokens_of_one_sequence >= self.kv.num_slots
        assert pin.num_tokens == pin.num_blocks * self.sim.bs <= len(tokens)
        self.pins[pin.pin_id] = (salt, tokens, pin.num_tokens)
        self.sim.pin_sizes[pin.pin_id] = pin.num_blocks

    def unpin(self, pin_id: int) -> None:
        self.kv.unpin(pin_id)
        del self.pins[pin_id], self.sim.pin_sizes[pin_id]

    def reset_prefix_cache(self) -> None:
        free = self.kv.num_free_blocks
        self.kv.reset_prefix_cache()
        assert self.kv.num_free_blocks == free
        for seq in self.sim.seqs.values():
            seq.is_double = True  # its ancestors' blocks may be another's, which are dropped now

    # -- invariants

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "sim"):
            self.sim.check_counts()
            assert 2 * self.kv.num_pinned_blocks <= self.kv.num_blocks
            if self.max_disk_blocks and not self.sim.under_way and not self.sim.shares:
                assert len(self.sim.disk.files) <= self.sim.max_disk_blocks

    def teardown(self) -> None:
        if hasattr(self, "sim") and sys.exc_info()[0] is None:
            self.sim.catch_up()
            self.sim.drain()


class CacheOffMachine(PrefixMachine):
    """The same without a prefix cache: only relatives find each other's blocks."""

    caching = False


class DiskMachine(PrefixMachine):
    """A disk behind a small host tier: it loses writes and damages blocks, and outlives us."""

    max_host_blocks = 4
    max_disk_blocks = 12
    pool_sizes = st.integers(3, 12)

    @precondition(lambda self: self.sim.disk.files)
    @rule(data=st.data(), what=st.sampled_from(["lose", "damage", "remove"]))
    def trouble(self, data: st.DataObject, what: str) -> None:
        """The next writes are lost, or a file is."""
        disk = self.sim.disk
        disk_id = data.draw(st.sampled_from(sorted(disk.files)))
        if what == "lose":
            disk.num_to_drop += 1
        elif what == "damage":
            disk.damaged.add(disk_id)
        else:
            del disk.files[disk_id]

    @precondition(lambda self: self.sim.disk.files)
    @rule(flush=st.booleans(), data=st.data())
    def restart(self, flush: bool, data: st.DataObject) -> None:
        """Another process, with another pool, finds what the disk has."""
        sim = self.sim
        prompts = [(seq.tokens[: seq.num_computed], seq.salt) for seq in self.running]
        sim.catch_up()
        sim.drain()
        self.pins.clear()
        if flush:
            self.kv.flush_to_disk()
            sim.plan()
            sim.catch_up()
        sim.max_disk_blocks = data.draw(st.integers(1, self.max_disk_blocks))
        sim.most_fetched = data.draw(st.sampled_from([None, None, 1, 2]))
        sim.boot(data.draw(self.pool_sizes))
        assert len(sim.disk.files) <= sim.max_disk_blocks
        self.was_reset = False
        for tokens, salt in prompts:
            if 0 < len(tokens) <= self.kv.max_tokens_of_one_sequence:
                sim.add(self.fresh_id(), tokens, salt=salt)


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = SETTINGS
TestCacheOffMachine = CacheOffMachine.TestCase
TestCacheOffMachine.settings = settings(SETTINGS, max_examples=max(1, SETTINGS.max_examples // 2))
TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = SETTINGS
