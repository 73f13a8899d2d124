"""What was found is taken: to make room for one block never pushes out another one of them."""

from __future__ import annotations

import pytest
from group_sim import GroupSim, Player
from kv_sim import Sim

BEGUN = list(range(12))


@pytest.mark.parametrize("num_host_blocks", [2, 3, 8])
def test_the_partial_block_outlives_the_whole_ones_before_it(num_host_blocks: int) -> None:
    """A prompt's second block is on the host, and so is one that begins like its third. A host of
    2 blocks has no room for what leaves the pool to bring the second one in: that is let go."""
    sim = Sim(3, 4, num_host_blocks=num_host_blocks)
    sim.run(first := sim.add(0, BEGUN))
    sim.end(first)
    sim.run(other := sim.add(1, [90, 91, 92, 93, 94, 95, 96, 97]))
    sim.end(other)
    assert sim.kv.host_ledger().cached == 2
    last = sim.add(2, [*BEGUN[:10], 77])
    assert sim.run(last) == 10
    assert sim.kv.cache_stats().partial_hit_tokens == 2


def test_a_partial_block_gives_way_to_whole_ones() -> None:
    """Of 6 blocks 4 are in use, one is free, and one begins like a prompt's third block. Its first
    two are on the host, where they went with a sequence that was swapped out: both are brought in,
    the second one in place of the third."""
    sim = Sim(5, 4, num_host_blocks=8)
    sim.run(first := sim.add(0, BEGUN))
    sim.end(first)
    sim.run(swapped := sim.add(1, [*BEGUN[:8], 50]))
    sim.kv.begin_step()
    sim.preempt(swapped, to_host=True)
    sim.run(sim.add(2, range(100, 116)))
    sim.resize(6)
    assert (sim.kv.num_free_blocks, sim.kv.ledger().cached) == (2, 4)
    sim.kv.begin_step()
    assert sim.start(sim.add(3, [*BEGUN[:10], 77])) == 8


def test_partial_blocks_of_groups_outlive_each_other() -> None:
    """Seed 8000: a swapped sequence comes back, and of three groups' last blocks, each the
    beginning of another sequence's, copying in the first must not push out the others."""
    Player(8000).play(60)


def test_what_is_near_is_not_lost_for_what_is_on_disk() -> None:
    """A prompt's first 4 blocks are in the pool, 10 are on disk, for which there is no room: the
    attempt must not push the window's two blocks out, without which nothing is gone on from."""
    tokens = list(range(20))
    sim = GroupSim(40, 2, (0, 4), max_chunk=4, num_host_blocks=1, max_disk_blocks=100)
    _run(sim, tokens)
    sim.reboot()
    sim.boot(10)
    assert _run(sim, [*tokens[:8], 99]) == 8
    assert sim.kv.ledger().cached == 2 * (4 + 2 + 2)
    disk = sim.kv._cache.cold
    assert disk is not None
    for node in sim.kv._cache.tree.walk():
        if node.block_id >= 0 and node.disk_id >= 0:
            disk.disk.delete(node.disk_id)
    sim.begin_step()
    assert sim.start(sim.add([*tokens, 5], 40)) == 8
    sim.kv.check_integrity()


def _run(sim: GroupSim, tokens: list[int]) -> int:
    """One sequence from its start to its end; how many tokens it found."""
    seq = sim.add(tokens, 40)
    sim.begin_step()
    found = sim.start(seq)
    assert sim.grow(seq, len(tokens))
    sim.plan()
    sim.execute()
    sim.end(seq)
    return found
