"""Host and disk behind the pool: swap, offload, promotion, holds, restart, in exact copies."""

from __future__ import annotations

import pytest
from kv_content import Sim

from octavo.errors import ConfigError
from octavo.kv import KVCacheManager, Preempted, RestoreCost
from octavo.kv import cold as cold_module
from octavo.kv.cold import block_digest, root_digest
from octavo.kv.node import Node, block_key
from octavo.kv.tiers import HostTier
from octavo.plan import PLANS_UNDER_WAY, BlockCopy, CopyKind

A, B, C, D = (list(range(i * 100, i * 100 + 60)) for i in range(1, 5))
WITHIN, TO_HOST, FROM_HOST = CopyKind.WITHIN, CopyKind.TO_HOST, CopyKind.FROM_HOST
TO_DISK, FROM_DISK = CopyKind.TO_DISK, CopyKind.FROM_DISK


def ran(sim: Sim, seq_id: int, tokens: list[int], **more: object) -> int:
    """Run a prompt to its end; what was found."""
    seq = sim.add(seq_id, tokens, **more)
    found = sim.run(seq)
    sim.end(seq)
    return found


def terms(sim: Sim) -> tuple[int, int, int]:
    """Host blocks: held, cached, free."""
    ledger = sim.kv.host_ledger()
    return ledger.held, ledger.cached, ledger.free


# -- swap


@pytest.mark.parametrize("caching", [False, True])
def test_a_preempted_sequence_waits_on_the_host_and_comes_back_whole(caching: bool) -> None:
    sim = Sim(4, 4, caching=caching, num_host_blocks=6)
    victim = sim.add(0, A[:11])
    sim.run(victim)
    victim.tokens.append(7)
    assert sim.kv.restore_cost(0) == RestoreCost(11, 3)
    assert sim.kv.preempt(0, True) == Preempted(3, 11, 0)
    victim.is_running, victim.was_preempted = False, True
    assert sim.kv._pool.copies == [BlockCopy(b, b, TO_HOST) for b in range(3)]
    assert terms(sim) == (3, 0, 3)
    assert sim.kv.num_free_blocks == 4
    sim.execute()
    ran(sim, 1, B[:16])  # takes every block of the pool
    sim.kv.begin_step()
    assert sim.start(victim) == 11
    copies = [copy for copy in sim.kv._pool.copies if copy.kind is FROM_HOST]
    assert [copy.src for copy in copies] == [0, 1, 2]
    assert sim.grow(victim, 12)
    sim.execute()
    assert sim.kv.host_ledger().held == 0
    stats = sim.kv.cache_stats()
    assert (stats.swapped_out, stats.promotions_from_host, stats.resumed_tokens) == (3, 3, 11)
    sim.drain()
    assert terms(sim)[1] == (6 if caching else 0)


def test_blocks_that_were_moved_go_first_and_are_found_as_long_as_they_are_there() -> None:
    sim = Sim(5, 4, num_host_blocks=6)
    ran(sim, 9, D[:4])
    victim = sim.add(0, A[:8])
    sim.run(victim)
    sim.preempt(victim, True)
    order = sim.kv._pool.free_block_ids()
    table = order[:2]
    assert sim.run(victim) == 7  # nothing had to be copied back but the last block, to be written
    assert sim.kv.cache_stats().promotions_from_host == 0
    sim.preempt(victim, True)
    other = sim.add(1, B[:4])
    sim.run(other)
    assert sim.kv.block_table(1)[0] in table or sim.kv.cache_stats().evictions == 0
    sim.drain()


def test_only_what_nobody_else_has_is_moved() -> None:
    sim = Sim(8, 4, num_host_blocks=6)
    parent = sim.add(0, A[:6])
    sim.run(parent)
    child = sim.fork(parent, 1, B[:6])
    sim.run(child)  # it copied the tail, and has two blocks of its own
    assert sim.kv.restore_cost(1) == RestoreCost(8, 2)
    assert sim.kv.restore_cost(0) == RestoreCost(2, 1)
    assert sim.kv.preempt(1, True) == Preempted(2, 8, 0)
    child.is_running, child.was_preempted = False, True
    assert terms(sim) == (2, 0, 4)
    sim.execute()
    # The parent ends, and its block is evicted: the child still waits for it, so it moves too.
    sim.end(parent)
    ran(sim, 2, C[:32])
    assert sim.run(child) == 11
    sim.drain()


