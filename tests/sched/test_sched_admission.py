"""What is refused for good, with the arithmetic, and what waits for room."""

from __future__ import annotations

import re

import pytest
from sched_support import (
    assert_drained,
    drain,
    make_beams,
    make_request,
    make_runner,
    make_scheduler,
    run_step,
    shares,
)

from octavo.errors import InvalidRequestError, RequestCapacityError
from octavo.request import FinishReason


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "max_model_len", "parameter", "message"),
    [
        (
            5000, 4000, 8192, "max_tokens",
            "prompt 5,000 + max_tokens 4,000 = 9,000 tokens exceed max_model_len 8,192: shorten "
            "the prompt, lower max_tokens to at most 3,192, or raise --max-model-len",
        ),
        (
            8192, 1, 8192, "prompt",
            "prompt 8,192 + 1 output token = 8,193 tokens exceed max_model_len 8,192: shorten "
            "the prompt to at most 8,191 tokens, or raise --max-model-len",
        ),
        (8192, None, 8192, "prompt", "prompt 8,192 + 1 output token = 8,193 tokens exceed max_"),
        (
            5000, 5001, 20_000, "max_tokens",
            "prompt 5,000 + max_tokens 5,001 = 10,001 tokens exceed the 10,000 that the KV pool of "
            "2,500 blocks of 4 holds for one sequence: shorten the prompt, lower max_tokens to at "
            "most 5,000, or raise --kv-cache-memory-bytes (or --num-gpu-blocks-override)",
        ),
        (
            10_000, 1, 20_000, "prompt",
            "prompt 10,000 + 1 output token = 10,001 tokens exceed the 10,000 that the KV pool of "
            "2,500 blocks of 4 holds for one sequence: shorten the prompt to at most 9,999 tokens, "
            "or raise --kv-cache-memory-bytes (or --num-gpu-blocks-override)",
        ),
        # Beyond both limits: the advice is good for both.
        (5000, 40_000, 20_000, "max_tokens", "lower max_tokens to at most 5,000, or raise --max-"),
    ],
)  # fmt: skip
def test_what_can_never_fit_is_refused_with_the_numbers(
    num_prompt: int, max_tokens: int | None, max_model_len: int, parameter: str, message: str
) -> None:
    scheduler, _ = make_scheduler(2500, 4, max_model_len=max_model_len)
    with pytest.raises(RequestCapacityError, match=re.escape(message)) as caught:
        scheduler.add(make_request("a", num_prompt, max_tokens=max_tokens))
    assert caught.value.parameter == parameter
    assert not scheduler.has_unfinished()
    scheduler.add(make_request("a", 3, max_tokens=2))


def test_an_empty_prompt_is_refused() -> None:
    scheduler, _ = make_scheduler()
    with pytest.raises(InvalidRequestError) as caught:
        scheduler.add(make_request("a", 0))
    assert caught.value.parameter == "prompt"


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "max_tokens", "num_output"),
    [
        (8, 1000, None, 32 - 5),  # as far as the pool allows
        (64, 30, None, 30 - 5),  # as far as the context allows
        (8, 1000, 27, 27),  # just fits the pool
        (64, 30, 25, 25),  # just fits the context
    ],
)
def test_what_just_fits_runs_to_its_end(
    num_blocks: int, max_model_len: int, max_tokens: int | None, num_output: int
) -> None:
    scheduler, kv = make_scheduler(num_blocks, 4, max_model_len=max_model_len, watermark=0.5)
    scheduler.add(make_request("a", 5, max_tokens=max_tokens))
    updates = drain(scheduler, make_runner(kv), 50)
    assert len(updates) == num_output
    assert updates[-1].finish_reason is FinishReason.LENGTH
    assert scheduler.num_preemptions == 0
    assert_drained(kv)


