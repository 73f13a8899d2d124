"""Why blocks of a prompt were not found: the miss explainer."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from octavo.kv.node import Node, Root, block_key
from octavo.kv.policy import SeqDemand
from octavo.kv.tree import PrefixTree, neighbours, whole_blocks
from octavo.outputs import MissReason, PrefixMiss
from octavo.util import cdiv

_MAX_SALTS = 64
"""Other salts that are searched for a prompt that nobody has sent under its own."""


def not_asked(demand: SeqDemand, block_size: int) -> tuple[PrefixMiss, ...]:
    """Of a prompt for which nothing is looked up."""
    num_blocks = cdiv(demand.num_tokens, block_size)
    return (PrefixMiss(0, num_blocks, MissReason.NOT_ASKED),)


class MissExplainer:
    """Finds the reasons for one prompt, run by run, from the first block that was not found on."""

    def __init__(self, tree: PrefixTree, demand: SeqDemand, block_size: int, now_s: float) -> None:
        self._tree = tree
        self._demand = demand
        self._block_size = block_size
        self._now_s = now_s
        self._num_blocks = cdiv(demand.num_tokens, block_size)
        self._misses: list[PrefixMiss] = []

    def explain(
        self,
        root: Root | None,
        found: Iterable[Node],
        num_found: int,
        limit: int,
        behind: Node | None = None,
    ) -> tuple[PrefixMiss, ...]:
        """`found` are the nodes of the whole blocks that were found, `num_found` is all tokens,
        of the `limit` that may be found at most. `behind`, where layers have windows: a node that
        holds nothing, for lack of which the blocks after `found` are of no use."""
        nodes = list(found)
        if num_found < limit and behind is not None and behind.evicted_s is not None:
            known = self._known_below(nodes[-1] if nodes else root or behind, len(nodes))
            ago = self._now_s - behind.evicted_s
            end = len(nodes) + max(1, len(known))
            self._add(len(nodes), end, MissReason.EVICTED, evicted_s_ago=ago)
            if end < self._num_blocks:
                self._from(known[-1] if known else None, end, end * self._block_size)
        elif num_found < limit:
            self._from(nodes[-1] if nodes else root, len(nodes), num_found)
        all_but_last = self._demand.num_tokens - 1
        if limit < all_but_last:
            self._cut_at(cdiv(limit, self._block_size) if num_found < limit else None, num_found)
        return tuple(self._misses)

    def _from(self, node: Node | None, index: int, num_found: int) -> None:
        """Block `index` is the first that was not found, below `node`."""
        index, node = self._skip_ghosts(node, index)
        if index == self._num_blocks:
            return
        start = index * self._block_size
        end = min(start + self._block_size, self._demand.num_tokens)
        key = block_key(self._demand.token_ids, start, end)
        common = 0
        if node is not None:
            nearest = (next(side, None) for side in neighbours(node, key))
            common = max((found[1] for found in nearest if found), default=0)
        common = max(common, num_found - start)
        is_tail = end - start < self._block_size
        if common == end - start:
            self._add(index, self._num_blocks, MissReason.NOT_READY)
            return
        if common or (index and node is not None and node.children and not is_tail):
            self._add(index, self._num_blocks, MissReason.DIVERGED, diverged_at=start + common)
        elif is_tail:
            self._add(index, self._num_blocks, MissReason.SHORT)
        else:
            self._never_seen(index, key)

    def _skip_ghosts(self, node: Node | None, index: int) -> tuple[int, Node | None]:
        """A run of blocks that the cache had, and lost: at least the first of them."""
        known = [] if node is None else self._known_below(node, index)
        if not known or known[0].evicted_s is None:
            return index, node
        ago = self._now_s - known[0].evicted_s
        self._add(index, index + len(known), MissReason.EVICTED, evicted_s_ago=ago)
        return index + len(known), known[-1]

    def _known_below(self, node: Node, index: int) -> list[Node]:
        """Nodes of the prompt's whole blocks from `index` on."""
        demand, size = self._demand, self._block_size
        return list(whole_blocks(node, demand.token_ids, index * size, demand.num_tokens, size))

    def _never_seen(self, index: int, key: bytes) -> None:
        end = index
        if not index:
            own = self._tree.roots.get((self._demand.salt, ""))
            # Roots of further groups of layers and of requests have another second name.
            others = (
                root for root in self._tree.roots.values() if root is not own and not root.name[1]
            )
            for root in islice(others, _MAX_SALTS):
                if key in root.children:
                    end = len(self._known_below(root, 0))
                    self._add(0, end, MissReason.OTHER_SALT)
                    break
        if end < self._num_blocks:
            self._add(end, self._num_blocks, MissReason.NEVER_SEEN)

    def _cut_at(self, first: int | None, num_found: int) -> None:
        """From some block on nothing could be found, for it must be computed."""
        if first is None:
            first = num_found // self._block_size
        kept = []
        for miss in self._misses:
            num = min(miss.num_blocks, first - miss.first_block)
            if num > 0:
                kept.append(
                    PrefixMiss(
                        miss.first_block, num, miss.reason, miss.evicted_s_ago, miss.diverged_at
                    )
                )
        self._misses = kept
        if first < self._num_blocks:
            self._add(first, self._num_blocks, MissReason.NOT_ASKED)

    def _add(
        self,
        first: int,
        end: int,
        reason: MissReason,
        evicted_s_ago: float | None = None,
        diverged_at: int | None = None,
    ) -> None:
        self._misses.append(PrefixMiss(first, end - first, reason, evicted_s_ago, diverged_at))