def test_a_shared_tail_is_held_while_its_other_owner_writes_on() -> None:
    sim = Sim(8, 4, num_host_blocks=6)
    parent = sim.add(0, A[:6])
    sim.run(parent)
    child = sim.fork(parent, 1, B[:1])
    assert sim.kv.restore_cost(1) == RestoreCost(0, 0)
    assert sim.kv.preempt(1, True) == Preempted(0, 0, 0)
    child.is_running, child.was_preempted = False, True
    parent.tokens += C[:5]
    sim.run(parent)
    sim.kv.check_integrity()
    assert sim.run(child) == 6
    sim.drain()


@pytest.mark.parametrize("num_host_blocks", [0, 1, 2])
def test_without_enough_room_the_first_blocks_are_moved(num_host_blocks: int) -> None:
    sim = Sim(4, 4, num_host_blocks=num_host_blocks)
    victim = sim.add(0, A[:12])
    sim.run(victim)
    assert sim.kv.host_room() == num_host_blocks
    moved = 4 * num_host_blocks
    assert sim.kv.preempt(0, True) == Preempted(3, moved, 12 - moved)
    victim.is_running, victim.was_preempted = False, True
    assert sim.kv.host_room() == 0
    sim.execute()
    ran(sim, 1, B[:16])
    assert sim.run(victim) == moved
    sim.drain()


def test_what_is_back_in_the_pool_is_the_first_to_leave_the_host() -> None:
    sim = Sim(4, 4, num_host_blocks=8)
    victim = sim.add(0, A[:12])
    sim.run(victim)
    sim.preempt(victim, True)
    sim.execute()
    ran(sim, 1, B[:16])
    victim.tokens.append(5)
    assert sim.run(victim) == 12
    host = sim.kv._cache.host
    twice = [node.host_id for node in host.cached() if node.block_id >= 0]
    assert len(twice) == 3
    assert [node.host_id for node in host.cached()][:3] == twice
    sim.drain()


def test_holds_are_not_evicted_by_offloads() -> None:
    sim = Sim(3, 4, num_host_blocks=3)
    victim = sim.add(0, A[:8])
    sim.run(victim)
    sim.preempt(victim, True)
    for seq_id in range(1, 6):
        ran(sim, seq_id, [seq_id] * 12)
    assert terms(sim) == (2, 1, 0)
    victim.tokens.append(5)
    assert sim.run(victim) == 8
    sim.drain()


def test_recompute_leaves_the_blocks_to_the_cache() -> None:
    sim = Sim(4, 4, num_host_blocks=4)
    victim = sim.add(0, A[:10])
    sim.run(victim)
    assert sim.kv.preempt(0, False) == Preempted(3, 0, 10)
    victim.is_running, victim.was_preempted = False, True
    assert terms(sim) == (0, 0, 4)
    assert sim.kv.ledger().cached == 12
    assert sim.run(victim) == 9
    sim.drain()


def test_blocks_that_a_group_shared_are_moved_and_counted_with_its_last() -> None:
    sim = Sim(8, 4, num_host_blocks=6)
    parent = sim.add(0, A[:10])
    sim.run(parent)
    child = sim.fork(parent, 1)
    moved = []
    for seq in (parent, child):
        moved.append(sim.kv.preempt(seq.seq_id, True))
        seq.is_running, seq.was_preempted = False, True
    assert moved == [Preempted(0, 0, 0), Preempted(3, 10, 0)]
    assert [copy.kind for copy in sim.kv._pool.copies] == [TO_HOST] * 3
    assert sim.kv.cache_stats().swapped_out == 3
    sim.execute()
    ran(sim, 2, B[:32])
    for seq in (parent, child):
        seq.tokens.append(7)
        assert sim.run(seq) == 10
    # Nothing new but two tails: what is on the host already is not moved again.
    again = [sim.kv.preempt(seq.seq_id, True) for seq in (parent, child)]
    assert sum(one.tokens_moved for one in again) == 3
    assert sum(one.tokens_lost for one in again) == 0
    for seq in (parent, child):
        seq.is_running = False
    sim.execute()
    sim.drain()


