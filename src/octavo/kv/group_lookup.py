"""Looking up what some memory holds of a prompt, where layers are in groups or have windows.

Each group of layers has its own branch of the prefix tree (`root_of_group`), so that a node has one
block. A prompt can go on from a length at which every group has what it needs: one that keeps all,
all blocks before it; one with a window, those of the last window. What lies behind may be gone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from octavo.kv.lookup import PrefixIndex, is_near
from octavo.kv.needs import BlockNeeds, num_behind
from octavo.kv.node import Node, Root, RootName, block_key
from octavo.kv.policy import SeqDemand
from octavo.kv.tree import whole_blocks


class GroupMatch(NamedTuple):
    """What of a prompt all groups have."""

    root: Root | None
    """Of the group for which no more is found, as are the next two."""
    path: list[Node]
    """Nodes of all whole blocks that are found, those included that hold nothing."""
    behind: Node | None
    """One that holds nothing, within the window before the next block: that one is of no use."""
    limit: int
    """Most tokens that may be found."""
    num_blocks: int
    """Whole blocks that are found."""
    num_partial: int
    """Tokens that are found of the next block."""
    chains: list[list[Node]]
    """By group the nodes of the prompt's whole blocks, as far as the tree has them."""
    partials: list[Node]
    """By group a node that begins like the next block; empty where `num_partial` is 0."""
    num_tokens: int = 0
    """That are found in all."""

    def needed(self, windows: Sequence[int], block_size: int) -> list[Node]:
        """Nodes of whole blocks that it takes to go on from the end of the last of them."""
        num = self.num_blocks
        firsts = [num_behind(num * block_size, window, block_size) for window in windows]
        chains = zip(self.chains, firsts, strict=True)
        return [node for chain, first in chains for node in chain[first:num]]


def root_of_group(name: RootName, group: int) -> RootName:
    """The root of a further group, by the name of the first one's. Of (salt, request) one is always
    empty in that, and never here."""
    if not group:
        return name
    salt, request_id = name
    return (str(group), request_id) if request_id else (salt, str(group))


def match_groups(
    index: PrefixIndex,
    demand: SeqDemand,
    root_name: RootName,
    windows: Sequence[int],
    *,
    with_disk: bool = False,
) -> GroupMatch:
    """What could be found for a demand; changes nothing. What is on disk is only looked at if that
    is asked for, and then no more of it is found than the coming step may read."""
    limit, size, tokens = index.limit_of(demand), index.pool.block_size, demand.token_ids
    roots = [index.tree.roots.get(root_of_group(root_name, g)) for g in range(len(windows))]
    known = [root for root in roots if root is not None]
    if limit < 1 or len(known) < len(roots):
        missing = next((g for g, root in enumerate(roots) if root is None), 0)
        return GroupMatch(roots[missing], [], None, limit, 0, 0, [[] for _ in windows], [])
    chains = [index.chain_in_group(group, tokens, root, limit) for group, root in enumerate(known)]
    found = _Found(index, windows, chains, with_disk=with_disk)
    for num in range(min(map(len, chains)), -1, -1):
        start, most = num * size, min(limit - num * size, size)
        if found.missing(num, start + most) is not None or not found.may_fetch(num):
            continue
        parents = [
            chain[num - 1] if num else root for chain, root in zip(chains, known, strict=True)
        ]
        partials, num_partial = found.partials(parents, num, block_key(tokens, start, start + most))
        if found.missing(num, start + num_partial) is None:
            group = found.limiting(num)
            return GroupMatch(
                known[group], chains[group][:num], found.lost(group, num), limit, num, num_partial,
                chains, partials, start + num_partial,
            )  # fmt: skip
    raise AssertionError("nothing is always found")


