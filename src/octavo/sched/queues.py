"""The line of waiting sequences: first come first served, or by priority; deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from octavo.config import SchedulingPolicy
from octavo.request import Request
from octavo.sched.sequence import Sequence


def place_in_line(
    policy: SchedulingPolicy, request: Request, arrival: int, sample_index: int
) -> tuple[int, int, int]:
    """A sequence's place, unique: smaller is served first.

    fcfs, and fair among the requests of one client: by arrival. priority: smaller `priority` first,
    ties by arrival. `arrival` numbers the requests in the order in which they were added.
    """
    return (request.priority if policy == "priority" else 0, arrival, sample_index)


class WaitingQueue:
    """Sequences without blocks, in order of their places.

    A preempted sequence keeps its place: under fcfs that is before everyone who never ran. A heap
    with lazy removal, so that pushing, popping and discarding stay cheap with any number waiting.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._waiting: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """In order; for reports (it sorts)."""
        return (seq for _, seq in sorted(self._heap) if seq.seq_id in self._waiting)

    is_shifting = False
    """Whether who is next may change while nobody comes or goes."""

    @property
    def passed(self) -> dict[str, str]:
        """Nobody is."""
        return {}

    def has(self, seq: Sequence) -> bool:
        """Whether a sequence waits here."""
        return seq.seq_id in self._waiting

    def push(self, seq: Sequence) -> None:
        """Put a sequence at its place."""
        assert seq.seq_id not in self._waiting, f"sequence {seq.seq_id} waits already"
        self._waiting.add(seq.seq_id)
        heapq.heappush(self._heap, (seq.place, seq))

    def head(self) -> Sequence | None:
        """Who is next; None when nobody waits."""
        while self._heap:
            seq = self._heap[0][1]
            if seq.seq_id in self._waiting:
                return seq
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        """Take the next one out."""
        seq = self.head()
        assert seq is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        self._waiting.remove(seq.seq_id)
        return seq

    def discard(self, seq: Sequence) -> None:
        """Take out one that ended while it waited; it never comes back."""
        self._waiting.remove(seq.seq_id)
        if len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = [entry for entry in self._heap if entry[1].seq_id in self._waiting]
            heapq.heapify(self._heap)
