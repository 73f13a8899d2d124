"""What the scheduler does and says when the pool is full: modes, events, storms, another size."""

from __future__ import annotations

import pytest
from sched_support import (
    ReplicaRunner,
    answer,
    assert_drained,
    drain,
    hold_blocks,
    lonely_run,
    make_beams,
    make_request,
    make_runner,
    make_scheduler,
    run_step,
    shares,
)

from octavo.errors import CapacityError
from octavo.events import EventKind
from octavo.kv import KVCacheManager
from octavo.plan import CopyKind, StepPlan, StepResult
from octavo.sched import Scheduler
from octavo.sched.costs import CostModel


def collide(mode: str, num_host_blocks: int = 8) -> tuple[Scheduler, KVCacheManager]:
    """Two prompts of 7 tokens in 4 blocks of 4; the next step preempts the second."""
    kv = KVCacheManager(4, 4, num_host_blocks=num_host_blocks)
    scheduler, _ = make_scheduler(
        kv=kv, preemption_mode=mode, costs=CostModel(token_s=1.0, block_s=0.1)
    )
    scheduler.add(make_request("a", 7, max_tokens=5))
    scheduler.add(make_request("b", 7, max_tokens=5))
    return scheduler, kv


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_swap_moves_and_recompute_computes(mode: str) -> None:
    scheduler, kv = collide(mode)
    runner = make_runner(kv)
    stats = scheduler.request_ids_of([0, 1])
    assert stats == ["a", "b"]
    updates = drain(scheduler, runner, 20)
    for name in "ab":
        tokens = [t for u in updates if u.request_id == name for t in u.token_ids]
        assert tokens == lonely_run(make_request(name, 7, max_tokens=5), 0, 12)[0]
    (event,) = scheduler.events("b")
    assert event.kind is EventKind.PREEMPTED
    assert (event.by, event.num_seqs, event.num_blocks) == ("a", 1, 2)
    assert event.until_s == 0.0
    if mode == "recompute":
        assert (event.mode, event.tokens_lost, event.tokens_moved) == ("recompute", 8, 0)
        assert runner.num_copies[CopyKind.TO_HOST] == 0
    else:  # by the priors copying is cheaper
        assert (event.mode, event.tokens_lost, event.tokens_moved) == ("swap", 0, 8)
        assert runner.num_copies[CopyKind.TO_HOST] == runner.num_copies[CopyKind.FROM_HOST] == 2
    assert "nobody who came later" not in event.why
    assert_drained(kv)


def test_no_room_on_the_host_is_no_error() -> None:
    scheduler, kv = collide("swap", num_host_blocks=1)
    drain(scheduler, make_runner(kv), 20)
    (event,) = scheduler.events("b")
    assert event.mode == "recompute"
    assert "host memory has room for 1 of its 2 blocks" in event.why


def test_abort_while_it_waits_on_the_host() -> None:
    scheduler, kv = collide("swap")
    runner = make_runner(kv)
    for _ in range(3):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(runner.execute(plan), 0.0)
    assert plan.preempted == [1]
    assert kv.host_room() == 6
    assert scheduler.abort("b")
    assert kv.host_room() == 8
    (event,) = scheduler.events("b")
    assert event.until_s is not None
    drain(scheduler, runner, 20)
    assert_drained(kv)


def test_what_steps_cost_is_learned() -> None:
    costs = CostModel(token_s=1.0)  # a step's time for each token is the most that it can be
    scheduler, _ = make_scheduler(costs=costs)
    scheduler.add(make_request("a", 8, max_tokens=5))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    sampled = answer(plan).sampled
    scheduler.update(StepResult(0, sampled, copy_s=0.5, num_host_copies=10, compute_s=0.8), 0.0)
    assert costs.token_s == pytest.approx(0.1)
    assert costs.block_s == pytest.approx(0.05)


def test_a_wait_is_told_with_its_reason() -> None:
    scheduler, _ = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a", 3, max_tokens=2))
    scheduler.add(make_request("b", 3, max_tokens=2))
    scheduler.schedule(1.0)
    (event,) = scheduler.events("b")
    assert event.kind is EventKind.WAITED and event.until_s is None
    assert "--max-num-seqs 1" in event.why
    assert scheduler.events("a") == []


def test_no_room_is_told_with_the_arithmetic() -> None:
    scheduler, _ = make_scheduler(4, 4)
    scheduler.add(make_request("a", 8, max_tokens=3))
    scheduler.add(make_request("b", 12, max_tokens=3))
    scheduler.schedule(1.0)
    (event,) = scheduler.events()
    assert event.request_id == "b"
    assert event.why == "its 12 tokens need up to 3 blocks, 2 are free"


