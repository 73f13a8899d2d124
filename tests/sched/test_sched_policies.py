"""What is special about scheduling over allocation policies that reserve."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sched_support import (
    ReplicaRunner,
    answer,
    assert_drained,
    drain,
    lonely_beams,
    lonely_run,
    make_beams,
    make_request,
    make_scheduler,
    run_step,
    shares,
)

from octavo.config import KVPolicy
from octavo.errors import RequestCapacityError
from octavo.events import EventKind
from octavo.kv import KVCacheManager, make_policy
from octavo.plan import CopyKind
from octavo.request import FinishReason, Request
from octavo.sched import Scheduler

RESERVING: tuple[KVPolicy, ...] = ("contiguous", "orca-max", "orca-pow2", "orca-oracle")


def make(
    policy: KVPolicy, num_blocks: int, max_seq_tokens: int = 32, **options: object
) -> tuple[Scheduler, KVCacheManager]:
    """Blocks of 4; `max_batch` is the policy's, the rest the scheduler's."""
    limits = {"max_batch": options.pop("max_batch")} if "max_batch" in options else {}
    kv_policy = make_policy(policy, max_seq_tokens=max_seq_tokens, **limits)  # type: ignore[arg-type]
    kv = KVCacheManager(num_blocks, 4, kv_policy)
    return make_scheduler(kv=kv, max_model_len=max_seq_tokens, **options)


# -- request-level batches


def test_a_batch_joins_in_one_step_and_its_prompts_follow_as_tokens_allow() -> None:
    scheduler, kv = make("contiguous", 40, max_num_seqs=4, max_num_batched_tokens=10)
    for name in "abcde":  # five regions, but four seats
        scheduler.add(make_request(name, 8, max_tokens=3, arrival_s=-1.0))
    plan, _ = run_step(scheduler)
    assert shares(plan) == [(0, 0, 8, True), (1, 0, 2, False)]
    assert scheduler.num_running == kv.num_sequences == 4
    assert [new.seq_id for new in plan.new_seqs] == [0, 1]
    plan, _ = run_step(scheduler)
    # One token is kept for each of those who come later in the step.
    assert shares(plan) == [(0, 8, 1, True), (1, 2, 6, True), (2, 0, 2, False), (3, 0, 1, False)]
    assert [new.seq_id for new in plan.new_seqs] == [2, 3]
    plan, _ = run_step(scheduler)
    assert shares(plan) == [(0, 9, 1, True), (1, 8, 1, True), (2, 2, 6, True), (3, 1, 2, False)]
    assert scheduler.num_waiting == 1
    assert scheduler.events("e")[0].why.startswith("it needs a seat")
    assert kv.ledger().internal == 32 + 3 * (32 - 11)  # the first has ended and keeps its region


def test_nobody_joins_until_all_have_ended() -> None:
    scheduler, kv = make("contiguous", 16)
    scheduler.add(make_request("short", 4, max_tokens=1))
    run_step(scheduler)
    scheduler.add(make_request("late", 4, max_tokens=2))
    plan, _ = run_step(scheduler)  # the batch of one has ended: the next one
    assert [new.seq_id for new in plan.new_seqs] == [1]
    scheduler.add(make_request("later", 4, max_tokens=1, arrival_s=-1.0))
    scheduler.add(make_request("last", 4, max_tokens=1))
    plan, _ = run_step(scheduler)
    assert shares(plan) == [(1, 4, 1, True)]
    assert [event.why for event in scheduler.events("later")] == [
        "the batch of 1 that runs takes nobody in until all have ended"
    ]
    plan, _ = run_step(scheduler)
    assert [new.seq_id for new in plan.new_seqs] == [2, 3]
    assert_drained(kv)


@pytest.mark.parametrize("first_ends", [False, True])
def test_a_member_that_waits_for_its_first_tokens_can_be_aborted(first_ends: bool) -> None:
    scheduler, kv = make("contiguous", 40, max_num_batched_tokens=8)
    runner = ReplicaRunner(40, 4, max_tokens=8, max_seqs=8)
    scheduler.add(make_request("a", 8, max_tokens=1 if first_ends else 6))
    scheduler.add(make_request("b", 8, max_tokens=2))
    scheduler.add(make_beams("c", 5, 2, max_tokens=3))
    plan = scheduler.schedule(0.0)
    assert plan is not None and shares(plan) == [(0, 0, 8, True)]
    assert scheduler.num_running == 3
    assert scheduler.abort("b")
    kv.check_integrity()
    scheduler.update(runner.execute(plan), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None and plan.finished == ([0] if first_ends else [])
    updates = scheduler.update(runner.execute(plan), 0.0)
    updates += drain(scheduler, runner, 30)
    found = [update.token_ids for update in updates if update.request_id == "c"]
    assert found == [beam.token_ids for beam in lonely_beams(make_beams("c", 5, 2, max_tokens=3))]
    assert_drained(kv)


def test_a_one_token_prompt_of_beams_may_wait_for_its_turn_too() -> None:
    scheduler, kv = make("contiguous", 40, max_num_batched_tokens=8)
    runner = ReplicaRunner(40, 4, max_tokens=8, max_seqs=8)
    request = make_beams("b", 1, 3, max_tokens=5)
    scheduler.add(make_request("a", 8, max_tokens=2))
    scheduler.add(request)
    updates = drain(scheduler, runner, 30)
    found = [update.token_ids for update in updates if update.request_id == "b"]
    assert found == [beam.token_ids for beam in lonely_beams(request)]
    assert_drained(kv)


# -- reserved runs


def finish_all(scheduler: Scheduler) -> None:
    """Run to the end with `run_step`."""
    for _ in range(100):
        if not scheduler.has_unfinished():
            return
        run_step(scheduler)
    raise AssertionError("not done after 100 steps")


def test_the_head_of_the_line_waits_for_its_run_and_nobody_passes() -> None:
    scheduler, kv = make("orca-oracle", 16)
    scheduler.add(make_request("large", 8, max_tokens=24))  # 8 blocks
    scheduler.add(make_request("small", 3, max_tokens=2))  # 2 blocks
    scheduler.add(make_request("next", 8, max_tokens=24))
    scheduler.add(make_request("tiny", 1, max_tokens=2))
    scheduler.schedule(0.0)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    assert kv.num_free_blocks == 6
    assert (kv.ledger().external, kv.ledger().free) == (4 * 6 + 3, 0)
    scheduler.schedule(1.0)
    why = (
        "--kv-policy orca-oracle reserves 32 tokens, a run of 8 blocks; 6 blocks are free, in "
        "runs of at most 4"
    )
    waits = {event.request_id: event.why for event in scheduler.events()}
    assert waits == {"next": why, "tiny": f"behind request next: {why}"}


@pytest.mark.parametrize("policy", RESERVING)
def test_samples_get_runs_of_their_own_and_copies_of_the_prompt(policy: KVPolicy) -> None:
    scheduler, kv = make(policy, 40)
    scheduler.add(make_request("n", 6, n=3, max_tokens=4))
    plan, _ = run_step(scheduler)
    assert plan.extra_draws == {0: (1, 2)} and not plan.copies
    plan, _ = run_step(scheduler)
    tables = [list(kv.block_table(i)) for i in range(3)]
    assert len({b for table in tables for b in table}) == 3 * len(tables[0])
    assert [(copy.src, copy.dst, copy.kind) for copy in plan.copies] == [
        (tables[0][i], tables[child][i], CopyKind.WITHIN) for child in (1, 2) for i in (0, 1)
    ]
    finish_all(scheduler)
    assert_drained(kv)


def test_what_is_promised_to_forks_is_not_given_to_others() -> None:
    scheduler, kv = make("orca-oracle", 8)
    scheduler.add(make_request("n", 6, n=3, max_tokens=2))  # 3 runs of 2 blocks
    scheduler.add(make_request("fits", 6, max_tokens=2))
    scheduler.add(make_request("waits", 1, max_tokens=2))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert (scheduler.num_running, kv.num_free_blocks, scheduler.num_waiting) == (2, 4, 1)
    assert kv.ledger().free == 0
    scheduler.update(answer(plan), 0.0)
    kv.check_integrity()
    assert (scheduler.num_running, kv.num_free_blocks) == (4, 0)
    finish_all(scheduler)
    assert_drained(kv)


@pytest.mark.parametrize("when", ["prompt", "first tokens"])
def test_a_promise_goes_when_the_sample_does_that_was_to_take_it(when: str) -> None:
    """4 runs of 2 blocks are the pool; samples are aborted one by one while their carrier
    computes the prompt, or while their first tokens are drawn."""
    budget = 5 if when == "prompt" else 8
    scheduler, kv = make("orca-oracle", 8, max_num_seqs=4, max_num_batched_tokens=budget)
    runner = ReplicaRunner(8, 4, max_tokens=8, max_seqs=8)
    request = make_request("n", 6, n=4, max_tokens=2)
    scheduler.add(request)
    plan = scheduler.schedule(0.0)
    assert plan is not None and plan.seqs[0].sample is (when == "first tokens")
    assert (kv.ledger().reserved, kv.ledger().free) == (4 * 8 - plan.num_tokens, 0)
    for num_left, seq_id in zip((2, 1), scheduler.seq_ids("n")[1:3], strict=True):
        assert scheduler.finish(seq_id, FinishReason.ABORT)
        ledger = kv.ledger()
        assert ledger.reserved == 8 * (1 + num_left) - plan.num_tokens
        assert ledger.free == 24 - 8 * num_left
        kv.check_integrity()
    scheduler.add(make_request("waits", 6, max_tokens=10))  # 4 blocks
    updates = scheduler.update(runner.execute(plan), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None and scheduler.num_waiting == 0
    updates += scheduler.update(runner.execute(plan), 0.0)
    updates += drain(scheduler, runner, 60)
    for index in (0, 3):
        mine = [u.token_ids for u in updates if (u.request_id, u.sample_index) == ("n", index)]
        assert [t for ids in mine for t in ids] == lonely_run(request, index, 8)[0]
    assert_drained(kv)


def test_a_region_that_no_sample_will_take_is_internal_until_its_batch_ends() -> None:
    scheduler, kv = make("contiguous", 24, max_num_batched_tokens=5 + 3)
    scheduler.add(make_request("n", 12, n=3, max_tokens=2))
    run_step(scheduler)
    assert (kv.ledger().reserved, kv.ledger().internal) == (3 * 14 - 8, 3 * 18)
    scheduler.finish(scheduler.seq_ids("n")[1], FinishReason.ABORT)
    assert (kv.ledger().reserved, kv.ledger().internal) == (2 * 14 - 8, 2 * 18 + 32)
    kv.check_integrity()
    finish_all(scheduler)
    assert_drained(kv)


def test_a_promise_goes_when_its_carrier_does() -> None:
    scheduler, kv = make("orca-oracle", 8)
    scheduler.add(make_request("n", 6, n=4, max_tokens=2))
    plan = scheduler.schedule(0.0)
    assert plan is not None and kv.ledger().free == 0
    scheduler.abort("n")
    scheduler.add(make_request("all", 8, max_tokens=24))
    run_step(scheduler)
    assert scheduler.num_running == 1
    finish_all(scheduler)
    assert_drained(kv)


@pytest.mark.parametrize("policy", RESERVING)
def test_more_samples_than_seats_come_in_turns(policy: KVPolicy) -> None:
    request = make_request("n", 6, n=7, max_tokens=5)
    scheduler, kv = make(policy, 40, max_num_seqs=3)
    runner = ReplicaRunner(40, 4, max_tokens=32, max_seqs=3)
    scheduler.add(request)
    updates = drain(scheduler, runner, 60)
    for index in range(7):
        mine = [u.token_ids for u in updates if u.sample_index == index]
        assert [t for ids in mine for t in ids] == lonely_run(request, index, 11)[0]
    assert_drained(kv)


# -- what could never be admitted


@pytest.mark.parametrize(
    ("policy", "num_fit"), [("contiguous", 5), ("orca-max", 5), ("orca-pow2", 10)]
)
@pytest.mark.parametrize("what", ["n", "beam_width"])
def test_sequences_that_never_fit_beside_each_other_are_refused(
    policy: KVPolicy, num_fit: int, what: str
) -> None:
    """40 blocks: 5 runs for 32 tokens; or 10 runs of 4 blocks for 7 + 4 tokens."""
    scheduler, kv = make(policy, 40, max_num_seqs=16)

    def request(num: int) -> Request:
        if what == "n":
            return make_request(f"n{num}", 7, n=num, max_tokens=3)
        return make_beams(f"b{num}", 7, num, max_tokens=3)

    with pytest.raises(RequestCapacityError) as refused:
        scheduler.add(request(num_fit + 1))
    assert refused.value.parameter == what
    why = f"{num_fit + 1} runs of {40 // num_fit} blocks exceed the {num_fit}"
    assert why in str(refused.value) and f"lower {what}" in str(refused.value)
    scheduler.add(request(num_fit))
    drain(scheduler, ReplicaRunner(40, 4, max_tokens=32, max_seqs=16), 40)
    assert_drained(kv)


def test_the_refusal_says_which_max_tokens_would_do() -> None:
    scheduler, _ = make("orca-pow2", 40, max_num_seqs=16)
    with pytest.raises(RequestCapacityError, match=r"lower n, or max_tokens to at most 8, set"):
        scheduler.add(make_request("n", 7, n=10, max_tokens=9))  # 7 + 16: runs of 8 blocks
    scheduler.add(make_request("n", 7, n=10, max_tokens=8))
    with pytest.raises(RequestCapacityError, match=r"lower n, set .* or use --kv-policy paged"):
        scheduler.add(make_request("m", 17, n=6, max_tokens=1))


def test_seats_limit_what_has_to_fit_at_once() -> None:
    """5 runs: the refusal says with how many seats samples would take turns in them."""
    scheduler, _ = make("orca-max", 40, max_num_seqs=8)
    with pytest.raises(RequestCapacityError, match="lower n, set --max-num-seqs to at most 5 "):
        scheduler.add(make_request("n", 7, n=12, max_tokens=3))
    with pytest.raises(RequestCapacityError, match=r"lower beam_width, raise --kv-cache"):
        scheduler.add(make_beams("b", 7, 6, max_tokens=3))
    scheduler, kv = make("orca-max", 40, max_num_seqs=5)
    scheduler.add(make_request("n", 7, n=12, max_tokens=3))
    finish_all(scheduler)
    assert_drained(kv)


@pytest.mark.parametrize("policy", RESERVING)
def test_one_sequence_is_as_long_as_the_largest_run(policy: KVPolicy) -> None:
    scheduler, kv = make(policy, 7)  # 28 tokens; the largest chunk is one of 4 blocks
    most = 28 if policy == "contiguous" else 16
    for num_prompt, max_tokens, parameter in ((most, 1, "prompt"), (4, most - 3, "max_tokens")):
        with pytest.raises(RequestCapacityError, match=f"the {most} that .* {policy}:") as error:
            scheduler.add(make_request("r", num_prompt, max_tokens=max_tokens))
        assert error.value.parameter == parameter
    scheduler.add(make_request("r", 4, max_tokens=None))
    finish_all(scheduler)
    assert_drained(kv)


# -- expectations


@pytest.mark.parametrize(
    ("expected", "policy", "run_len", "num_output"),
    [
        (10, "orca-oracle", 4, 11),  # 16 slots: a block is not cut
        (10, "orca-pow2", 8, 20),  # 6 + 16
        (10, "orca-max", 8, 20),
        (None, "orca-oracle", 8, 20),
        (99, "orca-oracle", 8, 20),
        (2, "orca-oracle", 2, 3),  # 8 tokens fit, and one more is sampled
    ],
)
def test_a_known_length_is_reserved_and_a_false_one_ends_the_request_early(
    expected: int | None, policy: KVPolicy, run_len: int, num_output: int
) -> None:
    request = make_request("r", 6, max_tokens=20)
    scheduler, kv = make(policy, 40)
    scheduler.add(replace(request, expected_output_tokens=expected))
    _, updates = run_step(scheduler)
    assert len(kv.block_table(0)) == run_len
    while scheduler.has_unfinished():
        plan = scheduler.schedule(0.0)
        updates += [] if plan is None else scheduler.update(answer(plan), 0.0)
        updates += scheduler.take_updates()
    assert sum(len(update.token_ids) for update in updates) == num_output
    assert updates[-1].finish_reason is FinishReason.LENGTH
    kinds = {event.kind for event in scheduler.events()}
    assert kinds == ({EventKind.CUT_SHORT} if num_output < 20 else set())
    assert_drained(kv)


def test_a_false_expectation_harms_nobody_else() -> None:
    """The pool has room for all; the one that outgrows its run ends, and says why."""
    scheduler, kv = make("orca-oracle", 40)
    scheduler.add(make_request("false", 4, max_tokens=20, expected_output_tokens=4))
    for name in "abc":
        scheduler.add(make_request(name, 4, max_tokens=20, expected_output_tokens=20))
    updates = []
    while scheduler.has_unfinished():
        updates += run_step(scheduler)[1]
        assert scheduler.num_preemptions == 0
    num_tokens = {
        name: sum(len(u.token_ids) for u in updates if u.request_id == name)
        for name in ("false", "a", "b", "c")
    }
    assert num_tokens == {"false": 5, "a": 20, "b": 20, "c": 20}
    (event,) = scheduler.events()
    assert (event.kind, event.request_id) == (EventKind.CUT_SHORT, "false")
    assert event.why == (
        "--kv-policy orca-oracle reserved 8 slots for 4 prompt and 4 expected output tokens "
        "(expected_output_tokens), and its 9 tokens do not fit"
    )
    assert_drained(kv)


def test_beams_that_outgrow_what_was_expected_end_together() -> None:
    scheduler, kv = make("orca-oracle", 40)
    runner = ReplicaRunner(40, 4, max_tokens=32, max_seqs=8)
    request = replace(make_beams("b", 4, 2, max_tokens=20), expected_output_tokens=4)
    scheduler.add(request)
    scheduler.add(make_request("other", 4, max_tokens=20))
    updates = drain(scheduler, runner, 60)
    beams = [u.token_ids for u in updates if u.request_id == "b"]
    assert len(beams) == 2 and all(len(tokens) <= 5 for tokens in beams)
    assert sum(len(u.token_ids) for u in updates if u.request_id == "other") == 20
    assert [event.num_seqs for event in scheduler.events("b")] == [2]
    assert scheduler.num_preemptions == 0
    assert_drained(kv)


# -- what lies in pieces too small


def test_external_is_told_of_those_who_wait_now() -> None:
    """16 blocks: `large` takes 8, `small` 2, and `next` wants 8 until it is aborted."""
    scheduler, kv = make("orca-oracle", 16)
    scheduler.add(make_request("large", 8, max_tokens=24))
    scheduler.add(make_request("small", 3, max_tokens=4))
    scheduler.add(make_request("next", 8, max_tokens=24))
    run_step(scheduler)
    assert (kv.ledger().external, kv.ledger().free) == (24 + 1, 0)  # 1 of rounding
    run_step(scheduler)
    assert (kv.ledger().external, kv.ledger().free) == (24 + 1, 0)
    scheduler.abort("next")
    run_step(scheduler)
    assert (kv.ledger().external, kv.ledger().free) == (1, 24)
    finish_all(scheduler)
    assert_drained(kv)


# -- the same tokens


@pytest.mark.parametrize("policy", ["paged", *RESERVING])
@pytest.mark.parametrize("budget", [8, 40])
def test_every_policy_gives_the_same_tokens(policy: KVPolicy, budget: int) -> None:
    scheduler, kv = make(policy, 40, max_num_batched_tokens=budget)
    runner = ReplicaRunner(40, 4, max_tokens=budget, max_seqs=8)
    requests = [make_request(f"r{i}", 1 + 5 * i % 23, max_tokens=1 + i % 9) for i in range(20)]
    requests += [make_request(f"n{i}", 5 + i, n=3, max_tokens=6) for i in range(3)]
    requests += [make_beams(f"b{i}", 4 + 3 * i, 3, max_tokens=7) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    updates = drain(scheduler, runner, 400)
    for request in requests:
        mine = [u for u in updates if u.request_id == request.request_id]
        if request.beam is not None:
            assert [u.token_ids for u in mine] == [b.token_ids for b in lonely_beams(request)]
            continue
        assert request.max_tokens is not None
        total = len(request.prompt_token_ids) + request.max_tokens
        for index in range(request.n):
            tokens = [t for u in mine if u.sample_index == index for t in u.token_ids]
            assert tokens == lonely_run(request, index, total)[0]
    assert policy == "paged" or not scheduler.num_preemptions
    assert_drained(kv)
