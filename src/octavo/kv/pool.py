"""The pool of physical blocks: reference counts, and the free ones in the order of their reuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from octavo.errors import IntegrityError
from octavo.kv.free_list import FreeList
from octavo.kv.node import Node
from octavo.plan import BlockCopy


class Journal:
    """Which blocks have changed, for somebody who watches the pool and takes them from here."""

    __slots__ = ("changed", "was_resized")

    def __init__(self) -> None:
        self.changed: set[int] = set()
        """Blocks that got or lost an owner, or a node while they had none."""
        self.was_resized = False
        """Whether blocks may have other ids since."""


class BlockPool:
    """Blocks `0 .. num_blocks - 1` of `block_size` slots each.

    A block is exactly one of (invariant I1): free (count 0, in the free list), cached (the same,
    and with a node of the prefix tree, whose KV it holds), or referenced (count = table entries
    and pins that point at it). Free and cached blocks can be allocated, in the order of the free
    list: blocks without a node first, then cached ones, the least recently used first. Refusals
    are `IntegrityError`s that name the block.
    """

    __slots__ = (
        "_free", "_ref_counts", "block_size", "copies", "evict", "journal", "keeps_cached", "nodes",
        "num_blocks", "num_cached", "num_only_pinned", "pins",
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._free = FreeList(num_blocks)
        self.nodes: list[Node | None] = [None] * num_blocks
        """By block: the node whose KV it holds. Set by the prefix cache."""
        self.num_cached = 0
        """Blocks that are cached."""
        self.pins: Counter[int] = Counter()
        """By block: how many of its owners are pins."""
        self.num_only_pinned = 0
        """Blocks whose owners are all pins."""
        self.keeps_cached = True
        """Whether blocks with a node stay cached when nobody references them."""
        self.evict: Callable[[int], None] = self._no_cache
        """Takes the node from a block that is allocated (or not kept); the prefix cache's."""
        self.journal: Journal | None = None
        """Is told of every change; None: nobody watches."""
        self.copies: list[BlockCopy] = []
        """Copies that no plan has taken yet, in the order in which they must be done."""

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free and cached ones."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody references, each counted once."""
        return self.num_blocks - len(self._free)

    @property
    def ref_counts(self) -> Sequence[int]:
        """Owners by block id; to be read only."""
        return self._ref_counts

    def free_block_ids(self) -> list[int]:
        """Free and cached blocks, next to be allocated first."""
        return list(self._free)

    def is_free(self, block_id: int) -> bool:
        """Whether the block is in the free list."""
        self._check_id(block_id)
        return block_id in self._free

    def ref_count(self, block_id: int) -> int:
        """Owners of a block; 0 means free."""
        self._check_id(block_id)
        return self._ref_counts[block_id]

    def allocate(self, num: int) -> list[int]:
        """Take the first `num` blocks of the free list, for one owner each; cached ones among them
        are evicted. Refuses more than there are."""
        if num > len(self._free):
            raise IntegrityError(
                f"{num} blocks were taken with {len(self._free)} of {self.num_blocks} free"
            )
        block_ids = self._free.pop_front(num)
        if self.journal is not None:
            self.journal.changed.update(block_ids)
        nodes, counts = self.nodes, self._ref_counts
        for block_id in block_ids:
            counts[block_id] = 1
            if nodes[block_id] is not None:
                self.num_cached -= 1
                self.evict(block_id)
        return block_ids

    def acquire(self, block_id: int) -> None:
        """Give a cached or referenced block one more owner."""
        if self.journal is not None:
            self.journal.changed.add(block_id)
        if not self._ref_counts[block_id]:
            assert self.nodes[block_id] is not None, f"block {block_id} holds nothing"
            self._free.remove(block_id)
            self.num_cached -= 1
        elif self.pins:
            self.num_only_pinned -= self._ref_counts[block_id] == self.pins.get(block_id)
        self._ref_counts[block_id] += 1

    def pin(self, block_ids: Sequence[int]) -> None:
        """Give each of these cached or referenced blocks an owner that is a pin."""
        for block_id in block_ids:
            self.acquire(block_id)
            self.pins[block_id] += 1
            self.num_only_pinned += self._ref_counts[block_id] == self.pins[block_id]

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Take those owners away again."""
        for block_id in block_ids:
            self.num_only_pinned -= self._ref_counts[block_id] == self.pins[block_id]
            self.pins[block_id] -= 1
            if not self.pins[block_id]:
                del self.pins[block_id]
        self.release(block_ids)

    def demote(self, block_id: int) -> None:
        """A cached block is the next to be allocated."""
        self._free.remove(block_id)
        self._free.push_front((block_id,))

    def make_free(self, block_id: int) -> None:
        """A cached block that has just lost its node is a free one."""
        if self.journal is not None:
            self.journal.changed.add(block_id)
        self.num_cached -= 1
        self.demote(block_id)

    def recover(self, block_id: int) -> None:
        """Put a block without an owner back into the free list, from which it was lost."""
        assert not self._ref_counts[block_id] and block_id not in self._free
        if self.journal is not None:
            self.journal.changed.add(block_id)
        self._free.push_front((block_id,))
        if self.nodes[block_id] is not None:
            self.evict(block_id)

    def take(self, block_ids: Iterable[int]) -> None:
        """Take these very blocks, for one owner each. Refuses one that is not free."""
        for block_id in block_ids:
            if not self.is_free(block_id):
                owners = self._ref_counts[block_id]
                raise IntegrityError(f"block {block_id} is taken twice: it has {owners} owners")
            self._free.remove(block_id)
            if self.journal is not None:
                self.journal.changed.add(block_id)
            self._ref_counts[block_id] = 1
            if self.nodes[block_id] is not None:
                self.num_cached -= 1
                self.evict(block_id)

    def share(self, block_ids: Iterable[int]) -> None:
        """Give each of these referenced blocks one more owner. Refuses a free one."""
        counts = self._ref_counts
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks or counts[block_id] < 1:
                self._check_id(block_id)
                raise IntegrityError(f"block {block_id} is free and cannot be shared")
            if self.pins:
                self.num_only_pinned -= counts[block_id] == self.pins.get(block_id)
            counts[block_id] += 1
            if self.journal is not None:
                self.journal.changed.add(block_id)

    def release(self, block_ids: Iterable[int]) -> None:
        """Take one owner away from each; one that has no owner left is cached or free.

        Free blocks that came last are reused first, a table's tail before its head: memory that
        was touched recently is warm, and a lightly used pool touches few pages of its memory.
        Cached blocks are reused after all others, again a table's tail before its head: a prefix
        outlives what follows it. Refuses a block that is free already.
        """
        if self.journal is not None:
            block_ids = list(block_ids)
            self.journal.changed.update(block_ids)
        counts, nodes = self._ref_counts, self.nodes
        freed, cached = [], []
        try:
            for block_id in block_ids:
                if not 0 <= block_id < self.num_blocks or counts[block_id] < 1:
                    self._check_id(block_id)
                    raise IntegrityError(f"block {block_id} is freed twice: it has no owner")
                counts[block_id] -= 1
                if counts[block_id]:
                    if self.pins:
                        self.num_only_pinned += counts[block_id] == self.pins.get(block_id)
                    continue
                if nodes[block_id] is not None:
                    if self.keeps_cached:
                        cached.append(block_id)
                        continue
                    self.evict(block_id)
                freed.append(block_id)
        finally:
            self._free.push_front(freed)
            self.num_cached += len(cached)
            for block_id in reversed(cached):
                self._free.push_back(block_id)

    def grow(self, num_blocks: int) -> None:
        """Add blocks; they are the next to be allocated."""
        num_new = num_blocks - self.num_blocks
        order = [*range(self.num_blocks, num_blocks), *self._free]
        if self.journal is not None:
            self.journal.was_resized = True
        self._ref_counts += [0] * num_new
        self.nodes += [None] * num_new
        self.num_blocks = num_blocks
        self._free = FreeList.of(num_blocks, order)

    def shrink(self, num_blocks: int) -> dict[int, int]:
        """Give up all but `num_blocks` blocks; returns who moved where, by the old id.

        Blocks go in the order of the free list, so the least recently used cached ones are evicted.
        Those that stay, but lie beyond the end, are copied to where one went. Refuses to give up
        referenced blocks.
        """
        num_gone = self.num_blocks - num_blocks
        if num_gone > len(self._free):
            raise IntegrityError(
                f"{num_gone} of {self.num_blocks} blocks cannot go with {len(self._free)} free"
            )
        if self.journal is not None:
            self.journal.was_resized = True
        gone = self._free.pop_front(num_gone)
        for block_id in gone:
            if self.nodes[block_id] is not None:
                self.num_cached -= 1
                self.evict(block_id)
        left = set(range(num_blocks, self.num_blocks)).difference(gone)
        places = (block_id for block_id in sorted(gone) if block_id < num_blocks)
        renamed = dict(zip(sorted(left), places, strict=True))
        order = [renamed.get(block_id, block_id) for block_id in self._free]
        moves = {}
        for old, new in renamed.items():
            node = self.nodes[old]
            if self._ref_counts[old] or node is not None:
                moves[old] = new
                self.copies.append(BlockCopy(old, new))
            self._ref_counts[new] = self._ref_counts[old]
            self.nodes[new] = node
            if node is not None:
                node.block_id = new
        if moves and self.pins:
            moved_pins = {moves.get(i, i): num for i, num in self.pins.items()}
            self.pins.clear()
            self.pins.update(moved_pins)
        del self._ref_counts[num_blocks:]
        del self.nodes[num_blocks:]
        self.num_blocks = num_blocks
        self._free = FreeList.of(num_blocks, order)
        return moves

    def _no_cache(self, block_id: int) -> None:
        raise AssertionError(f"block {block_id} has a node, and there is no prefix cache")

    def _check_id(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise IntegrityError(
                f"block {block_id} does not exist: the pool has blocks 0 to {self.num_blocks - 1}"
            )
