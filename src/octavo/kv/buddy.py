"""Buddy allocation of consecutive units (Knowlton 1965), as Orca manages KV memory (paper, 6.1)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from octavo.errors import IntegrityError


def next_power_of_two(num_units: int) -> int:
    """The smallest power of two that is at least `num_units` (>= 1): the size of its chunk."""
    return 1 << (num_units - 1).bit_length()


class BuddyAllocator:
    """Hands out chunks of an arena of units: each a power of two of them, aligned to its size.

    The arena is cut into chunks of the largest size first, and what is left of it into halves of
    that, quarters and so on. The smallest free chunk that fits is taken, of equal ones the first,
    and halved until it fits tightly; a freed chunk merges with its other half when that is free.
    Units are numbers: nothing here knows what they hold.
    """

    __slots__ = ("_free", "_taken", "max_chunk", "num_units")

    def __init__(self, num_units: int, max_chunk: int) -> None:
        """`num_units` >= 1; `max_chunk` is a power of two, and cut to what the arena has."""
        assert num_units >= 1, f"{num_units} units"
        assert max_chunk == next_power_of_two(max_chunk), f"{max_chunk} is not a power of two"
        self.num_units = num_units
        self.max_chunk = min(max_chunk, 1 << (num_units.bit_length() - 1))
        """Units in the largest chunk."""
        self._free: list[list[int]] = [[] for _ in range(self.max_chunk.bit_length())]
        """By the logarithm of the size: first units of free chunks, in order."""
        self._taken: dict[int, int] = {}
        """By first unit: the logarithm of the size."""
        start = 0
        for order in reversed(range(len(self._free))):
            while start + (1 << order) <= num_units:
                self._free[order].append(start)
                start += 1 << order

    def take(self, num_units: int) -> int | None:
        """The first unit of a chunk of `next_power_of_two(num_units)`; None when there is none."""
        order = (num_units - 1).bit_length()
        found = next((o for o in range(order, len(self._free)) if self._free[o]), None)
        if found is None:
            return None
        start = self._free[found].pop(0)
        while found > order:
            found -= 1
            insort(self._free[found], start + (1 << found))
        self._taken[start] = order
        return start

    def free(self, start: int) -> None:
        """Give a chunk back by its first unit."""
        order = self._taken.pop(start, None)
        if order is None:
            raise IntegrityError(f"no chunk that begins at unit {start} was taken")
        while order + 1 < len(self._free):
            buddies = self._free[order]
            index = bisect_left(buddies, start ^ (1 << order))
            if index == len(buddies) or buddies[index] != start ^ (1 << order):
                break
            start = min(start, buddies.pop(index))
            order += 1
        insort(self._free[order], start)

    def can_take(self, sizes: Iterable[int]) -> bool:
        """Whether chunks for all of these numbers of units can be taken now.

        The order of taking does not matter: sizes are powers of two and so are free chunks, and
        from the largest on each is cut out of the smallest that fits.
        """
        counts = [len(starts) for starts in self._free]
        for num_units in sorted(sizes, reverse=True):
            order = (num_units - 1).bit_length()
            found = next((o for o in range(order, len(counts)) if counts[o]), None)
            if found is None:
                return False
            counts[found] -= 1
            for halved in range(order, found):
                counts[halved] += 1
        return True

    def num_idle(self, num_units: int) -> int:
        """How many chunks for so many units the arena has when nothing is taken."""
        size = next_power_of_two(num_units)
        return self.num_units // size if size <= self.max_chunk else 0

    @property
    def largest_free(self) -> int:
        """Units in the largest free chunk; 0 when all is taken."""
        return next((1 << o for o in reversed(range(len(self._free))) if self._free[o]), 0)

    def num_too_small(self, num_units: int) -> int:
        """Free units in chunks too small for `num_units` of them."""
        smaller = self._free[: (num_units - 1).bit_length() if num_units else 0]
        return sum(len(starts) << order for order, starts in enumerate(smaller))

    def too_small(self, num_units: int) -> list[range]:
        """The chunks that these units are in."""
        smaller = self._free[: (num_units - 1).bit_length() if num_units else 0]
        return [
            range(start, start + (1 << order))
            for order, starts in enumerate(smaller)
            for start in starts
        ]

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless free and taken chunks are the arena, each unit once, lie
        where their size says, and no two free halves of a chunk are left unmerged."""
        free = [(start, order) for order, starts in enumerate(self._free) for start in starts]
        end = 0
        for start, order in sorted([*free, *self._taken.items()]):
            if start != end or start % (1 << order):
                raise IntegrityError(
                    f"a chunk of {1 << order} units begins at unit {start}, expected {end}"
                )
            end = start + (1 << order)
        if end != self.num_units:
            raise IntegrityError(f"chunks have {end} units, expected {self.num_units}")
        known = set(free)
        for start, order in free:
            if 1 << order < self.max_chunk and (start ^ (1 << order), order) in known:
                raise IntegrityError(f"free chunks of {1 << order} units at {start} did not merge")
