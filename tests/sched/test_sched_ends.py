"""How sequences end: by token, by length, from outside; also while a step is under way."""

from __future__ import annotations

import pytest
from sched_support import (
    answer,
    assert_drained,
    make_request,
    make_scheduler,
    run_step,
    shares,
)

from octavo.request import FinishReason

EOS, STOP_ID, BOTH = 1, 2, 3
ENDS = {"eos_token_ids": frozenset({EOS, BOTH}), "stop_token_ids": frozenset({STOP_ID, BOTH})}


@pytest.mark.parametrize(
    ("token_id", "reason", "stop_reason"),
    [
        (EOS, FinishReason.STOP, None),
        (STOP_ID, FinishReason.STOP, STOP_ID),
        (BOTH, FinishReason.STOP, None),
        (7, None, None),
    ],
)
def test_tokens_that_end(
    token_id: int, reason: FinishReason | None, stop_reason: int | None
) -> None:
    scheduler, kv = make_scheduler()
    scheduler.add(make_request("a", 3, max_tokens=5, **ENDS))
    _, (update,) = run_step(scheduler, token_id)
    assert update.token_ids == (token_id,)  # a stop token is part of what is handed out
    assert (update.finish_reason, update.stop_reason) == (reason, stop_reason)
    assert scheduler.has_unfinished() == (reason is None)
    if reason is not None:
        assert_drained(kv)


def test_stop_wins_over_length() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", 3, max_tokens=1, **ENDS))
    _, (update,) = run_step(scheduler, STOP_ID)
    assert (update.finish_reason, update.stop_reason) == (FinishReason.STOP, STOP_ID)


def test_length_counts_output_tokens() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", 3, max_tokens=3))
    reasons = [run_step(scheduler)[1][0].finish_reason for _ in range(3)]
    assert reasons == [None, None, FinishReason.LENGTH]
    assert not scheduler.has_unfinished()


def test_a_stop_before_min_tokens_is_an_ordinary_token() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", 3, max_tokens=9, min_tokens=2, **ENDS))
    reasons = [run_step(scheduler, token)[1][0].finish_reason for token in (EOS, STOP_ID, EOS)]
    assert reasons == [None, None, FinishReason.STOP]


def test_without_eos_ids_the_token_goes_on() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", 3, max_tokens=2))
    assert run_step(scheduler, EOS)[1][0].finish_reason is None


def test_abort_of_the_running_and_of_the_waiting() -> None:
    scheduler, kv = make_scheduler(max_num_seqs=1)
    stats = scheduler.add(make_request("a", 3, max_tokens=9))
    scheduler.add(make_request("b", 3, max_tokens=9))
    run_step(scheduler)
    assert scheduler.abort("b")
    assert scheduler.abort("a")
    assert_drained(kv)
    assert not scheduler.has_unfinished()
    assert not scheduler.abort("a")
    assert not scheduler.abort("never seen")
    assert scheduler.take_updates() == []  # who aborts knows
    assert stats.metrics.finished_s == 0.0


def test_abort_takes_all_samples_along() -> None:
    scheduler, kv = make_scheduler(max_num_seqs=2)
    scheduler.add(make_request("a", 3, n=4, max_tokens=9))
    run_step(scheduler)
    scheduler.finish(0, FinishReason.STOP, "END")
    assert scheduler.abort("a")
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert_drained(kv)


def test_abort_of_the_preempted() -> None:
    scheduler, kv = make_scheduler(4, 4)
    scheduler.add(make_request("a", 7, max_tokens=5))
    scheduler.add(make_request("b", 7, max_tokens=5))
    for _ in range(3):
        plan, _ = run_step(scheduler)
    assert plan.preempted == [1]
    assert scheduler.abort("b")
    plan, _ = run_step(scheduler)
    assert (plan.finished, plan.preempted) == ([1], [])
    assert scheduler.abort("a")
    assert_drained(kv)


@pytest.mark.parametrize("by_abort", [True, False])
def test_the_result_for_one_that_ended_meanwhile_is_dropped(by_abort: bool) -> None:
    scheduler, kv = make_scheduler()
    scheduler.add(make_request("a", 3, max_tokens=9))
    scheduler.add(make_request("b", 3, max_tokens=9))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    if by_abort:
        assert scheduler.abort("a")
    else:
        assert scheduler.finish(0, FinishReason.STOP, "END")
    updates = scheduler.update(answer(plan), 0.0)
    assert [u.request_id for u in updates] == ["b"]
    plan, _ = run_step(scheduler)
    assert plan.finished == [0]
    assert shares(plan) == [(1, 3, 1, True)]
    kv.check_integrity()


def test_the_same_id_again_while_the_step_of_the_first_is_under_way() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", 3, max_tokens=9))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert scheduler.abort("a")
    scheduler.add(make_request("a", 5, max_tokens=9))
    assert scheduler.update(answer(plan), 0.0) == []
    plan, updates = run_step(scheduler)
    assert (plan.finished, shares(plan)) == ([0], [(1, 0, 5, True)])
    assert [(u.request_id, u.seq_id) for u in updates] == [("a", 1)]


def test_finish_by_stop_string_after_the_update() -> None:
    scheduler, kv = make_scheduler()
    scheduler.add(make_request("a", 3, n=2, max_tokens=9))
    run_step(scheduler)
    assert scheduler.finish(0, FinishReason.STOP, "END")
    assert not scheduler.finish(0, FinishReason.STOP, "END")
    assert not scheduler.finish(77, FinishReason.STOP, "END")
    plan, _ = run_step(scheduler)
    assert (plan.finished, shares(plan)) == ([0], [(1, 3, 1, True)])
    assert kv.num_sequences == 1
