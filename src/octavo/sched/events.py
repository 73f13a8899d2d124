"""The event log: what happened to requests under memory pressure, as it happens, in bounded memory.

Times are arguments, in the engine's clock. Nothing here is done for a request that never waits.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.events import EngineEvent, EventKind
from octavo.sched.storm import StormChange


@dataclass(slots=True)
class _Preemption:
    """A preemption that is not over."""

    serial: int
    event: EngineEvent
    seq_ids: set[int]
    """Those that have not run again."""


class EventLog:
    """The last `capacity` events that are over, and all that still go on.

    Those that go on are at most one for each preempted sequence and one for each raised level of
    the watermark; waits are not events until they are over, so that thousands in line cost
    nothing (`events` makes them up when asked).
    """

    def __init__(self, capacity: int = 1000) -> None:
        assert capacity >= 1, f"capacity {capacity}"
        self._over: deque[tuple[int, EngineEvent]] = deque(maxlen=capacity)
        self._preemptions: dict[int, _Preemption] = {}
        """By sequence that has not run again."""
        self._raises: list[tuple[float, int, EngineEvent]] = []
        """(Watermark, serial, event) of each level that was raised and not taken back."""
        self._num_begun = 0
        self._num_forgotten = 0
        self._passed: dict[str, str] = {}
        """Requests that have not run and that others pass now -> why."""
        self._blocked_s = -math.inf
        """When the line was last blocked."""
        self._blocked_id = ""
        """Who was the head of it."""
        self._blocked_why = ""
        self._num_let_in = 0
        """Requests out of the line since then."""
        self.news: deque[tuple[int, EngineEvent]] | None = None
        """(Serial, event) of each that begins or ends, for somebody who watches and takes them from
        here; None: nobody does."""

    @property
    def blocked(self) -> tuple[str, str]:
        """Who was the head of the line when it was blocked last, and why; empty: it never was."""
        return self._blocked_id, self._blocked_why

    @property
    def num_forgotten(self) -> int:
        """Events that had to make room for later ones."""
        return self._num_forgotten

    # -- what happens

    def add(self, event: EngineEvent) -> None:
        """An event that is over, or has no duration: a refusal, an end cut short, a resize, a
        failure."""
        self._close(self._next_serial(), event)

    def preempted(self, event: EngineEvent, seq_ids: Iterable[int]) -> None:
        """A preemption of some sequences; it goes on until `back` was said of each."""
        preemption = _Preemption(self._next_serial(), event, set(seq_ids))
        self._tell(preemption.serial, event)
        for seq_id in preemption.seq_ids:
            assert seq_id not in self._preemptions, f"sequence {seq_id} was preempted twice"
            self._preemptions[seq_id] = preemption

    def back(self, seq_id: int, now_s: float) -> None:
        """A sequence runs again, or has ended. May be said of those never preempted, too."""
        preemption = self._preemptions.pop(seq_id, None)
        if preemption is None:
            return
        preemption.seq_ids.remove(seq_id)
        if not preemption.seq_ids:
            self._close(preemption.serial, _ended(preemption.event, now_s))

    def watermark_changed(self, change: StormChange, now_s: float) -> None:
        """The storm watch moved the watermark: a raise begins an event, and going back below that
        level ends it."""
        if change.is_raise:
            event = EngineEvent(kind=EventKind.STORM, time_s=now_s, request_id=None, why=change.why)
            self._raises.append((change.new, self._next_serial(), event))
            self._tell(self._num_begun, event)
            return
        while self._raises and self._raises[-1][0] > change.new:
            _, serial, event = self._raises.pop()
            self._close(serial, _ended(event, now_s))

    # -- the line

    def line_blocked(self, request_id: str, why: str, now_s: float) -> None:
        """The head of the line could not be admitted now, and so nobody behind it."""
        self._blocked_s = now_s
        self._blocked_id = request_id
        self._blocked_why = why
        self._num_let_in = 0

    def passed(self, reasons: dict[str, str]) -> None:
        """Heads of clients' lines that may not come in now, while others pass them."""
        self._passed = reasons

    def wait_over(
        self, request_id: str, arrival_s: float, now_s: float, *, aborted: bool = False
    ) -> None:
        """A request that had not run before left the line. An event if it was in it when the
        line was blocked."""
        if request_id not in self._passed and not self._has_waited(arrival_s, now_s):
            return
        why = self._why_waiting(request_id, self._num_let_in) + " (the last reason)"
        if aborted:
            why += "; aborted"
        else:
            self._num_let_in += 1
        self._passed.pop(request_id, None)
        event = _wait(request_id, arrival_s, why)
        self._close(self._next_serial(), _ended(event, now_s))

    # -- questions

    def events(
        self,
        request_id: str | None = None,
        *,
        waiting: Iterable[tuple[str, float]] = (),
        now_s: float = math.inf,
    ) -> list[EngineEvent]:
        """What happened, by the time it began; of one request if it is given.

        `waiting` are the id and arrival of each request in line that never ran, in the order of
        the line; those who had to wait by `now_s` are added, with `until_s` None.
        """
        numbered = list(self._over)
        numbered += {p.serial: (p.serial, p.event) for p in self._preemptions.values()}.values()
        numbered += [(serial, event) for _, serial, event in self._raises]
        for num_ahead, (waiting_id, arrival_s) in enumerate(waiting):
            if waiting_id in self._passed or self._has_waited(arrival_s, now_s):
                why = self._why_waiting(waiting_id, num_ahead)
                numbered.append((self._num_begun, _wait(waiting_id, arrival_s, why)))
        numbered.sort(key=lambda entry: (entry[1].time_s, entry[0]))
        return [
            event for _, event in numbered if request_id is None or event.request_id == request_id
        ]

    # -- inside

    def _has_waited(self, arrival_s: float, now_s: float) -> bool:
        """Nobody passes a blocked head: who came before the line was last blocked was in it."""
        return arrival_s <= self._blocked_s and arrival_s < now_s

    def _why_waiting(self, request_id: str, num_ahead: int) -> str:
        if request_id in self._passed:
            return self._passed[request_id]
        if request_id == self._blocked_id:
            return self._blocked_why
        others = "" if num_ahead <= 1 else f"{num_ahead} others, first "
        return f"behind {others}request {self._blocked_id}: {self._blocked_why}"

    def _next_serial(self) -> int:
        self._num_begun += 1
        return self._num_begun

    def _close(self, serial: int, event: EngineEvent) -> None:
        self._num_forgotten += len(self._over) == self._over.maxlen
        self._over.append((serial, event))
        self._tell(serial, event)

    def _tell(self, serial: int, event: EngineEvent) -> None:
        if self.news is not None:
            self.news.append((serial, event))


