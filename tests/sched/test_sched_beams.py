"""Beam search in the scheduler: beams fork and end, run together, and come back together."""

from __future__ import annotations

import math

import pytest
from sched_support import (
    OUTSIDE,
    ReplicaRunner,
    assert_drained,
    drain,
    hold_blocks,
    lonely_beams,
    lonely_run,
    make_beams,
    make_request,
    make_runner,
    make_scheduler,
    shares,
)

from octavo.errors import RequestCapacityError
from octavo.events import EventKind
from octavo.kv import KVCacheManager
from octavo.kv.paged import PagedPolicy
from octavo.kv.table import BlockTable
from octavo.plan import BeamCandidate, StepPlan, StepResult
from octavo.request import FinishReason, Request
from octavo.sched import Scheduler, SeqUpdate


def must_plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    return plan


def assert_found(request: Request, updates: list[SeqUpdate]) -> None:
    """The news of a request are what its search finds alone."""
    news = [u for u in updates if u.request_id == request.request_id]
    expected = lonely_beams(request)
    assert [u.sample_index for u in news] == list(range(request.n))
    assert [(u.token_ids, u.cum_logprob, u.score, u.finish_reason) for u in news] == expected


def draw_plan(result: list[tuple[int, int, float]], plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, [], {}, [[BeamCandidate(*entry) for entry in result]])


def test_beams_fork_and_end() -> None:
    scheduler, kv = make_scheduler()
    stats = scheduler.add(make_beams("a", 6, 2, max_tokens=9))
    plan = must_plan(scheduler)
    assert shares(plan) == [(0, 0, 6, True)]
    (draw,) = plan.beams
    assert (draw.seq_ids, draw.scores, draw.num_candidates) == ((0,), (0.0,), 4)
    found = [(0, 7, -1.0), (0, 8, -2.0), (0, 9, -3.0), (0, 10, -4.0)]
    assert scheduler.update(draw_plan(found, plan), 0.0) == []
    assert stats.metrics.first_token_s == 0.0
    assert scheduler.seq_ids("a") == (0, 1)

    plan = must_plan(scheduler)
    assert [(f.parent_id, f.child_id, f.num_tokens) for f in plan.forks] == [(0, 1, 6)]
    assert plan.appends == [(0, 7), (1, 8)]
    assert shares(plan) == [(0, 6, 1, True), (1, 6, 1, True)]
    assert len(plan.copies) == 1
    assert plan.beams[0].seq_ids == (0, 1) and plan.beams[0].scores == (-1.0, -2.0)
    # Both go on from the second one: the first is given back before anyone forks.
    found = [(1, 3, -2.5), (1, 4, -2.6), (0, 5, -2.7), (0, 6, -2.8)]
    scheduler.update(draw_plan(found, plan), 0.0)
    assert scheduler.seq_ids("a") == (1, 2)
    plan = must_plan(scheduler)
    assert plan.finished == [0]
    assert [(f.parent_id, f.child_id, f.num_tokens) for f in plan.forks] == [(1, 2, 7)]
    assert plan.appends == [(1, 3), (2, 4)]
    # Changing places needs no fork.
    found = [(1, 3, -2.9), (0, 4, -3.1), (0, 5, -3.2), (0, 6, -3.3)]
    scheduler.update(draw_plan(found, plan), 0.0)
    assert scheduler.seq_ids("a") == (2, 1)
    plan = must_plan(scheduler)
    assert (plan.finished, plan.forks, plan.appends) == ([], [], [(2, 3), (1, 4)])
    kv.check_integrity()
    assert scheduler.abort("a")
    assert scheduler.update(draw_plan(found, plan), 0.0) == []
    assert_drained(kv)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("budget", [8, 32])
