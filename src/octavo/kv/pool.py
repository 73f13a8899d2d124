"""The pool of physical blocks: reference counts, and the free ones in the order of their reuse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.errors import IntegrityError
from octavo.kv.free_list import FreeList


class BlockPool:
    """Blocks `0 .. num_blocks - 1` of `block_size` slots each.

    A block is free (count 0, in the free list) or referenced (count = table entries that point at
    it): invariant I1. Refusals are `IntegrityError`s that name the block.
    """

    __slots__ = ("_free", "_ref_counts", "block_size", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._free = FreeList(num_blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody references."""
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
        """The free blocks, next to be allocated first."""
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
        """Take the first `num` free blocks, for one owner each. Refuses more than are free."""
        if num > len(self._free):
            raise IntegrityError(
                f"{num} blocks were taken with {len(self._free)} of {self.num_blocks} free"
            )
        block_ids = self._free.pop_front(num)
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def take(self, block_ids: Iterable[int]) -> None:
        """Take these very blocks, for one owner each. Refuses one that is not free."""
        for block_id in block_ids:
            if not self.is_free(block_id):
                owners = self._ref_counts[block_id]
                raise IntegrityError(f"block {block_id} is taken twice: it has {owners} owners")
            self._free.remove(block_id)
            self._ref_counts[block_id] = 1

    def share(self, block_ids: Iterable[int]) -> None:
        """Give each of these referenced blocks one more owner. Refuses a free one."""
        counts = self._ref_counts
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks or counts[block_id] < 1:
                self._check_id(block_id)
                raise IntegrityError(f"block {block_id} is free and cannot be shared")
            counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Take one owner away from each; one that has no owner left is free.

        Blocks freed last are reused first, a table's tail before its head: memory that was
        touched recently is warm, and a lightly used pool touches few pages of its memory.
        Refuses a block that is free already.
        """
        counts = self._ref_counts
        freed = []
        try:
            for block_id in block_ids:
                if not 0 <= block_id < self.num_blocks or counts[block_id] < 1:
                    self._check_id(block_id)
                    raise IntegrityError(f"block {block_id} is freed twice: it has no owner")
                counts[block_id] -= 1
                if not counts[block_id]:
                    freed.append(block_id)
        finally:
            self._free.push_front(freed)

    def _check_id(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise IntegrityError(
                f"block {block_id} does not exist: the pool has blocks 0 to {self.num_blocks - 1}"
            )
