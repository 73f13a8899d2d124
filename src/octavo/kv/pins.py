"""Pinned prefixes: blocks that stay in the pool though no sequence references them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from octavo.errors import CapacityError, InvalidRequestError
from octavo.kv.cache import PrefixCache
from octavo.kv.node import Node, block_key

_MOST = 0.5
"""Share of the pool that pins may take."""


class Pin(NamedTuple):
    """A prefix that stays in the pool until `unpin`."""

    pin_id: int
    num_tokens: int
    """How many of its tokens are pinned: whole blocks that were in the pool."""
    num_blocks: int


class Pins:
    """References on the blocks of prefixes."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.blocks: dict[int, list[int]] = {}
        """By pin."""
        self.counts: Counter[int] = Counter()
        """By block: pins that hold it."""
        self._next_id = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that are pinned, each counted once."""
        return len(self.counts)

    @property
    def num_unused_blocks(self) -> int:
        """Blocks that only pins reference."""
        counts = self._cache.pool.ref_counts
        return sum(counts[block_id] == num for block_id, num in self.counts.items())

    def pin(self, token_ids: Sequence[int], salt: str) -> Pin:
        """Pin the whole blocks of a prefix, as far as they are in the pool now."""
        cache, pool = self._cache, self._cache.pool
        size = pool.block_size
        node: Node | None = cache.tree.roots.get((salt, "")) if cache.enabled else None
        block_ids: list[int] = []
        while node is not None and (len(block_ids) + 1) * size <= len(token_ids):
            start = len(block_ids) * size
            node = node.children.get(block_key(token_ids, start, start + size))
            if node is None or node.block_id < 0:
                break
            block_ids.append(node.block_id)
        num_new = sum(block_id not in self.counts for block_id in block_ids)
        most = int(pool.num_blocks * _MOST)
        if self.num_blocks + num_new > most:
            raise CapacityError(
                f"pinning {len(block_ids)} blocks takes {num_new} more than the {self.num_blocks} "
                f"pinned already, {self.num_blocks + num_new} in all; pins may take {most}, half "
                f"of the KV pool's {pool.num_blocks:,} blocks of {size} tokens: unpin something, "
                "pin a shorter prefix, or raise --kv-cache-memory-bytes"
            )
        for block_id in block_ids:
            pool.acquire(block_id)
        self.counts.update(block_ids)
        pin = Pin(self._next_id, len(block_ids) * size, len(block_ids))
        self._next_id += 1
        self.blocks[pin.pin_id] = block_ids
        return pin

    def unpin(self, pin_id: int) -> None:
        """Let go of a pinned prefix; its blocks are cached."""
        block_ids = self.blocks.pop(pin_id, None)
        if block_ids is None:
            raise InvalidRequestError(
                f"pin_id {pin_id!r} is not pinned: it never was, or is unpinned already",
                parameter="pin_id",
            )
        for block_id in block_ids:
            if self.counts[block_id] == 1:
                del self.counts[block_id]
            else:
                self.counts[block_id] -= 1
        self._cache.pool.release(block_ids)

    def rename(self, moves: dict[int, int]) -> None:
        """Blocks have other ids, by the old one."""
        self.counts = Counter({moves.get(i, i): num for i, num in self.counts.items()})
        for pin_id, block_ids in self.blocks.items():
            self.blocks[pin_id] = [moves.get(i, i) for i in block_ids]
