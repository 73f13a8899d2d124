"""When requests come: at their times, when others have ended, or when a conversation goes on."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from octavo.errors import ConfigError, TraceError
from octavo.lab.trace import TraceRequest


@dataclass(slots=True)
class _Session:
    """A conversation of which a request has not ended."""

    ended_s: float
    """The last end of those that have."""
    num_live: int = 0
    """In an engine, or on its way there after a pause."""
    following: deque[TraceRequest] = field(default_factory=deque)
    """Those that wait for the end of the one before."""


class Feed:
    """Hands out the requests of a workload in the order in which they come.

    It reads ahead one request, and those that wait for their session's turn. A request that says
    `think_s` comes so long after the end of the one before it; but not before those in front of it
    in the workload have come, since it is not known before.

    In a closed loop each has a seat, and one comes when there is a free seat: a conversation that
    goes on by then, else the next one of the workload.
    """

    def __init__(self, requests: Iterable[TraceRequest], concurrency: int | None = None) -> None:
        """`requests` in the order of their arrivals; `concurrency` makes a closed loop. Raises
        `ConfigError` for one below 1; reading raises `TraceError` for what cannot be served."""
        if concurrency is not None and concurrency < 1:
            raise ConfigError(f"--concurrency must be at least 1, got {concurrency}")
        self._requests = iter(requests)
        self._is_closed = concurrency is not None
        self._num_new_seats = concurrency or 0
        """Of a closed loop, seats that nobody has had: free since the start."""
        self._seats: list[float] = []
        """Since when the other free ones are free: a heap."""
        self._sessions: dict[str, _Session] = {}
        self._ended_s: dict[str, float] = {}
        """Of all other sessions: when the last one ended."""
        self._thought: list[tuple[float, int, TraceRequest]] = []
        """(arrival, serial, request) of those whose session's last one has ended: a heap."""
        self._serial = 0
        self._num_following = self._num_read = 0
        self._read_s = self._now_s = 0.0
        """Up to when the workload was read, and when the last one came."""
        self._next: TraceRequest | None = None
        self._next_s = math.inf
        """Arrival of the next one of the workload; in a closed loop 0."""
        self._read()

    @property
    def is_reactive(self) -> bool:
        """Whether the end of one may bring another one."""
        return self._is_closed or self._num_following > 0

    @property
    def next_s(self) -> float:
        """When the next one comes, as far as is known now; infinite: not before one has ended, or
        never. It may lie in the past."""
        thought = self._thought
        next_s = self._next_s
        if thought and thought[0][0] < next_s:
            next_s = thought[0][0]
        if not self._is_closed:
            return next_s
        return max(next_s, self._seat_s)

    def pop(self) -> tuple[TraceRequest, float]:
        """The next one, and when it comes."""
        thought = self._thought
        seat_s = self._seat_s if self._is_closed else 0.0
        if self._is_closed:
            self._take_seat()
        if thought and thought[0][0] <= max(self._next_s, seat_s):
            thought_s, _, request = heapq.heappop(thought)
            self._now_s = arrival_s = max(thought_s, seat_s)
        else:
            assert self._next is not None, "nothing comes"
            request = self._next
            self._now_s = arrival_s = max(self._next_s, seat_s)
            if request.session:  # before others of it are read
                self._session(request.session).num_live += 1
            self._read()
        return request, arrival_s

    def ended(self, request: TraceRequest, now_s: float) -> None:
        """One has ended, or was refused."""
        if self._is_closed:
            heapq.heappush(self._seats, now_s)
        name = request.session
        if not name:
            return
        session = self._sessions[name]
        session.num_live -= 1
        session.ended_s = max(session.ended_s, now_s)
        if session.num_live:
            return
        if session.following:
            self._num_following -= 1
            self._think(session.following.popleft(), session)
        else:
            del self._sessions[name]
            self._ended_s[name] = session.ended_s

    @property
    def _seat_s(self) -> float:
        """Since when a seat is free; infinite: none is."""
        if self._num_new_seats:
            return 0.0
        return self._seats[0] if self._seats else math.inf

    def _take_seat(self) -> None:
        if self._num_new_seats:
            self._num_new_seats -= 1
        else:
            heapq.heappop(self._seats)

    def _session(self, name: str) -> _Session:
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = _Session(self._ended_s.pop(name, 0.0))
        return session

    def _think(self, request: TraceRequest, session: _Session) -> None:
        self._serial += 1
        arrival_s = max(session.ended_s + (request.think_s or 0.0), self._now_s)
        heapq.heappush(self._thought, (arrival_s, self._serial, request))
        session.num_live += 1  # it is in no engine yet, but the one after it must not overtake it

    def _read(self) -> None:
        """Read up to the next request that waits for nobody."""
        for request in self._requests:
            self._num_read += 1
            self._check(request)
            name = request.session
            goes_on = request.think_s is not None and name
            if not goes_on or (name not in self._sessions and name not in self._ended_s):
                self._next, self._next_s = request, self._arrival_s(request)
                return
            session = self._session(name)
            if session.num_live:
                session.following.append(request)
                self._num_following += 1
            else:
                self._think(request, session)
        self._next, self._next_s = None, math.inf

    def _arrival_s(self, request: TraceRequest) -> float:
        if self._is_closed:
            return 0.0
        if request.arrival_s is not None:
            if request.arrival_s < self._read_s:
                raise TraceError(
                    f"request {self._num_read:,} comes at {request.arrival_s:g} s, the one "
                    f"before it at {self._read_s:g} s: sort requests by their arrivals"
                )
            self._read_s = request.arrival_s
        return self._read_s

    def _check(self, request: TraceRequest) -> None:
        if request.num_input < 1 or request.num_output < 1:
            raise TraceError(
                f"request {self._num_read:,} has {request.num_input:,} prompt tokens and "
                f"{request.num_output:,} output tokens: there must be at least 1 of each"
            )
        for name, value in (("arrival_s", request.arrival_s), ("think_s", request.think_s)):
            if value is not None and not 0 <= value < math.inf:
                raise TraceError(
                    f"request {self._num_read:,} has {name}={value:g}: it must be a number of "
                    "seconds, 0 or more"
                )
