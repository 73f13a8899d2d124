"""A full pool: the last come gives way, keeps its tokens, and comes back; nobody waits for ever."""

from __future__ import annotations

import pytest
from sched_support import (
    OUTSIDE,
    ReplicaRunner,
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

from octavo.kv import KVCacheManager, PagedPolicy, SeqDemand
from octavo.kv.table import BlockTable
from octavo.plan import StepPlan
from octavo.request import FinishReason
from octavo.sched import Scheduler


def two_that_collide() -> tuple[Scheduler, KVCacheManager]:
    """Two prompts of 7 tokens in 4 blocks of 4: both stand at the third block after two steps."""
    scheduler, kv = make_scheduler(4, 4)
    scheduler.add(make_request("a", 7, max_tokens=5))
    scheduler.add(make_request("b", 7, max_tokens=5))
    assert shares(run_step(scheduler)[0]) == [(0, 0, 7, True), (1, 0, 7, True)]
    assert shares(run_step(scheduler)[0]) == [(0, 7, 1, True), (1, 7, 1, True)]
    return scheduler, kv


def test_the_last_come_gives_way_and_is_computed_again() -> None:
    scheduler, kv = two_that_collide()
    blocks_of_b = list(kv.block_table(1))

    plan, _ = run_step(scheduler)
    assert plan.preempted == [1]
    assert shares(plan) == [(0, 8, 1, True)]
    assert plan.seqs[0].new_block_ids[0] in blocks_of_b
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert scheduler.num_preemptions == 1

    plan, _ = run_step(scheduler)
    assert plan.preempted == []  # said once
    assert shares(plan) == [(0, 9, 1, True)]
    plan, updates = run_step(scheduler)
    assert updates[0].finish_reason is FinishReason.LENGTH

    plan, updates = run_step(scheduler)
    assert plan.finished == [0]
    assert plan.new_seqs == []  # the runner has kept its tokens
    assert shares(plan) == [(1, 0, 9, True)]  # the prompt and what was generated
    assert [len(s.new_block_ids) for s in plan.seqs] == [3]
    assert updates[0].token_ids == (5,)


def test_the_user_sees_every_token_once() -> None:
    requests = [make_request(name, 7, max_tokens=9) for name in "abcd"]
    scheduler, kv = make_scheduler(5, 4)
    stats = [scheduler.add(request) for request in requests]
    updates = drain(scheduler, make_runner(kv), 200)
    for request in requests:
        tokens = [t for u in updates if u.request_id == request.request_id for t in u.token_ids]
        assert tokens == lonely_run(request, 0, 16)[0]
    assert scheduler.num_preemptions == sum(s.metrics.num_preemptions for s in stats) > 0
    assert stats[0].metrics.num_preemptions == 0  # the first come is never preempted
    assert stats[0].num_computed_tokens == 15  # the last token is not computed
    assert stats[1].num_computed_tokens > 15
    assert_drained(kv)


def test_the_preempted_comes_back_before_those_who_never_ran() -> None:
    scheduler, _ = two_that_collide()
    scheduler.add(make_request("c", 1, max_tokens=5))
    plan, _ = run_step(scheduler)
    assert plan.preempted == [1]
    # One block is free: enough for c, not for b, and b is before c.
    for _ in range(2):
        assert [s.seq_id for s in run_step(scheduler)[0].seqs] == [0]
    assert [s.seq_id for s in run_step(scheduler)[0].seqs] == [1, 2]


def test_room_that_a_victim_leaves_goes_to_the_head_of_the_line() -> None:
    scheduler, _ = make_scheduler(4, 4, policy="priority")
    scheduler.add(make_request("a", 4, max_tokens=9, priority=1))
    scheduler.add(make_request("b", 12, max_tokens=3, priority=2))
    run_step(scheduler)
    scheduler.add(make_request("urgent", 2, max_tokens=3, priority=0))
    plan, _ = run_step(scheduler)
    assert plan.preempted == [1]
    assert shares(plan) == [(0, 4, 1, True), (2, 0, 2, True)]


def test_a_sequence_may_have_to_give_way_itself() -> None:
    scheduler, _ = make_scheduler(4, 4)
    scheduler.add(make_request("a", 6, max_tokens=9))
    scheduler.add(make_request("b", 8, max_tokens=3))
    run_step(scheduler)
    plan, _ = run_step(scheduler)  # a has room in its block, b has not
    assert plan.preempted == [1]
    assert shares(plan) == [(0, 6, 1, True)]


def test_low_priority_gives_way_even_if_it_came_first() -> None:
    scheduler, _ = make_scheduler(4, 4, policy="priority")
    scheduler.add(make_request("a", 7, max_tokens=5, priority=1))
    scheduler.add(make_request("b", 7, max_tokens=5, priority=0))
    assert shares(run_step(scheduler)[0]) == [(1, 0, 7, True), (0, 0, 7, True)]
    run_step(scheduler)
    plan, _ = run_step(scheduler)
    assert plan.preempted == [0]
    assert shares(plan) == [(1, 8, 1, True)]


def test_a_prompt_under_way_is_preempted_before_it_sampled() -> None:
    scheduler, kv = make_scheduler(4, 4, max_num_batched_tokens=9)
    runner = make_runner(kv)
    b = make_request("b", 12, max_tokens=3)
    scheduler.add(make_request("a", 4, max_tokens=9))
    scheduler.add(b)
    plans: list[StepPlan] = []
    outputs: list[int] = []
    while scheduler.has_unfinished():
        plan = scheduler.schedule(0.0)
        assert plan is not None
        plans.append(plan)
        updates = scheduler.update(runner.execute(plan), 0.0)
        outputs += [t for u in updates if u.request_id == "b" for t in u.token_ids]
    assert shares(plans[0]) == [(0, 0, 4, True), (1, 0, 5, False)]
    assert plans[1].preempted == [1]  # its next chunk needs two blocks, one is left
    assert shares(plans[1]) == [(0, 4, 1, True)]
    assert [p.step_id for p in plans if any(n.seq_id == 1 for n in p.new_seqs)] == [0]
    assert outputs == lonely_run(b, 0, 15)[0]


def test_preempted_while_its_token_is_being_sampled() -> None:
    """The token comes, is kept, and is sampled only once; until then it does not run."""
    scheduler, kv = make_scheduler(8, 4, max_num_batched_tokens=8, policy="priority")
    runner = make_runner(kv)
    b = make_request("b", 5, max_tokens=9, priority=5)
    scheduler.add(b)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    updates = scheduler.update(runner.execute(plan), 0.0)
    scheduler.add(make_request("a", 16, max_tokens=2, priority=0))
    plans = [scheduler.schedule(0.0)]
    assert shares(plans[0]) == [(0, 5, 1, True), (1, 0, 7, False)]

    hold_blocks(kv, kv.num_free_blocks)
    plans.append(scheduler.schedule(0.0))
    assert shares(plans[1]) == [(1, 7, 8, False)]
    assert plans[1] is not None and plans[1].preempted == [0]
    kv.release(OUTSIDE)
    plans.append(scheduler.schedule(0.0))
    assert shares(plans[2]) == [(1, 15, 1, True)]  # there is room for b, but it waits

    for plan in plans:
        assert plan is not None
        updates += scheduler.update(runner.execute(plan), 0.0)
    plan = scheduler.schedule(0.0)
    assert shares(plan) == [(1, 16, 1, True), (0, 0, 7, True)]
    assert plan is not None
    updates += scheduler.update(runner.execute(plan), 0.0) + drain(scheduler, runner, 20)
    tokens = [t for u in updates if u.request_id == "b" for t in u.token_ids]
    assert tokens == lonely_run(b, 0, 14)[0]


def preempt_in_a_step_that_runs_nobody() -> tuple[Scheduler, ReplicaRunner, StepPlan]:
    """a waits for its token, and b, inside its prompt, finds no block for the next chunk."""
    scheduler, kv = make_scheduler(8, 4, max_num_batched_tokens=8)
    runner = make_runner(kv)
    scheduler.add(make_request("a", 2, max_tokens=9))
    scheduler.add(make_request("b", 12, max_tokens=9))
    plan = scheduler.schedule(0.0)
    assert shares(plan) == [(0, 0, 2, True), (1, 0, 6, False)]
    assert plan is not None
    hold_blocks(kv, kv.num_free_blocks)
    assert scheduler.schedule(0.0) is None
    assert (scheduler.num_preemptions, scheduler.num_waiting) == (1, 1)
    return scheduler, runner, plan


def test_the_runner_hears_of_a_preemption_with_the_next_plan() -> None:
    scheduler, runner, plan = preempt_in_a_step_that_runs_nobody()
    scheduler.update(runner.execute(plan), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None and plan.preempted == [1]
    assert shares(plan)[0] == (0, 2, 1, True)
    scheduler.update(runner.execute(plan), 0.0)


def test_preempted_and_aborted_before_the_runner_heard_of_it() -> None:
    scheduler, runner, plan = preempt_in_a_step_that_runs_nobody()
    assert scheduler.abort("b")
    scheduler.update(runner.execute(plan), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert (plan.preempted, plan.finished) == ([], [1])
    scheduler.update(runner.execute(plan), 0.0)


def test_alone_in_a_full_pool_it_ends_by_length_and_keeps_its_text() -> None:
    scheduler, kv = make_scheduler(6, 4)
    runner = make_runner(kv)
    request = make_request("a", 6, max_tokens=None)
    stats = scheduler.add(request)
    hold_blocks(kv, 3)
    updates = drain(scheduler, runner, 20)
    tokens = [t for u in updates for t in u.token_ids]
    assert tokens == lonely_run(request, 0, 13)[0]  # 12 slots, and a token that needs none
    assert updates[-1].finish_reason is FinishReason.LENGTH
    assert updates[-1].token_ids == ()
    assert stats.metrics.num_preemptions == 0
    kv.release(OUTSIDE)
    assert_drained(kv)


def test_news_of_an_end_while_planning_comes_with_the_next_update() -> None:
    scheduler, kv = make_scheduler(6, 4)
    runner = make_runner(kv)
    scheduler.add(make_request("a", 8, max_tokens=None))
    hold_blocks(kv, 4)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.update(runner.execute(plan), 0.0)
    scheduler.add(make_request("b", 3, max_tokens=1))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.finished == [0]
    assert shares(plan) == [(1, 0, 3, True)]
    ended, grown = scheduler.update(runner.execute(plan), 0.0)
    assert (ended.request_id, ended.token_ids) == ("a", ())
    assert ended.finish_reason is FinishReason.LENGTH
    assert grown.request_id == "b"


def test_preempted_for_one_that_ends_all_the_same() -> None:
    """Whoever was preempted in vain runs again in the same step: no step is wasted."""
    scheduler, kv = make_scheduler(8, 4, max_num_batched_tokens=8, policy="priority")
    runner = make_runner(kv)
    b = make_request("b", 3, max_tokens=4, priority=1)
    scheduler.add(b)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    updates = scheduler.update(runner.execute(plan), 0.0)
    scheduler.add(make_request("a", 20, max_tokens=4, priority=0))
    plan = scheduler.schedule(0.0)
    assert shares(plan) == [(0, 3, 1, True), (1, 0, 7, False)]
    assert plan is not None
    updates += scheduler.update(runner.execute(plan), 0.0)

    hold_blocks(kv, kv.num_free_blocks)  # a's next chunk needs two blocks, b holds one
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert (plan.preempted, plan.finished) == ([0], [1])
    assert shares(plan) == [(0, 0, 5, True)]
    updates += scheduler.update(runner.execute(plan), 0.0) + drain(scheduler, runner, 20)
    assert [t for u in updates if u.request_id == "b" for t in u.token_ids] == lonely_run(b, 0, 7)[
        0
    ]
    ends = {u.request_id: u.finish_reason for u in updates if u.finish_reason}
    assert ends == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}


def test_a_prompt_that_an_idle_pool_cannot_hold_gets_an_answer() -> None:
    scheduler, kv = make_scheduler(6, 4)
    hold_blocks(kv, 4)
    scheduler.add(make_request("a", 12, max_tokens=2))
    scheduler.add(make_request("b", 5, max_tokens=2))
    plan = scheduler.schedule(0.0)
    assert shares(plan) == [(1, 0, 5, True)]
    assert plan is not None and plan.finished == []
    (news,) = scheduler.take_updates()
    assert (news.request_id, news.finish_reason) == ("a", FinishReason.LENGTH)


def test_a_write_to_a_shared_block_copies_it_first() -> None:
    scheduler, kv = make_scheduler(6, 4)
    scheduler.add(make_request("a", 6, max_tokens=9))
    run_step(scheduler)
    kv.fork(0, OUTSIDE)
    old_last = kv.block_table(0)[1]
    plan, _ = run_step(scheduler)
    (copy,) = plan.copies
    assert (copy.src, copy.dst) == (old_last, kv.block_table(0)[1])
    assert plan.seqs[0].replaced == (1, copy.dst)
    assert plan.seqs[0].new_block_ids == ()
    kv.check_integrity()


class ReservingPolicy(PagedPolicy):
    """Refuses to let anyone be preempted."""

    can_preempt = False


def test_a_policy_that_reserves_is_never_preempted() -> None:
    kv = KVCacheManager(4, 4, ReservingPolicy())
    scheduler, _ = make_scheduler(kv=kv)
    scheduler.add(make_request("a", 7, max_tokens=5))
    scheduler.add(make_request("b", 7, max_tokens=5))
    updates = drain(scheduler, make_runner(kv), 20)
    assert scheduler.num_preemptions == 0
    ends = [(u.request_id, u.finish_reason) for u in updates if u.finish_reason]
    assert ends == [("a", FinishReason.LENGTH), ("b", FinishReason.LENGTH)]
    assert_drained(kv)


class BatchPolicy(PagedPolicy):
    """Request-level batches: who comes waits until the whole batch has ended, and so do blocks."""

    can_preempt = False
    max_batch = 3

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.done: list[BlockTable] = []
        self.is_sealed = False

    def can_admit(self, demand: SeqDemand, keep_free: int, num_shared: int) -> bool:
        return not self.is_sealed and super().can_admit(demand, keep_free, num_shared)

    def start(self, table: BlockTable) -> bool:
        self.open.add(table.seq_id)
        self.is_sealed = len(self.open) == self.max_batch
        return super().start(table)

    def release(self, table: BlockTable) -> tuple[BlockTable, ...]:
        self.open.remove(table.seq_id)
        self.done.append(table)
        if self.open:
            return ()
        batch, self.done, self.is_sealed = tuple(self.done), [], False
        for ended in batch:
            super().release(ended)
        return batch


def test_request_level_batches_fit_behind_the_same_scheduler() -> None:
    kv = KVCacheManager(64, 4, BatchPolicy())
    scheduler, _ = make_scheduler(kv=kv)
    for i, name in enumerate("abcdef"):
        scheduler.add(make_request(name, 5, max_tokens=2 + i))
    batches = []
    for _ in range(40):
        if not scheduler.has_unfinished():
            break
        plan, _ = run_step(scheduler)
        batches.append([new.seq_id for new in plan.new_seqs])
    assert [batch for batch in batches if batch] == [[0, 1, 2], [3, 4, 5]]
    assert batches.index([3, 4, 5]) == 4  # the longest of the first batch takes 4 steps
    assert_drained(kv)


@pytest.mark.parametrize("num_blocks", range(3, 12))
@pytest.mark.parametrize("budget", [8, 11, 32])
def test_everybody_finishes_in_any_pool_that_fits_each_alone(num_blocks: int, budget: int) -> None:
    """I5. The first in line advances in every step, so the steps are at most all its tokens."""
    scheduler, kv = make_scheduler(num_blocks, 4, max_num_batched_tokens=budget)
    most = 4 * num_blocks
    num_prompts = [1 + (5 * i) % (most - 1) for i in range(10)]
    for i, num_prompt in enumerate(num_prompts):
        scheduler.add(make_request(f"r{i}", num_prompt, max_tokens=most - num_prompt))
    updates = drain(scheduler, make_runner(kv), 10 * most)
    assert sum(len(u.token_ids) for u in updates) == sum(most - p for p in num_prompts)
    assert_drained(kv)
