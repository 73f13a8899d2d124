"""The prefix cache: what blocks hold, who finds them again, and where they go when evicted."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from octavo.kv.cold import ColdBlocks
from octavo.kv.group_lookup import GroupMatch
from octavo.kv.lookup import NOBODY_ASKED, Match, PrefixIndex
from octavo.kv.misses import MissExplainer, not_asked
from octavo.kv.needs import BlockNeeds
from octavo.kv.node import NOWHERE, Node, RootName, block_key
from octavo.kv.pool import BlockPool
from octavo.kv.stats import PrefixCacheStats
from octavo.kv.table import BlockTable
from octavo.kv.take import find_in_groups, prefer, take
from octavo.kv.tiers import ColdStore
from octavo.kv.tree import neighbours
from octavo.plan import BlockCopy, CopyKind

_MAX_GHOST_TOKENS = 2**20


class PrefixCache(PrefixIndex):
    """Keeps the tree of what is in the pool and the tiers behind it.

    `enabled=False` is a cache of nothing but what running and preempted sequences hold: each
    request has a root of its own, and no block stays that nobody waits for.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        enabled: bool,
        num_host_blocks: int,
        disk: ColdStore | None,
        max_disk_blocks: int,
        bytes_per_block: int,
        needs: BlockNeeds | None = None,
    ) -> None:
        super().__init__(pool, enabled=enabled, num_host_blocks=num_host_blocks)
        self.needs = needs
        """Where layers are in several groups, or have windows."""
        pool.keeps_cached = enabled
        pool.evict = self.evict
        self.tree.max_ghosts = self._num_ghosts_kept()
        self.stats = PrefixCacheStats()
        self.now_s = 0.0
        if disk is not None:
            self.cold = ColdBlocks(self, disk, max_disk_blocks, bytes_per_block)

    def _num_ghosts_kept(self) -> int:
        if not self.enabled:
            return 0
        return min(4 * self.pool.num_blocks, max(64, _MAX_GHOST_TOKENS // self.pool.block_size))

    def pool_was_resized(self) -> None:
        """The number of ghosts follows the pool."""
        self.tree.max_ghosts = self._num_ghosts_kept()
        self.tree.trim()

    # -- what is found

    def open(self, table: BlockTable) -> None:
        """Give a new sequence what is found for it, and set its `num_committed`.

        Found by the first sequence of a request: the work of others. By one that was preempted: its
        own. By a further one that starts from the beginning: its siblings', as if it had forked.
        """
        demand, account = table.demand, table.account
        if not demand.token_ids:
            return
        if self.ignores(demand):
            if not account.has_started:
                account.misses = not_asked(demand, self.pool.block_size)
                self.stats.count_misses(account.misses)
                account.has_started = True
            return
        is_first = not account.has_started and not demand.resumed
        match: Match | GroupMatch
        if self.needs is None:
            match = self.match(demand, table.root_name)
            self._asked = NOBODY_ASKED
            behind, num_found = None, take(self, table, match)
        else:
            match, num_found = find_in_groups(self, table, self.needs.windows)
            self._asked_groups.clear()
            behind = match.behind
        if is_first:
            account.cached_tokens = num_found
            if self.enabled:
                self.stats.queries += 1
                self.stats.query_tokens += demand.num_tokens
                self.stats.hit_tokens += num_found
                explainer = MissExplainer(self.tree, demand, self.pool.block_size, self.now_s)
                num_full = table.num_registered
                account.misses = explainer.explain(
                    match.root, match.path[:num_full], num_found, match.limit, behind
                )
            else:
                account.misses = not_asked(demand, self.pool.block_size)
            self.stats.count_misses(account.misses)
        elif demand.resumed:
            account.resumed_tokens += num_found
            self.stats.resumed_tokens += num_found
        else:
            account.forked_tokens += num_found
            self.stats.forked_tokens += num_found
        account.has_started = True

    def protect(self, node: Node) -> None:
        """What makes room for one block must not evict another one that is needed."""
        if node.block_id >= 0:
            self.pool.acquire(node.block_id)
        else:
            self.host.hold(node)

    def unprotect(self, nodes: Sequence[Node]) -> None:
        """The other way, also of those that were brought in."""
        for node in reversed(nodes):
            if node.block_id >= 0:
                self.pool.release((node.block_id,))
            else:
                self.unhold(node)

    def bring_in(self, node: Node) -> bool:
        """Promote a protected node from a tier to a block of the pool, with one owner. Its host
        block stays: should the pool evict it, nothing is copied."""
        block_id = self._copy_in(node)
        if block_id is None:
            return False
        self._settle_in(node, block_id)
        self.unhold(node)
        return True

    def _copy_in(self, node: Node) -> int | None:
        """A new block of the pool with a copy of what a tier holds; None: no room, or damaged."""
        if not self.pool.num_free or (node.host_id < 0 and not self._may_fetch()):
            return None
        self.host.hold(node)  # what is evicted for it must not take its place on the host
        (block_id,) = self.pool.allocate(1)
        self.host.unhold(node)
        if node.host_id >= 0:
            copy = BlockCopy(node.host_id, block_id, CopyKind.FROM_HOST)
            self.stats.promotions_from_host += 1
        elif self.cold is not None and self.cold.fetch(node):
            copy = BlockCopy(node.disk_id, block_id, CopyKind.FROM_DISK)
            self.stats.promotions_from_disk += 1
        else:
            self.pool.release((block_id,))
            return None
        self.pool.copies.append(copy)
        return block_id

    def _may_fetch(self) -> bool:
        return self.cold is not None and self.cold.num_left() > 0

    def take_part(self, node: Node, num_tokens: int) -> int | None:
        """A block that begins with the first tokens of a node and may be written behind them."""
        pool = self.pool
        block_id = node.block_id
        if block_id < 0:
            return self._take_part_from_tier(node, num_tokens)
        if pool.ref_counts[block_id]:
            if not pool.num_free:
                return None
            (own_id,) = pool.allocate(1)
            pool.copies.append(BlockCopy(block_id, own_id))
            return own_id
        pool.acquire(block_id)
        if num_tokens == node.num_tokens:
            return block_id
        if not pool.num_free:  # the last block: it cannot be kept
            self.evict(block_id)
            return block_id
        (own_id,) = pool.allocate(1)
        pool.copies.append(BlockCopy(block_id, own_id))
        pool.release((block_id,))
        return own_id

    def _take_part_from_tier(self, node: Node, num_tokens: int) -> int | None:
        block_id = self._copy_in(node)
        if block_id is None:
            return None
        if num_tokens == node.num_tokens:
            self._settle_in(node, block_id)  # exactly its tokens: others may find them here too
        return block_id

    # -- what is registered

    def register(self, table: BlockTable) -> None:
        """The sequence has filled blocks since the last call: others may find them from now on."""
        for part in table.parts():
            self._register(part)
        if any(part.next_register == sys.maxsize for part in table.others):
            self.stop_registering(table)  # what one group lacks, nobody can go on from
        table.align()

    def _register(self, table: BlockTable) -> None:
        size, tokens = self.pool.block_size, table.token_ids
        node, index = table.last_node, table.num_registered
        while (end := (index + 1) * size) <= table.num_committed:
            if node is not None and node.parent is None:
                self.stop_registering(table)  # its node was forgotten: there is no way to it
                return
            if len(tokens) < end:
                break
            if index < table.num_dropped:
                self.stop_registering(table)
                return
            key = block_key(tokens, end - size, end)
            known = None if node is None else node.children.get(key)
            node = known or self._child(node, table.root_name, key)
            if node.block_id < 0:
                self.assign(node, table.block_ids[index])
            elif self.needs is not None:
                prefer(self, node, table.block_ids[index])
            index += 1
        table.last_node, table.num_registered = node, index
        table.next_register = (index + 1) * size
        table.exclusive_from = max(table.exclusive_from, index * size)

    def stop_registering(self, table: BlockTable) -> None:
        """Nothing more of the sequence will be found from now on."""
        for part in table.parts():
            part.last_node, part.num_registered = None, 0
            part.next_register = sys.maxsize

    def register_tail(
        self, table: BlockTable, *, or_shared: bool = False, is_old: bool = False
    ) -> Node | None:
        """The sequence gives its blocks up: its last, partial block gets a node; None if it
        cannot or need not have one. A block that others go on writing (`or_shared`) may have one
        too: they write behind its tokens. `is_old` says that it has not grown in the step that is
        being planned: what it holds may be copied in that step. Else nobody knows, and it is found
        from the next step on."""
        num_full, num_tail = divmod(table.num_committed, self.pool.block_size)
        parent, end = table.last_node, table.num_committed
        if not num_tail or num_full != table.num_registered or len(table.token_ids) < end:
            return None
        if table.next_register == sys.maxsize or (parent is not None and parent.parent is None):
            return None
        block_id = table.block_ids[num_full]
        if self.pool.ref_counts[block_id] > 1 and not or_shared:
            return None
        key = block_key(table.token_ids, end - num_tail, end)
        known = self.pool.nodes[block_id]
        if known is not None and known.num_tokens >= num_tail:
            return known if known.key == key else None
        above = parent or self.tree.roots.get(table.root_name)
        if above is not None:
            for other, num in next(neighbours(above, key)):
                if num == num_tail and other.block_id >= 0:  # it has all that this one would
                    return other if other.key == key else None
        node = self._child(parent, table.root_name, key)
        self.assign(node, block_id)
        node.step -= is_old
        return node

    def _child(self, parent: Node | None, root_name: RootName, key: bytes) -> Node:
        """The node of a block; the caller gives it one if it has none."""
        if parent is None:
            parent = self.tree.root(root_name)
        return parent.children.get(key) or self.tree.add(parent, key)

    def assign(self, node: Node, block_id: int) -> None:
        """A block that somebody owns holds what the node says, once this step has run."""
        before = self.pool.nodes[block_id]
        node.step = self.step
        self._settle_in(node, block_id)
        if before is not None:  # the beginning of the same
            before.block_id = NOWHERE
            self.lost(before)

    def _settle_in(self, node: Node, block_id: int) -> None:
        node.block_id = block_id
        self.pool.nodes[block_id] = node
        self.tree.found(node)

    def forked(self, parent: BlockTable, child: BlockTable) -> None:
        """A child has begun with all that its parent has committed."""
        for of_parent, of_child in zip(parent.parts(), child.parts(), strict=True):
            of_child.root_name = of_parent.root_name
            of_child.last_node = of_parent.last_node
            of_child.num_registered = of_parent.num_registered
            if child.token_ids:
                of_child.next_register = of_parent.next_register
        child.account.forked_tokens += child.num_committed
        self.stats.forked_tokens += child.num_committed

    # -- what is lost

    def lost(self, node: Node) -> None:
        """A node lost a block somewhere."""
        self.tree.lost(node, self.pool.block_size, self.now_s)

    def evict(self, block_id: int) -> None:
        """Take the node from a block of the pool; it moves to the host if it is worth it."""
        node = self.pool.nodes[block_id]
        assert node is not None
        if node.host_id >= 0:
            self.host.touch(node)
        elif (self.enabled or node.num_holds) and node.step < self.step and self.to_host(node):
            self.stats.offloads_to_host += 1
        self.stats.evictions += self.enabled
        self.unregister(node)

    def unregister(self, node: Node) -> None:
        """Take the node from its block of the pool."""
        self.pool.nodes[node.block_id] = None
        node.block_id = NOWHERE
        self.lost(node)

    def to_host(self, node: Node) -> bool:
        """Copy the node's block of the pool to the host; False: every block there is waited for."""
        host = self.host
        if not host.num_free:
            oldest = host.oldest()
            if oldest is None:
                return False
            self.leave_host(oldest)
        host_id = host.put(node)
        self.pool.copies.append(BlockCopy(node.block_id, host_id, CopyKind.TO_HOST))
        return True

    def leave_host(self, node: Node) -> None:
        """Use the node's host block for something else: it moves to disk if nothing else has it."""
        if self.cold is not None and node.block_id < 0:
            self.cold.to_disk(node)
        self.host.remove(node)
        self.lost(node)

    def unhold(self, node: Node) -> None:
        """One fewer waits for the node. If it is in the pool too, its host block is the first to
        be used again; without the cache it goes at once when nobody waits."""
        self.host.unhold(node)
        if node.num_holds or node.host_id < 0:
            return
        if not self.enabled:
            self.host.remove(node)
            self.lost(node)
        elif node.block_id >= 0:
            self.host.touch(node, last=False)

    def drop_unused(self) -> int:
        """Forget what nobody references or waits for, in all tiers; returns the pool's share."""
        num_cached = self.pool.num_cached
        for block_id in self.pool.free_block_ids():
            node = self.pool.nodes[block_id]
            if node is not None:
                self.unregister(node)
                self.pool.make_free(block_id)
        for node in self.host.cached():
            self.host.remove(node)
            self.lost(node)
        if self.cold is not None:
            self.cold.disk.delete_all()
        return num_cached

    def drop_all(self, num_plans: int) -> None:
        """Forget what is in the pool and on the host, and what was on its way to disk in the last
        so many plans."""
        self.pool.copies.clear()
        for block_id, node in enumerate(list(self.pool.nodes)):
            if node is not None:
                self.unregister(node)
                if not self.pool.ref_counts[block_id]:
                    self.pool.make_free(block_id)
        for node in list(self.host.nodes):
            if node is not None:
                self.host.remove(node)
                self.lost(node)
        if self.cold is not None:
            self.cold.disk.delete_since(self.plan - num_plans)