def test_beams_find_what_they_find_alone(width: int, budget: int) -> None:
    scheduler, kv = make_scheduler(max_num_batched_tokens=budget)
    runner = make_runner(kv)
    requests = [
        make_beams("a", 10, width, max_tokens=7, eos_token_ids=frozenset({3, 17})),
        make_beams("b", 3, width, max_tokens=1),
        make_beams("c", 8, width, max_tokens=12, eos_token_ids=frozenset({5}), early_stopping=True),
        make_beams("d", 1, width, max_tokens=12, length_penalty=-1.0, ignore_eos=True),
    ]
    for request in requests:
        scheduler.add(request)
    updates = drain(scheduler, runner, 60)
    for request in requests:
        assert_found(request, updates)
    assert_drained(kv)


def test_a_beam_that_finishes_in_the_step_in_which_it_forks() -> None:
    scheduler, kv = make_scheduler()
    scheduler.add(make_beams("a", 6, 2, max_tokens=2, eos_token_ids=frozenset({1})))
    plan = must_plan(scheduler)
    found = [(0, 1, -1.0), (0, 8, -2.0), (0, 9, -3.0), (0, 10, -4.0)]
    assert scheduler.update(draw_plan(found, plan), 0.0) == []  # one ended, two go on
    plan = must_plan(scheduler)
    found = [(0, 1, -2.1), (1, 4, -3.1), (0, 5, -3.2), (0, 6, -3.3)]
    first, second = scheduler.update(draw_plan(found, plan), 0.0)
    assert (first.sample_index, first.token_ids, first.score) == (0, (1,), -1.0)
    assert (second.token_ids, second.cum_logprob) == ((8, 1), pytest.approx(-2.1))
    assert first.finish_reason is FinishReason.STOP
    assert not scheduler.has_unfinished()
    assert_drained(kv)


def test_a_vocabulary_too_small_for_so_many_beams() -> None:
    scheduler, kv = make_scheduler()
    scheduler.add(make_beams("a", 6, 3, max_tokens=1))
    updates = scheduler.update(draw_plan([(0, 0, -1.0), (0, 1, -2.0)], must_plan(scheduler)), 0.0)
    assert [(u.sample_index, u.token_ids) for u in updates] == [(0, (0,)), (1, (1,)), (2, ())]
    assert updates[2].score == -math.inf and updates[2].finish_reason is FinishReason.LENGTH
    assert_drained(kv)


def test_beams_do_not_end_one_by_one() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_beams("a", 6, 2, max_tokens=9))
    assert not scheduler.finish(0, FinishReason.ABORT)
    assert scheduler.abort("a")
    assert not scheduler.has_unfinished()


@pytest.mark.parametrize("when", ["waiting", "drawing", "forked", "decoding"])
def test_abort_at_any_moment_and_the_same_id_again(when: str) -> None:
    scheduler, kv = make_scheduler()
    runner = make_runner(kv)
    request = make_beams("a", 6, 3, max_tokens=5)
    scheduler.add(request)
    results = []
    if when != "waiting":
        results.append(runner.execute(must_plan(scheduler)))
    if when in ("forked", "decoding"):
        scheduler.update(results.pop(), 0.0)
    if when == "decoding":
        results.append(runner.execute(must_plan(scheduler)))
    assert scheduler.abort("a")
    assert_drained(kv)
    scheduler.add(request)
    for result in results:
        assert scheduler.update(result, 0.0) == []
    assert_found(request, drain(scheduler, runner, 20))
    assert_drained(kv)
    assert len(runner.seqs) <= 3, "the runner was not told to forget"


def test_two_equal_requests_in_one_step() -> None:
    scheduler, kv = make_scheduler(enable_prefix_caching=True)
    runner = make_runner(kv)
    requests = [make_beams(name, 9, 2, max_tokens=5, like="same") for name in "ab"]
    for request in requests:
        scheduler.add(request)
    updates = drain(scheduler, runner, 20)
    for request in requests:
        assert_found(request, updates)


