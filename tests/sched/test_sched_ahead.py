"""Plans made ahead: sequences are planned again while their last token is being sampled."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sched_support import (
    answer,
    assert_drained,
    drain,
    lonely_run,
    make_beams,
    make_request,
    make_runner,
    make_scheduler,
    shares,
)

from octavo.plan import SeqResult, StepPlan, StepResult
from octavo.request import FinishReason, SamplerParams
from octavo.sched import Scheduler


def must_plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    return plan


def test_a_decode_is_planned_once_ahead() -> None:
    scheduler, kv = make_scheduler(plan_ahead=True)
    scheduler.add(make_request("a", 5, max_tokens=10))
    first, second = must_plan(scheduler), must_plan(scheduler)
    assert shares(first) == [(0, 0, 5, True)]
    assert shares(second) == [(0, 5, 1, True)], "the runner knows the token at position 5"
    assert scheduler.schedule(0.0) is None, "the token at position 6 is sampled in no plan yet"
    assert kv.num_committed(0) == 5, "what is not known is no prefix of anybody"
    assert [u.token_ids for u in scheduler.update(answer(first), 0.0)] == [(5,)]
    assert kv.num_committed(0) == 6
    third = must_plan(scheduler)
    assert shares(third) == [(0, 6, 1, True)]
    scheduler.update(answer(second), 0.0)
    scheduler.update(answer(third), 0.0)
    assert shares(scheduler.schedule(0.0)) == [(0, 7, 1, True)] and kv.num_committed(0) == 8


def test_nothing_is_planned_ahead_unless_asked_for() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", 5, max_tokens=10))
    must_plan(scheduler)
    assert scheduler.schedule(0.0) is None


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_the_last_token_by_length_is_never_computed(max_tokens: int) -> None:
    scheduler, kv = make_scheduler(plan_ahead=True)
    scheduler.add(make_request("a", 4, max_tokens=max_tokens))
    plans, num_tokens = [], 0
    while scheduler.has_unfinished():
        while (plan := scheduler.schedule(0.0)) is not None:
            plans.append(plan)
        updates = scheduler.update(answer(plans[num_tokens]), 0.0)
        num_tokens += 1
    assert updates[-1].finish_reason is FinishReason.LENGTH
    assert len(plans) == num_tokens == max_tokens
    assert_drained(kv)


def test_a_stop_is_noticed_a_step_late_and_its_block_comes_back() -> None:
    scheduler, kv = make_scheduler(plan_ahead=True)
    scheduler.add(make_request("a", 3, max_tokens=10, stop_token_ids=frozenset([7])))
    first, second = must_plan(scheduler), must_plan(scheduler)
    third = scheduler.update(answer(first), 0.0) and must_plan(scheduler)
    assert len(kv.block_table(0)) == 2, "position 4 is in a block of its own"
    (end,) = scheduler.update(answer(second, token_id=7), 0.0)
    assert (end.token_ids, end.finish_reason, end.stop_reason) == ((7,), FinishReason.STOP, 7)
    assert_drained(kv)
    scheduler.add(make_request("b", 3, max_tokens=10))
    assert third and must_plan(scheduler).finished == [0]
    assert scheduler.update(answer(third), 0.0) == [], "drawn behind the end"


@pytest.mark.parametrize(
    "sampler",
    [
        SamplerParams(repetition_penalty=1.1),
        SamplerParams(frequency_penalty=0.5),
        SamplerParams(presence_penalty=0.5),
        SamplerParams(bad_words=((1, 2),)),
    ],
)
def test_who_has_to_know_the_tokens_before_sits_out(sampler: SamplerParams) -> None:
    scheduler, _ = make_scheduler(plan_ahead=True)
    scheduler.add(replace(make_request("a", 3, max_tokens=10), sampler=sampler))
    scheduler.add(make_request("b", 3, max_tokens=10))
    scheduler.add(make_beams("c", 3, 2, max_tokens=5))
    first = must_plan(scheduler)
    assert [s.seq_id for s in first.seqs] == [0, 1, 2]
    assert shares(scheduler.schedule(0.0)) == [(1, 3, 1, True)]


def test_a_carrier_waits_for_its_forks() -> None:
    scheduler, kv = make_scheduler(plan_ahead=True)
    runner = make_runner(kv)
    request = make_request("a", 3, max_tokens=5, n=3)
    scheduler.add(request)
    first = must_plan(scheduler)
    assert len(first.forks) == 2
    assert scheduler.schedule(0.0) is None
    result = runner.execute(first)
    scheduler.update(result, 0.0)
    second, third = must_plan(scheduler), must_plan(scheduler)
    assert len(second.seqs) == len(third.seqs) == 3, "they are like any other from then on"
    late = [runner.execute(second), runner.execute(third)]
    updates = [u for r in late for u in scheduler.update(r, 0.0)] + drain(scheduler, runner, 9)
    tokens = {i: [t for u in updates if u.sample_index == i for t in u.token_ids] for i in range(3)}
    firsts = [token for _, token, _ in result.sampled]
    assert all([firsts[i], *tokens[i]] == lonely_run(request, i, 8)[0] for i in range(3))


def test_prompts_get_what_those_leave_who_are_planned_ahead() -> None:
    """One that passes them all is served before them, and leaves each its token."""
    scheduler, _ = make_scheduler(
        plan_ahead=True, max_num_batched_tokens=8, max_num_seqs=4, policy="priority"
    )
    for name in "abc":
        scheduler.add(make_request(name, 2, max_tokens=20))
    first = must_plan(scheduler)
    scheduler.add(make_request("long", 30, max_tokens=2, priority=-1))
    second = must_plan(scheduler)
    assert shares(second)[3:] == [(3, 0, 5, False)]
    third = scheduler.update(answer(first), 0.0) and must_plan(scheduler)
    assert third and third.num_tokens == 8 and shares(third)[:1] == [(3, 5, 5, False)]


def test_nobody_gives_way_for_a_token_that_may_not_be_wanted() -> None:
    """Three blocks of 4: with 4 and 7 tokens they are full, and the first wants its second block
    before its token is known."""
    scheduler, kv = make_scheduler(3, plan_ahead=True)
    scheduler.add(make_request("a", 4, max_tokens=6))
    scheduler.add(make_request("b", 6, max_tokens=4))
    first = must_plan(scheduler)
    second = must_plan(scheduler)
    assert shares(second) == [(1, 6, 1, True)] and scheduler.num_preemptions == 0
    scheduler.update(answer(first), 0.0)
    third = must_plan(scheduler)
    assert third.preempted == [1] and shares(third) == [(0, 4, 1, True)]
    updates = scheduler.update(answer(second), 0.0)
    assert [(u.seq_id, u.token_ids) for u in updates] == [(1, (5,))]
    assert kv.num_sequences == 1


def test_a_full_pool_ends_nobody_whose_token_is_on_its_way() -> None:
    """It has all that it can get, and gets as many tokens as without planning ahead."""
    outputs = []
    for plan_ahead in (False, True):
        scheduler, kv = make_scheduler(4, plan_ahead=plan_ahead)
        runner = make_runner(kv)
        scheduler.add(make_request("a", 6))
        first = must_plan(scheduler)
        scheduler.update(runner.execute(first), 0.0)
        scheduler.resize(2, 0.0)
        scheduler.update(runner.execute(must_plan(scheduler)), 0.0)
        under_way: list[StepResult] = []
        tokens: list[int] = []
        for _ in range(12):
            plan = scheduler.schedule(0.0)
            under_way += [] if plan is None else [runner.execute(plan)]
            updates = scheduler.take_updates()
            if under_way and (plan is None or len(under_way) > plan_ahead):
                updates += scheduler.update(under_way.pop(0), 0.0)
            tokens += [t for u in updates for t in u.token_ids]
            assert all(u.finish_reason in (None, FinishReason.LENGTH) for u in updates)
        assert not scheduler.has_unfinished()
        outputs.append(tokens)
    assert outputs[0] == outputs[1] and len(outputs[0]) == 2


def test_two_tokens_come_for_one_that_was_preempted_meanwhile() -> None:
    scheduler, kv = make_scheduler(4, plan_ahead=True)
    runner = make_runner(kv)
    requests = [make_request("a", 6, max_tokens=6), make_request("b", 6, max_tokens=6)]
    for request in requests:
        scheduler.add(request)
    results = [runner.execute(must_plan(scheduler)), runner.execute(must_plan(scheduler))]
    scheduler.resize(3, 0.0)
    assert scheduler.num_waiting == 1, "the last come gave way"
    results.append(runner.execute(must_plan(scheduler)))
    updates = [u for result in results for u in scheduler.update(result, 0.0)]
    assert sum(len(u.token_ids) for u in updates if u.request_id == "b") == 2
    updates += drain(scheduler, runner, 40)
    for request in requests:
        tokens = [t for u in updates if u.request_id == request.request_id for t in u.token_ids]
        assert tokens == lonely_run(request, 0, 12)[0]
    assert_drained(kv)


@pytest.mark.parametrize("caching", [True, False])
def test_a_late_write_harms_nobody_who_has_the_block_next(caching: bool) -> None:
    """A sequence ends while a step computes a token of it that nobody wanted: its blocks are found
    and taken over at once, and each plan is carried out only then."""
    scheduler, kv = make_scheduler(3, plan_ahead=True, enable_prefix_caching=caching)
    runner = make_runner(kv)
    first = make_request("a", 5, max_tokens=7)
    stop = lonely_run(first, 0, 12)[0][1]
    scheduler.add(replace(first, stop_token_ids=frozenset([stop])))
    plans = [must_plan(scheduler), must_plan(scheduler)]
    scheduler.update(runner.execute(plans[0]), 0.0)
    plans.append(must_plan(scheduler))
    ends = scheduler.update(runner.execute(plans[1]), 0.0)
    assert ends[-1].finish_reason is FinishReason.STOP
    heirs = [
        make_request("b", 6, like="a", differs_at=5, max_tokens=3),
        make_request("c", 4, max_tokens=1),
    ]
    for request in heirs:
        scheduler.add(request)
    plans.append(must_plan(scheduler))
    assert len(plans[3].seqs) == 2
    assert {i for s in plans[3].seqs for i in s.new_block_ids} == {0, 1, 2}
    assert scheduler.update(runner.execute(plans[2]), 0.0) == []
    updates = scheduler.update(runner.execute(plans[3]), 0.0) + drain(scheduler, runner, 9)
    for request in heirs:
        tokens = [t for u in updates if u.request_id == request.request_id for t in u.token_ids]
        total = len(request.prompt_token_ids) + (request.max_tokens or 0)
        assert tokens == lonely_run(request, 0, total)[0]


def test_after_a_failure_the_void_plans_are_told_again() -> None:
    scheduler, kv = make_scheduler(plan_ahead=True)
    for name in "ab":
        scheduler.add(make_request(name, 3, max_tokens=9))
    first = must_plan(scheduler)
    scheduler.update(answer(first), 0.0)
    scheduler.abort("a")
    second, third = must_plan(scheduler), must_plan(scheduler)
    assert second.finished == [0] and shares(third) == [(1, 4, 1, True)]
    assert scheduler.request_ids_in(second) == scheduler.request_ids_in(third) == ["b"]
    scheduler.abort("b")
    for plan in (third, second):
        scheduler.retell(plan)
    kv.reset_cache()
    scheduler.add(make_request("c", 3, max_tokens=9))
    fourth = must_plan(scheduler)
    assert fourth.finished == [0, 1]
    result = StepResult(fourth.step_id, [SeqResult(2, 5, None)])
    assert [u.request_id for u in scheduler.update(result, 0.0)] == ["c"]
