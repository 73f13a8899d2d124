"""A step's decision does not look at everybody for everybody: counted, not timed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sched_support import make_request, make_scheduler, run_step

from octavo.sched.sequence import Sequence, SequenceGroup


def test_thousands_in_line_are_not_asked_for_their_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, _ = make_scheduler(64, 4)
    scheduler.add(make_request("a", 4, n=3, max_tokens=50))
    for i in range(1000):
        scheduler.add(make_request(f"r{i}", 250, n=2, max_tokens=2))
    asked = []
    count = SequenceGroup.num_reserved_seats.fget  # type: ignore[attr-defined]

    def counting(group: SequenceGroup) -> int:
        asked.append(group.request.request_id)
        return int(count(group))

    monkeypatch.setattr(SequenceGroup, "num_reserved_seats", property(counting))
    for _ in range(5):
        run_step(scheduler)
    assert set(asked) == {"a"} and len(asked) <= 10


def test_who_still_wants_a_token_is_counted_once_a_step() -> None:
    class Counting(list[Sequence]):
        num_passes = 0

        def __reversed__(self) -> Iterator[Sequence]:
            Counting.num_passes += 1
            return super().__reversed__()

    scheduler, _ = make_scheduler(64, 4, max_num_batched_tokens=40)
    for i in range(8):
        scheduler.add(make_request(f"r{i}", 3, max_tokens=90))
    run_step(scheduler)
    for seq in scheduler.roster.running:  # as if all were in the middle of their prompts
        seq.token_ids += [5] * 9
    scheduler.roster.running = Counting(scheduler.roster.running)
    plan, _ = run_step(scheduler)
    assert [s.num_tokens for s in plan.seqs] == [10, 10, 10, 6, 1, 1, 1, 1]
    assert Counting.num_passes == 1
