"""Blocks on disk as the prefix cache sees them: named by digests, which outlive the process."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING

from octavo.kv.node import TOKEN_BYTES, Node, Root, RootName, block_key, tokens_of_key
from octavo.kv.tiers import ColdStore, DiskTier
from octavo.plan import PLANS_UNDER_WAY, BlockCopy, BlockLabel, CopyKind

if TYPE_CHECKING:
    from octavo.kv.cache import PrefixCache

MAX_FETCH_BYTES = 64 << 20
"""Read from disk while one step is planned, at most: everybody waits for it, about 0.1 s with the
verification. What more was found is computed, as if it were not there."""
_MAX_ADOPTED = 64
"""Blocks that are taken into the tree because a prompt may begin like them, at most at a time."""
_DIGEST_BYTES = 16


class ColdBlocks:
    """Takes blocks that the host has no room for, and finds again what an earlier process left.

    A block's digest is the hash of the one above it and its own tokens; a root's is the hash of
    the salt, in a domain of its own for each group of layers: no salt has the digest of a block.
    Digests are only computed for what goes to disk or may be found there.
    """

    def __init__(
        self, cache: PrefixCache, store: ColdStore, max_blocks: int, bytes_per_block: int
    ) -> None:
        self._cache = cache
        self.disk = DiskTier(store, max_blocks, cache.lost, self._is_right)
        self._most_fetched = max(1, MAX_FETCH_BYTES // max(1, bytes_per_block))
        self._num_fetched = 0
        self._fetched_in_step = -1

    def digest(self, node: Node) -> bytes:
        """The digest of a node, computed with those above it where they are not known yet."""
        todo: list[Node] = []
        at: Node | None = node
        while at is not None and at.digest is None:
            todo.append(at)
            at = at.parent
        for below in reversed(todo):
            if isinstance(below, Root):
                below.digest = root_digest(*below.name)
            else:
                assert below.parent is not None and below.parent.digest is not None
                below.digest = block_digest(below.parent.digest, below.key)
        assert node.digest is not None
        return node.digest

    def can_fetch(self, node: Node) -> bool:
        """Whether the node is on disk, and can have arrived there."""
        return self.disk.can_fetch(node, self._cache.plan)

    def num_left(self) -> int:
        """How many more blocks may be read while this step is planned."""
        if self._fetched_in_step != self._cache.step:
            self._fetched_in_step, self._num_fetched = self._cache.step, 0
        return self._most_fetched - self._num_fetched

    def fetch(self, node: Node) -> bool:
        """Read the node's block, if it is on disk, for a copy of the coming plan."""
        if not self.num_left() or not self.can_fetch(node):
            return False
        self._num_fetched += 1
        return self.disk.fetch(node)

    def to_disk(self, node: Node) -> bool:
        """Copy the node's host block to disk, if it is a whole one, is not there yet, and there is
        room."""
        if node.num_tokens < self._cache.pool.block_size:
            return False
        assert node.parent is not None
        self._adopt(node.parent, node.key)
        if node.disk_id >= 0:
            return False
        label = BlockLabel(self.digest(node), self.digest(node.parent), tokens_of_key(node.key))
        disk_id = self.disk.put(node, self._cache.plan)
        if disk_id is None:
            return False
        copy = BlockCopy(node.host_id, disk_id, CopyKind.TO_DISK, label)
        self._cache.pool.copies.append(copy)
        self._cache.stats.offloads_to_disk += 1
        return True

    def adopt_path(self, name: RootName, token_ids: Sequence[int], limit: int) -> None:
        """Take in what an earlier process left of a prompt's whole blocks, whatever lies between:
        of layers with a window the first ones may be gone. Those become ghosts.

        So many hashes as the prompt has blocks, where there are orphans at all.
        """
        orphans, cache = self.disk.orphans, self._cache
        size, tree = cache.pool.block_size, cache.tree
        digest, num_path = root_digest(*name), 0
        path: list[tuple[bytes, bytes]] = []
        for start in range(0, limit - size + 1, size) if orphans else ():
            key = block_key(token_ids, start, start + size)
            is_there = key in orphans.get(digest, ())
            digest = block_digest(digest, key)
            path.append((key, digest))
            num_path = len(path) if is_there else num_path
        node: Node | None = tree.root(name) if num_path else None
        gaps: list[Node] = []
        for key, digest in path[:num_path]:
            assert node is not None
            if not self._adopt(node, key) and key not in node.children:
                gaps.append(tree.add(node, key))
            node = node.children[key]
            node.digest = digest
        for node in gaps:  # now that they have children they stay
            tree.lost(node, size, cache.now_s)

    def adopt_alike(self, node: Node, key: bytes) -> None:
        """Take in a bounded number of blocks below a node that may begin like `key`."""
        # A file is not read for less than half a block.
        half = -(-self._cache.pool.block_size // 2) * TOKEN_BYTES
        if len(key) >= half:
            siblings = self.disk.orphans.get(self.digest(node), ())
            alike = (other for other in siblings if other.startswith(key[:half]))
            for other in list(islice(alike, _MAX_ADOPTED)):
                self._adopt(node, other)

    def has_below(self, salt: str) -> bool:
        """Whether an earlier process left prefixes of that salt which nobody has looked for yet."""
        return bool(self.disk.orphans) and root_digest(salt) in self.disk.orphans

    def adopt_next(self, node: Node, token_ids: Sequence[int], start: int, limit: int) -> bool:
        """The tree ends at `node`, and tokens `start .. limit - 1` are looked for below it: take in
        what an earlier process left there. Whether the next whole block is among it.

        Only the path goes on. Where it ends, children that may begin like what follows are taken
        in too, a bounded number.
        """
        orphans, size = self.disk.orphans, self._cache.pool.block_size
        if not orphans or start >= limit:
            return False
        key = block_key(token_ids, start, min(start + size, limit))
        if start + size <= limit and self._adopt(node, key):
            return True
        self.adopt_alike(node, key)
        return False

    def _adopt(self, parent: Node, key: bytes) -> bool:
        """Give a block of an earlier process to its node, which is made if need be."""
        orphans, tree = self.disk.orphans, self._cache.tree
        disk_id = orphans.get(self.digest(parent), {}).get(key) if orphans else None
        if disk_id is None:
            return False
        child = parent.children.get(key)
        if child is not None and child.disk_id >= 0:
            self.disk.delete(disk_id)  # it was written again before anybody looked for it
            return False
        child = child or tree.add(parent, key)
        self.disk.adopt(disk_id, child)
        tree.found(child)
        return True

    def _is_right(self, label: BlockLabel, key: bytes) -> bool:
        """Whether a label belongs to a whole block, and says the same with its digest as with its
        tokens."""
        is_whole = len(label.token_ids) == self._cache.pool.block_size
        return is_whole and label.digest == block_digest(label.parent, key)

    def flush(self) -> int:
        """Copy to disk what is only in the pool or on the host, the most recently used last, as
        much as the disk keeps; returns the number of blocks. All earlier plans were executed."""
        cache = self._cache
        cache.step += 1
        cache.plan += PLANS_UNDER_WAY
        pool, size = cache.pool, cache.pool.block_size
        in_order: list[Node | None] = [
            *cache.host.cached(),
            *(pool.nodes[i] for i in pool.free_block_ids()),
        ]
        for node in in_order:
            if node is not None and node.parent is not None:
                self._adopt(node.parent, node.key)
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


def root_digest(salt: str, group: str = "") -> bytes:
    """Stands for a root: the salt, and the number of a further group of layers, as in its name."""
    # A salt may come as JSON, with halves of surrogate pairs.
    content = salt.encode("utf-8", "surrogatepass")
    person = b"salt" + group.encode()
    return blake2b(content, digest_size=_DIGEST_BYTES, person=person).digest()


def block_digest(parent: bytes, key: bytes) -> bytes:
    """Stands for a block: the digest above it and its own tokens."""
    return blake2b(parent + key, digest_size=_DIGEST_BYTES, person=b"block").digest()