def test_what_the_tree_has_forgotten_is_lost_and_not_held() -> None:
    sim = Sim(8, 4, num_host_blocks=6)
    seq = sim.add(0, A[:4])
    sim.run(seq)
    sim.reset()
    table = sim.kv._tables[0]
    table.last_node, table.num_registered = Node(None, block_key(A, 0, 4)), 1
    assert sim.kv.preempt(0, True) == Preempted(1, 0, 4)
    assert sim.kv._holds.nodes[0] == []
    seq.is_running, seq.was_preempted = False, True
    sim.drain()


def test_the_tail_of_a_preempted_sequence_is_found_in_the_same_step() -> None:
    for to_host in (False, True):
        sim = Sim(8, 4, num_host_blocks=6)
        victim = sim.add(0, A[:7])
        sim.run(victim)
        sim.kv.begin_step()
        sim.preempt(victim, to_host)
        other = sim.add(1, A[:9])
        assert sim.start(other) == 7
        assert sim.grow(other, 9)
        sim.execute()
        sim.drain()


# -- offload


def test_an_evicted_block_moves_to_the_host_and_back_when_it_is_found() -> None:
    sim = Sim(2, 4, num_host_blocks=3)
    ran(sim, 0, A[:8])
    sim.kv.begin_step()
    seq = sim.add(1, B[:8])
    sim.start(seq)
    assert sim.grow(seq, 8)
    assert sim.kv._pool.copies == [BlockCopy(1, 0, TO_HOST), BlockCopy(0, 1, TO_HOST)]
    sim.execute()
    sim.end(seq)
    assert terms(sim) == (0, 2, 1)
    sim.kv.begin_step()
    again = sim.add(2, [*A[:4], 1])
    assert sim.start(again) == 4
    # The tail of B goes out for the head of A, which keeps its host block.
    assert sim.kv._pool.copies == [BlockCopy(0, 2, TO_HOST), BlockCopy(1, 0, FROM_HOST)]
    assert sim.grow(again, 5)
    # Its host copy was the first to go for B's other block.
    assert sim.kv._pool.copies[2:] == [BlockCopy(1, 1, TO_HOST)]
    sim.execute()
    stats = sim.kv.cache_stats()
    assert (stats.evictions, stats.offloads_to_host, stats.promotions_from_host) == (4, 4, 1)
    sim.drain()


def test_a_block_that_is_on_the_host_too_is_evicted_without_a_copy() -> None:
    sim = Sim(2, 4, num_host_blocks=8)
    for seq_id, tokens in enumerate((A, B, A, B, A, B)):
        ran(sim, seq_id, tokens[:8])
    stats = sim.kv.cache_stats()
    assert stats.evictions > 6
    assert stats.offloads_to_host <= 6
    sim.drain()


def test_a_beginning_comes_from_the_host_into_a_block_of_its_own() -> None:
    sim = Sim(2, 4, num_host_blocks=4)
    ran(sim, 0, A[:8])
    ran(sim, 1, B[:8])
    seq = sim.add(2, [*A[:2], 1, 2, 3])
    assert sim.run(seq) == 2
    assert terms(sim)[1] == 4
    sim.end(seq)
    assert ran(sim, 3, A[:4]) == 3
    sim.drain()


def test_the_host_tier_forgets_the_least_recently_used() -> None:
    host = HostTier(2)
    first, second, third = (Node(None, b"") for _ in range(3))
    assert (host.put(first), host.put(second)) == (0, 1)
    assert host.oldest() is first
    host.touch(first)
    assert host.oldest() is second
    host.touch(first, last=False)
    assert host.oldest() is first
    host.hold(first)
    host.hold(second)
    assert (host.oldest(), host.room) == (None, 0)
    host.unhold(first)
    assert (host.oldest(), host.room) == (first, 1)
    host.remove(first)
    assert host.put(third) == 0
    host.check_integrity()


# -- disk


