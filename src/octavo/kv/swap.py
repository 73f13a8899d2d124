"""What waits for preempted sequences: swap is the host tier with holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from octavo.kv.cache import PrefixCache
from octavo.kv.node import Node, RootName
from octavo.kv.policy import RestoreCost, SeqDemand
from octavo.kv.table import BlockTable
from octavo.kv.tree import chain_to
from octavo.util import cdiv


class MovedOut(NamedTuple):
    """What became of a preempted sequence's token states."""

    tokens_moved: int
    tokens_lost: int
    block_ids: list[int]
    """Blocks of the pool whose content is on the host now."""


class Holds:
    """By preempted sequence: the nodes that are kept for it until it starts again or ends.

    A hold outlasts where a node is: one that others keep in the pool moves to the host when they
    are done with it, and stays there as long as somebody waits for it.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.nodes: dict[int, list[Node]] = {}
        self._relatives: dict[int, tuple[Sequence[int], RootName]] = {}
        """By preempted sequence where each request has its own root: its tokens and that root."""

    def note(self, table: BlockTable) -> None:
        """A sequence is preempted: it will look for its relatives' blocks when it comes back."""
        if not (self._cache.enabled or self._cache.ignores(table.demand)):
            self._relatives[table.seq_id] = (table.token_ids, table.root_name)

    def root_name_of(self, demand: SeqDemand) -> RootName:
        """Under which root a waiting sequence will look."""
        for token_ids, root_name in self._relatives.values():
            if token_ids is demand.token_ids:
                return root_name
        return self._cache.root_name(demand.salt, None)

    def close(self, request_id: str) -> None:
        """A request has ended."""
        for seq_id, (_, root_name) in list(self._relatives.items()):
            if root_name == ("", request_id):
                del self._relatives[seq_id]

    def move_out(self, table: BlockTable) -> MovedOut:
        """Hold all that a running sequence has, and move to the host what only it has, from its
        first block on, as far as there is room; of all groups. Its blocks are still to be
        released. Tokens that move are counted in the first group, those that are lost where most
        are."""
        held = [self._hold(part) for part in table.parts()]
        self.nodes[table.seq_id] = [node for nodes in held for node in nodes]
        (moved, lost, block_ids), *others = (
            self._move(part, nodes) for part, nodes in zip(table.parts(), held, strict=True)
        )
        for other in others:
            block_ids += other.block_ids
            lost = max(lost, other.tokens_lost)
        return MovedOut(moved, lost, block_ids)

    def _hold(self, table: BlockTable) -> list[Node]:
        """The nodes of its entries, as far as there are any; each is held from now on."""
        cache = self._cache
        tail = cache.register_tail(table, or_shared=True, is_old=True)
        last = table.last_node
        # A node without a parent was forgotten by the tree: nobody would find what it holds.
        nodes = []
        if last and last.parent:
            nodes = chain_to(last, table.num_registered - table.num_dropped)
        if tail is not None:
            nodes.append(tail)
        for node in nodes:
            cache.host.hold(node)
        return nodes

    def _move(self, table: BlockTable, nodes: list[Node]) -> MovedOut:
        cache = self._cache
        moved = lost = 0
        block_ids: list[int] = []
        for index, block_id, num_tokens in own_blocks(table, cache):
            place = index - table.num_dropped
            held = nodes[place] if place < len(nodes) else None
            if held is None or (held.block_id != block_id and not held.is_resident):
                lost += num_tokens
            elif held.block_id != block_id:
                pass  # an equal block is somewhere else
            elif held.host_id >= 0:
                block_ids.append(block_id)  # it is there already
            elif cache.to_host(held):
                block_ids.append(block_id)
                cache.stats.swapped_out += 1
                moved += num_tokens
            else:
                lost += num_tokens
        return MovedOut(moved, lost, block_ids)

    def drop(self, seq_id: int) -> None:
        """Nobody waits for the sequence's blocks any more; harmless if nobody did."""
        self._relatives.pop(seq_id, None)
        for node in reversed(self.nodes.pop(seq_id, ())):
            self._cache.unhold(node)

    def clear(self) -> None:
        """Forget all holds, without regard to where the nodes are."""
        for nodes in self.nodes.values():
            for node in nodes:
                node.num_holds = 0
        self.nodes.clear()


def own_blocks(table: BlockTable, cache: PrefixCache) -> list[tuple[int, int, int]]:
    """(index, block, token states) of the blocks with tokens that nobody else references; of one
    group."""
    counts, size = cache.pool.ref_counts, table.block_size
    found = []
    for index in range(table.num_dropped, cdiv(table.num_committed, size)):
        block_id = table.block_ids[index]
        if counts[block_id] == 1:
            found.append((index, block_id, min(size, table.num_committed - index * size)))
    return found


def restore_cost(tables: Sequence[BlockTable], cache: PrefixCache) -> RestoreCost:
    """Of sequences that are preempted together: blocks that nobody else references count once,
    with as many tokens as the fullest view of them has. Tokens are those of the first group, and
    those that it has given back: they would be computed again."""
    by_group = zip(*(table.parts() for table in tables), strict=True)
    costs = [_cost_of_group(of_group, cache) for of_group in by_group]
    num_gone = sum(table.num_dropped for table in tables) * cache.pool.block_size
    return RestoreCost(costs[0].num_tokens + num_gone, sum(cost.num_blocks for cost in costs))


def _cost_of_group(tables: Sequence[BlockTable], cache: PrefixCache) -> RestoreCost:
    if len(tables) == 1:
        own = own_blocks(tables[0], cache)
        return RestoreCost(sum(num for _, _, num in own), len(own))
    size = cache.pool.block_size
    owners: Counter[int] = Counter()
    filled: dict[int, int] = {}
    for table in tables:
        for index in range(table.num_dropped, cdiv(table.num_committed, size)):
            block_id = table.block_ids[index]
            owners[block_id] += 1
            num_tokens = min(size, table.num_committed - index * size)
            filled[block_id] = max(num_tokens, filled.get(block_id, 0))
    counts = cache.pool.ref_counts
    own_tokens = [filled[block_id] for block_id, num in owners.items() if num == counts[block_id]]
    return RestoreCost(sum(own_tokens), len(own_tokens))