def test_cut_short_is_told() -> None:
    scheduler, kv = make_scheduler(6, 4)
    scheduler.add(make_request("a", 6, max_tokens=None))
    hold_blocks(kv, 3)
    drain(scheduler, make_runner(kv), 20)
    (event,) = scheduler.events("a")
    assert event.kind is EventKind.CUT_SHORT
    assert "0 of 6 are free" in event.why


def test_a_storm_raises_the_watermark_and_is_over_with_the_last_request() -> None:
    scheduler, kv = make_scheduler(40, 1, max_num_seqs=40, max_num_batched_tokens=200)
    for i in range(60):
        scheduler.add(make_request(f"r{i}", 1, max_tokens=30))
    runner = ReplicaRunner(40, 1, max_tokens=200, max_seqs=40)
    drain(scheduler, runner, 3000)
    assert scheduler.schedule(1.0) is None
    storms = [e for e in scheduler.events() if e.kind is EventKind.STORM]
    assert storms and all(e.until_s is not None for e in storms)
    assert scheduler.num_preemptions > 16
    assert_drained(kv)


# -- another size


def resized(scheduler: Scheduler, runner: ReplicaRunner, num_blocks: int) -> StepPlan:
    """Shrink, and carry out the plan that does it."""
    scheduler.resize(num_blocks, 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None and plan.seqs == []
    assert scheduler.update(runner.execute(plan), 0.0) == []
    runner.resize(num_blocks)
    return plan


def test_the_pool_shrinks_under_running_requests() -> None:
    scheduler, kv = make_scheduler(20, 4)
    runner = make_runner(kv)
    requests = [make_request(name, 6, max_tokens=14) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    updates = []
    for _ in range(6):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        updates += scheduler.update(runner.execute(plan), 0.0)
    assert scheduler.abort("a")  # leaves a hole at the beginning
    plan = resized(scheduler, runner, 6)
    assert plan.moved and len(plan.copies) == len(plan.moved)
    assert (scheduler.num_preemptions, kv.num_blocks) == (0, 6)
    plan = resized(scheduler, runner, 5)
    assert len(plan.preempted) == 1
    updates += drain(scheduler, runner, 60)
    for request in requests[1:]:
        tokens = [t for u in updates if u.request_id == request.request_id for t in u.token_ids]
        assert tokens == lonely_run(request, 0, 20)[0]
    kinds = [e.kind for e in scheduler.events()]
    assert kinds.count(EventKind.RESIZED) == 2
    assert_drained(kv)


def test_the_pool_grows_and_waiting_requests_come_in() -> None:
    scheduler, kv = make_scheduler(4, 4)
    scheduler.add(make_request("a", 12, max_tokens=3))
    scheduler.add(make_request("b", 12, max_tokens=3))
    assert [s.seq_id for s in run_step(scheduler)[0].seqs] == [0]
    scheduler.resize(8, 0.0)
    assert shares(run_step(scheduler)[0]) == [(0, 12, 1, True), (1, 0, 12, True)]
    assert kv.num_blocks == 8


def test_a_size_that_live_requests_may_outgrow_is_refused() -> None:
    scheduler, kv = make_scheduler(20, 4)
    scheduler.add(make_beams("a", 9, 3, max_tokens=14))
    scheduler.add(make_request("b", 9, max_tokens=None))  # takes what there is
    with pytest.raises(CapacityError, match="request a may come to need 14 blocks"):
        scheduler.resize(13, 0.0)
    assert kv.num_blocks == 20
    scheduler.resize(14, 0.0)
    assert kv.num_blocks == 14


# -- the runner fails


def test_a_failed_step_takes_those_along_whose_blocks_it_copies() -> None:
    """Beams that were swapped in wait for each other: not in `seqs`, but their copies are lost."""
    kv = KVCacheManager(14, 4, num_host_blocks=20)
    scheduler, _ = make_scheduler(kv=kv, policy="priority", preemption_mode="swap")
    runner = make_runner(kv)
    scheduler.add(make_beams("a", 6, 3, max_tokens=12, priority=5))
    for _ in range(3):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(runner.execute(plan), 0.0)
    scheduler.add(make_request("b", 20, max_tokens=30, priority=0))
    for _ in range(60):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        from_host = [c for c in plan.copies if c.kind is CopyKind.FROM_HOST]
        ran = scheduler.request_ids_of(s.seq_id for s in plan.seqs)
        if from_host:
            assert "a" in scheduler.request_ids_in(plan)
            break
        assert scheduler.request_ids_in(plan) == ran
        scheduler.update(runner.execute(plan), 0.0)
    assert from_host


def test_a_failed_step_takes_those_along_who_found_blocks_that_it_was_to_compute() -> None:
    """A beam whose tokens but the last are the beginning of a new prompt computes nothing and
    copies nothing, and is lost all the same."""
    scheduler, kv = make_scheduler(
        40, 4, policy="priority", max_num_batched_tokens=9, enable_prefix_caching=True
    )
    runner = make_runner(kv)
    scheduler.add(make_beams("a", 4, 2, max_tokens=12, priority=5))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.update(runner.execute(plan), 0.0)
    assert scheduler._pressure.shrink(1, 1)
    kv.reset_prefix_cache()
    scheduler.add(make_request("u", 8, max_tokens=3, priority=0, like="a", differs_at=4))
    plan = scheduler.schedule(0.0)
    assert plan is not None and plan.copies == []
    assert scheduler.request_ids_of(s.seq_id for s in plan.seqs) == ["u"]
    assert scheduler.num_running == 3
    failed = scheduler.request_ids_in(plan)
    assert failed == ["a", "u"]
    runner.fail(plan, late=True)
    for name in failed:
        scheduler.abort(name)
    kv.reset_cache()
    scheduler.retell(plan)
    scheduler.add(make_request("next", 8, max_tokens=3, like="a"))
    assert {u.request_id for u in drain(scheduler, runner, 60)} == {"next"}
    assert_drained(kv)


def test_after_a_failed_step_nobody_is_trusted_if_one_of_it_has_ended() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", 8, max_tokens=9))
    run_step(scheduler)
    scheduler.add(make_request("b", 8, max_tokens=9))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert scheduler.request_ids_in(plan) == ["a", "b"]
    run = shares(plan)
    scheduler.update(answer(plan), 0.0)
    scheduler.add(make_request("c", 8, max_tokens=9))
    later = scheduler.schedule(0.0)
    assert later is not None and len(later.seqs) == len(run) + 1
    scheduler.abort("c")
    assert scheduler.request_ids_in(later) == ["a", "b"]


# -- two sizes before a plan


def test_two_shrinks_before_a_plan_are_one_for_the_runner() -> None:
    scheduler, kv = make_scheduler(30, 4)
    runner = make_runner(kv)
    scheduler.add(make_request("x", 24, max_tokens=2))
    scheduler.add(make_request("y", 8, max_tokens=2))
    request = make_request("a", 20, max_tokens=9)
    scheduler.add(request)
    updates = []
    for _ in range(3):  # x and y leave holes
        plan = scheduler.schedule(0.0)
        assert plan is not None
        updates += scheduler.update(runner.execute(plan), 0.0)
    table = list(kv.block_table(2))
    scheduler.resize(max(table), 0.0)
    between = list(kv.block_table(2))
    scheduler.resize(8, 0.0)
    assert between != table and list(kv.block_table(2)) != between
    plan = scheduler.schedule(0.0)
    assert plan is not None and plan.seqs == []
    assert [dict(plan.moved).get(i, i) for i in table] == list(kv.block_table(2))
    scheduler.update(runner.execute(plan), 0.0)
    runner.resize(8)
    updates += drain(scheduler, runner, 30)
    tokens = [t for u in updates if u.request_id == "a" for t in u.token_ids]
    assert tokens == lonely_run(request, 0, 29)[0]
    assert_drained(kv)


# -- what is told


def test_a_preemption_says_how_much_was_needed_and_how_much_was_free() -> None:
    scheduler, kv = collide("recompute")
    drain(scheduler, make_runner(kv), 20)
    (event,) = scheduler.events("b")
    assert event.why.startswith("needs 1 block, 0 of 4 free; last come of 1 not served yet; ")


def test_who_has_to_go_itself_goes_for_itself() -> None:
    scheduler, kv = make_scheduler(8, 4)
    scheduler.add(make_request("a", 13, max_tokens=9))
    scheduler.add(make_request("b", 15, max_tokens=9))
    drain(scheduler, make_runner(kv), 60)
    whys = [str(e) for e in scheduler.events("b") if e.by == "b"]
    assert whys and " for itself: needs 1 block, 0 of 8 free; nobody who came later" in whys[0]


def test_a_wait_for_a_token_that_is_being_sampled_is_told() -> None:
    scheduler, kv = make_scheduler(8, 4)
    runner = make_runner(kv)
    for name in "abc":
        scheduler.add(make_request(name, 9, max_tokens=9))
    plan = scheduler.schedule(0.5)
    assert plan is not None
    scheduler._pressure.shrink(1, 1)  # b, whose token is being sampled
    assert scheduler.schedule(1.0) is None
    (event,) = scheduler.events("c")
    assert event.why.startswith("behind request b: its next token is being sampled")
    scheduler.update(runner.execute(plan), 1.0)