def test_what_the_host_has_no_room_for_moves_to_disk_with_its_label() -> None:
    sim = Sim(2, 4, num_host_blocks=1, max_disk_blocks=8)
    ran(sim, 0, A[:8])
    seq = sim.add(1, B[:8])
    sim.kv.begin_step()
    sim.start(seq)
    assert sim.grow(seq, 8)
    out, to_disk, again = sim.kv._pool.copies
    assert (out, again) == (BlockCopy(1, 0, TO_HOST), BlockCopy(0, 0, TO_HOST))
    assert (to_disk.src, to_disk.dst, to_disk.kind) == (0, 0, TO_DISK)
    assert to_disk.label is not None
    assert to_disk.label.token_ids == tuple(A[4:8])
    sim.execute()
    assert list(sim.disk.files) == [0]
    ledger = sim.kv.disk_ledger()
    assert (ledger.cached, ledger.free, ledger.num_blocks) == (1, 7, 8)
    assert "8 blocks" in str(ledger)
    sim.drain()


@pytest.mark.parametrize(("num_void", "num_left"), [(1, 1), (2, 0)])
def test_of_void_plans_nothing_is_kept_on_disk(num_void: int, num_left: int) -> None:
    """Two plans write to it: one block, then two. The last, or both, come to nothing."""
    sim = Sim(2, 4, num_host_blocks=1, max_disk_blocks=8)
    for seq_id, tokens in enumerate((A, B, C)):
        ran(sim, seq_id, tokens[:8])
    assert sim.kv.disk_ledger().cached == len(sim.disk.files) == 3
    sim.kv.reset_cache(num_void)
    assert sim.kv.disk_ledger().cached == len(sim.disk.files) == num_left


def wait(sim: Sim) -> None:
    """Until what is on its way to disk has arrived."""
    for _ in range(PLANS_UNDER_WAY):
        sim.execute()


def test_blocks_come_back_from_disk() -> None:
    sim = Sim(2, 4, num_host_blocks=1, max_disk_blocks=8)
    ran(sim, 0, A[:8])
    ran(sim, 1, B[:8])
    ran(sim, 2, C[:8])
    assert len(sim.disk.files) == 3
    wait(sim)
    seq = sim.add(4, [*A[:4], 1])
    sim.kv.begin_step()
    assert sim.start(seq) == 4
    assert [copy.kind for copy in sim.kv._pool.copies][-1] is FROM_DISK
    assert sim.grow(seq, 5)
    sim.execute()
    assert sim.kv.cache_stats().promotions_from_disk == 1
    sim.drain()


def test_a_block_that_may_not_have_arrived_on_the_disk_is_not_asked_for() -> None:
    sim = Sim(2, 4, num_host_blocks=1, max_disk_blocks=8)
    ran(sim, 0, A[:8])
    ran(sim, 1, B[:8])
    ran(sim, 2, C[:8])
    assert ran(sim, 3, [*A[:4], 1]) == 0
    sim.drain()


def test_a_damaged_block_is_a_miss_and_is_forgotten() -> None:
    sim = Sim(2, 4, num_host_blocks=1, max_disk_blocks=8)
    for seq_id, tokens in enumerate((A, B, C)):
        ran(sim, seq_id, tokens[:8])
    wait(sim)
    (head,) = (i for i, (label, _) in sim.disk.files.items() if label.token_ids == tuple(A[:4]))
    sim.disk.damaged.update(sim.disk.files)
    assert ran(sim, 3, [*A[:4], 1]) == 0
    assert head not in sim.disk.files
    assert len(sim.disk.files) == sim.kv.disk_ledger().cached
    sim.drain()


def test_the_disk_is_bounded_and_forgets_the_oldest() -> None:
    sim = Sim(2, 4, num_host_blocks=1, max_disk_blocks=3)
    for number in range(20):
        wait(sim)
        ran(sim, number, [number] * 8)
        assert len(sim.disk.files) <= 3
    assert min(sim.disk.files) > 20
    sim.drain()


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_a_restart_finds_what_was_flushed(salt: str) -> None:
    sim = Sim(8, 4, num_host_blocks=2, max_disk_blocks=20)
    ran(sim, 0, A[:16], salt=salt)
    ran(sim, 1, [*A[:8], *B[:10]], salt=salt)
    assert sim.kv.flush_to_disk() == 6  # whole blocks only
    sim.execute()
    assert sim.kv.flush_to_disk() == 0
    sim.boot(8)
    assert sim.kv.disk_ledger().cached == 6
    assert ran(sim, 2, A[:16]) == (15 if salt == "" else 0)
    assert ran(sim, 3, [*A[:8], *B[:9]], salt=salt) == 16
    sim.drain()


