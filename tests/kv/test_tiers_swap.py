"""Preempted sequences that wait on the host: what is moved, held, shared and found again."""

from __future__ import annotations

import pytest
from kv_sim import Sim

from octavo.kv import Preempted, RestoreCost
from octavo.kv.node import Node, block_key
from octavo.plan import BlockCopy, CopyKind

A, B, C, D = (list(range(i * 100, i * 100 + 60)) for i in range(1, 5))
TO_HOST, FROM_HOST = CopyKind.TO_HOST, CopyKind.FROM_HOST


@pytest.mark.parametrize("caching", [False, True])
def test_a_preempted_sequence_waits_on_the_host_and_comes_back_whole(caching: bool) -> None:
    sim = Sim(4, 4, caching=caching, num_host_blocks=6)
    victim = sim.add(0, A[:11])
    sim.run(victim)
    victim.tokens.append(7)
    assert sim.kv.restore_cost(0) == RestoreCost(11, 3)
    assert sim.preempt(victim, True) == Preempted(3, 11, 0)
    assert sim.kv._pool.copies == [BlockCopy(b, b, TO_HOST) for b in range(3)]
    assert sim.host_terms() == (3, 0, 3)
    assert sim.kv.num_free_blocks == 4
    sim.execute()
    sim.finish(1, B[:16])  # takes every block of the pool
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
    assert sim.host_terms()[1] == (6 if caching else 0)


def test_blocks_that_were_moved_go_first_and_are_found_as_long_as_they_are_there() -> None:
    sim = Sim(5, 4, num_host_blocks=6)
    sim.finish(9, D[:4])
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
    assert sim.preempt(child, True) == Preempted(2, 8, 0)
    assert sim.host_terms() == (2, 0, 4)
    sim.execute()
    # The parent ends, and its block is evicted: the child still waits for it, so it moves too.
    sim.end(parent)
    sim.finish(2, C[:32])
    assert sim.run(child) == 11
    sim.drain()


def test_a_shared_tail_is_held_while_its_other_owner_writes_on() -> None:
    sim = Sim(8, 4, num_host_blocks=6)
    parent = sim.add(0, A[:6])
    sim.run(parent)
    child = sim.fork(parent, 1, B[:1])
    assert sim.kv.restore_cost(1) == RestoreCost(0, 0)
    assert sim.preempt(child, True) == Preempted(0, 0, 0)
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
    assert sim.preempt(victim, True) == Preempted(3, moved, 12 - moved)
    assert sim.kv.host_room() == 0
    sim.execute()
    sim.finish(1, B[:16])
    assert sim.run(victim) == moved
    sim.drain()


def test_what_is_back_in_the_pool_is_the_first_to_leave_the_host() -> None:
    sim = Sim(4, 4, num_host_blocks=8)
    victim = sim.add(0, A[:12])
    sim.run(victim)
    sim.preempt(victim, True)
    sim.execute()
    sim.finish(1, B[:16])
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
        sim.finish(seq_id, [seq_id] * 12)
    assert sim.host_terms() == (2, 1, 0)
    victim.tokens.append(5)
    assert sim.run(victim) == 8
    sim.drain()


def test_recompute_leaves_the_blocks_to_the_cache() -> None:
    sim = Sim(4, 4, num_host_blocks=4)
    victim = sim.add(0, A[:10])
    sim.run(victim)
    assert sim.preempt(victim, False) == Preempted(3, 0, 10)
    assert sim.host_terms() == (0, 0, 4)
    assert sim.kv.ledger().cached == 12
    assert sim.run(victim) == 9
    sim.drain()


def test_blocks_that_a_group_shared_are_moved_and_counted_with_its_last() -> None:
    sim = Sim(8, 4, num_host_blocks=6)
    parent = sim.add(0, A[:10])
    sim.run(parent)
    child = sim.fork(parent, 1)
    moved = [sim.preempt(seq, True) for seq in (parent, child)]
    assert moved == [Preempted(0, 0, 0), Preempted(3, 10, 0)]
    assert [copy.kind for copy in sim.kv._pool.copies] == [TO_HOST] * 3
    assert sim.kv.cache_stats().swapped_out == 3
    sim.execute()
    sim.finish(2, B[:32])
    for seq in (parent, child):
        seq.tokens.append(7)
        assert sim.run(seq) == 10
    # Nothing new but two tails: what is on the host already is not moved again.
    again = [sim.preempt(seq, True) for seq in (parent, child)]
    assert sum(one.tokens_moved for one in again) == 3
    assert sum(one.tokens_lost for one in again) == 0
    sim.execute()
    sim.drain()


def test_what_the_tree_has_forgotten_is_lost_and_not_held() -> None:
    sim = Sim(8, 4, num_host_blocks=6)
    seq = sim.add(0, A[:4])
    sim.run(seq)
    sim.reset()
    table = sim.kv._tables[0]
    table.last_node, table.num_registered = Node(None, block_key(A, 0, 4)), 1
    assert sim.preempt(seq, True) == Preempted(1, 0, 4)
    assert sim.kv._holds.nodes[0] == []
    sim.drain()


@pytest.mark.parametrize("to_host", [False, True])
def test_the_tail_of_a_preempted_sequence_is_found_in_the_same_step(to_host: bool) -> None:
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
