"""Giving a new sequence what was found for it, in all groups of layers or in none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kv.group_lookup import GroupMatch
from octavo.kv.needs import num_behind
from octavo.kv.node import Node
from octavo.kv.table import BlockTable

if TYPE_CHECKING:
    from octavo.kv.cache import PrefixCache


def take_groups(cache: PrefixCache, table: BlockTable, match: GroupMatch) -> int:
    """Fill the empty tables of a sequence with what was matched; returns how many tokens that is.

    Nothing of it where a block that one group needs cannot be brought in: there is no room.
    """
    size, parts = cache.pool.block_size, table.parts()
    num_blocks, num_partial = match.num_blocks, match.num_partial
    firsts = [num_behind(num_blocks * size + num_partial, part.window, size) for part in parts]
    whole = [num_behind(num_blocks * size, part.window, size) for part in parts]
    needed = _between(match.chains, firsts, num_blocks)
    nodes = [node for of_group in needed for node in of_group]
    # To go on from the end of the whole blocks takes these besides; admission may count on it.
    spans = zip(match.chains, whole, firsts, strict=True)
    spare = [node for chain, first, end in spans for node in chain[first:end]]
    is_enough = all(node.block_id >= 0 or node.host_id >= 0 for node in spare)
    if not is_enough:
        spare = []
    for node in (*nodes, *spare):
        cache.protect(node)
    is_there = all(node.block_id >= 0 or cache.bring_in(node) for node in nodes)
    partial_ids = _take_partials(cache, match) if is_there and num_partial else []
    if num_partial and not partial_ids:
        num_partial = 0
        is_there &= is_enough and all(node.block_id >= 0 or cache.bring_in(node) for node in spare)
        firsts, needed = whole, _between(match.chains, whole, num_blocks)
        nodes, spare = [*nodes, *spare], []
    cache.unprotect(spare)
    if not is_there:
        cache.unprotect(nodes)
        num_blocks = num_partial = 0
        firsts, needed = [0] * len(parts), [[] for _ in parts]
    for place, part in enumerate(parts):
        last = match.chains[place][num_blocks - 1] if num_blocks else None
        _fill(part, firsts[place], needed[place], last, num_blocks)
        if num_partial:
            part.append((partial_ids[place],))
            part.num_committed += num_partial
    if num_partial:
        cache.stats.partial_hits += 1
        cache.stats.partial_hit_tokens += num_partial
    return table.num_committed


def _between(chains: list[list[Node]], firsts: list[int], end: int) -> list[list[Node]]:
    """Of each group's nodes those from its first one to the last whole block that was found."""
    return [chain[first:end] for chain, first in zip(chains, firsts, strict=True)]


def prefer(cache: PrefixCache, node: Node, block_id: int) -> None:
    """What a block that somebody owns holds is also in another one, as is common where layers have
    windows. If nobody owns that, it is made free: it would be evicted, and the node with it, while
    a block that holds the same is in use."""
    known_id, pool = node.block_id, cache.pool
    if known_id != block_id and not pool.ref_counts[known_id]:
        pool.nodes[known_id] = None
        pool.make_free(known_id)
        cache.assign(node, block_id)


def _fill(
    table: BlockTable, first: int, nodes: list[Node], last: Node | None, num_blocks: int
) -> None:
    table.skip(first)
    table.append([node.block_id for node in nodes])
    table.num_registered, table.last_node = num_blocks, last
    table.num_committed = num_blocks * table.block_size
    table.next_register = table.num_committed + table.block_size


def _take_partials(cache: PrefixCache, match: GroupMatch) -> list[int]:
    """By group a block that begins with the partial tokens; empty if one group gets none."""
    block_ids: list[int] = []
    for node in match.partials:
        block_id = cache.take_part(node, match.num_partial)
        if block_id is None:
            cache.pool.release(block_ids)
            return []
        block_ids.append(block_id)
    return block_ids