def test_flush_keeps_the_most_recently_used() -> None:
    sim = Sim(8, 4, num_host_blocks=1, max_disk_blocks=4)
    ran(sim, 0, A[:16])
    ran(sim, 1, B[:16])
    assert sim.kv.flush_to_disk() == 4
    sim.execute()
    sim.boot(8)
    assert ran(sim, 2, B[:16]) == 15
    assert ran(sim, 3, A[:16]) == 0
    sim.drain()


def test_a_restart_with_less_room_forgets_the_oldest() -> None:
    sim = Sim(8, 4, num_host_blocks=1, max_disk_blocks=8)
    ran(sim, 0, A[:16])
    sim.kv.flush_to_disk()
    sim.execute()
    sim.max_disk_blocks = 3
    sim.boot(8)
    assert len(sim.disk.files) == 3
    sim.kv.check_integrity()


def test_orphans_are_found_when_their_parent_is_computed_again() -> None:
    sim = Sim(8, 4, num_host_blocks=1, max_disk_blocks=8)
    ran(sim, 0, A[:16])
    sim.kv.flush_to_disk()
    sim.execute()
    first = next(i for i, (label, _) in sim.disk.files.items() if label.token_ids == tuple(A[:4]))
    sim.disk.delete(first)
    sim.boot(8)
    assert ran(sim, 1, A[:4]) == 0
    assert ran(sim, 2, A[:16]) == 15
    sim.drain()


def left_on_disk(num_prompts: int, num_blocks: int, **more: object) -> Sim:
    """A new process over a disk with prompts that begin differently, and agree from then on."""
    most = num_prompts * num_blocks
    sim = Sim(most + 1, 4, num_host_blocks=2, max_disk_blocks=most)
    for number in range(num_prompts):
        ran(sim, number, [number, *A[: 4 * num_blocks - 1]], **more)
    assert sim.kv.flush_to_disk() == most
    sim.execute()
    sim.boot(most + 1)
    return sim


def test_only_what_is_looked_for_enters_the_tree() -> None:
    sim = left_on_disk(10, 5)
    tree, disk = sim.kv._cache.tree, sim.kv._cache.cold.disk
    assert not tree.roots and len(disk) == 50
    seq = sim.add(99, [3, *A[:12], 1])
    assert sim.can_admit(seq)
    assert sim.kv.can_admit(seq.demand(), keep_free=50) is False
    assert not tree.roots, "a question changed something"
    assert sim.run(seq) == 12
    assert len(list(tree.walk())) == 3  # no other prompt, and not what follows
    assert sum(len(siblings) for siblings in disk.orphans.values()) == 50 - 3
    # A beginning is found too, if it is at least half of a block.
    assert sim.run(sim.add(98, [4, A[0], A[1], 7, 7])) == 3
    assert sim.run(sim.add(97, [5, 7, 7, 7, 7])) == 0
    assert ran(sim, 96, [50, *A[:6]]) == 0
    sim.drain()


def test_a_root_is_not_made_for_what_is_not_on_disk() -> None:
    sim = left_on_disk(2, 2)
    seq = sim.add(99, B[:9])
    sim.kv.begin_step()
    assert sim.start(seq) == 0
    assert not sim.kv._cache.tree.roots
    sim.end(seq)
    sim.drain()


def test_a_block_that_an_earlier_process_left_is_not_written_again() -> None:
    sim = left_on_disk(1, 3)
    cold = sim.kv._cache.cold
    # Registered without being looked for: it must not be a second file.
    seq = sim.add(99, [0, *A[:11]], max_hit_tokens=0)
    sim.run(seq)
    sim.end(seq)
    assert len(cold.disk.orphans) == 3
    assert sim.kv.flush_to_disk() == 0
    assert not cold.disk.orphans and len(sim.disk.files) == 3
    sim.drain()


def test_a_step_reads_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_module, "MAX_FETCH_BYTES", 2 * 4)  # a token is a byte here
    sim = left_on_disk(3, 5)
    first, second = (sim.add(i, [i, *A[:19]]) for i in (0, 1))
    sim.kv.begin_step()
    assert sim.start(first) == 8
    assert sim.disk.num_reads == 2
    assert sim.start(second) == 0
    assert sim.disk.num_reads == 2
    assert sim.grow(first, 20) and sim.grow(second, 20)
    sim.execute()
    assert sim.run(sim.add(2, [2, *A[:19]])) == 8  # another step
    assert sim.disk.num_reads == 4
    misses = sim.kv.request_usage("r2").misses
    assert [(miss.first_block, miss.num_blocks) for miss in misses] == [(2, 3)]
    sim.drain()


