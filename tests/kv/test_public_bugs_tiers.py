"""Bugs that other engines had with preemption, swap and ids that come again, each with the right
answer.

The memories are simulated (`kv_sim`): `Sim.execute` fails when a slot that a sequence has holds
anything but its own prefix, so every test checks contents beside the numbers it names.
"""

from __future__ import annotations

import pytest
from kv_sim import Sim

from octavo.errors import IntegrityError
from octavo.plan import CopyKind

A, B, C = [1] * 40, [2] * 40, [3] * 40


# -- preemption while a prefix is shared


@pytest.mark.parametrize("to_host", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_a_victim_takes_nothing_from_those_it_shares_with(to_host: bool, caching: bool) -> None:
    sim = Sim(8, 4, caching=caching, num_host_blocks=4)
    victim = sim.add(0, A[:10])
    sim.run(victim)
    child = sim.fork(victim, 1, B[:1])
    sim.run(child)
    victim.tokens += C[:3]
    sim.run(victim)
    sim.preempt(victim, to_host)
    assert [sim.kv.ref_count(block_id) for block_id in sim.kv.block_table(1)] == [1, 1, 1]
    child.tokens += B[:9]
    sim.run(child)
    sim.run(victim)
    if to_host:
        assert victim.found == 12  # eight are shared with the child, four were on the host
    sim.check_counts()
    sim.drain()


def test_the_shared_prefix_outlives_the_victim_and_is_shared_again() -> None:
    sim = Sim(8, 4, num_host_blocks=4)
    victim, other = sim.add(0, A[:9]), sim.add(1, A[:9])
    sim.run(victim)
    sim.run(other)
    sim.preempt(victim, True)
    assert sim.run(victim) == 8
    assert list(sim.kv.block_table(0))[:2] == list(sim.kv.block_table(1))[:2]
    sim.drain()


# -- abort during a swap


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_abort_of_a_sequence_on_the_host(planned: bool, caching: bool) -> None:
    """Before or after the copies out have run: its room is free again, and nobody is hurt."""
    sim = Sim(4, 4, caching=caching, num_host_blocks=3)
    victim, other = sim.add(0, A[:8]), sim.add(1, B[:8])
    sim.run(victim)
    sim.run(other)
    sim.preempt(victim, True)
    assert sim.kv.host_room() == 1
    if planned:
        sim.execute()
    sim.end(victim)
    assert sim.kv.host_room() == 3
    other.tokens += B[:8]
    sim.run(other)
    sim.preempt(other, True)
    assert sim.run(other) >= sim.caching * 12
    sim.drain()


def test_abort_of_a_sequence_on_its_way_back() -> None:
    """The copies in are in the list, and their targets are free again: nothing is served wrong."""
    sim = Sim(4, 4, num_host_blocks=4)
    victim = sim.add(0, A[:12])
    sim.run(victim)
    sim.preempt(victim, True)
    sim.finish(1, B[:16])
    sim.kv.begin_step()
    assert sim.start(victim) == 11
    sim.end(victim)
    assert sim.kv.host_room() == 4
    other = sim.add(2, C[:16])
    sim.start(other)
    assert sim.grow(other, 16)
    sim.execute()
    sim.end(other)
    sim.finish(3, A[:12])
    sim.drain()


def test_dropping_a_hold_twice_or_without_one_is_harmless() -> None:
    sim = Sim(4, 4, num_host_blocks=4)
    victim = sim.add(0, A[:8])
    sim.run(victim)
    sim.preempt(victim, True)
    sim.kv.drop_hold(0)
    sim.kv.drop_hold(0)
    sim.kv.drop_hold(77)
    assert sim.kv.host_room() == 4
    sim.end(victim)
    sim.drain()


# -- the same request id again


@pytest.mark.parametrize("caching", [False, True])
def test_the_same_sequence_twice_is_refused(caching: bool) -> None:
    sim = Sim(6, 4, caching=caching)
    seq = sim.add(0, A[:6], request_id="r")
    sim.run(seq)
    with pytest.raises(IntegrityError, match="sequence 0 has a block table already"):
        sim.kv.start(0, seq.demand(), "r")
    with pytest.raises(IntegrityError, match="request 'r' still has"):
        sim.kv.close_request("r")
    sim.check_counts()
    sim.drain()


@pytest.mark.parametrize("caching", [False, True])
def test_the_same_request_id_right_after_its_abort(caching: bool) -> None:
    """In the step after, with other tokens and another salt, though its memory is still warm."""
    sim = Sim(8, 4, caching=caching, num_host_blocks=4)
    sim.finish(0, A[:8], request_id="r")
    assert sim.kv.request_usage("r").peak_blocks == 0
    assert sim.finish(1, A[:8], request_id="r", salt="tenant") == 0
    assert sim.finish(2, B[:8], request_id="r") == 0
    assert sim.finish(3, A[:8], request_id="r") == (7 if caching else 0)
    sim.drain()


@pytest.mark.parametrize("caching", [False, True])
def test_the_same_request_id_right_after_its_abort_on_the_host(caching: bool) -> None:
    sim = Sim(4, 4, caching=caching, num_host_blocks=4)
    victim = sim.add(0, A[:8], request_id="r")
    sim.run(victim)
    sim.preempt(victim, True)
    sim.end(victim)
    assert sim.finish(1, A[:8], request_id="r", salt="tenant") == 0
    assert sim.kv.host_room() == 4
    assert sim.finish(2, A[:8], request_id="r") == (7 if caching else 0)
    sim.drain()


# -- a block is promoted while what makes room for it is demoted


@pytest.mark.parametrize("num_host_blocks", [1, 2, 3])
def test_promotion_and_demotion_through_the_same_host_blocks(num_host_blocks: int) -> None:
    """Each prompt fills the pool; what it evicts takes the host blocks that it needs itself."""
    sim = Sim(3, 4, num_host_blocks=num_host_blocks)
    for seq_id in range(8):
        sim.finish(seq_id, (A if seq_id % 2 else B)[:12])
    sim.drain()


@pytest.mark.parametrize("max_disk_blocks", [1, 2, 6])
def test_promotion_and_demotion_through_host_and_disk(max_disk_blocks: int) -> None:
    sim = Sim(3, 4, num_host_blocks=1, max_disk_blocks=max_disk_blocks)
    for seq_id in range(12):
        sim.finish(seq_id, (A, B, C)[seq_id % 3][:12])
        assert len(sim.disk.files) <= max_disk_blocks
    sim.drain()


def test_a_disk_that_fails_is_a_miss() -> None:
    sim = Sim(3, 4, num_host_blocks=1, max_disk_blocks=8)
    sim.finish(0, A[:12])
    sim.finish(1, B[:12])
    assert sim.disk.files
    sim.disk.damaged.update(sim.disk.files)
    assert sim.finish(2, A[:12]) < 12
    sim.finish(3, B[:12])
    sim.finish(4, A[:12])
    assert len(sim.disk.files) <= 8
    sim.drain()


def test_a_block_on_its_way_to_disk_is_not_given_up_while_nothing_is_planned() -> None:
    """Steps that yield no plan leave copies in the list, for a plan that comes much later: were
    the first block's id given up meanwhile, its file would be written and never be deleted."""
    sim = Sim(3, 1, num_host_blocks=1, max_disk_blocks=1)
    first, second, third = (sim.add(i, tokens) for i, tokens in enumerate((A[:1], B[:1], C[:1])))
    for seq in (first, second, third):
        sim.run(seq)
    sim.preempt(first, True)
    sim.run(sim.add(3, [4]))  # takes the first one's block
    sim.end(first)
    sim.preempt(second, True)  # moves the first one from the host to disk
    for _ in range(6):
        sim.kv.begin_step()
    fifth = sim.add(4, [5])
    sim.start(fifth)
    assert sim.grow(fifth, 1)  # takes the second one's block
    sim.end(second)
    sim.preempt(third, True)  # would move the second one from the host to disk
    plan = sim.plan()
    assert CopyKind.TO_DISK in [copy.kind for copy in plan.copies]
    sim.catch_up()
    assert len(sim.disk.files) <= 1
    sim.drain()


def test_a_block_on_its_way_out_is_not_overwritten_before() -> None:
    """Copies out come before the block is used again, in the one list of a plan."""
    sim = Sim(2, 4, num_host_blocks=2)
    victim = sim.add(0, A[:8])
    sim.run(victim)
    sim.kv.begin_step()
    sim.preempt(victim, True)
    other = sim.add(1, B[:8])
    sim.start(other)
    assert sim.grow(other, 8)
    plan = sim.plan()
    assert [copy.kind for copy in plan.copies] == [CopyKind.TO_HOST] * 2
    sim.catch_up()
    sim.end(other)
    assert sim.run(victim) >= 4
    sim.drain()
