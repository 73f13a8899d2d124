"""Parallel sampling: one sample runs the prompt, the others are forked from it."""

from __future__ import annotations

import pytest
from sched_support import (
    OUTSIDE,
    answer,
    assert_drained,
    drain,
    hold_blocks,
    lonely_run,
    make_request,
    make_runner,
    make_scheduler,
    run_step,
    shares,
)

from octavo.plan import StepPlan
from octavo.request import FinishReason
from octavo.sched import Scheduler, SeqUpdate


def tokens_of(updates: list[SeqUpdate], sample_index: int) -> list[int]:
    return [t for u in updates if u.sample_index == sample_index for t in u.token_ids]


def must_plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    return plan


def test_the_prompt_is_computed_once_and_the_others_fork() -> None:
    scheduler, kv = make_scheduler(max_num_batched_tokens=8)
    request = make_request("a", 10, n=3, max_tokens=4)
    stats = scheduler.add(request)
    assert scheduler.seq_ids("a") == (0, 1, 2)
    runner = make_runner(kv)
    plan = must_plan(scheduler)
    assert shares(plan) == [(0, 0, 8, False)]
    assert (plan.forks, plan.extra_draws) == ([], {})
    updates = scheduler.update(runner.execute(plan), 0.0)

    plan = must_plan(scheduler)
    assert shares(plan) == [(0, 8, 2, True)]
    assert [(f.parent_id, f.child_id, f.num_tokens, f.sample_index) for f in plan.forks] == [
        (0, 1, 10, 1),
        (0, 2, 10, 2),
    ]
    assert plan.extra_draws == {0: (1, 2)}
    updates += scheduler.update(runner.execute(plan), 0.0)
    assert [u.seq_id for u in updates] == [0, 1, 2]
    assert scheduler.num_running == 3
    assert list(kv.block_table(0)) == list(kv.block_table(2))

    plan = must_plan(scheduler)
    assert shares(plan) == [(0, 10, 1, True), (1, 10, 1, True), (2, 10, 1, True)]
    assert len(plan.copies) == 2  # the partial block; the last owner writes in place
    assert kv.num_blocks - kv.num_free_blocks == 2 + 3
    updates += scheduler.update(runner.execute(plan), 0.0) + drain(scheduler, runner, 20)
    for index in range(3):
        assert tokens_of(updates, index) == lonely_run(request, index, 14)[0]
    assert stats.metrics.num_generation_tokens == 12
    assert stats.num_computed_tokens == 10 + 3 * 3
    assert scheduler.seq_ids("a") == ()
    assert_drained(kv)


def test_a_group_waits_for_all_its_seats() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=4)
    scheduler.add(make_request("a", 2, max_tokens=2))
    scheduler.add(make_request("b", 2, max_tokens=3))
    scheduler.add(make_request("c", 2, n=3, max_tokens=2))
    scheduler.add(make_request("d", 2, max_tokens=2))
    assert shares(run_step(scheduler)[0]) == [(0, 0, 2, True), (1, 0, 2, True)]
    run_step(scheduler)
    assert shares(run_step(scheduler)[0]) == [(1, 3, 1, True), (2, 0, 2, True)]
    # d has a seat only now that b has ended
    assert [s.seq_id for s in run_step(scheduler)[0].seqs] == [2, 3, 4, 5]


@pytest.mark.parametrize("n", [4, 7])
def test_more_samples_than_seats_come_in_waves(n: int) -> None:
    scheduler, kv = make_scheduler(max_num_seqs=3)
    runner = make_runner(kv)
    runner.max_seqs = 3
    request = make_request("a", 6, n=n, max_tokens=3)
    scheduler.add(request)
    plan = must_plan(scheduler)
    assert plan.extra_draws == {0: (1, 2)}
    updates = scheduler.update(runner.execute(plan), 0.0) + drain(scheduler, runner, 40)
    for index in range(n):
        assert tokens_of(updates, index) == lonely_run(request, index, 9)[0]
    assert_drained(kv)


