"""The cost model: right seconds out of disturbed measurements, and the arithmetic it shows."""

from __future__ import annotations

import random

import pytest

from octavo.sched.costs import Comparison, CostModel

FIXED_S, TOKEN_S, BLOCK_S = 20e-3, 0.4e-3, 0.08e-3


def watch_steps(
    costs: CostModel, sizes: list[int], *, seed: int = 0, outliers: float = 0.0
) -> None:
    """Steps of a fixed cost and a cost for each token, 3 % of noise, and some 20 times too long."""
    rng = random.Random(seed)
    for size in sizes:
        seconds = (FIXED_S + TOKEN_S * size) * rng.uniform(0.97, 1.03)
        costs.observe_step(size, seconds * (20 if rng.random() < outliers else 1))


def test_the_comparison_shows_its_arithmetic() -> None:
    swap = Comparison(180, 12, token_s=0.4e-3, block_s=0.08e-3)
    assert swap.mode == "swap"
    assert swap.swap_s == pytest.approx(1.92e-3)
    assert swap.recompute_s == pytest.approx(72e-3)
    assert str(swap) == (
        "swap 12 blocks out and in = 24 x 0.08 ms = 1.9 ms < recompute 180 tokens x 0.4 ms = 72 ms"
    )
    recompute = Comparison(3, 100, token_s=2e-6, block_s=0.0123)
    assert recompute.mode == "recompute"
    assert str(recompute) == (
        "recompute 3 tokens x 2 us = 6 us <= swap 100 blocks out and in = 200 x 12 ms = 2.5 s"
    )


def test_what_is_equal_is_recomputed_as_that_needs_no_memory() -> None:
    assert Comparison(8, 4, 1e-3, 1e-3).mode == "recompute"
    assert Comparison(0, 0, 1e-3, 1e-3).mode == "recompute"
    assert Comparison(9, 4, 1e-3, 1e-3).mode == "swap"


def test_priors_hold_until_something_was_measured() -> None:
    costs = CostModel(token_s=1e-3, block_s=5e-4)
    assert costs.compare(100, 10) == Comparison(100, 10, 1e-3, 5e-4)
    costs.observe_copies(8, 8 * BLOCK_S)
    assert costs.compare(100, 10) == Comparison(100, 10, 1e-3, pytest.approx(BLOCK_S))
    watch_steps(costs, [32, 512])
    assert costs.token_s == pytest.approx(TOKEN_S, rel=0.1)


def test_a_token_costs_what_it_adds_to_a_step_not_a_share_of_the_step() -> None:
    costs = CostModel()
    watch_steps(costs, [random.Random(1).choice([1, 8, 30, 100, 512]) for _ in range(5)])
    watch_steps(costs, [random.Random(i).randint(1, 512) for i in range(300)])
    assert costs.token_s == pytest.approx(TOKEN_S, rel=0.05)


def test_one_step_in_five_that_took_twenty_times_as_long_changes_little() -> None:
    costs = CostModel()
    watch_steps(costs, [random.Random(i).randint(1, 512) for i in range(600)], outliers=0.2)
    assert costs.token_s == pytest.approx(TOKEN_S, rel=0.1)


def test_ten_thousand_decode_steps_do_not_wash_out_what_prompts_cost() -> None:
    costs = CostModel()
    watch_steps(costs, [500] * 5)
    watch_steps(costs, [random.Random(i).randint(24, 32) for i in range(10_000)], outliers=0.05)
    assert costs.token_s == pytest.approx(TOKEN_S, rel=0.1)


def test_a_machine_that_became_slower_is_believed_after_a_few_steps() -> None:
    costs = CostModel()
    sizes = [16, 500] * 15
    watch_steps(costs, sizes)
    for size in sizes[:20]:
        costs.observe_step(size, 3 * (FIXED_S + TOKEN_S * size))
    assert costs.token_s == pytest.approx(3 * TOKEN_S, rel=0.05)


def test_while_one_size_is_known_its_time_for_each_token_is_the_limit() -> None:
    costs = CostModel()
    costs.observe_step(500, 0.2)
    assert costs.token_s == pytest.approx(0.4e-3)


def test_tokens_that_add_nothing_to_a_step_cost_next_to_nothing() -> None:
    """Far below what the device can do at a time, a step takes as long as the weights take."""
    costs = CostModel()
    for size in (1, 4, 16, 64, 256):
        costs.observe_step(size, 5e-3 - size * 1e-7)
    assert costs.token_s == pytest.approx(5e-3 / 256 / 16, rel=0.01)
    assert costs.compare(100, 1).mode == "recompute"


def test_blocks_cost_what_the_large_copies_tell_fixed_costs_included() -> None:
    costs = CostModel()
    for num_blocks in (1, 2, 5, 5, 1, 64, 3):
        costs.observe_copies(num_blocks, 30e-6 + num_blocks * BLOCK_S)
    assert costs.block_s == pytest.approx(BLOCK_S + 30e-6 / 64, rel=0.02)
    small = CostModel()
    small.observe_copies(1, 30e-6 + BLOCK_S)
    assert small.block_s == pytest.approx(30e-6 + BLOCK_S)


def test_a_copy_that_was_held_up_once_changes_nothing() -> None:
    costs = CostModel()
    for i in range(15):
        costs.observe_copies(12, 12 * BLOCK_S * (50 if i == 7 else 1))
    assert costs.block_s == pytest.approx(BLOCK_S)


def test_of_two_measurements_the_faster_is_believed() -> None:
    """What disturbs makes things slower."""
    costs = CostModel()
    costs.observe_copies(12, 12 * BLOCK_S * 9)
    costs.observe_copies(12, 12 * BLOCK_S)
    assert costs.block_s == pytest.approx(BLOCK_S)


def test_decodes_that_cost_more_than_prompt_tokens_do_not_tell_what_those_cost() -> None:
    costs = CostModel()
    for size in (1, 2, 4, 8):
        costs.observe_step(size, 0.2 + 10 * TOKEN_S * size)
    costs.observe_step(512, 0.2 + TOKEN_S * 512)
    assert costs.token_s == pytest.approx(TOKEN_S, rel=0.1)


def test_measurements_of_nothing_are_left_out() -> None:
    costs = CostModel(token_s=7.0, block_s=9.0)
    costs.observe_step(0, 1.0)
    costs.observe_copies(0, 1.0)
    costs.observe_copies(3, -1.0)
    assert (costs.token_s, costs.block_s) == (7.0, 9.0)


def test_memory_is_bounded() -> None:
    costs = CostModel()
    watch_steps(costs, [1 + i % 4096 for i in range(20_000)])
    kept = sum(len(window) for window in costs._steps._by_magnitude.values())
    assert kept <= 13 * 15


def test_a_few_small_steps_do_not_make_computing_free() -> None:
    """Decodes and tiny prompts take about the same time each: that is noise, not a slope."""
    costs = CostModel(token_s=5e-4)
    for num_tokens, seconds in ((1, 0.0157), (3, 0.0148), (12, 0.0150)):
        costs.observe_step(num_tokens, seconds)
    assert costs.token_s == 5e-4
    assert costs.compare(1000, 3).mode == "swap"


def test_steps_that_grow_shorter_with_their_size_still_cost_something() -> None:
    costs = CostModel()
    for num_tokens, seconds in ((1, 0.020), (64, 0.018), (512, 0.016)):
        costs.observe_step(num_tokens, seconds)
    assert costs.token_s == pytest.approx(0.016 / 512 / 16)
