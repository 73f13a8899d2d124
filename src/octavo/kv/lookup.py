"""Looking up what some memory holds of a prompt. Changes nothing."""

from __future__ import annotations

from typing import NamedTuple

from octavo.kv.cold import ColdBlocks
from octavo.kv.node import Node, Root, RootName, block_key
from octavo.kv.policy import SeqDemand
from octavo.kv.pool import BlockPool
from octavo.kv.tiers import HostTier
from octavo.kv.tree import PrefixTree, neighbours


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

    def root_name(self, salt: str, request_id: str | None) -> RootName:
        """Under which root a sequence looks and leaves its blocks."""
        return (salt, "") if self.enabled else ("", request_id or "")

    def match(self, demand: SeqDemand, root_name: RootName) -> Match:
        """What could be found for a demand; changes nothing.

        The last token is never found: it is computed, for its logits.
        """
        limit = min(demand.num_tokens, len(demand.token_ids)) - 1
        if demand.max_hit_tokens is not None:
            limit = min(limit, demand.max_hit_tokens)
        root = self.find_root(root_name)
        path: list[Node] = []
        if root is None or limit < 1:
            return Match(root, path, None, 0, limit)
        node: Node = root
        size, tokens = self.pool.block_size, demand.token_ids
        start = 0
        while start + size <= limit:
            child = node.children.get(block_key(tokens, start, start + size))
            if child is None or not self._has(child):
                break
            path.append(child)
            node = child
            start += size
        num_left = min(limit - start, size)
        if not node.children or not num_left:
            return Match(root, path, None, 0, limit)
        best, num_best = self._longest(node, block_key(tokens, start, start + num_left))
        return Match(root, path, best, num_best, limit)

    def find_root(self, name: RootName) -> Root | None:
        """The root of a name; None if there is nothing below it."""
        root = self.tree.roots.get(name)
        if root is None and self.cold is not None:
            root = self.cold.find_root(name)
        return root

    def _has(self, node: Node) -> bool:
        """Whether a whole block can be had from some memory."""
        if node.block_id >= 0 or node.host_id >= 0:
            return True
        return self.cold is not None and self.cold.can_fetch(node)

    def _longest(self, parent: Node, key: bytes) -> tuple[Node | None, int]:
        """The child with the longest beginning of `key`, whose KV exists before the coming step
        computes (it is copied)."""
        best, num_best = None, 0
        for side in neighbours(parent, key):
            for child, num in side:
                if num <= num_best:
                    break
                if self._has_part(child, num):
                    best, num_best = child, num
                    break
        return best, num_best

    def _has_part(self, node: Node, num_tokens: int) -> bool:
        if node.step >= self.step:
            return False
        if node.block_id >= 0 or node.host_id >= 0:
            return True
        # A file is not read for a few tokens.
        return 2 * num_tokens >= self.pool.block_size and self._has(node)

    def num_shared(self, demand: SeqDemand, root_name: RootName) -> int:
        """Blocks that a demand would share with others who reference them now: it needs no room
        for them. Exact, but for blocks behind one on disk, which may turn out to be damaged."""
        if not demand.token_ids:
            return 0
        counts = self.pool.ref_counts
        num = 0
        for node in self.match(demand, root_name).path:
            if node.block_id >= 0:
                num += counts[node.block_id] > 0
            elif node.host_id < 0:
                break
        return num
