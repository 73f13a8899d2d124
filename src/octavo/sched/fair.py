"""Clients side by side: whose turn it is when each is to get the same service.

The virtual token counter (VTC) of Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024: every client has a counter of the service it got; of those who wait the one with the smallest
is served next; and who comes back after a pause is lifted to them, so that nobody saves up.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import chain

from octavo.sched.clients import ClientAccount, Clients
from octavo.sched.queues import WaitingQueue
from octavo.sched.sequence import Sequence


class ClientQueue:
    """Waiting sequences by client, in the place of `WaitingQueue`.

    Sequences that have run come before all others, and so do beams, which wait for each other. Of
    the rest the head of each client's line is looked at: under `is_fair` the client
    with the smallest counter comes first, otherwise the smallest place. A client that may hold no
    more of the pool is passed. Amortized O(log clients) a change, and as much for each client that
    is passed.
    """

    def __init__(self, clients: Clients, *, is_fair: bool) -> None:
        self._clients, self._is_fair = clients, is_fair
        self._begun = WaitingQueue()
        self._lines: dict[str, WaitingQueue] = {}
        self._order: list[tuple[float, tuple[int, int, int], str]] = []
        """A heap of (counter, place, client), of which each is at most what it is now."""
        self._last: ClientAccount | None = None
        """Who left the line last."""
        self.passed: dict[str, str] = {}
        """Request at the head of a client's line that was passed the last time -> why."""

    def __len__(self) -> int:
        return len(self._begun) + sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines) or bool(self._begun)

    def __iter__(self) -> Iterator[Sequence]:
        """Those who have begun, then the others by their places; for reports (it sorts)."""
        fresh = sorted(chain.from_iterable(self._lines.values()), key=lambda seq: seq.place)
        return chain(self._begun, fresh)

    @property
    def is_shifting(self) -> bool:
        """Whether who is next may change while nobody comes or goes."""
        return len(self._lines) > 1 or bool(self._lines and self.passed)

    def push(self, seq: Sequence) -> None:
        """Put a sequence at its place."""
        if seq.has_run or (seq.search is not None and seq.group.has_begun):
            self._begun.push(seq)
            return
        client_id = seq.group.request.client_id
        line = self._lines.get(client_id)
        if line is None:
            account = self._clients.of(seq.group)
            if self._is_fair:
                self._lift(account)
            line = self._lines[client_id] = WaitingQueue()
        line.push(seq)
        if line.head() is seq:
            heapq.heappush(self._order, (self._counter(seq), seq.place, client_id))

    def _lift(self, account: ClientAccount) -> None:
        """It was not in line: it counts as having got as much as the least served who is, or who
        was last."""
        floor = 0.0
        if self._refresh() is not None:
            floor = self._order[0][0]
        elif self._last is not None:
            floor = self._last.counter
        account.lifted += max(0.0, floor - account.counter)

    def _counter(self, seq: Sequence) -> float:
        return self._clients.of(seq.group).counter if self._is_fair else 0.0

    def head(self) -> Sequence | None:
        """Who is next; None when nobody waits who may come in."""
        begun, fresh = self._begun.head(), self._fresh_head()
        if begun is None or fresh is None:
            return fresh if begun is None else begun
        return begun if self._is_fair or begun.place < fresh.place else fresh

    def _refresh(self) -> Sequence | None:
        """Bring the top of the heap up to date: the head of that client's line, if there is one.
        Counters only grow, so that a top which is right is the least."""
        order = self._order
        while order:
            line = self._lines.get(order[0][2])
            seq = None if line is None else line.head()
            if seq is None:
                heapq.heappop(order)
                continue
            now = (self._counter(seq), seq.place, seq.group.request.client_id)
            if now == order[0]:
                return seq
            heapq.heapreplace(order, now)
        return None

    def _fresh_head(self) -> Sequence | None:
        self.passed, aside = {}, []
        while (seq := self._refresh()) is not None:
            why = self._clients.why_over_share(seq.group)
            if why is None:
                break
            self.passed[seq.group.request.request_id] = why
            aside.append(heapq.heappop(self._order))
        for entry in dict.fromkeys(aside):
            heapq.heappush(self._order, entry)
        return seq

    def pop(self) -> Sequence:
        """Take the next one out."""
        seq = self.head()
        assert seq is not None, "pop from an empty queue"
        self._take_out(seq)
        return seq

    def discard(self, seq: Sequence) -> None:
        """Take out one that ended while it waited; it never comes back."""
        self._take_out(seq)

    def _take_out(self, seq: Sequence) -> None:
        if self._begun.has(seq):
            self._begun.discard(seq)
            return
        client_id = seq.group.request.client_id
        line = self._lines[client_id]
        line.discard(seq)
        if not len(line):
            del self._lines[client_id]
            self._last = self._clients.of(seq.group)
