"""The event log: what happened to whom, why, and until when."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.events import EngineEvent, EventKind
from octavo.sched.events import EventLog, no_room, no_seat, no_tokens
from octavo.sched.storm import StormChange


def make_event(
    kind: EventKind, request_id: str | None, time_s: float, **fields: Any
) -> EngineEvent:
    why = fields.pop("why", "because")
    return EngineEvent(kind=kind, time_s=time_s, request_id=request_id, why=why, **fields)


def preemption(request_id: str, time_s: float, **fields: Any) -> EngineEvent:
    return make_event(EventKind.PREEMPTED, request_id, time_s, mode="recompute", **fields)


def told(log: EventLog, **question: Any) -> list[tuple[str | None, float, float | None, str]]:
    return [(e.request_id, e.time_s, e.until_s, e.why) for e in log.events(**question)]


def test_a_preemption_goes_on_until_the_sequence_runs_again() -> None:
    log = EventLog()
    log.preempted(preemption("a", 1.0, by="b", tokens_lost=30, num_blocks=4), [7])
    (event,) = log.events()
    assert event.until_s is None
    log.back(8, 1.5)  # somebody else, who was never preempted
    assert log.events()[0].until_s is None
    log.back(7, 2.5)
    (event,) = log.events()
    assert (event.time_s, event.until_s) == (1.0, 2.5)
    assert (event.by, event.tokens_lost, event.num_blocks) == ("b", 30, 4)
    log.back(7, 9.0)
    assert log.events() == [event]


def test_beams_are_back_when_the_last_of_them_is() -> None:
    log = EventLog()
    log.preempted(preemption("a", 1.0, num_seqs=3), [1, 2, 3])
    log.back(1, 2.0)
    log.back(3, 2.0)
    assert [e.until_s for e in log.events()] == [None]
    log.back(2, 4.0)  # it ended instead
    assert [e.until_s for e in log.events()] == [4.0]


def test_preempted_again_after_it_ran_is_another_event() -> None:
    log = EventLog()
    log.preempted(preemption("a", 1.0), [7])
    with pytest.raises(AssertionError, match="sequence 7 was preempted twice"):
        log.preempted(preemption("a", 1.5), [7])
    log.back(7, 2.0)
    log.preempted(preemption("a", 3.0), [7])
    assert [(e.time_s, e.until_s) for e in log.events()] == [(1.0, 2.0), (3.0, None)]


def test_events_are_told_by_time_and_by_request() -> None:
    log = EventLog()
    log.preempted(preemption("a", 1.0), [1])
    log.add(make_event(EventKind.REFUSED, "b", 2.0))
    log.preempted(preemption("c", 3.0), [2])
    log.add(make_event(EventKind.RESIZED, None, 3.0))
    log.back(2, 4.0)
    log.back(1, 5.0)  # begun first, over last
    log.line_blocked("d", "no room", 6.0)
    log.wait_over("d", 1.5, 7.0)  # begun when it came
    assert [e.request_id for e in log.events()] == ["a", "d", "b", "c", None]
    assert [e.kind for e in log.events("c")] == [EventKind.PREEMPTED]
    assert log.events("nobody") == []


def test_memory_is_bounded_and_what_goes_on_is_kept() -> None:
    log = EventLog(capacity=10)
    log.preempted(preemption("long", 0.0), [999])
    for i in range(100):
        log.preempted(preemption(f"r{i}", 1.0 + i), [i])
        log.back(i, 1.5 + i)
    events = log.events()
    assert [e.request_id for e in events] == ["long"] + [f"r{i}" for i in range(90, 100)]
    assert log.num_forgotten == 90
    log.back(999, 200.0)
    assert [e.request_id for e in log.events()] == ["long"] + [f"r{i}" for i in range(91, 100)]
    assert not log._preemptions and len(log._over) == 10


def test_levels_of_a_storm_lie_one_inside_the_other() -> None:
    log = EventLog()
    log.watermark_changed(StormChange(0.01, 0.03, "up"), 1.0)
    log.watermark_changed(StormChange(0.03, 0.06, "up again"), 2.0)
    assert told(log) == [(None, 1.0, None, "up"), (None, 2.0, None, "up again")]
    log.watermark_changed(StormChange(0.06, 0.03, "down"), 5.0)
    assert told(log) == [(None, 1.0, None, "up"), (None, 2.0, 5.0, "up again")]
    log.watermark_changed(StormChange(0.03, 0.06, "up"), 6.0)
    log.watermark_changed(StormChange(0.06, 0.01, "nobody is left"), 9.0)
    assert [(e.time_s, e.until_s) for e in log.events()] == [(1.0, 9.0), (2.0, 5.0), (6.0, 9.0)]
    assert {e.kind for e in log.events()} == {EventKind.STORM}


# -- waits


def test_who_is_admitted_at_the_first_chance_has_not_waited() -> None:
    log = EventLog()
    log.wait_over("a", 1.0, 1.1)
    log.line_blocked("b", "full", 2.0)
    log.wait_over("b", 1.5, 3.0)
    log.line_blocked("c", "full", 3.0)
    log.wait_over("now", 3.0, 3.0)
    log.wait_over("urgent", 3.5, 4.0)  # came after the line was blocked, and was let past it
    log.wait_over("later", 4.0, 4.1)
    assert told(log) == [("b", 1.5, 3.0, "full (the last reason)")]


def test_the_head_is_told_the_last_reason_and_the_others_how_many_went_before() -> None:
    log = EventLog()
    log.line_blocked("a", "no seat", 1.0)
    log.line_blocked("a", "no room", 2.0)
    for name in "abc":
        log.wait_over(name, 0.5, 3.0)
    assert told(log) == [
        ("a", 0.5, 3.0, "no room (the last reason)"),
        ("b", 0.5, 3.0, "behind request a: no room (the last reason)"),
        ("c", 0.5, 3.0, "behind 2 others, first request a: no room (the last reason)"),
    ]
    log.line_blocked("d", "no seat", 3.0)
    log.wait_over("d", 0.5, 4.0)
    log.wait_over("e", 0.5, 4.0)
    assert log.events("d")[0].why == "no seat (the last reason)"
    assert log.events("e")[0].why == "behind request d: no seat (the last reason)"


def test_who_gives_up_in_line_is_an_event_too() -> None:
    log = EventLog()
    log.line_blocked("a", "no room", 1.0)
    log.wait_over("a", 0.5, 2.0, aborted=True)
    log.wait_over("b", 0.6, 2.5)
    log.wait_over("c", 2.2, 2.5)
    assert told(log) == [
        ("a", 0.5, 2.0, "no room (the last reason); aborted"),
        ("b", 0.6, 2.5, "behind request a: no room (the last reason)"),
    ]


def test_waits_that_go_on_are_told_when_asked_and_kept_nowhere() -> None:
    log = EventLog()
    waiting = [("a", 0.5), ("b", 0.5), ("c", 0.9), ("new", 1.5)]
    assert log.events(waiting=waiting, now_s=2.0) == []  # the line was never blocked
    log.line_blocked("a", "no room", 1.0)
    expected = [
        ("a", 0.5, None, "no room"),
        ("b", 0.5, None, "behind request a: no room"),
        ("c", 0.9, None, "behind 2 others, first request a: no room"),
    ]
    assert told(log, waiting=waiting, now_s=2.0) == expected
    assert told(log, waiting=waiting, now_s=2.0, request_id="c") == expected[2:]
    assert log.events() == []


def test_thousands_in_line_cost_nothing_until_they_are_admitted() -> None:
    log = EventLog(capacity=50)
    for step in range(1000):
        log.line_blocked("head", "no room", float(step))
    assert log.events() == [] and log.num_forgotten == 0
    waiting = [(f"r{i}", 0.0) for i in range(5000)]
    assert len(log.events(waiting=waiting, now_s=1000.0)) == 5000
    for name, arrival_s in waiting:
        log.wait_over(name, arrival_s, 1001.0)
    assert len(log.events()) == 50


def test_the_reasons_for_being_blocked() -> None:
    assert no_room(180, 12, 5, 2) == (
        "its 180 tokens need up to 12 blocks, 5 are free and 2 of them are kept for those who run"
    )
    assert no_room(180, 12, 5, 0) == "its 180 tokens need up to 12 blocks, 5 are free"
    assert no_seat(1, 256) == (
        "it needs a seat, and --max-num-seqs 256 leaves too few beside those who run"
    )
    assert no_seat(4, 256).startswith("it needs 4 seats, and --max-num-seqs 256")
    assert no_tokens(512) == "those who run use the --max-num-batched-tokens 512 of the step"


# -- the event itself


def test_an_event_is_one_line_for_people() -> None:
    event = preemption(
        "a", 1.25, by="b", why="last come : of 3", num_seqs=4, tokens_lost=30, tokens_moved=7,
        num_blocks=4, until_s=2.0,
    )  # fmt: skip
    assert str(event) == (
        "     1.250 s  preempted request a, 4 sequences (recompute) for request b: "
        "last come : of 3; 7 tokens moved, 30 lost; until 2.000 s (0.750 s)"
    )
    itself = preemption("a", 1.25, by="a")
    assert str(itself) == "     1.250 s  preempted request a (recompute) for itself: because"
    assert str(make_event(EventKind.STORM, None, 2.0)) == "     2.000 s  storm     engine: because"


def test_an_event_is_json() -> None:
    event = preemption("a", 1.25, by="b", tokens_lost=30)
    assert json.loads(json.dumps(event.as_dict())) == {
        "kind": "preempted", "time_s": 1.25, "request_id": "a", "why": "because", "by": "b",
        "mode": "recompute", "num_seqs": 0, "tokens_lost": 30, "tokens_moved": 0,
        "num_blocks": 0, "until_s": None,
    }  # fmt: skip
    assert type(event.as_dict()["kind"]) is str
