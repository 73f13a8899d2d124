"""The prefix tree: exact, with a root for each salt.

A dictionary at every node takes the place of chained hashes: Python compares keys token by token
where hashes agree, so a collision cannot serve the KV of other tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from octavo.kv.node import TOKEN_BYTES, Node, Root, RootName, block_key, num_common_tokens

_MAX_LOOKED_AT = 16
"""Neighbours on either side of a key that are looked at for a common beginning."""


class PrefixTree:
    """Nodes, and the ghosts among them, of which at most `max_ghosts` are kept.

    Who gives a node its first block calls `found`, who takes the last one away calls `lost`.
    """

    __slots__ = ("_leaf_ghosts", "max_ghosts", "num_ghosts", "roots")

    def __init__(self, max_ghosts: int) -> None:
        self.max_ghosts = max_ghosts
        self.num_ghosts = 0
        self.roots: dict[RootName, Root] = {}
        self._leaf_ghosts: OrderedDict[Node, None] = OrderedDict()
        """Ghosts without children, those that go first in front."""

    def root(self, name: RootName) -> Root:
        """The root of that name, made if need be. It goes with its last child."""
        root = self.roots.get(name)
        if root is None:
            root = self.roots[name] = Root(name)
        return root

    def add(self, parent: Node, key: bytes) -> Node:
        """A new child, which is to be given a block at once."""
        child = Node(parent, key)
        siblings = parent.children
        if len(siblings) > 1:
            insort(parent.keys, key)
        elif siblings:
            parent.keys = sorted((*siblings, key))
        elif parent.evicted_s is not None:
            del self._leaf_ghosts[parent]
        siblings[key] = child
        return child

    def found(self, node: Node) -> None:
        """The node has a block."""
        if node.evicted_s is not None:
            node.evicted_s = None
            self.num_ghosts -= 1
            self._leaf_ghosts.pop(node, None)

    def lost(self, node: Node, num_full: int, now_s: float) -> None:
        """The node lost a block. Without any it is a ghost, unless it is a partial one (fewer than
        `num_full` tokens), which goes."""
        if node.block_id >= 0 or node.host_id >= 0 or node.disk_id >= 0:
            return
        if node.evicted_s is not None or node.parent is None:
            return
        if len(node.key) < num_full * TOKEN_BYTES:
            self._remove(node)
        else:
            node.evicted_s = now_s
            self.num_ghosts += 1
            if not node.children:
                self._leaf_ghosts[node] = None
        if self.num_ghosts > self.max_ghosts:
            self.trim()

    def trim(self) -> None:
        """Forget the oldest ghosts that are too many."""
        while self.num_ghosts > self.max_ghosts and self._leaf_ghosts:
            node, _ = self._leaf_ghosts.popitem(last=False)
            self.num_ghosts -= 1
            self._remove(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and not node.children
        node.parent = node.evicted_s = None
        siblings = parent.children
        if len(siblings) > 1:
            del parent.keys[bisect_left(parent.keys, node.key)]
        del siblings[node.key]
        if siblings:
            return
        if isinstance(parent, Root):
            del self.roots[parent.name]
        elif parent.evicted_s is not None:
            # It was lost after its child, but what is left of a chain is of little use.
            self._leaf_ghosts[parent] = None
            self._leaf_ghosts.move_to_end(parent, last=False)

    def walk(self) -> Iterator[Node]:
        """All nodes below the roots, parents first."""
        todo: list[Node] = list(self.roots.values())
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            if not isinstance(node, Root):
                yield node


def whole_blocks(
    node: Node, token_ids: Sequence[int], start: int, end: int, block_size: int
) -> Iterator[Node]:
    """The nodes of the whole blocks of tokens `start .. end - 1`, each a child of the one before
    and the first of `node`, as far as the tree has them: ghosts too."""
    for at in range(start, end - block_size + 1, block_size):
        child = node.children.get(block_key(token_ids, at, at + block_size))
        if child is None:
            return
        yield child
        node = child


def neighbours(parent: Node, key: bytes) -> Iterator[Iterator[tuple[Node, int]]]:
    """Children that begin like `key`, with the number of common tokens, at least 1.

    Twice: from the place of `key` in the sorted order upwards, where those come first that begin
    with all of it, and from there downwards; either way the longest common beginnings come first.
    A bounded number is looked at.
    """
    if len(parent.children) < 2:
        yield _common(parent, iter(parent.children), key)
        return
    place = bisect_left(parent.keys, key)
    yield _common(parent, islice(parent.keys, place, place + _MAX_LOOKED_AT), key)
    yield _common(parent, reversed(parent.keys[max(0, place - _MAX_LOOKED_AT) : place]), key)


def _common(parent: Node, keys: Iterator[bytes], key: bytes) -> Iterator[tuple[Node, int]]:
    for other in keys:
        num = num_common_tokens(other, key)
        if not num:
            return
        yield parent.children[other], num


def chain_to(node: Node | None, num: int) -> list[Node]:
    """The `num` nodes from below the root down to `node`."""
    chain: list[Node] = []
    while node is not None and len(chain) < num:
        chain.append(node)
        node = node.parent
    chain.reverse()
    return chain
