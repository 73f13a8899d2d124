"""Clients side by side: whose turn it is when each is to get the same service.

The virtual token counter (VTC) of Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024: every client has a counter of the service it got; of those who wait the one with the smallest
is served next; and who comes back after a pause is lifted to them, so that nobody saves up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from octavo.sched.queues import WaitingQueue
from octavo.sched.sequence import Sequence, SequenceGroup

INPUT_WEIGHT = 1.0
"""Of a prompt token that is computed; one found in the prefix cache is free."""
OUTPUT_WEIGHT = 2.0
"""Of a token generated."""
_MAX_IDLE = 1024
"""Clients without a request whose counters are kept."""
_FORGET_EVERY = 256
"""Requests that end between two looks for idle clients."""

Held = Callable[[SequenceGroup], str | None]
"""Why a request may not begin now for its client's share of the pool; None: it may."""


def service_of(group: SequenceGroup) -> float:
    """What a request has got. Tokens computed again after a preemption are not charged again."""
    output = OUTPUT_WEIGHT * group.stats.metrics.num_generation_tokens
    return INPUT_WEIGHT * group.num_charged_tokens + output


@dataclass(slots=True, eq=False)
class ClientAccount:
    """A client and what it has got."""

    client_id: str
    ended: float = 0.0
    """Service of requests that have ended."""
    lifted: float = 0.0
    """What its counter was raised by when it came back: service that it did not get."""
    live: dict[SequenceGroup, None] = field(default_factory=dict)
    """Its requests that have begun and not ended: those that wait have got nothing."""
    num_requests: int = 0
    """Its requests that have not ended."""

    @property
    def service(self) -> float:
        """What it has got."""
        return self.ended + sum(service_of(group) for group in self.live)

    @property
    def counter(self) -> float:
        """The virtual token counter."""
        return self.lifted + self.service


class Clients:
    """The accounts of all clients; of idle ones the latest, and those who got most."""

    def __init__(self) -> None:
        self._accounts: dict[str, ClientAccount] = {}
        self._num_closed = 0

    def add(self, group: SequenceGroup) -> None:
        """A request has come."""
        self.of(group).num_requests += 1

    def begin(self, group: SequenceGroup) -> None:
        """A request runs for the first time."""
        self.of(group).live[group] = None

    def close(self, group: SequenceGroup) -> None:
        """A request has ended."""
        account = self.of(group)
        account.num_requests -= 1
        if group in account.live:
            del account.live[group]
            account.ended += service_of(group)
        self._num_closed += 1
        if self._num_closed % _FORGET_EVERY == 0 and len(self._accounts) > 2 * _MAX_IDLE:
            self._forget()

    def of(self, group: SequenceGroup) -> ClientAccount:
        """The account that a request is on."""
        client_id = group.request.client_id
        account = self._accounts.get(client_id)
        if account is None:
            account = self._accounts[client_id] = ClientAccount(client_id)
        return account

    def __iter__(self) -> Iterator[ClientAccount]:
        return iter(self._accounts.values())

    def _forget(self) -> None:
        """Who got least would be lifted when it comes back: its counter need not be kept."""
        idle = sorted((a for a in self if not a.num_requests), key=lambda a: a.counter)
        for account in idle[: max(0, len(idle) - _MAX_IDLE)]:
            del self._accounts[account.client_id]


class ClientQueue:
    """Waiting sequences by client, in the place of `WaitingQueue`.

    Sequences that have run come before all others, and so do beams, which wait for each other. Of
    the rest the head of each client's line is looked at: under `is_fair` the client
    with the smallest counter comes first, otherwise the smallest place. A client that may hold no
    more of the pool is passed. Amortized O(log clients) a change, and as much for each client that
    is passed.
    """

    def __init__(self, clients: Clients, held: Held, *, is_fair: bool) -> None:
        self._clients, self._held, self._is_fair = clients, held, is_fair
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
            why = self._held(seq.group)
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