def test_all_beams_or_none_run() -> None:
    """Another request leaves room for one beam, not for two: the last come gives way."""
    scheduler, kv = make_scheduler(7, 4)
    runner = make_runner(kv)
    request = make_beams("a", 4, 3, max_tokens=5)
    other = make_request("b", 11, max_tokens=9)
    scheduler.add(request)
    scheduler.add(other)
    updates = scheduler.update(runner.execute(must_plan(scheduler)), 0.0)
    plan = must_plan(scheduler)
    assert [s.seq_id for s in plan.seqs] == [0, 2, 3, 1]
    updates += scheduler.update(runner.execute(plan), 0.0)
    updates += drain(scheduler, runner, 40)
    assert scheduler.num_preemptions == 1
    assert_found(request, updates)
    tokens = [t for u in updates if u.request_id == "b" for t in u.token_ids]
    assert tokens == lonely_run(other, 0, 20)[0]
    assert_drained(kv)


def test_a_preempted_search_comes_back_whole() -> None:
    scheduler, kv = make_scheduler(11, 4, policy="priority")
    runner = make_runner(kv)
    search = make_beams("a", 6, 3, max_tokens=10, priority=5)
    stats = scheduler.add(search)
    updates: list[SeqUpdate] = []
    for _ in range(3):
        updates += scheduler.update(runner.execute(must_plan(scheduler)), 0.0)
    scheduler.add(make_request("b", 24, max_tokens=9, priority=0))
    preempted: list[int] = []
    for _ in range(40):
        if not scheduler.has_unfinished():
            break
        plan = must_plan(scheduler)
        preempted += plan.preempted
        ran = {s.seq_id for s in plan.seqs if s.sample} & set(scheduler.seq_ids("a"))
        assert ran in (set(), set(scheduler.seq_ids("a")))
        updates += scheduler.update(runner.execute(plan), 0.0)
    assert 2 <= len(preempted) <= 3  # not those of which the runner has no blocks yet
    assert stats.metrics.num_preemptions == 1
    assert scheduler.num_preemptions == 3
    assert_found(search, updates)
    assert_drained(kv)


def test_preempted_while_drawing() -> None:
    """The candidates make beams that have no blocks; the runner hears of them when they run."""
    scheduler, kv = make_scheduler(8, 4, policy="priority", max_num_batched_tokens=8)
    runner = make_runner(kv)
    search = make_beams("a", 6, 2, max_tokens=4, priority=5)
    scheduler.add(search)
    scheduler.update(runner.execute(must_plan(scheduler)), 0.0)
    results = [runner.execute(must_plan(scheduler))]
    scheduler.add(make_request("b", 16, max_tokens=2, priority=0))
    results.append(runner.execute(must_plan(scheduler)))
    hold_blocks(kv, kv.num_free_blocks)
    plan = must_plan(scheduler)
    assert plan.preempted == [1, 0]
    results.append(runner.execute(plan))
    kv.release(OUTSIDE)
    assert scheduler.schedule(0.0) is None
    updates = [u for result in results for u in scheduler.update(result, 0.0)]
    updates += drain(scheduler, runner, 40)
    assert_found(search, updates)
    assert_drained(kv)


@pytest.mark.parametrize("watermark", [0.0, 0.6])
@pytest.mark.parametrize("budget", [4, 32])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_search_comes_back_into_the_room_it_was_promised(
    watermark: float, budget: int, prefix_caching: bool
) -> None:
    """Its beams find the prompt's blocks again, one after the other, however small the chunks."""
    scheduler, kv = make_scheduler(
        2 + 3 * 4,
        4,
        watermark=watermark,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        enable_prefix_caching=prefix_caching,
    )
    runner = make_runner(kv)
    search = make_beams("a", 9, 3, max_tokens=14)
    scheduler.add(search)
    updates: list[SeqUpdate] = []
    for _ in range(5):
        updates += scheduler.update(runner.execute(must_plan(scheduler)), 0.0)
    for _ in range(3):
        assert scheduler._pressure.shrink(1, 1)
        for _ in range(2):
            updates += scheduler.update(runner.execute(must_plan(scheduler)), 0.0)
    updates += drain(scheduler, runner, 300)
    assert_found(search, updates)
    assert_drained(kv)


