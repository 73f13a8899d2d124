"""Looking up what some memory holds of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.kv.cold import ColdBlocks
from octavo.kv.node import Node, Root, RootName, block_key
from octavo.kv.policy import SeqDemand
from octavo.kv.pool import BlockPool
from octavo.kv.tiers import HostTier
from octavo.kv.tree import PrefixTree, neighbours, whole_blocks


def is_near(node: Node) -> bool:
    """Whether the node is in the pool or on the host."""
    return node.block_id >= 0 or node.host_id >= 0


class Match(NamedTuple):
    """What of a prompt some memory holds."""

    root: Root | None
    path: list[Node]
    """Nodes of its first whole blocks."""
    partial: Node | None
    """A node below them that begins like what follows."""
    num_partial: int
    """How many tokens of it."""
    limit: int
    """Most tokens that may be found."""


class _Asked(NamedTuple):
    """The way down the tree that was found for a sequence which may have to wait, and will be asked
    for again: tokens are compared once, and from then on it is only looked at what became of the
    nodes. Nodes that the tree has forgotten hold nothing, and never will again."""

    token_ids: Sequence[int]
    """That very list, which only grows."""
    root_name: RootName
    path: list[Node]


NOBODY_ASKED = _Asked((), ("", ""), [])


class PrefixIndex:
    """The tree, the memories that its nodes are in, and the step that is being planned."""

    def __init__(self, pool: BlockPool, *, enabled: bool, num_host_blocks: int) -> None:
        self.enabled = enabled
        self.pool = pool
        self.tree = PrefixTree(max_ghosts=0)
        self.host = HostTier(num_host_blocks)
        self.cold: ColdBlocks | None = None
        self.step = 0
        """The step that is being planned. A step of which nothing came counts too."""
        self.plan = 0
        """How many plans have taken their copies: the number of the coming one."""
        self._asked = NOBODY_ASKED
        self._asked_groups: dict[int, _Asked] = {}
        """The same by group of layers, where blocks may be missing on the way."""

    def root_name(self, salt: str, request_id: str | None) -> RootName:
        """Under which root a sequence looks and leaves its blocks."""
        return (salt, "") if self.enabled else ("", request_id or "")

    def ignores(self, demand: SeqDemand) -> bool:
        """Whether nobody will ever look for the blocks of such a sequence, so that they need not be
        registered."""
        return demand.is_only and not self.enabled and not self.host.num_blocks

    def match(self, demand: SeqDemand, root_name: RootName) -> Match:
        """What could be found for a demand. Takes into the tree what an earlier process left of it
        on disk, and changes nothing else.

        The last token is never found: it is computed, for its logits.
        """
        limit = self.limit_of(demand)
        root = self.tree.roots.get(root_name)
        if limit < 1:
            return Match(root, [], None, 0, limit)
        if root is None:
            if self.cold is None or not self.cold.has_below(root_name[0]):
                return Match(None, [], None, 0, limit)
            root = self.tree.root(root_name)
        path = self._near_path(demand.token_ids, root, limit)
        size, tokens = self.pool.block_size, demand.token_ids
        if self.cold is not None and not self._add_cold(self.cold, path, root, tokens, limit):
            return Match(root, path, None, 0, limit)
        node: Node = path[-1] if path else root
        start = len(path) * size
        num_left = min(limit - start, size)
        if not root.children:  # nothing on disk begins like this
            del self.tree.roots[root_name]
            return Match(None, path, None, 0, limit)
        if not node.children or not num_left:
            return Match(root, path, None, 0, limit)
        best, num_best = self.longest(node, block_key(tokens, start, start + num_left))
        return Match(root, path, best, num_best, limit)

    def _near_path(self, token_ids: Sequence[int], root: Root, limit: int) -> list[Node]:
        """The nodes of a prompt's first whole blocks, as far as they are in the pool or on the
        host; a new list. Takes a fraction of the time when the prompt is the one that was asked
        for last."""
        asked, size = self._asked, self.pool.block_size
        path: list[Node] = []
        if asked.token_ids is token_ids and asked.root_name == root.name:
            path = asked.path[: limit // size]
            for index, node in enumerate(path):
                if node.block_id < 0 and node.host_id < 0:
                    del path[index:]
                    break
        last = path[-1] if path else root
        for node in whole_blocks(last, token_ids, len(path) * size, limit, size):
            if node.block_id < 0 and node.host_id < 0:
                break
            path.append(node)
        return path

    def _add_cold(
        self, cold: ColdBlocks, path: list[Node], root: Root, tokens: Sequence[int], limit: int
    ) -> bool:
        """Go on down the path with blocks that are on disk, and what lies behind them. False if
        there would be more, but the coming step may read no more of them."""
        size, num_left = self.pool.block_size, cold.num_left()
        goes_on = True
        while goes_on:
            last: Node = path[-1] if path else root
            for node in whole_blocks(last, tokens, len(path) * size, limit, size):
                if node.block_id < 0 and node.host_id < 0:
                    if not cold.can_fetch(node):
                        break
                    if not num_left:
                        return False
                    num_left -= 1
                path.append(node)
            last = path[-1] if path else root
            goes_on = cold.adopt_next(last, tokens, len(path) * size, limit)
        return True

    def longest(
        self, parent: Node, key: bytes, *, with_disk: bool = True
    ) -> tuple[Node | None, int]:
        """The child with the longest beginning of `key`, whose KV exists before the coming step
        computes (it is copied)."""
        best, num_best = None, 0
        for side in neighbours(parent, key):
            for child, num in side:
                if num <= num_best:
                    break
                # A file is not read for a few tokens.
                is_worth_it = with_disk and 2 * num >= self.pool.block_size
                if child.step < self.step and (is_near(child) or (is_worth_it and self.has(child))):
                    best, num_best = child, num
                    break
        return best, num_best

    def has(self, node: Node) -> bool:
        """Whether some memory holds a node for the coming step."""
        return is_near(node) or (self.cold is not None and self.cold.can_fetch(node))

    def num_shared(self, demand: SeqDemand, root_name: RootName) -> int:
        """Blocks that a demand would share with others who reference them now: it needs no room
        for them. Changes nothing. Exact, but for blocks behind one on disk, which may turn out to
        be damaged: those are not counted."""
        root = self.tree.roots.get(root_name)
        limit = self.limit_of(demand)
        if root is None or limit < 1:
            return 0
        path = self._near_path(demand.token_ids, root, limit)
        self._asked = _Asked(demand.token_ids, root_name, path)
        counts = self.pool.ref_counts
        return sum(counts[node.block_id] > 0 for node in path if node.block_id >= 0)

    def chain_in_group(
        self, group: int, token_ids: Sequence[int], root: Root, limit: int
    ) -> list[Node]:
        """The nodes of a prompt's first whole blocks in a group, those that hold nothing too; a new
        list. Remembers them, as `_near_path` does."""
        asked, size = self._asked_groups.get(group, NOBODY_ASKED), self.pool.block_size
        chain: list[Node] = []
        if asked.token_ids is token_ids and asked.root_name == root.name:
            chain = asked.path[: limit // size]
            for place, node in enumerate(chain):
                if node.parent is None:  # the tree has forgotten it
                    del chain[place:]
                    break
        last: Node = chain[-1] if chain else root
        chain.extend(whole_blocks(last, token_ids, len(chain) * size, limit, size))
        self._asked_groups[group] = _Asked(token_ids, root.name, chain)
        return chain

    def limit_of(self, demand: SeqDemand) -> int:
        """Most tokens that may be found."""
        limit = min(demand.num_tokens, len(demand.token_ids)) - 1
        return limit if demand.max_hit_tokens is None else min(limit, demand.max_hit_tokens)