def _ended(event: EngineEvent, now_s: float) -> EngineEvent:
    return dataclasses.replace(event, until_s=now_s)


def _wait(request_id: str, arrival_s: float, why: str) -> EngineEvent:
    return EngineEvent(
        kind=EventKind.WAITED, time_s=arrival_s, request_id=request_id, why=why, num_seqs=1
    )


def no_room(num_tokens: int, num_blocks: int, num_free: int, num_kept: int) -> str:
    """Why the head of the line is blocked: the pool. Numbers of blocks but for the first."""
    text = f"its {num_tokens} tokens need up to {num_blocks} blocks, {num_free} are free"
    return f"{text} and {num_kept} of them are kept for those who run" if num_kept else text


def over_share(
    client_id: str, num_held: int, num_needed: int, share: float, num_blocks: int
) -> str:
    """Why a request is passed in the line: its client's share of the pool."""
    most = int(share * num_blocks)
    return (
        f"client {client_id or 'without a name'} holds {num_held} blocks, it needs {num_needed} "
        f"more, and {share:.0%} of the {num_blocks} are {most}: others may pass"
    )


def no_seat(num_seqs: int, max_num_seqs: int) -> str:
    """Why the head of the line is blocked: the number of sequences in a step."""
    need = "it needs a seat" if num_seqs == 1 else f"it needs {num_seqs} seats"
    return f"{need}, and --max-num-seqs {max_num_seqs} leaves too few beside those who run"


def no_token_yet() -> str:
    """Why the head of the line is blocked: it was preempted in the middle of a step."""
    return "its next token is being sampled; it comes back when that is known"


def beams_behind() -> str:
    """Why the head of the line is blocked: it is a beam, and another one comes before it."""
    return "what another of its beams computes first it will find"


def no_tokens(max_num_batched_tokens: int) -> str:
    """Why the head of the line is blocked: the tokens of a step."""
    return f"those who run use the --max-num-batched-tokens {max_num_batched_tokens} of the step"
