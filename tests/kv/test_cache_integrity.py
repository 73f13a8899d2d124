"""Each way to corrupt tree, tiers or pins is found and named by `check_integrity`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kv_sim import Sim

from octavo.errors import IntegrityError
from octavo.kv.node import Node, block_key

A, B = list(range(100, 140)), list(range(200, 240))


def make() -> Sim:
    """Block 0 and 1 are pinned and run, 2 is the runner's tail, 3 to 5 are cached (with a tail);
    host blocks 0 and 1 wait for sequence 1; disk block 0 is there."""
    sim = Sim(10, 4, num_host_blocks=6, max_disk_blocks=4)
    sim.run(sim.add(0, A[:10]))
    sim.kv.pin(A[:8])
    other = sim.add(2, B[:10])
    sim.run(other)
    sim.end(other)
    victim = sim.add(1, [*A[:8], 1, 2, 3, 4, 5])
    sim.run(victim)
    sim.preempt(victim, True)
    cold = sim.kv._cache.cold
    assert cold is not None
    sim.kv._cache.to_host(node_of(sim, 3))
    assert cold.to_disk(node_of(sim, 3))
    sim.kv.check_integrity()
    return sim


def node_of(sim: Sim, block_id: int) -> Node:
    node = sim.kv._pool.nodes[block_id]
    assert node is not None
    return node


def unpin_behind_its_back(sim: Sim) -> None:
    sim.kv._pins.counts[0] -= 1


def miscount_the_only_pinned(sim: Sim) -> None:
    sim.kv._pool.num_only_pinned += 1


def forget_a_node(sim: Sim) -> None:
    node = node_of(sim, 4)
    assert node.parent is not None
    del node.parent.children[node.key]


def two_nodes_of_one_block(sim: Sim) -> None:
    node_of(sim, 4).block_id = 3


def node_of_a_free_block(sim: Sim) -> None:
    sim.kv._pool.nodes[9] = Node(None, b"")


def miscount_the_cached(sim: Sim) -> None:
    sim.kv._pool.num_cached += 1


def lose_a_hold(sim: Sim) -> None:
    held = sim.kv._holds.nodes[1][-1]
    sim.kv._cache.host.unhold(held)


def forget_a_holder(sim: Sim) -> None:
    del sim.kv._holds.nodes[1]


def held_and_evictable(sim: Sim) -> None:
    held = sim.kv._holds.nodes[1][-1]
    sim.kv._cache.host._lru[held.host_id] = held


def leak_a_host_block(sim: Sim) -> None:
    sim.kv._cache.host._free.pop()


def wrong_host_block(sim: Sim) -> None:
    node_of(sim, 3).host_id = 5


def forget_a_disk_block(sim: Sim) -> None:
    node_of(sim, 3).disk_id = -1


def ghost_with_a_block(sim: Sim) -> None:
    node_of(sim, 3).evicted_s = 1.0


def miscount_ghosts(sim: Sim) -> None:
    sim.kv._cache.tree.num_ghosts = 3


def too_many_tokens(sim: Sim) -> None:
    node = node_of(sim, 5)
    parent = node.parent
    assert parent is not None
    del parent.children[node.key]
    node.key = block_key(A, 0, 5)
    parent.children[node.key] = node


def disorder(sim: Sim) -> None:
    node_of(sim, 1).parent.parent.keys.reverse()  # type: ignore[union-attr]


def empty_root(sim: Sim) -> None:
    sim.kv._cache.tree.root(("x", ""))


def registered_beyond_what_may_be_written(sim: Sim) -> None:
    sim.kv._tables[0].exclusive_from = 6


@pytest.mark.parametrize(
    ("corrupt", "named"),
    [
        (unpin_behind_its_back, r"block 0 has reference count 2, expected 1: .*sequences \[0\]"),
        (miscount_the_only_pinned, "counts 2 pinned blocks, 1 of them .* expected 2 and 0"),
        (forget_a_node, "nodes in the pool are not in the tree|block 4"),
        (two_nodes_of_one_block, "names block 3, which is another's"),
        (node_of_a_free_block, "block 9 has the node .* which names another block"),
        (miscount_the_cached, "does not add up|cached blocks, found"),
        (lose_a_hold, "counts 0 holds, expected 1"),
        (forget_a_holder, "counts 1 holds, expected 0"),
        (held_and_evictable, "has 1 holds and may go"),
        (leak_a_host_block, r"host block \d is neither or both"),
        (wrong_host_block, "names host block 5, which is another's"),
        (forget_a_disk_block, "disk block 0 belongs to a node that names -1"),
        (ghost_with_a_block, "has a block and yet is a ghost"),
        (miscount_ghosts, "the tree counts 3 ghosts, found 0"),
        (too_many_tokens, "has 5 tokens in a block of 4"),
        (disorder, "not in order"),
        (empty_root, r"root \('x', ''\) has no nodes"),
        (
            registered_beyond_what_may_be_written,
            "entry 1 of sequence 0, may be written from slot 2",
        ),
    ],
)
def test_corruption_is_named(corrupt: Callable[[Sim], None], named: str) -> None:
    sim = make()
    corrupt(sim)
    with pytest.raises(IntegrityError, match=named):
        sim.kv.check_integrity()
