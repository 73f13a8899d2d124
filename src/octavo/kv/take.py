"""Giving a new sequence what was found for it; where layers are in groups in all of them or none.

What makes room for one block must not push out another one that was found: all are protected
before the first is brought in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from octavo.kv.group_lookup import GroupMatch, match_groups, root_of_group
from octavo.kv.lookup import Match
from octavo.kv.needs import num_behind
from octavo.kv.node import Node, block_key
from octavo.kv.table import BlockTable

if TYPE_CHECKING:
    from octavo.kv.cache import PrefixCache
    from octavo.kv.cold import ColdBlocks


def take(cache: PrefixCache, table: BlockTable, match: Match) -> int:
    """Fill the empty table of a sequence with what was matched, as far as it can be brought in;
    returns how many tokens that is."""
    path = match.path
    partials = () if match.partial is None else (match.partial,)
    for node in (*path, *partials):
        cache.protect(node)
    num_taken = 0
    for node in path:
        if not _bring_in(cache, node):
            cache.unprotect(partials)  # there may be room in its place
            has_room, partials = bool(partials), ()
            if not (has_room and _bring_in(cache, node)):
                break
        num_taken += 1
    cache.unprotect(path[num_taken:])
    _fill(table, 0, path[:num_taken], path[num_taken - 1] if num_taken else None, num_taken)
    if partials and num_taken == len(path):
        _append(cache, (table,), _take_partials(cache, partials, match.num_partial), match)
    else:
        cache.unprotect(partials)
    return table.num_committed


def find_in_groups(
    cache: PrefixCache, table: BlockTable, windows: Sequence[int]
) -> tuple[GroupMatch, int]:
    """Look up a new sequence where layers are in groups, and fill its empty tables; returns what
    was found, and how many tokens of it were taken."""
    demand, name, cold = table.demand, table.root_name, cache.cold
    near = match_groups(cache, demand, name, windows)
    if cold is None:
        return near, take_groups(cache, table, near)
    _adopt_in_groups(cache, cold, table, windows)
    before = sys.maxsize
    while True:
        match = match_groups(cache, demand, name, windows, with_disk=True)
        if not near.num_tokens < match.num_tokens < before:  # the same again: there was no room
            return near, take_groups(cache, table, near)
        before = match.num_tokens
        # Blocks that cannot be read are no reason to lose what is near: admission counts on it.
        # Where each of them is now is noted, as some come from the host into the pool meanwhile.
        protected = near.needed(windows, cache.pool.block_size)
        in_pool = [node.block_id for node in protected if node.block_id >= 0]
        on_host = [node for node in protected if node.block_id < 0]
        for node in protected:
            cache.protect(node)
        num_taken = take_groups(cache, table, match)
        cache.pool.release(reversed(in_pool))
        for node in on_host:
            cache.unhold(node)
        if num_taken:
            return match, num_taken


def _adopt_in_groups(
    cache: PrefixCache, cold: ColdBlocks, table: BlockTable, windows: Sequence[int]
) -> None:
    """Take into the tree what an earlier process left on disk of a prompt."""
    if not cold.disk.orphans:
        return
    demand, size = table.demand, cache.pool.block_size
    limit = end = cache.limit_of(demand)
    for group, window in enumerate(windows):
        name = root_of_group(table.root_name, group)
        cold.adopt_path(name, demand.token_ids, end)
        root = cache.tree.roots.get(name)
        chain: list[Node] = []
        if root is not None:
            chain = cache.chain_in_group(group, demand.token_ids, root, limit)
        if not window:  # all its blocks are needed: behind the first that is missing is no more
            there = sum(1 for _ in takewhile(cache.has, chain))
            end = min(end, there * size)
        num = end // size
        if root is not None and len(chain) >= num:
            last = chain[num - 1] if num else root
            key = block_key(demand.token_ids, num * size, min((num + 1) * size, limit))
            cold.adopt_alike(last, key)


def take_groups(cache: PrefixCache, table: BlockTable, match: GroupMatch) -> int:
    """As `take`, for the tables of all groups of layers.

    Nothing is taken where a block that one group needs cannot be brought in: there is no room.
    """
    size, parts = cache.pool.block_size, table.parts()
    num_blocks, num_partial = match.num_blocks, match.num_partial
    firsts = [num_behind(num_blocks * size + num_partial, part.window, size) for part in parts]
    assert num_partial < size and max(firsts) <= num_blocks, f"{firsts} of {num_blocks} blocks"
    whole = [num_behind(num_blocks * size, part.window, size) for part in parts]
    needed = _between(match.chains, firsts, num_blocks)
    nodes = [node for of_group in needed for node in of_group]
    # To go on from the end of the whole blocks takes these besides; admission may count on it.
    spans = zip(match.chains, whole, firsts, strict=True)
    spare = [node for chain, first, end in spans for node in chain[first:end]]
    is_enough = all(map(cache.has, spare))
    if not is_enough:
        spare = []
    for node in (*nodes, *spare, *match.partials):
        cache.protect(node)
    is_there = all(_bring_in(cache, node) for node in nodes)
    partial_ids: list[int] = []
    if is_there:
        partial_ids = _take_partials(cache, match.partials, num_partial)
    else:
        cache.unprotect(match.partials)  # there may be room in their place
    if num_partial and not partial_ids:
        is_there = is_enough and all(_bring_in(cache, node) for node in (*nodes, *spare))
        firsts, needed = whole, _between(match.chains, whole, num_blocks)
        nodes, spare = [*nodes, *spare], []
    cache.unprotect(spare)
    if not is_there:
        cache.unprotect(nodes)
        num_blocks = 0
        firsts, needed = [0] * len(parts), [[] for _ in parts]
    for place, part in enumerate(parts):
        last = match.chains[place][num_blocks - 1] if num_blocks else None
        _fill(part, firsts[place], needed[place], last, num_blocks)
    _append(cache, parts, partial_ids, match)
    return table.num_committed


def prefer(cache: PrefixCache, node: Node, block_id: int) -> None:
    """What a block that somebody owns holds is also in another one, as is common where layers have
    windows. If nobody owns that, it is made free: it would be evicted, and the node with it, while
    a block that holds the same is in use."""
    known_id, pool = node.block_id, cache.pool
    if known_id != block_id and not pool.ref_counts[known_id]:
        pool.nodes[known_id] = None
        pool.make_free(known_id)
        cache.assign(node, block_id)


def _bring_in(cache: PrefixCache, node: Node) -> bool:
    """Whether a protected node is in the pool now."""
    return node.block_id >= 0 or cache.bring_in(node)


def _between(chains: list[list[Node]], firsts: list[int], end: int) -> list[list[Node]]:
    """Of each group's nodes those from its first one to the last whole block that was found."""
    return [chain[first:end] for chain, first in zip(chains, firsts, strict=True)]


