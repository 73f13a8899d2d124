"""Bugs that other engines had with shared and cached KV, each with the right answer.

The memories are simulated (`kv_content`): `Sim.execute` fails when a slot that a sequence has holds
anything but its own prefix, so every test checks contents beside the numbers it names.
"""

from __future__ import annotations

import pytest
from kv_content import Sim

from octavo.errors import IntegrityError
from octavo.plan import CopyKind

A, B, C = [1] * 40, [2] * 40, [3] * 40


def finished(sim: Sim, seq_id: int, tokens: list[int], **more: object) -> int:
    """Run a sequence to its end; what its start found."""
    seq = sim.add(seq_id, tokens, **more)
    found = sim.run(seq)
    sim.end(seq)
    return found


# -- a block is reused while its old key is still mapped


def test_a_reused_block_is_not_found_under_its_old_prefix() -> None:
    sim = Sim(4, 4)
    assert finished(sim, 0, A[:16]) == 0
    assert finished(sim, 1, B[:16]) == 0  # takes all four blocks
    assert finished(sim, 2, A[:16]) == 0
    assert finished(sim, 3, A[:12]) == 11
    sim.drain()


def test_only_what_was_reused_is_lost_and_tails_go_first() -> None:
    sim = Sim(5, 4)
    finished(sim, 0, A[:20])
    assert finished(sim, 1, B[:4]) == 0  # takes the block of positions 16 to 19
    assert finished(sim, 2, A[:20]) == 16
    sim.drain()


def test_a_block_reused_in_the_step_in_which_its_prefix_is_asked_for() -> None:
    """The eviction happens between two admissions of one plan."""
    sim = Sim(4, 4)
    finished(sim, 0, A[:16])
    other, again = sim.add(1, B[:8]), sim.add(2, A[:8])
    sim.kv.begin_step()
    sim.start(other)
    assert sim.grow(other, 8)  # takes the tail of A
    assert sim.can_admit(again)
    assert sim.start(again) >= 4  # a copy of the second block has no room
    assert sim.grow(again, 8)
    sim.execute()
    sim.drain()


def test_a_hit_block_is_not_reused_for_the_rest_of_the_same_prompt() -> None:
    """What start found must be out of reach of the allocation that follows."""
    sim = Sim(4, 4)
    finished(sim, 0, A[:8])
    seq = sim.add(1, A[:8] + B[:8])
    assert sim.run(seq) == 8
    assert len(set(sim.kv.block_table(1))) == 4
    sim.drain()


# -- a prompt that is an exact multiple of the block size, and fully cached


@pytest.mark.parametrize("still_runs", [False, True])
def test_a_fully_cached_prompt_computes_its_last_token(still_runs: bool) -> None:
    """The last token's KV is written into a copy, never into the cached block."""
    sim = Sim(3, 4)
    first = sim.add(0, A[:8])
    sim.run(first)
    before = list(sim.kv.block_table(0))
    if not still_runs:
        sim.end(first)
    assert sim.run(sim.add(1, A[:8])) == 7
    table = list(sim.kv.block_table(1))
    assert table[0] == before[0]
    assert table[1] not in before
    sim.drain()


def test_a_fully_cached_prompt_without_room_for_a_copy() -> None:
    """It fits into an idle pool, so it runs; what it cannot copy it computes, or takes whole."""
    sim = Sim(2, 4)
    finished(sim, 0, A[:8])
    for seq_id in range(1, 4):
        assert finished(sim, seq_id, A[:8]) >= 4
    sim.drain()


def test_a_one_token_prompt_of_one_token_blocks() -> None:
    sim = Sim(3, 1)
    assert finished(sim, 0, A[:1]) == 0
    assert finished(sim, 1, A[:1]) == 0
    assert finished(sim, 2, A[:3]) == 1
    assert finished(sim, 3, A[:3]) == 2
    sim.drain()


def test_a_fully_cached_prompt_as_large_as_the_pool() -> None:
    sim = Sim(3, 4)
    for seq_id in range(3):
        assert finished(sim, seq_id, A[:12]) >= (8 if seq_id else 0)
    sim.drain()


# -- prompt logprobs with a cached prefix


@pytest.mark.parametrize(("max_hit_tokens", "found"), [(0, 0), (4, 4), (6, 6), (8, 8), (100, 9)])
def test_no_more_is_found_than_may_be(max_hit_tokens: int, found: int) -> None:
    sim = Sim(12, 4)
    finished(sim, 0, A[:10])
    seq = sim.add(1, A[:10], max_hit_tokens=max_hit_tokens)
    assert sim.run(seq) == found
    assert finished(sim, 2, A[:10]) == 9  # the cache is as good as before
    sim.end(seq)
    assert finished(sim, 3, A[:10]) == 9
    sim.drain()


# -- two equal prompts in one step


@pytest.mark.parametrize(("length", "found"), [(10, 8), (8, 4), (4, 0), (3, 0)])
def test_two_equal_prompts_in_one_step_share_whole_blocks(length: int, found: int) -> None:
    """Whole blocks are written before they are read; a partial hit would copy nothing yet."""
    sim = Sim(12, 4)
    first, second = sim.add(0, A[:length]), sim.add(1, A[:length])
    sim.kv.begin_step()
    for seq in (first, second):
        sim.start(seq)
        assert sim.grow(seq, length)
    assert (first.found, second.found) == (0, found)
    sim.execute()
    first.tokens += B[:6]
    second.tokens += C[:6]
    for seq in (first, second):
        sim.run(seq)
    sim.check_counts()
    sim.drain()


