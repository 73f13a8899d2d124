"""Exact plans: chunked prefill beside decodes, budgets, order, n, several plans under way."""

from __future__ import annotations

import pytest
from sched_support import (
    answer,
    make_request,
    make_runner,
    make_scheduler,
    run_step,
    shares,
)

from octavo.errors import ConfigError
from octavo.plan import SeqResult, StepResult, TokenLogprobs
from octavo.request import FinishReason


def test_prompts_are_chunked_beside_decodes() -> None:
    scheduler, kv = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", 5, max_tokens=9))
    scheduler.add(make_request("b", 12, max_tokens=9))

    plan, updates = run_step(scheduler)
    assert shares(plan) == [(0, 0, 5, True), (1, 0, 3, False)]
    assert [new.seq_id for new in plan.new_seqs] == [0, 1]
    assert [len(s.new_block_ids) for s in plan.seqs] == [2, 1]
    assert [(u.request_id, u.token_ids) for u in updates] == [("a", (5,))]

    plan, _ = run_step(scheduler)
    assert shares(plan) == [(0, 5, 1, True), (1, 3, 7, False)]
    assert plan.new_seqs == []
    assert [len(s.new_block_ids) for s in plan.seqs] == [0, 2]

    plan, updates = run_step(scheduler)
    assert shares(plan) == [(0, 6, 1, True), (1, 10, 2, True)]
    assert [(u.request_id, u.token_ids) for u in updates] == [("a", (5,)), ("b", (5,))]

    plan, _ = run_step(scheduler)
    assert shares(plan) == [(0, 7, 1, True), (1, 12, 1, True)]
    assert list(kv.block_table(1))[-1:] == list(plan.seqs[1].new_block_ids)


def test_a_plan_carries_the_blocks_the_manager_gave() -> None:
    scheduler, kv = make_scheduler()
    scheduler.add(make_request("a", 9, max_tokens=3))
    plan, _ = run_step(scheduler)
    assert plan.seqs[0].new_block_ids == tuple(kv.block_table(0))
    assert plan.new_seqs[0].token_ids == make_request("a", 9).prompt_token_ids
    assert plan.seqs[0].replaced is None and plan.copies == []


def test_a_new_prompt_waits_for_budget_and_takes_what_is_left() -> None:
    scheduler, _ = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", 20, max_tokens=2))
    scheduler.add(make_request("b", 2, max_tokens=2))
    assert shares(run_step(scheduler)[0]) == [(0, 0, 8, False)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert shares(run_step(scheduler)[0]) == [(0, 8, 8, False)]
    assert shares(run_step(scheduler)[0]) == [(0, 16, 4, True), (1, 0, 2, True)]


def test_a_long_prompt_leaves_every_decode_its_token() -> None:
    """Under priority a prompt may run before decodes that came earlier."""
    scheduler, _ = make_scheduler(max_num_batched_tokens=8, policy="priority")
    scheduler.add(make_request("a", 2, max_tokens=9, priority=5))
    scheduler.add(make_request("b", 2, max_tokens=9, priority=5))
    run_step(scheduler)
    scheduler.add(make_request("urgent", 30, max_tokens=9, priority=0))
    assert shares(run_step(scheduler)[0]) == [(0, 2, 1, True), (1, 2, 1, True), (2, 0, 6, False)]
    assert shares(run_step(scheduler)[0]) == [(2, 6, 6, False), (0, 3, 1, True), (1, 3, 1, True)]


def test_no_more_sequences_than_allowed() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, 2, max_tokens=2))
    assert shares(run_step(scheduler)[0]) == [(0, 0, 2, True), (1, 0, 2, True)]
    plan, updates = run_step(scheduler)
    assert len(plan.seqs) == 2
    assert [u.finish_reason for u in updates] == [FinishReason.LENGTH] * 2
    plan, _ = run_step(scheduler)
    assert plan.finished == [0, 1]
    assert shares(plan) == [(2, 0, 2, True)]


def test_head_of_line_is_strict() -> None:
    scheduler, _ = make_scheduler(4, 4)
    scheduler.add(make_request("a", 8, max_tokens=3))
    scheduler.add(make_request("big", 12, max_tokens=2))
    scheduler.add(make_request("small", 1, max_tokens=2))
    assert shares(run_step(scheduler)[0]) == [(0, 0, 8, True)]
    assert shares(run_step(scheduler)[0]) == [(0, 8, 1, True)]
    assert shares(run_step(scheduler)[0]) == [(0, 9, 1, True)]
    assert shares(run_step(scheduler)[0]) == [(1, 0, 12, True), (2, 0, 1, True)]


def test_priority_admits_smaller_numbers_first_and_ties_by_arrival() -> None:
    scheduler, _ = make_scheduler(policy="priority", max_num_seqs=1)
    for name, priority in (("a", 3), ("b", 1), ("c", 1), ("d", -2)):
        scheduler.add(make_request(name, 2, max_tokens=1, priority=priority))
    order = [run_step(scheduler)[1][0].request_id for _ in range(4)]
    assert order == ["d", "b", "c", "a"]


def test_fcfs_ignores_priority() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a", 2, max_tokens=1, priority=3))
    scheduler.add(make_request("b", 2, max_tokens=1, priority=1))
    assert [run_step(scheduler)[1][0].request_id for _ in range(2)] == ["a", "b"]