def test_a_live_id_is_refused_and_free_again_after_its_end() -> None:
    scheduler, _ = make_scheduler()
    scheduler.add(make_request("a", 3, max_tokens=1))
    with pytest.raises(InvalidRequestError, match="'a'") as caught:
        scheduler.add(make_request("a", 3, max_tokens=1))
    assert caught.value.parameter == "request_id"
    run_step(scheduler)
    first_again = scheduler.add(make_request("a", 6, max_tokens=5))
    run_step(scheduler)
    assert scheduler.abort("a")
    second_again = scheduler.add(make_request("a", 3, max_tokens=1))
    plan, updates = run_step(scheduler)
    assert shares(plan) == [(2, 0, 3, True)]
    assert plan.finished == [1]
    assert updates[0].finish_reason is FinishReason.LENGTH
    assert (first_again.kv.peak_blocks, second_again.kv.peak_blocks) == (2, 1)


def test_admission_leaves_the_watermark_free_while_others_run() -> None:
    scheduler, kv = make_scheduler(10, 4, watermark=0.2)
    scheduler.add(make_request("a", 14, max_tokens=2))  # 4 blocks
    scheduler.add(make_request("b", 14, max_tokens=2))  # would leave 2 of 10: just allowed
    scheduler.add(make_request("c", 1, max_tokens=2))  # would leave 1
    assert shares(run_step(scheduler)[0]) == [(0, 0, 14, True), (1, 0, 14, True)]
    assert scheduler.num_waiting == 1
    assert kv.num_free_blocks == 2


def test_an_idle_pool_is_given_whole() -> None:
    scheduler, _ = make_scheduler(10, 4, watermark=0.5, max_num_batched_tokens=64)
    scheduler.add(make_request("a", 39, max_tokens=1))
    assert shares(run_step(scheduler)[0]) == [(0, 0, 39, True)]


@pytest.mark.parametrize(("num_blocks", "fewer"), [(13, 10), (10, 6), (7, 2), (5, 2)])
def test_beams_are_told_how_many_tokens_fit(num_blocks: int, fewer: int) -> None:
    """10 tokens of prompt fill 2 blocks of 4, which the beams share; what is over they do not."""
    scheduler, _ = make_scheduler(num_blocks, 4)
    says = f"lower max_tokens to at most {fewer}, or beam_width, or raise"
    with pytest.raises(RequestCapacityError, match=says) as caught:
        scheduler.add(make_beams("a", 10, 3, max_tokens=fewer + 1))
    assert caught.value.parameter == "max_tokens"
    scheduler.add(make_beams("a", 10, 3, max_tokens=fewer))


def test_beams_that_do_not_fit_at_all_are_told_so() -> None:
    scheduler, _ = make_scheduler(4, 4)
    with pytest.raises(RequestCapacityError, match="lower beam_width, or raise") as caught:
        scheduler.add(make_beams("a", 10, 3, max_tokens=1))
    assert caught.value.parameter == "beam_width"


def test_refusals_tell_of_pinned_blocks() -> None:
    scheduler, kv = make_scheduler(8, 16, enable_prefix_caching=True)
    first = make_request("first", 33, max_tokens=1)
    scheduler.add(first)
    drain(scheduler, make_runner(kv), 9)
    pin = kv.pin(first.prompt_token_ids)
    assert pin.num_blocks == 2
    less = re.escape("8 blocks of 16, less 2 pinned (unpin_prefix frees them), holds for one seq")
    with pytest.raises(RequestCapacityError, match=f"exceed the 96 that the KV pool of {less}"):
        scheduler.add(make_request("b", 50, max_tokens=101))
    less = re.escape("exceed the 6 that the KV pool, less 2 pinned (unpin_prefix frees them), has")
    with pytest.raises(RequestCapacityError, match=less):
        scheduler.add(make_beams("b", 16, 3, max_tokens=40))
    kv.unpin(pin.pin_id)
    with pytest.raises(RequestCapacityError, match=r"the 128 that .* 8 blocks of 16 holds"):
        scheduler.add(make_request("b", 50, max_tokens=101))