def test_the_carrier_ends_inside_its_prompt_and_the_next_one_takes_over() -> None:
    scheduler, kv = make_scheduler(max_num_batched_tokens=8)
    runner = make_runner(kv)
    request = make_request("a", 10, n=3, max_tokens=4)
    scheduler.add(request)
    scheduler.update(runner.execute(must_plan(scheduler)), 0.0)
    assert scheduler.finish(0, FinishReason.ABORT)
    plan = must_plan(scheduler)
    assert plan.finished == [0]
    assert [(new.seq_id, new.sample_index) for new in plan.new_seqs] == [(1, 1)]
    updates = scheduler.update(runner.execute(plan), 0.0) + drain(scheduler, runner, 20)
    assert tokens_of(updates, 0) == []
    for index in (1, 2):
        assert tokens_of(updates, index) == lonely_run(request, index, 14)[0]
    assert_drained(kv)


@pytest.mark.parametrize("ended", [(0,), (1,), (0, 1), (0, 2), (2, 1)])
def test_samples_end_while_the_forking_step_is_under_way(ended: tuple[int, ...]) -> None:
    scheduler, kv = make_scheduler()
    runner = make_runner(kv)
    request = make_request("a", 6, n=3, max_tokens=4)
    scheduler.add(request)
    plan = must_plan(scheduler)
    result = runner.execute(plan)
    for seq_id in ended:
        assert scheduler.finish(seq_id, FinishReason.ABORT)
        kv.check_integrity()
    updates = scheduler.update(result, 0.0)
    assert scheduler.num_running == 3 - len(ended)
    plan = must_plan(scheduler)
    assert sorted(plan.finished) == sorted(ended)
    updates += scheduler.update(runner.execute(plan), 0.0) + drain(scheduler, runner, 20)
    for index in range(3):
        expected = [] if index in ended else lonely_run(request, index, 10)[0]
        assert tokens_of(updates, index) == expected
    assert_drained(kv)


def test_unborn_samples_end_before_any_plan() -> None:
    scheduler, kv = make_scheduler()
    runner = make_runner(kv)
    request = make_request("a", 6, n=4, max_tokens=4)
    scheduler.add(request)
    assert scheduler.finish(0, FinishReason.ABORT)
    assert scheduler.finish(2, FinishReason.ABORT)
    assert not scheduler.finish(2, FinishReason.ABORT)
    plan = must_plan(scheduler)
    assert [new.seq_id for new in plan.new_seqs] == [1]
    assert plan.extra_draws == {1: (3,)}
    updates = scheduler.update(runner.execute(plan), 0.0) + drain(scheduler, runner, 20)
    assert tokens_of(updates, 3) == lonely_run(request, 3, 10)[0]
    assert_drained(kv)


def test_the_group_is_preempted_between_the_fork_and_its_result() -> None:
    """The samples have tokens, but no blocks; all are in line, and each token comes once."""
    scheduler, kv = make_scheduler(8, 4, max_num_batched_tokens=8, policy="priority")
    runner = make_runner(kv)
    group = make_request("b", 5, n=3, max_tokens=4, priority=5)
    scheduler.add(group)
    results = [runner.execute(must_plan(scheduler))]
    scheduler.add(make_request("a", 16, max_tokens=2, priority=0))
    results.append(runner.execute(must_plan(scheduler)))
    hold_blocks(kv, kv.num_free_blocks)
    plan = must_plan(scheduler)
    assert plan.preempted == [0]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 3)
    results.append(runner.execute(plan))
    kv.release(OUTSIDE)
    assert scheduler.schedule(0.0) is None
    updates = [u for result in results for u in scheduler.update(result, 0.0)]
    updates += drain(scheduler, runner, 30)
    of_group = [u for u in updates if u.request_id == "b"]
    for index in range(3):
        assert tokens_of(of_group, index) == lonely_run(group, index, 9)[0]
    assert_drained(kv)


