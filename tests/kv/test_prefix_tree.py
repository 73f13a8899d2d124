"""The tree itself: keys, order of siblings, ghosts and their bound."""

from __future__ import annotations

import random

import pytest

from octavo.kv.node import Node, block_key, num_common_tokens, tokens_of_key
from octavo.kv.tree import PrefixTree, chain_to, neighbours

NAME = ("", "")


def key_of(*tokens: int) -> bytes:
    return block_key(tokens, 0, len(tokens))


def child(tree: PrefixTree, parent: Node, *tokens: int) -> Node:
    """A node with a block."""
    node = tree.add(parent, key_of(*tokens))
    node.block_id = 0
    return node


def lose(tree: PrefixTree, node: Node, now_s: float = 0.0) -> None:
    node.block_id = -1
    tree.lost(node, num_full=4, now_s=now_s)


def test_keys_hold_the_tokens_themselves() -> None:
    tokens = (0, -1, 2**62, 151_643)
    assert tokens_of_key(block_key([9, *tokens, 9], 1, 5)) == tokens
    assert len(key_of(1, 2, 3)) == 24


@pytest.mark.parametrize(
    ("a", "b", "num"),
    [
        ((1, 2, 3), (1, 2, 3), 3),
        ((1, 2, 3), (1, 2), 2),
        ((1, 2, 3), (1, 2, 4, 5), 2),
        ((1, 2, 3), (7, 2, 3), 0),
        ((256, 1), (1, 1), 0),
        ((1, 2**40), (1, 2**41), 1),
        ((0, 0), (0, 2**56), 1),
    ],
)
def test_common_tokens(a: tuple[int, ...], b: tuple[int, ...], num: int) -> None:
    assert num_common_tokens(key_of(*a), key_of(*b)) == num
    assert num_common_tokens(key_of(*b), key_of(*a)) == num


def test_the_longest_common_beginning_is_the_nearest_neighbour() -> None:
    rng = random.Random(0)
    tree = PrefixTree(100)
    root = tree.root(NAME)
    keys = {tuple(rng.randrange(3) for _ in range(rng.randrange(1, 7))) for _ in range(200)}
    for tokens in keys:
        child(tree, root, *tokens)
    for _ in range(300):
        wanted = key_of(*(rng.randrange(3) for _ in range(6)))
        sides = [next(side, None) for side in neighbours(root, wanted)]
        found = max((num for _, num in filter(None, sides)), default=0)
        assert found == max(num_common_tokens(key_of(*tokens), wanted) for tokens in keys)


def test_neighbours_of_no_and_of_one_child() -> None:
    tree = PrefixTree(100)
    root = tree.root(NAME)
    assert [list(side) for side in neighbours(root, key_of(1))] == [[]]
    only = child(tree, root, 1, 2, 3)
    assert [list(side) for side in neighbours(root, key_of(1, 2, 9))] == [[(only, 2)]]
    assert [list(side) for side in neighbours(root, key_of(2))] == [[]]


def test_ghosts_are_bounded_and_the_oldest_leaf_goes_first() -> None:
    tree = PrefixTree(2)
    root = tree.root(NAME)
    nodes = [child(tree, root, i, i, i, i) for i in range(4)]
    for now, node in enumerate(nodes):
        lose(tree, node, float(now))
    assert tree.num_ghosts == 2
    assert list(root.children.values()) == nodes[2:]
    assert [node.parent for node in nodes[:2]] == [None, None]
    assert nodes[3].evicted_s == 3.0


def test_a_ghost_with_children_stays_and_goes_after_them() -> None:
    tree = PrefixTree(1)
    root = tree.root(NAME)
    top = child(tree, root, 1, 1, 1, 1)
    below = child(tree, top, 2, 2, 2, 2)
    other = child(tree, root, 3, 3, 3, 3)
    lose(tree, top)
    lose(tree, other)  # one ghost too many, and this is the only one without children
    assert (tree.num_ghosts, other.parent) == (1, None)
    lose(tree, below)
    assert (tree.num_ghosts, below.parent, top.parent) == (1, None, root)
    assert chain_to(top, 1) == [top]


def test_a_ghost_that_has_a_block_again_is_none() -> None:
    tree = PrefixTree(1)
    root = tree.root(NAME)
    node = child(tree, root, 1, 1, 1, 1)
    lose(tree, node)
    node.host_id = 3
    tree.found(node)
    assert (tree.num_ghosts, node.evicted_s) == (0, None)
    node.block_id = 1
    lose(tree, node)  # the host has it
    assert tree.num_ghosts == 0


def test_partial_nodes_leave_no_ghost_and_empty_roots_go() -> None:
    tree = PrefixTree(10)
    tail = child(tree, tree.root(NAME), 1, 2)
    assert tree.roots
    lose(tree, tail)
    assert (tree.num_ghosts, tree.roots) == (0, {})
