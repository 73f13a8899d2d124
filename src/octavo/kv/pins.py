"""Pinned prefixes: blocks that stay in the pool though no sequence references them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from octavo.errors import CapacityError, IntegrityError, InvalidRequestError
from octavo.kv.cache import PrefixCache
from octavo.kv.group_lookup import nodes_in_pool, root_of_group
from octavo.kv.node import Node
from octavo.kv.tree import whole_blocks

_MOST = 0.5
"""Share of the pool that pins may take."""


class Pin(NamedTuple):
    """A prefix that stays in the pool until `unpin`."""

    pin_id: int
    num_tokens: int
    """How many of its tokens are pinned: whole blocks that were in the pool."""
    num_blocks: int
    """Of all groups of layers; of those with a window, what the last token looks back at."""


class Pins:
    """References on the blocks of prefixes."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.blocks: dict[int, list[int]] = {}
        """By pin."""
        self.counts = cache.pool.pins
        """By block: pins that hold it."""
        self._next_id = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that are pinned, each counted once."""
        return len(self.counts)

    def check_fits(self, num_blocks: int) -> None:
        """Raise `CapacityError` if pins would have more than their share of so large a pool."""
        if self.num_blocks > int(num_blocks * _MOST):
            raise CapacityError(
                f"the KV pool cannot have {num_blocks:,} blocks: {self.num_blocks:,} are pinned, "
                f"and pins may take half, {int(num_blocks * _MOST):,}; unpin something "
                f"(unpin_prefix), or leave at least {2 * self.num_blocks:,}"
            )

    def num_in(self, token_ids: Sequence[int], salt: str) -> int:
        """Pinned blocks that a prompt finds. Its last token is never found."""
        cache, counts = self._cache, self.counts
        if not counts:
            return 0
        windows = (0,) if cache.needs is None else cache.needs.windows
        found = 0
        for group, window in enumerate(windows):
            root = cache.tree.roots.get(root_of_group((salt, ""), group))
            if root is not None and not window:  # a window moves on, away from what is pinned
                nodes = whole_blocks(root, token_ids, 0, len(token_ids) - 1, cache.pool.block_size)
                found += sum(1 for _ in takewhile(lambda node: node.block_id in counts, nodes))
        return found

    def pin(self, token_ids: Sequence[int], salt: str) -> Pin:
        """Pin the whole blocks of a prefix, as far as they are in the pool now."""
        cache, pool = self._cache, self._cache.pool
        size = pool.block_size
        windows = (0,) if cache.needs is None else cache.needs.windows
        num_whole, nodes = 0, list[Node]()
        if cache.enabled:
            num_whole, nodes = nodes_in_pool(cache, token_ids, (salt, ""), windows)
        block_ids = [node.block_id for node in nodes]
        num_new = sum(block_id not in self.counts for block_id in block_ids)
        most = int(pool.num_blocks * _MOST)
        if self.num_blocks + num_new > most:
            raise CapacityError(
                f"pinning {len(block_ids)} blocks takes {num_new} more than the {self.num_blocks} "
                f"pinned already, {self.num_blocks + num_new} in all; pins may take {most}, half "
                f"of the KV pool's {pool.num_blocks:,} blocks of {size} tokens: unpin something, "
                "pin a shorter prefix, or raise --kv-cache-memory-bytes"
            )
        pool.pin(block_ids)
        pin = Pin(self._next_id, num_whole * size, len(block_ids))
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
        self._cache.pool.unpin(block_ids)

    def let_go(self) -> None:
        """What the blocks hold is not known any more: every pin goes on with no blocks."""
        for pin_id, block_ids in self.blocks.items():
            self._cache.pool.unpin(block_ids)
            self.blocks[pin_id] = []

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the pool counts what the pins say."""
        pool = self._cache.pool
        pinned = Counter(block_id for block_ids in self.blocks.values() for block_id in block_ids)
        num_only = sum(pool.ref_counts[block_id] == num for block_id, num in pinned.items())
        if pinned != self.counts or num_only != pool.num_only_pinned:
            raise IntegrityError(
                f"the pool counts {len(self.counts)} pinned blocks, {pool.num_only_pinned} of them "
                f"without another owner, expected {len(pinned)} and {num_only}"
            )

    def rename(self, moves: dict[int, int]) -> None:
        """Blocks have other ids, by the old one."""
        for pin_id, block_ids in self.blocks.items():
            self.blocks[pin_id] = [moves.get(i, i) for i in block_ids]