def test_a_sample_that_ends_with_its_first_token() -> None:
    scheduler, kv = make_scheduler()
    scheduler.add(make_request("a", 6, n=3, max_tokens=1))
    _, updates = run_step(scheduler)
    assert [u.finish_reason for u in updates] == [FinishReason.LENGTH] * 3
    assert not scheduler.has_unfinished()
    assert_drained(kv)


def test_abort_and_the_same_id_again_while_the_forking_step_is_under_way() -> None:
    scheduler, kv = make_scheduler()
    scheduler.add(make_request("a", 6, n=3, max_tokens=4))
    plan = must_plan(scheduler)
    assert scheduler.abort("a")
    assert_drained(kv)
    scheduler.add(make_request("a", 6, n=2, max_tokens=4))
    assert scheduler.update(answer(plan), 0.0) == []
    plan, updates = run_step(scheduler)
    assert plan.finished == [2, 1, 0]
    assert [(u.seq_id, u.sample_index) for u in updates] == [(3, 0), (4, 1)]


def test_prompt_logprobs_come_once_whoever_carries() -> None:
    scheduler, kv = make_scheduler(max_num_seqs=2, max_num_batched_tokens=4)
    runner = make_runner(kv)
    request = make_request("a", 10, n=5, max_tokens=2, num_prompt_logprobs=0)
    scheduler.add(request)
    updates = drain(scheduler, runner, 60)
    found = [entry.token_id for u in updates for entry in u.prompt_logprobs]
    assert found == request.prompt_token_ids[1:]


def test_prompt_logprobs_are_computed_although_the_prompt_is_cached() -> None:
    scheduler, kv = make_scheduler(enable_prefix_caching=True)
    runner = make_runner(kv)
    scheduler.add(make_request("a", 10, max_tokens=2))
    drain(scheduler, runner, 9)
    request = make_request("b", 10, max_tokens=2, like="a", num_prompt_logprobs=0)
    scheduler.add(make_request("c", 10, max_tokens=2, like="a"))
    scheduler.add(request)
    plan = must_plan(scheduler)
    assert shares(plan) == [(1, 9, 1, True), (2, 0, 10, True)]
    updates = scheduler.update(runner.execute(plan), 0.0)
    found = [entry.token_id for u in updates for entry in u.prompt_logprobs]
    assert found == request.prompt_token_ids[1:]


def test_after_a_preemption_answered_prompt_logprobs_are_found_again() -> None:
    scheduler, kv = make_scheduler(8, 4, max_num_batched_tokens=8, enable_prefix_caching=True)
    runner = make_runner(kv)
    requests = [
        make_request("a", 7, max_tokens=16),
        make_request("b", 13, max_tokens=16, num_prompt_logprobs=0),
    ]
    for request in requests:
        scheduler.add(request)
    updates: list[SeqUpdate] = []
    starts: list[int] = []
    while scheduler.has_unfinished():
        plan = must_plan(scheduler)
        if scheduler.num_preemptions:
            starts += [s.start for s in plan.seqs if s.seq_id == 1]
        updates += scheduler.update(runner.execute(plan), 0.0)
    assert scheduler.num_preemptions == 1
    assert starts[0] > 0, "nothing was found"
    found = [entry.token_id for u in updates for entry in u.prompt_logprobs]
    assert found == requests[1].prompt_token_ids[1:]


def test_many_samples_are_cheap_to_add_and_abort() -> None:
    """MAX_N sequences: nothing here may be quadratic."""
    scheduler, kv = make_scheduler(max_num_seqs=8)
    scheduler.add(make_request("a", 6, n=16_384, max_tokens=4))
    for _ in range(3):
        run_step(scheduler)
    assert scheduler.abort("a")
    assert_drained(kv)
