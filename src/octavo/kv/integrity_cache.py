"""Proof that tree, blocks, host tier and disk tell the same story, beside `integrity.py`."""

from __future__ import annotations

from collections import Counter

from octavo.errors import IntegrityError
from octavo.kv.cache import PrefixCache
from octavo.kv.node import Node, Root
from octavo.kv.swap import Holds


def check_cache(cache: PrefixCache, holds: Holds) -> None:
    """Raise `IntegrityError` naming the node, what was expected and found."""
    pool = cache.pool
    num_in_pool = num_on_host = num_on_disk = num_ghosts = 0
    for node in cache.tree.walk():
        who = _name(node)
        _check_shape(node, who, pool.block_size)
        if node.block_id >= 0:
            num_in_pool += 1
            if pool.nodes[node.block_id] is not node:
                raise IntegrityError(f"{who} names block {node.block_id}, which is another's")
        if node.host_id >= 0:
            num_on_host += 1
            if cache.host.nodes[node.host_id] is not node:
                raise IntegrityError(f"{who} names host block {node.host_id}, which is another's")
        num_on_disk += node.disk_id >= 0
        if node.is_resident == (node.evicted_s is not None):
            raise IntegrityError(
                f"{who} has a block and yet is a ghost" if node.is_resident
                else f"{who} has no block and yet is no ghost"
            )  # fmt: skip
        num_ghosts += node.evicted_s is not None
    for root in cache.tree.roots.values():
        if not root.children:
            raise IntegrityError(f"root {root.name} has no nodes")
        _check_order(root, f"root {root.name}")
    if num_ghosts != cache.tree.num_ghosts:
        raise IntegrityError(f"the tree counts {cache.tree.num_ghosts} ghosts, found {num_ghosts}")
    _check_blocks(cache, num_in_pool)
    cache.host.check_integrity()
    if num_on_host != cache.host.num_blocks - cache.host.num_free:
        raise IntegrityError(
            f"{num_on_host} nodes are on the host, where "
            f"{cache.host.num_blocks - cache.host.num_free} blocks are used"
        )
    if cache.cold is not None:
        cache.cold.disk.check_integrity(num_on_disk)
    _check_holds(cache, holds)


def _check_shape(node: Node, who: str, block_size: int) -> None:
    if not 1 <= node.num_tokens <= block_size:
        raise IntegrityError(f"{who} has {node.num_tokens} tokens in a block of {block_size}")
    if node.num_tokens < block_size and node.children:
        raise IntegrityError(f"{who} is not a whole block, and yet has children")
    _check_order(node, who)
    if node.parent is None or node.parent.children.get(node.key) is not node:
        raise IntegrityError(f"{who} is no child of its parent")


def _check_order(node: Node, who: str) -> None:
    if len(node.children) > 1 and node.keys != sorted(node.children):
        raise IntegrityError(f"the children of {who} are not in order")


def _check_blocks(cache: PrefixCache, num_in_pool: int) -> None:
    pool = cache.pool
    counts = pool.ref_counts
    num_cached = 0
    for block_id, node in enumerate(pool.nodes):
        if node is None:
            continue
        if node.block_id != block_id:
            raise IntegrityError(f"block {block_id} has {_name(node)}, which names another block")
        num_in_pool -= 1
        num_cached += not counts[block_id]
        if not counts[block_id] and not cache.enabled:
            raise IntegrityError(f"block {block_id} is cached, and the prefix cache is off")
    if num_in_pool:
        raise IntegrityError(f"{num_in_pool:+} nodes in the pool are not in the tree")
    if num_cached != pool.num_cached:
        raise IntegrityError(f"the pool counts {pool.num_cached} cached blocks, found {num_cached}")


def _check_holds(cache: PrefixCache, holds: Holds) -> None:
    expected = Counter(node for nodes in holds.nodes.values() for node in nodes)
    in_tree = {node: node.num_holds for node in cache.tree.walk() if node.num_holds}
    for node in expected.keys() | in_tree.keys():
        if node.num_holds != expected[node]:
            raise IntegrityError(
                f"{_name(node)} counts {node.num_holds} holds, expected {expected[node]}"
            )


def _name(node: Node) -> str:
    depth, at = 0, node
    while at.parent is not None:
        depth, at = depth + 1, at.parent
    under = at.name if isinstance(at, Root) else "nothing"
    return f"the node of {node.num_tokens} tokens at depth {depth} under {under!r}"
