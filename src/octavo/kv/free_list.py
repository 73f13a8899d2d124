"""The order in which free blocks are used again: a doubly linked list inside two arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

_ABSENT = -1


class FreeList:
    """Block ids in a definite order; every operation on one block is O(1).

    Both ends are open and any member can leave from the middle, so that blocks with content
    worth keeping can wait at the back and be taken out again when they are needed. Entry
    `num_blocks` of the arrays is the ring's sentinel.
    """

    __slots__ = ("_next", "_num", "_prev", "_sentinel")

    def __init__(self, num_blocks: int) -> None:
        """All blocks, 0 in front."""
        self._sentinel = num_blocks
        self._num = num_blocks
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]

    @classmethod
    def of(cls, num_blocks: int, block_ids: Sequence[int]) -> FreeList:
        """A list of some of the blocks, in this order."""
        free = cls(num_blocks)
        free._next = [_ABSENT] * (num_blocks + 1)
        free._next[num_blocks] = num_blocks
        free._prev[num_blocks] = num_blocks
        free._num = 0
        for block_id in block_ids:
            free.push_back(block_id)
        return free

    def __len__(self) -> int:
        return self._num

    def __contains__(self, block_id: int) -> bool:
        return self._next[block_id] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        """From the front. Follows at most `num_blocks` links, so that a broken ring ends too."""
        block_id = self._next[self._sentinel]
        for _ in range(self._sentinel):
            if block_id == self._sentinel:
                return
            yield block_id
            block_id = self._next[block_id]

    def pop_front(self, num: int) -> list[int]:
        """Take the first `num` (at most `len`) ids."""
        assert num <= self._num, f"{num} blocks of {self._num} free ones"
        following = self._next
        taken = []
        block_id = following[self._sentinel]
        for _ in range(num):
            taken.append(block_id)
            successor = following[block_id]
            following[block_id] = _ABSENT
            block_id = successor
        following[self._sentinel] = block_id
        self._prev[block_id] = self._sentinel
        self._num -= num
        return taken

    def push_front(self, block_ids: Iterable[int]) -> None:
        """Put ids in front, one after the other: the last is the next to be taken."""
        following, preceding, sentinel = self._next, self._prev, self._sentinel
        front = following[sentinel]
        for block_id in block_ids:
            assert following[block_id] == _ABSENT, f"block {block_id} is free already"
            following[block_id] = front
            preceding[front] = block_id
            front = block_id
            self._num += 1
        following[sentinel] = front
        preceding[front] = sentinel

    def push_back(self, block_id: int) -> None:
        """Put an id at the back: it is the last to be taken."""
        assert self._next[block_id] == _ABSENT, f"block {block_id} is free already"
        last = self._prev[self._sentinel]
        self._next[last] = self._prev[self._sentinel] = block_id
        self._prev[block_id] = last
        self._next[block_id] = self._sentinel
        self._num += 1

    def remove(self, block_id: int) -> None:
        """Take a member out, wherever it stands."""
        assert block_id in self, f"block {block_id} is not free"
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before] = after
        self._prev[after] = before
        self._next[block_id] = _ABSENT
        self._num -= 1