def test_the_first_of_two_equal_prompts_ends_first() -> None:
    sim = Sim(6, 4)
    first, second = sim.add(0, A[:9]), sim.add(1, A[:9])
    sim.kv.begin_step()
    for seq in (first, second):
        sim.start(seq)
        assert sim.grow(seq, 9)
    sim.execute()
    sim.end(first)
    finished(sim, 2, B[:12])  # what the first left is used again; what is shared is not
    second.tokens += C[:1]
    sim.run(second)
    sim.drain()


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
    finished(sim, 1, B[:16])
    sim.kv.begin_step()
    assert sim.start(victim) == 11
    sim.end(victim)
    assert sim.kv.host_room() == 4
    other = sim.add(2, C[:16])
    sim.start(other)
    assert sim.grow(other, 16)
    sim.execute()
    sim.end(other)
    finished(sim, 3, A[:12])
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
    finished(sim, 0, A[:8], request_id="r")
    assert sim.kv.request_usage("r").peak_blocks == 0
    assert finished(sim, 1, A[:8], request_id="r", salt="tenant") == 0
    assert finished(sim, 2, B[:8], request_id="r") == 0
    assert finished(sim, 3, A[:8], request_id="r") == (7 if caching else 0)
    sim.drain()


@pytest.mark.parametrize("caching", [False, True])
def test_the_same_request_id_right_after_its_abort_on_the_host(caching: bool) -> None:
    sim = Sim(4, 4, caching=caching, num_host_blocks=4)
    victim = sim.add(0, A[:8], request_id="r")
    sim.run(victim)
    sim.preempt(victim, True)
    sim.end(victim)
    assert finished(sim, 1, A[:8], request_id="r", salt="tenant") == 0
    assert sim.kv.host_room() == 4
    assert finished(sim, 2, A[:8], request_id="r") == (7 if caching else 0)
    sim.drain()


# -- a block is promoted while what makes room for it is demoted


@pytest.mark.parametrize("num_host_blocks", [1, 2, 3])
def test_promotion_and_demotion_through_the_same_host_blocks(num_host_blocks: int) -> None:
    """Each prompt fills the pool; what it evicts takes the host blocks that it needs itself."""
    sim = Sim(3, 4, num_host_blocks=num_host_blocks)
    for seq_id in range(8):
        finished(sim, seq_id, (A if seq_id % 2 else B)[:12])
    sim.drain()


@pytest.mark.parametrize("max_disk_blocks", [1, 2, 6])
def test_promotion_and_demotion_through_host_and_disk(max_disk_blocks: int) -> None:
    sim = Sim(3, 4, num_host_blocks=1, max_disk_blocks=max_disk_blocks)
    for seq_id in range(12):
        finished(sim, seq_id, (A, B, C)[seq_id % 3][:12])
        assert len(sim.disk.files) <= max_disk_blocks
    sim.drain()


def test_a_disk_that_fails_is_a_miss() -> None:
    sim = Sim(3, 4, num_host_blocks=1, max_disk_blocks=8)
    finished(sim, 0, A[:12])
    finished(sim, 1, B[:12])
    assert sim.disk.files
    sim.disk.damaged.update(sim.disk.files)
    assert finished(sim, 2, A[:12]) < 12
    finished(sim, 3, B[:12])
    finished(sim, 4, A[:12])
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


def test_tokens_that_are_taken_back_are_not_found_under_the_new_ones() -> None:
    """A sequence that drops computed tokens for others (rejected drafts) is refused."""
    sim = Sim(12, 4)
    seq = sim.add(0, A[:8])
    sim.run(seq)
    with pytest.raises(IntegrityError, match=r"cannot have 6 tokens .* it has 8"):
        sim.kv.commit(0, 6)
    sim.end(seq)
    sim.drain()


# -- colliding hashes

WRAP = 2**61 - 1
"""CPython hashes whole numbers modulo this prime, so that tuples of t and t + WRAP collide."""


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ([1, 2, 3, 4], [1 + WRAP, 2, 3, 4]),
        ([1, 2, 3, 4], [1, 2, 3, 4 + WRAP]),
        ([0, 0, 0, 0], [WRAP, WRAP, WRAP, WRAP]),
        ([5, -1, 5, 5], [5, -2, 5, 5]),
    ],
)
def test_colliding_tokens_are_never_taken_for_each_other(mine: list[int], other: list[int]) -> None:
    """First blocks, later ones, partial ones: same hash, different tokens."""
    assert hash(tuple(mine)) == hash(tuple(other))
    assert mine != other
    same = next(i for i in range(4) if mine[i] != other[i])
    sim = Sim(32, 4, num_host_blocks=4, max_disk_blocks=4)
    finished(sim, 0, mine * 3)
    assert finished(sim, 1, other * 3) == same
    assert finished(sim, 2, mine + other * 2) == 4 + same
    assert finished(sim, 3, mine * 3) == 11
    assert finished(sim, 4, other * 3) == 11
    sim.drain()


def test_a_salt_separates_what_is_equal() -> None:
    sim = Sim(16, 4)
    finished(sim, 0, A[:8])
    assert finished(sim, 1, A[:8], salt="x") == 0
    assert finished(sim, 2, A[:8], salt="x") == 7
    assert finished(sim, 3, A[:8]) == 7
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