def test_two_searches_that_are_partly_back_do_not_wait_for_each_other() -> None:
    scheduler, kv = make_scheduler(16, 4, policy="priority")
    runner = make_runner(kv)
    searches = [make_beams(name, 9, 2, max_tokens=12, priority=i) for i, name in enumerate("ab")]
    for search in searches:
        scheduler.add(search)
    updates: list[SeqUpdate] = []
    for _ in range(6):
        updates += scheduler.update(runner.execute(must_plan(scheduler)), 0.0)
    roster = scheduler.roster
    hold_blocks(kv, 1)
    for name, num_left in (("a", 0), ("b", 1)):
        for seq_id in scheduler.seq_ids(name)[num_left:]:
            roster.preempt(roster.sequences[seq_id], to_host=False)
    hold_blocks(kv, kv.num_free_blocks - 4, seq_id=OUTSIDE + 1)  # too few for all of a
    plan = must_plan(scheduler)
    updates += scheduler.update(runner.execute(plan), 0.0)
    for _ in range(4):
        updates += scheduler.update(runner.execute(must_plan(scheduler)), 0.0)
    assert len(scheduler.roster.groups["a"].search.running) == 2  # type: ignore[union-attr]
    kv.release(OUTSIDE)
    kv.release(OUTSIDE + 1)
    updates += drain(scheduler, runner, 60)
    for search in searches:
        assert_found(search, updates)
    assert_drained(kv)


def test_room_is_promised_at_admission() -> None:
    """2 full blocks of the prompt, and for each beam 4 more."""
    fits, _ = make_scheduler(2 + 3 * 4, 4)
    fits.add(make_beams("a", 9, 3, max_tokens=14))
    scheduler, _ = make_scheduler(2 + 3 * 4 - 1, 4)
    with pytest.raises(RequestCapacityError, match="2 full blocks of the prompt \\+ 3 beams x 4"):
        scheduler.add(make_beams("a", 9, 3, max_tokens=14))
    narrow, _ = make_scheduler(64, 4, max_num_seqs=3)
    with pytest.raises(RequestCapacityError, match="beam_width 4 exceeds max_num_seqs 3") as caught:
        narrow.add(make_beams("a", 9, 4, max_tokens=2))
    assert caught.value.parameter == "beam_width"


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_the_worst_case_just_fits(prefix_caching: bool) -> None:
    scheduler, kv = make_scheduler(2 + 3 * 4, 4, enable_prefix_caching=prefix_caching)
    request = make_beams("a", 9, 3, max_tokens=14)
    scheduler.add(request)
    assert_found(request, drain(scheduler, make_runner(kv), 40))
    assert scheduler.num_preemptions == 0


def test_when_others_hold_the_pool_a_search_ends_with_what_it_has() -> None:
    scheduler, kv = make_scheduler(8, 4)
    runner = make_runner(kv)
    scheduler.add(make_beams("a", 6, 2, max_tokens=8))
    hold_blocks(kv, 5)
    updates = drain(scheduler, runner, 20)
    assert [u.finish_reason for u in updates] == [FinishReason.LENGTH] * 2
    assert 0 < len(updates[0].token_ids) < 8
    assert all(u.score is not None and u.score > -math.inf for u in updates)
    assert scheduler.num_preemptions == 0