def _fill(
    table: BlockTable, first: int, nodes: list[Node], last: Node | None, num_blocks: int
) -> None:
    table.skip(first)
    table.append([node.block_id for node in nodes])
    table.num_registered, table.last_node = num_blocks, last
    table.num_committed = num_blocks * table.block_size
    table.next_register = table.num_committed + table.block_size


def _append(
    cache: PrefixCache,
    parts: Iterable[BlockTable],
    partial_ids: list[int],
    match: Match | GroupMatch,
) -> None:
    """The blocks of the partial tokens, if there are any."""
    if not partial_ids:
        return
    for part, block_id in zip(parts, partial_ids, strict=True):
        part.append((block_id,))
        part.num_committed += match.num_partial
    cache.stats.partial_hits += 1
    cache.stats.partial_hit_tokens += match.num_partial


def _take_partials(cache: PrefixCache, partials: Iterable[Node], num_tokens: int) -> list[int]:
    """For each of these protected nodes a block that begins with so many of its tokens; empty if
    one gets none. They are protected no more."""
    block_ids: list[int] = []
    left = list(partials)
    while left:
        node = left.pop(0)
        cache.unprotect((node,))
        block_id = cache.take_part(node, num_tokens)
        if block_id is None:
            cache.pool.release(block_ids)
            cache.unprotect(left)
            return []
        block_ids.append(block_id)
    return block_ids
