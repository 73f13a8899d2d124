"""How sequences end: by token, by length, from outside; also while a step is under way."""

from __future__ import annotations

import pytest
from sched_support import (
    answer,
    assert_drained,
    hold_blocks,
    make_request,
    make_scheduler,
    run_step,
    shares,
)

from octavo.request import FinishReason
from octavo.sched import SeqUpdate

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


def test_an_update_has_every_field() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", 3))
    _, (update,) = run_step(scheduler, 7)
    assert update == SeqUpdate("a", 0, update.seq_id, (7,), (), (), None, None)


def test_tokens_that_are_told_at_the_end_are_told_once_and_all() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", 3, n=2, max_tokens=3, told_at_end=True, **ENDS))
    scheduler.add(make_request("b", 3, max_tokens=4, told_at_end=True))
    scheduler.add(make_request("c", 3, max_tokens=4))
    found = [run_step(scheduler, token_id)[1] for token_id in (7, 8, STOP_ID, 9)]
    told = [[(u.request_id, u.sample_index, u.token_ids) for u in updates] for updates in found]
    assert told == [
        [("c", 0, (7,))],
        [("c", 0, (8,))],
        [("a", 0, (7, 8, STOP_ID)), ("a", 1, (7, 8, STOP_ID)), ("c", 0, (STOP_ID,))],
        [("b", 0, (7, 8, STOP_ID, 9)), ("c", 0, (9,))],
    ]


def test_what_is_told_at_the_end_is_told_of_who_is_cut_short() -> None:
    scheduler, kv = make_scheduler(6, 4)
    scheduler.add(make_request("a", 6, told_at_end=True))
    hold_blocks(kv, 3)
    assert scheduler.untold_ids("a", 0) == scheduler.untold_ids("none", 0) == []
    tokens = []
    while (plan := scheduler.schedule(0.0)) is not None:
        tokens.append(5 + len(tokens))
        assert scheduler.update(answer(plan, tokens[-1]), 0.0) == []
        assert scheduler.untold_ids("a", 0) == tokens
    (end,) = scheduler.take_updates()
    assert end.token_ids == tuple(tokens) and len(tokens) > 2
    assert end.finish_reason is FinishReason.LENGTH


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
