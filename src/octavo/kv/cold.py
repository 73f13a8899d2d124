"""Blocks on disk as the prefix cache sees them: named by digests, which outlive the process."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from octavo.kv.node import Node, Root, RootName, block_key, tokens_of_key
from octavo.kv.tiers import PLANS_UNDER_WAY, ColdStore, DiskTier
from octavo.plan import BlockCopy, BlockLabel, CopyKind

if TYPE_CHECKING:
    from octavo.kv.cache import PrefixCache

_DIGEST_BYTES = 16


class ColdBlocks:
    """Takes blocks that the host has no room for, and finds again what an earlier process left.

    A block's digest is the hash of the one above it and its own tokens; a root's is the hash of
    the salt. Digests are only computed for what goes to disk or may be found there.
    """

    def __init__(self, cache: PrefixCache, store: ColdStore, max_blocks: int) -> None:
        self._cache = cache
        self.disk = DiskTier(store, max_blocks, cache.lost)

    def digest(self, node: Node) -> bytes:
        """The digest of a node, computed with those above it where they are not known yet."""
        todo: list[Node] = []
        at: Node | None = node
        while at is not None and at.digest is None:
            todo.append(at)
            at = at.parent
        for below in reversed(todo):
            if isinstance(below, Root):
                below.digest = _hash(below.name[0].encode())
            else:
                assert below.parent is not None and below.parent.digest is not None
                below.digest = _hash(below.parent.digest + below.key)
        assert node.digest is not None
        return node.digest

    def can_fetch(self, node: Node) -> bool:
        """Whether the node is on disk, and can have arrived there."""
        return self.disk.can_fetch(node, self._cache.plan)

    def fetch(self, node: Node) -> bool:
        """Read the node's block, if it is on disk, for a copy of the coming plan."""
        return self.can_fetch(node) and self.disk.fetch(node)

    def to_disk(self, node: Node) -> bool:
        """Copy the node's host block to disk, if it is a whole one, is not there yet, and there is
        room."""
        if node.disk_id >= 0 or node.num_tokens < self._cache.pool.block_size:
            return False
        assert node.parent is not None
        label = BlockLabel(self.digest(node), self.digest(node.parent), tokens_of_key(node.key))
        disk_id = self.disk.put(node, self._cache.plan)
        if disk_id is None:
            return False
        copy = BlockCopy(node.host_id, disk_id, CopyKind.TO_DISK, label)
        self._cache.pool.copies.append(copy)
        self._cache.stats.offloads_to_disk += 1
        return True

    def find_root(self, name: RootName) -> Root | None:
        """The root of a name that nobody has used yet, if the disk has something below it."""
        if not self.disk.orphans or _hash(name[0].encode()) not in self.disk.orphans:
            return None
        root = self._cache.tree.root(name)
        self.adopt_below(root)
        if not root.children:  # all were damaged
            del self._cache.tree.roots[name]
            return None
        return root

    def adopt_below(self, node: Node) -> None:
        """The tree has this node: what an earlier process left below it is found from now on."""
        if not self.disk.orphans:
            return
        tree, size = self._cache.tree, self._cache.pool.block_size
        todo = [node]
        while todo:
            parent = todo.pop()
            for disk_id, label in list(self.disk.orphans.get(self.digest(parent), {}).items()):
                key = block_key(label.token_ids, 0, len(label.token_ids))
                is_right = len(label.token_ids) == size and label.digest == _hash(
                    label.parent + key
                )
                child = parent.children.get(key) if is_right else None
                if not is_right or (child is not None and child.disk_id >= 0):
                    self.disk.delete(disk_id)
                    continue
                child = child or tree.add(parent, key)
                child.digest = label.digest
                self.disk.adopt(disk_id, child)
                tree.found(child)
                todo.append(child)

    def flush(self) -> int:
        """Copy to disk what is only in the pool or on the host, the most recently used last, as
        much as the disk keeps; returns the number of blocks. All earlier plans were executed."""
        cache = self._cache
        cache.step += 1
        cache.plan += PLANS_UNDER_WAY
        pool, size = cache.pool, cache.pool.block_size
        in_order = [*cache.host.cached(), *(pool.nodes[i] for i in pool.free_block_ids())]
        nodes = dict.fromkeys(
            node
            for node in in_order
            if node is not None and node.disk_id < 0 and node.num_tokens == size
        )
        num_left_out = max(0, len(nodes) - self.disk.max_blocks)
        for node in list(nodes)[:num_left_out]:
            if node.host_id >= 0:  # it would go to disk to make room for a later one
                cache.host.remove(node)
                cache.lost(node)
        num = 0
        for node in list(nodes)[num_left_out:]:
            if node.host_id < 0 and (node.block_id < 0 or not cache.to_host(node)):
                continue
            num += self.to_disk(node)
        return num


def _hash(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()