class _Found:
    """Where the blocks of a prompt are, by group."""

    def __init__(
        self,
        index: PrefixIndex,
        windows: Sequence[int],
        chains: list[list[Node]],
        *,
        with_disk: bool = False,
    ) -> None:
        self._index, self._size = index, index.pool.block_size
        self._windows, self._chains = windows, chains
        has = index.has if with_disk else is_near
        self._is_there = [[has(node) for node in chain] for chain in chains]
        self._runs = [_runs(is_there) for is_there in self._is_there]
        self._num_far: list[list[int]] | None = None
        """By group, [len + 1]: of the blocks before each those that must be read from disk."""
        self._most_far = 0
        if with_disk and index.cold is not None:
            far = ((not is_near(node) for node in chain) for chain in chains)
            self._num_far = [list(accumulate(of_group, initial=0)) for of_group in far]
            self._most_far = index.cold.num_left()

    def missing(self, num: int, num_tokens: int) -> int | None:
        """A group that has not all of the `num` first blocks that it needs to go on from
        `num_tokens`; None: all have."""
        return _missing(self._runs, self._windows, num, num_tokens, self._size)

    def may_fetch(self, num: int, partials: Sequence[Node] = ()) -> bool:
        """Whether all that is missing in the pool and on the host to go on from the first `num`
        blocks may be read while this step is planned."""
        if self._num_far is None:
            return True
        num_far = sum(not is_near(node) for node in partials)
        for window, of_group in zip(self._windows, self._num_far, strict=True):
            first = num_behind(num * self._size, window, self._size)
            num_far += of_group[num] - of_group[first]
        return num_far <= self._most_far

    def partials(self, parents: list[Node], num: int, key: bytes) -> tuple[list[Node], int]:
        """(By group a node that begins most like block `num`, tokens that all of them have)."""
        if self._num_far is not None:
            nodes, num_tokens = self._partials(parents, key, with_disk=True)
            if self.may_fetch(num, nodes):
                return nodes, num_tokens
        return self._partials(parents, key, with_disk=False)

    def _partials(
        self, parents: list[Node], key: bytes, *, with_disk: bool
    ) -> tuple[list[Node], int]:
        nodes: list[Node] = []
        fewest = sys.maxsize
        for parent in parents:
            if not key or not parent.children:
                return [], 0
            node, num_tokens = self._index.longest(parent, key, with_disk=with_disk)
            if node is None:
                return [], 0
            nodes.append(node)
            fewest = min(fewest, num_tokens)
        return nodes, fewest

    def limiting(self, num: int) -> int:
        """The first group for which one block more is not found."""
        for group, chain in enumerate(self._chains):
            behind = num_behind((num + 1) * self._size, self._windows[group], self._size)
            if len(chain) == num or self._runs[group][num + 1] < num + 1 - behind:
                return group
        return 0

    def lost(self, group: int, num: int) -> Node | None:
        """Why a group's block `num`, which is there, is of no use: the last one before it that is
        not."""
        chain, is_there = self._chains[group], self._is_there[group]
        if num == len(chain) or not is_there[num]:
            return None
        return next((chain[i] for i in range(num - 1, -1, -1) if not is_there[i]), None)


def num_saved(index: PrefixIndex, demand: SeqDemand, root_name: RootName, needs: BlockNeeds) -> int:
    """Blocks of a demand's need (`BlockNeeds.blocks`) that it does not need: others have them, or
    it goes on behind them. Changes nothing."""
    match = match_groups(index, demand, root_name, needs.windows)
    counts, size = index.pool.ref_counts, index.pool.block_size
    runs = [_runs(map(is_near, chain)) for chain in match.chains]
    num_whole = match.num_blocks * size
    # The partial block is an offer: there may be no room to take it, and then it must do without.
    if (
        not num_whole
        or _missing(runs, needs.windows, match.num_blocks, num_whole, size) is not None
    ):
        return 0
    saved = 0
    for window, chain in zip(needs.windows, match.chains, strict=True):
        first = num_behind(num_whole, window, size)
        num_shared = sum(
            node.block_id >= 0 and counts[node.block_id] > 0
            for node in chain[first : match.num_blocks]
        )
        need = needs.of_window(window, demand.num_tokens)
        saved += need - min(need, -(-demand.num_tokens // size) - first - num_shared)
    return saved


def nodes_in_pool(
    index: PrefixIndex, token_ids: Sequence[int], root_name: RootName, windows: Sequence[int]
) -> tuple[int, list[Node]]:
    """(How many whole blocks of a prefix could be gone on from by what is in the pool alone, the
    nodes that this takes)."""
    size, chains = index.pool.block_size, []
    for group in range(len(windows)):
        root = index.tree.roots.get(root_of_group(root_name, group))
        nodes = () if root is None else whole_blocks(root, token_ids, 0, len(token_ids), size)
        chains.append(list(nodes))
    runs = [_runs([node.block_id >= 0 for node in chain]) for chain in chains]
    for num in range(min(map(len, chains)), 0, -1):
        if _missing(runs, windows, num, num * size, size) is None:
            behind = [num_behind(num * size, window, size) for window in windows]
            parts = zip(chains, behind, strict=True)
            return num, [node for chain, first in parts for node in chain[first:num]]
    return 0, []


def _runs(is_there: Iterable[bool]) -> list[int]:
    """[len + 1] how many blocks without a gap end before each."""
    runs = [0]
    for one in is_there:
        runs.append(runs[-1] + 1 if one else 0)
    return runs


def _missing(
    runs: list[list[int]], windows: Sequence[int], num: int, num_tokens: int, size: int
) -> int | None:
    """A group that has not all of the `num` first blocks that it needs to go on from `num_tokens`;
    None: all have."""
    for group, (run, window) in enumerate(zip(runs, windows, strict=True)):
        if run[num] < num - num_behind(num_tokens, window, size):
            return group
    return None