def mixed() -> list[Request]:
    """Greedy, sampled, n, beams; different lengths."""
    return [
        make_request("greedy", 5, max_tokens=9),
        make_request("n", 9, n=3, max_tokens=12, like="greedy", differs_at=4),
        make_beams("wide", 7, 4, max_tokens=8, eos_token_ids=frozenset({2, 9})),
        make_request("stops", 17, max_tokens=30, stop_token_ids=frozenset({4, 11, 30})),
        make_beams("beams", 12, 2, max_tokens=11, like="n"),
        make_request("long", 21, n=2, max_tokens=3, num_prompt_logprobs=1),
    ]


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("num_blocks", [14, 18, 24, 64])
@pytest.mark.parametrize("budget", [12, 40])
def test_all_kinds_in_one_step(prefix_caching: bool, num_blocks: int, budget: int) -> None:
    kv = KVCacheManager(num_blocks, 4, enable_prefix_caching=prefix_caching)
    scheduler, _ = make_scheduler(kv=kv, max_num_seqs=12, max_num_batched_tokens=budget)
    runner = ReplicaRunner(num_blocks, 4, max_tokens=budget, max_seqs=12)
    requests = mixed()
    for request in requests:
        scheduler.add(request)
    updates: list[SeqUpdate] = []
    most_at_once = 0
    for _ in range(400):
        if not scheduler.has_unfinished():
            break
        plan = must_plan(scheduler)
        kinds = {r for s in plan.seqs for r in scheduler.request_ids_of([s.seq_id])}
        most_at_once = max(most_at_once, len(kinds))
        updates += scheduler.update(runner.execute(plan), 0.0)
        kv.check_integrity()
    assert not scheduler.has_unfinished()
    for request in requests:
        if request.beam is not None:
            assert_found(request, updates)
            continue
        assert request.max_tokens is not None
        for index in range(request.n):
            mine = [u for u in updates if u.request_id == request.request_id]
            tokens = [t for u in mine if u.sample_index == index for t in u.token_ids]
            total = len(request.prompt_token_ids) + request.max_tokens
            assert tokens == lonely_run(request, index, total)[0]
    if num_blocks == 64:
        assert most_at_once >= 4
    else:
        assert scheduler.num_preemptions > 0
    assert_drained(kv)


def test_a_search_that_ends_for_lack_of_room_is_not_in_the_plan_that_ends_it() -> None:
    """One of its beams came back in that plan; the next one finds no room even alone."""
    kv = KVCacheManager(12, 4, enable_prefix_caching=True)
    scheduler, _ = make_scheduler(kv=kv, policy="priority", max_num_batched_tokens=64)
    runner = ReplicaRunner(12, 4, max_tokens=64, max_seqs=8)
    scheduler.add(make_beams("ayz", 3, 3, max_tokens=12, priority=5))
    for _ in range(11):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(runner.execute(plan), 0.0)
    assert scheduler._pressure.shrink(1, 1)
    scheduler.add(make_request("b", 25, max_tokens=1, priority=0))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.update(runner.execute(plan), 0.0)
    kv.pin(make_request("b", 25).prompt_token_ids[:24])  # behind the scheduler's back
    drain(scheduler, runner, 80)
    assert any(event.kind is EventKind.CUT_SHORT for event in scheduler.events("ayz"))


def test_beams_that_cannot_be_copied_give_way_together_and_that_is_told() -> None:
    class CopiesFail(PagedPolicy):
        num_left = 3

        def fork(self, parent: BlockTable, child: BlockTable) -> bool:
            self.num_left -= 1
            return self.num_left < 0 and super().fork(parent, child)

    request = make_beams("a", 6, 3, max_tokens=8)
    kv = KVCacheManager(32, 4, CopiesFail())
    scheduler, _ = make_scheduler(kv=kv)
    scheduler.add(request)
    updates = drain(scheduler, make_runner(kv), 60)
    assert [u.token_ids for u in updates] == [beam.token_ids for beam in lonely_beams(request)]
    events = scheduler.events("a")
    assert events and {event.kind for event in events} == {EventKind.PREEMPTED}
    assert events[0].by == "a" and events[0].until_s is not None
    assert events[0].why.startswith("no room to copy 2 of its 3 beams, ")
    assert_drained(kv)
