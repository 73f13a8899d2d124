"""Bugs that other engines had with samples and beams that share blocks, each with the right answer.

The memories are simulated (`kv_sim`): `Sim.execute` fails when a slot that a sequence has holds
anything but its own prefix, so every test checks contents beside the numbers it names.
"""

from __future__ import annotations

import pytest
from kv_sim import Sim

from octavo.errors import IntegrityError

A, B, C = [1] * 40, [2] * 40, [3] * 40


# -- abort of one sample of a group


@pytest.mark.parametrize("aborted", [0, 1, 2])
@pytest.mark.parametrize("caching", [False, True])
def test_the_other_samples_go_on(aborted: int, caching: bool) -> None:
    sim = Sim(12, 4, caching=caching)
    carrier = sim.add(0, A[:10])
    sim.run(carrier)
    group = [carrier, sim.fork(carrier, 1, B[:1]), sim.fork(carrier, 2, C[:1])]
    carrier.tokens += A[:1]
    sim.end(group.pop(aborted))
    assert [sim.kv.ref_count(b) for b in sim.kv.block_table(group[0].seq_id)] == [2, 2, 2]
    for _ in range(6):
        sim.kv.begin_step()
        for seq in group:
            assert sim.grow(seq, len(seq.tokens))
        sim.execute()
        sim.check_counts()
        for seq in group:
            seq.tokens.append(seq.tokens[-1])
    assert sim.kv.ledger().num_physical_blocks == 6  # two shared, two of each
    sim.end(group.pop())
    sim.run(group[0])
    sim.drain()


# -- a fork is freed twice


@pytest.mark.parametrize("caching", [False, True])
def test_freeing_a_fork_twice_is_refused_and_changes_nothing(caching: bool) -> None:
    sim = Sim(6, 4, caching=caching)
    parent = sim.add(0, A[:6])
    sim.run(parent)
    child = sim.fork(parent, 1, B[:1])
    sim.end(child)
    counts = [sim.kv.ref_count(block_id) for block_id in range(6)]
    for call in (
        lambda: sim.kv.release(1),
        lambda: sim.kv.preempt(1, True),
        lambda: sim.kv.preempt(1, False),
    ):
        with pytest.raises(IntegrityError, match="sequence 1 "):
            call()
    assert [sim.kv.ref_count(block_id) for block_id in range(6)] == counts
    sim.check_counts()
    parent.tokens += C[:3]
    sim.run(parent)
    sim.drain()


# -- a beam ends in the step in which it forks


@pytest.mark.parametrize("parent_goes_first", [False, True])
@pytest.mark.parametrize("length", [7, 8, 9])
def test_a_beam_that_ends_as_others_fork_from_its_sibling(
    length: int, parent_goes_first: bool
) -> None:
    """One update ends beam 0, forks beam 1 twice and ends beam 1 itself."""
    sim = Sim(12, 4)
    first = sim.add(0, A[:length])
    sim.run(first)
    second = sim.fork(first, 1, B[:1])
    first.tokens += A[:1]
    assert sim.kv.can_grow_all([(i, length + 1, length) for i in (0, 1)])
    sim.kv.begin_step()
    for seq in (first, second):
        assert sim.grow(seq, length + 1)
    sim.execute()
    sim.end(first)
    children = [sim.fork(second, 2, A[:1]), sim.fork(second, 3, C[:1])]
    if parent_goes_first:
        sim.end(second)
        demands = [(2, length + 2, length + 1), (3, length + 2, length + 1)]
        assert sim.kv.can_grow_all(demands)
    sim.kv.begin_step()
    for seq in children:
        assert sim.grow(seq, length + 2)
    sim.execute()
    sim.check_counts()
    if not parent_goes_first:
        sim.end(second)
    assert sim.kv.num_free_blocks == 12 - sim.kv.ledger().num_physical_blocks
    sim.drain()


@pytest.mark.parametrize("num_writers", [2, 3])
@pytest.mark.parametrize("another_waits", [False, True])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_group_asks_for_exactly_the_copies_it_needs(
    num_writers: int, another_waits: bool, missing: int
) -> None:
    """The last owner of a shared block writes in place, unless one that does not write stays."""
    num_copies = num_writers - (not another_waits)
    sim = Sim(3 + num_copies - missing + 2, 4)
    first = sim.add(0, A[:10])
    sim.run(first)
    group = [sim.fork(first, 1 + i, B[:1]) for i in range(num_writers)]
    if not another_waits:
        sim.end(first)
    sim.run(sim.add(9, C[:8]))
    assert sim.kv.num_free_blocks == num_copies - missing
    assert sim.kv.can_grow_all([(seq.seq_id, 11, 10) for seq in group]) == (not missing)
    sim.kv.begin_step()
    num_grown = num_copies - missing if missing else num_writers
    grown = [sim.grow(seq, 11) for seq in group]
    assert grown == [i < num_grown for i in range(num_writers)]
    sim.execute()
    sim.drain()