def test_damaged_blocks_count_as_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_module, "MAX_FETCH_BYTES", 1)  # one block at least
    sim = left_on_disk(3, 5)
    sim.disk.damaged.update(sim.disk.files)
    sim.kv.begin_step()
    for number in range(3):
        assert sim.start(sim.add(number, [number, *A[:19]])) == 0
    assert sim.disk.num_reads == 1
    assert sim.kv.check_integrity() is None


def test_no_salt_has_the_digest_of_a_block() -> None:
    """A salt whose bytes are what a block's digest is made of."""
    root = root_digest("")
    for number in range(100_000):
        tokens = [number, 1, 2, 3]
        parent, key = block_digest(root, block_key(tokens, 0, 4)), block_key(A, 0, 4)
        try:
            salt = (parent + key).decode()
        except UnicodeDecodeError:
            continue
        break
    else:
        raise AssertionError("no digest is UTF-8")
    assert root_digest(salt) != block_digest(parent, key)
    sim = Sim(8, 4, num_host_blocks=2, max_disk_blocks=8)
    ran(sim, 0, [*tokens, *A[:4], *B[:4]])
    assert sim.kv.flush_to_disk() == 3
    sim.execute()
    sim.boot(8)
    assert ran(sim, 1, B[:5], salt=salt) == 0
    assert ran(sim, 2, [*tokens, *A[:4], *B[:4]]) == 11
    sim.drain()


def test_a_salt_that_is_no_text_has_a_digest() -> None:
    assert root_digest("\ud800") != root_digest("\udfff")


def test_resetting_the_cache_empties_all_tiers_but_what_waits() -> None:
    sim = Sim(2, 4, num_host_blocks=3, max_disk_blocks=8)
    for seq_id, tokens in enumerate((A, B, C, D)):
        ran(sim, seq_id, tokens[:8])
    victim = sim.add(9, A[20:28])
    sim.run(victim)
    sim.preempt(victim, True)
    sim.execute()
    sim.kv.reset_prefix_cache()
    assert terms(sim) == (2, 0, 1)
    assert sim.disk.files == {}
    assert sim.kv.ledger().cached == 0
    assert sim.run(victim) == 7
    sim.drain()


def test_a_failed_step_empties_the_host_with_its_holds_and_keeps_the_disk() -> None:
    sim = Sim(2, 4, num_host_blocks=3, max_disk_blocks=8)
    for seq_id, tokens in enumerate((A, B, C)):
        ran(sim, seq_id, tokens[:8])
    victim = sim.add(9, D[:8])
    sim.run(victim)
    sim.preempt(victim, True)
    sim.execute()
    wait(sim)
    num_files = len(sim.disk.files)
    assert num_files
    sim.reset()
    assert terms(sim) == (0, 0, 3)
    assert len(sim.disk.files) == num_files
    sim.check_counts()
    assert sim.run(victim) == 0
    sim.drain()


def test_tiers_that_cannot_be_used_are_refused() -> None:
    sim = Sim(2, 4)
    for more in ({"num_host_blocks": 0}, {"enable_prefix_caching": False}):
        options = {"enable_prefix_caching": True, "num_host_blocks": 2, **more}
        with pytest.raises(ConfigError, match="--swap-space"):
            KVCacheManager(2, 4, disk=sim.disk, max_disk_blocks=1, **options)
    with pytest.raises(ConfigError, match="num_host_blocks=-1"):
        KVCacheManager(2, 4, num_host_blocks=-1)


def test_beams_that_go_together_cost_what_they_share_once() -> None:
    sim = Sim(20, 4)
    parent = sim.add(0, A[:10])
    sim.run(parent)
    children = [sim.fork(parent, 1), sim.fork(parent, 2)]
    assert sim.kv.restore_cost(0) == RestoreCost(0, 0)
    assert sim.kv.restore_cost(0, 1) == RestoreCost(0, 0)
    assert sim.kv.restore_cost(0, 1, 2) == RestoreCost(10, 3)
    for seq in (parent, *children):
        sim.end(seq)
    sim.drain()
