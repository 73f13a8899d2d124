"""Pins and smaller pools leave live requests what they were promised (I5)."""

from __future__ import annotations

import pytest
from sched_support import (
    answer,
    assert_drained,
    drain,
    make_beams,
    make_request,
    make_runner,
    make_scheduler,
    run_step,
)

from octavo.errors import CapacityError, InvalidRequestError, RequestCapacityError
from octavo.kv import KVCacheManager
from octavo.request import FinishReason, Request
from octavo.sched import Scheduler


def with_prefix(num_tokens: int = 40) -> tuple[Scheduler, KVCacheManager, list[int]]:
    """20 blocks of 4, some of which hold the prompt of a request that has ended."""
    scheduler, kv = make_scheduler(20, 4, enable_prefix_caching=True)
    request = make_request("p", num_tokens, max_tokens=1)
    scheduler.add(request)
    drain(scheduler, make_runner(kv), 10)
    return scheduler, kv, request.prompt_token_ids


def finish(scheduler: Scheduler, kv: KVCacheManager, request: Request) -> int:
    """Run it; returns how many tokens it got."""
    runner = make_runner(kv)
    runner.next_step_id = scheduler.next_step_id
    runner.has_failed = True  # it knows nobody yet
    updates = [u for u in drain(scheduler, runner, 200) if u.request_id == request.request_id]
    assert updates[-1].finish_reason is FinishReason.LENGTH
    return sum(len(u.token_ids) for u in updates)


def test_a_pin_that_breaks_a_promise_is_refused() -> None:
    scheduler, kv, prefix = with_prefix()
    request = make_request("a", 30, max_tokens=50)
    scheduler.add(request)
    match = "request a may come to need 20 blocks besides 10 that are pinned"
    with pytest.raises(CapacityError, match=match):
        scheduler.pin(prefix)
    assert kv.num_pinned_blocks == 0
    kv.reset_prefix_cache()
    assert finish(scheduler, kv, request) == 50
    assert_drained(kv)


def test_a_pin_that_leaves_enough_is_taken_and_let_go() -> None:
    scheduler, kv, prefix = with_prefix()
    scheduler.add(make_request("a", 10, max_tokens=30))
    pin = scheduler.pin(prefix)
    assert (pin.num_blocks, kv.num_pinned_blocks) == (10, 10)
    scheduler.unpin(pin.pin_id)
    with pytest.raises(InvalidRequestError):
        scheduler.unpin(pin.pin_id)
    assert kv.num_pinned_blocks == 0


def test_blocks_that_a_request_begins_with_are_pinned_for_it_too() -> None:
    scheduler, kv, prefix = with_prefix(32)
    scheduler.pin(prefix)
    for name, like, num_most in (("own", "p", 80), ("other", "q", 48)):
        with pytest.raises(RequestCapacityError, match=f"the {num_most} that the KV pool"):
            scheduler.add(make_request(name, 40, max_tokens=60, like=like))
    request = Request(request_id="a", prompt_token_ids=[*prefix, 1, 2], max_tokens=46)
    scheduler.add(request)
    for start in (32, 34):  # while it waits, and while it runs
        with pytest.raises(CapacityError, match="request a may come to need 12 blocks besides 8"):
            scheduler.resize(19, 0.0)
        plan = scheduler.schedule(0.0)
        assert plan is not None and plan.seqs[0].start == start
        scheduler.update(answer(plan), 0.0)
    updates = []
    while scheduler.has_unfinished():
        _, news = run_step(scheduler)
        updates += news
    assert len(updates) == 44  # and two before
    assert [e.kind for e in scheduler.events()] == []
    assert kv.num_free_blocks == 20 - 8


def test_the_last_token_of_a_prompt_is_not_found_and_needs_a_block() -> None:
    scheduler, _, prefix = with_prefix()
    scheduler.pin(prefix)
    request = Request(request_id="a", prompt_token_ids=prefix, max_tokens=37)
    with pytest.raises(RequestCapacityError, match="lower max_tokens to at most 36"):
        scheduler.add(request)


def test_who_runs_with_the_blocks_of_a_prefix_does_not_mind_that_they_are_pinned() -> None:
    scheduler, kv, prefix = with_prefix()
    request = Request(request_id="a", prompt_token_ids=[*prefix, 1, 2], max_tokens=38)
    scheduler.add(request)
    plan = scheduler.schedule(0.0)
    assert plan is not None and plan.seqs[0].start == 40
    scheduler.pin(prefix)
    assert kv.num_pinned_blocks == 10


def test_prompt_logprobs_want_the_prompt_computed_and_so_room_for_it() -> None:
    scheduler, _, prefix = with_prefix()
    scheduler.pin(prefix)
    with pytest.raises(RequestCapacityError, match=r"prompt 40 .* exceed the 40 that"):
        scheduler.add(make_request("a", 40, max_tokens=9, like="p", num_prompt_logprobs=0))


def test_pins_have_no_more_than_half_of_a_smaller_pool() -> None:
    scheduler, kv, prefix = with_prefix()
    scheduler.pin(prefix)
    scheduler.add(make_request("a", 10, max_tokens=9))
    assert scheduler.schedule(0.0) is not None
    with pytest.raises(CapacityError, match="10 are pinned, and pins may take half"):
        scheduler.resize(19, 0.0)
    assert (kv.num_blocks, scheduler.num_preemptions) == (20, 0)


def test_beams_are_promised_blocks_besides_pins() -> None:
    scheduler, _, prefix = with_prefix()
    scheduler.add(make_beams("b", 9, 3, max_tokens=10))  # 2 + 3 x 3 blocks
    with pytest.raises(CapacityError, match="request b may come to need 11 blocks besides 10"):
        scheduler.pin(prefix)
    assert scheduler.abort("b")
    scheduler.add(make_beams("b", 9, 3, max_tokens=10, like="p"))  # its own beginning, 2 blocks
    scheduler.pin(prefix)


def test_a_request_without_max_tokens_is_promised_its_next_token() -> None:
    scheduler, kv = make_scheduler(20, 4)
    request = make_request("a", 60, max_tokens=None)
    scheduler.add(request)
    with pytest.raises(CapacityError, match="request a may come to need 16 blocks"):
        scheduler.resize(15, 0.0)
    scheduler.resize(16, 0.0)
    scheduler.resize(20, 0.0)  # more is never refused
    scheduler.resize(16, 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None and plan.seqs == []
    assert finish(scheduler, kv, request) >= 1