def test_the_request_ends_with_its_last_sequence() -> None:
    scheduler, _ = make_scheduler()
    stats = scheduler.add(make_request("a", 2, n=2, max_tokens=5))
    run_step(scheduler)
    assert scheduler.finish(0, FinishReason.STOP, "END")
    assert stats.metrics.finished_s is None
    assert scheduler.finish(1, FinishReason.STOP, "END")
    assert stats.metrics.finished_s == 0.0
    assert not scheduler.has_unfinished()


def test_nothing_to_run_is_none_and_the_runner_hears_of_ends_later() -> None:
    scheduler, _ = make_scheduler()
    assert scheduler.schedule(0.0) is None
    scheduler.add(make_request("a", 2, max_tokens=1))
    run_step(scheduler)
    assert scheduler.schedule(0.0) is None
    scheduler.add(make_request("b", 2, max_tokens=1))
    plan, _ = run_step(scheduler)
    assert plan.step_id == 1
    assert plan.finished == [0]


def test_a_sequence_that_never_ran_is_not_named_to_the_runner() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a", 2, max_tokens=3))
    scheduler.add(make_request("b", 2, max_tokens=3))
    run_step(scheduler)
    assert scheduler.abort("b")
    plan, _ = run_step(scheduler)
    assert plan.finished == []


def test_a_sequence_sits_out_until_its_token_exists() -> None:
    """Two plans under way: prompts go on, decodes wait for their token."""
    scheduler, kv = make_scheduler(max_num_batched_tokens=8)
    runner = make_runner(kv)
    scheduler.add(make_request("a", 3, max_tokens=5))
    scheduler.add(make_request("b", 12, max_tokens=5))
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)
    assert shares(first) == [(0, 0, 3, True), (1, 0, 5, False)]
    assert shares(second) == [(1, 5, 7, True)]
    assert scheduler.schedule(0.0) is None
    assert first is not None and second is not None
    results = [runner.execute(first), runner.execute(second)]
    assert [u.seq_id for u in scheduler.update(results[0], 0.0)] == [0]
    third = scheduler.schedule(0.0)
    assert shares(third) == [(0, 3, 1, True)]
    assert [u.seq_id for u in scheduler.update(results[1], 0.0)] == [1]


def test_a_sequence_that_sits_out_keeps_its_place_among_the_running() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a", 3, max_tokens=5))
    scheduler.add(make_request("b", 3, max_tokens=5))
    assert shares(scheduler.schedule(0.0)) == [(0, 0, 3, True)]
    assert scheduler.schedule(0.0) is None
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


def test_results_come_in_order() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", 3, max_tokens=5))
    plan, _ = run_step(scheduler)
    with pytest.raises(AssertionError, match="result of step 0"):
        scheduler.update(answer(plan), 0.0)
    with pytest.raises(AssertionError, match="result of step 7"):
        scheduler.update(StepResult(7, []), 0.0)


def test_a_failed_step_takes_only_its_requests_along() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a", 3, max_tokens=2))
    scheduler.add(make_request("b", 3, max_tokens=2))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    names = scheduler.request_ids_of(s.seq_id for s in plan.seqs)
    assert names == ["a"]
    assert all(scheduler.abort(name) for name in names)
    plan, updates = run_step(scheduler)
    assert (plan.step_id, plan.finished) == (1, [0])
    assert [u.request_id for u in updates] == ["b"]


def test_logprobs_reach_the_updates() -> None:
    scheduler, _ = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", 10, max_tokens=5))
    scheduler.add(make_request("b", 1, max_tokens=5))
    of_prompt = [TokenLogprobs(i, -float(i), 1, ()) for i in range(9)]
    of_token = TokenLogprobs(5, -0.5, 2, ((3, -0.1),))

    plan = scheduler.schedule(0.0)
    assert shares(plan) == [(0, 0, 8, False)]
    (update,) = scheduler.update(StepResult(0, [], {0: of_prompt[:8]}), 0.0)
    assert update.prompt_logprobs == tuple(of_prompt[:8])
    assert (update.token_ids, update.logprobs, update.finish_reason) == ((), (), None)

    plan = scheduler.schedule(0.0)
    assert shares(plan) == [(0, 8, 2, True), (1, 0, 1, True)]
    sampled = [SeqResult(0, 5, of_token), SeqResult(1, 6, None)]
    a, b = scheduler.update(StepResult(1, sampled, {0: of_prompt[8:]}), 0.0)
    assert (a.token_ids, a.logprobs, a.prompt_logprobs) == ((5,), (of_token,), (of_prompt[8],))
    assert (b.token_ids, b.logprobs, b.prompt_logprobs) == ((6,), (), ())


def test_stats_tell_what_a_request_went_through() -> None:
    scheduler, _ = make_scheduler()
    stats = scheduler.add(make_request("a", 6, max_tokens=2, arrival_s=1.0))
    plan = scheduler.schedule(3.0)
    assert plan is not None
    scheduler.update(answer(plan), 4.0)
    plan = scheduler.schedule(5.0)
    assert plan is not None
    scheduler.update(answer(plan), 7.0)
    metrics = stats.metrics
    assert (metrics.queue_s, metrics.ttft_s, metrics.e2e_s) == (2.0, 3.0, 6.0)
    assert metrics.last_token_s == 7.0
    assert (metrics.num_generation_tokens, stats.num_computed_tokens) == (2, 7)
    assert (stats.kv.peak_blocks, stats.kv.block_seconds) == (2, 8.0)


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"watermark": 1.0}, "watermark"),
        ({"watermark": -0.1}, "watermark"),
    ],
)
def test_impossible_limits_are_refused(limits: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make_scheduler(**limits)  # type: ignore[arg-type]
