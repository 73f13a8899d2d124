"""When requests come: at their times, when others have ended, or when a conversation goes on."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.lab.trace import TraceRequest


@dataclass(slots=True)
class _Session:
    """A conversation: one request at a time, as far as its requests say when they follow."""

    ended_s: float
    """When its last request ended; of those that are in the engine, nothing yet."""
    num_live: int = 0
    following: deque[TraceRequest] = field(default_factory=deque)
    """Those that wait for the end of the one before."""


class Feed:
    """Hands out the requests of a workload in the order in which they come.

    It reads ahead one request, and those that wait for their session's turn.
    """

    def __init__(self, requests: Iterable[TraceRequest], concurrency: int | None = None) -> None:
        """`requests` in the order of their arrivals; `concurrency` makes a closed loop."""
        self._requests = iter(requests)
        self._concurrency = concurrency
        self._sessions: dict[str, _Session] = {}
        self._thought: list[tuple[float, int, TraceRequest]] = []
        """(arrival, serial, request) of those whose session's last one has ended: a heap."""
        self._serial = 0
        self._num_live = 0
        self._last_end_s = 0.0
        self._next: TraceRequest | None = None
        self._read()

    @property
    def is_reactive(self) -> bool:
        """Whether what comes depends on what has ended."""
        return self._concurrency is not None or bool(self._sessions)

    @property
    def next_s(self) -> float:
        """When the next one comes, as far as is known now; infinite: not before one has ended, or
        never. It may lie in the past."""
        if self._concurrency is not None and self._num_live >= self._concurrency:
            return math.inf
        next_s = self._thought[0][0] if self._thought else math.inf
        if self._next is not None:
            next_s = min(next_s, self._arrival_s(self._next))
        return next_s

    def pop(self) -> tuple[TraceRequest, float]:
        """The next one, and when it comes."""
        upcoming, thought = self._next, self._thought
        if thought and (upcoming is None or thought[0][0] <= self._arrival_s(upcoming)):
            arrival_s, _, request = heapq.heappop(thought)
        else:
            assert upcoming is not None, "nothing comes"
            request, arrival_s = upcoming, self._arrival_s(upcoming)
            if request.session:
                self._session(request).num_live += 1  # before others of it are read
            self._read()
        if self._concurrency is not None:
            arrival_s = max(arrival_s, self._last_end_s)
        self._num_live += 1
        return request, arrival_s

    def ended(self, request: TraceRequest, now_s: float) -> None:
        """One has ended, or was refused."""
        self._num_live -= 1
        self._last_end_s = max(self._last_end_s, now_s)
        if not request.session:
            return
        session = self._session(request)
        session.num_live -= 1
        session.ended_s = now_s
        if session.following and not session.num_live:
            self._think(session.following.popleft(), session)

    def _session(self, request: TraceRequest) -> _Session:
        session = self._sessions.get(request.session)
        if session is None:
            session = self._sessions[request.session] = _Session(0.0)
        return session

    def _think(self, request: TraceRequest, session: _Session) -> None:
        self._serial += 1
        arrival_s = session.ended_s + (request.think_s or 0.0)
        heapq.heappush(self._thought, (arrival_s, self._serial, request))
        session.num_live += 1  # it is in no engine yet, but the one after it must not overtake it

    def _arrival_s(self, request: TraceRequest) -> float:
        if self._concurrency is not None or request.arrival_s is None:
            return 0.0
        return request.arrival_s

    def _read(self) -> None:
        """Read up to the next request that waits for nobody."""
        for request in self._requests:
            session = self._sessions.get(request.session) if request.session else None
            if request.think_s is None or session is None:
                self._next = request
                return
            if session.num_live or session.following:
                session.following.append(request)
            else:
                self._think(request, session)
        self._next = None
