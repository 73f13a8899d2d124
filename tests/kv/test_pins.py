"""Pinned prefixes."""

from __future__ import annotations

import pytest
from kv_sim import Sim

from octavo.errors import CapacityError, InvalidRequestError
from octavo.kv import Pin

A, B = list(range(100, 140)), list(range(200, 260))


def cached(num_blocks: int = 10, **more: object) -> Sim:
    sim = Sim(num_blocks, 4, **more)
    sim.finish(0, A[:18])
    return sim


def pinned(sim: Sim, tokens: list[int], salt: str = "") -> Pin:
    pin = sim.kv.pin(tokens, salt)
    sim.pin_sizes[pin.pin_id] = pin.num_blocks
    sim.check_counts()
    return pin


def unpin(sim: Sim, pin: Pin) -> None:
    sim.kv.unpin(pin.pin_id)
    del sim.pin_sizes[pin.pin_id]
    sim.check_counts()


def test_pinned_blocks_are_not_evicted() -> None:
    sim = cached()
    assert pinned(sim, A[:15]) == Pin(0, 12, 3)
    assert sim.kv.num_free_blocks == 7
    assert sim.kv.max_tokens_of_one_sequence == 28
    ledger = sim.kv.ledger()
    assert (ledger.cached, ledger.free) == (20, 20)
    assert (ledger.num_physical_blocks, ledger.tokens) == (0, 0)
    sim.finish(1, B[:28])
    again = sim.add(2, [*A[:12], 1])
    assert sim.run(again) == 12
    assert [sim.kv.ref_count(b) for b in sim.kv.block_table(2)] == [2, 2, 2, 1]
    assert sim.kv.ledger().num_physical_blocks == 4
    assert sim.kv.ledger().shared_saved == 0
    sim.drain()


def test_an_unpinned_prefix_is_cached_as_the_latest() -> None:
    sim = cached()
    pin = pinned(sim, A[:8])
    sim.finish(1, B[:16])
    unpin(sim, pin)
    assert sim.kv.num_free_blocks == 10
    assert sim.kv.max_tokens_of_one_sequence == 40
    assert sim.kv._pool.free_block_ids()[-2:] == [1, 0]
    sim.drain()


def test_pins_overlap() -> None:
    sim = cached()
    first, second = pinned(sim, A[:8]), pinned(sim, A[:12])
    assert (second.num_blocks, sim.kv.max_tokens_of_one_sequence) == (3, 28)
    unpin(sim, first)
    assert sim.kv.max_tokens_of_one_sequence == 28
    unpin(sim, second)
    assert sim.kv.max_tokens_of_one_sequence == 40


def test_only_what_is_in_the_pool_is_pinned() -> None:
    sim = cached()
    assert pinned(sim, [*A[:4], *B[:8]]).num_tokens == 4
    assert pinned(sim, B[:8]).num_blocks == 0
    assert pinned(sim, A[:8], "x").num_blocks == 0
    off = cached(caching=False)
    assert pinned(off, A[:8]).num_blocks == 0


def test_pins_take_half_of_the_pool_at_most() -> None:
    sim = cached(num_blocks=6)
    pinned(sim, A[:12])
    with pytest.raises(CapacityError, match=r"1 more than the 3 .* 4 in all; .* take 3, half .* 6"):
        sim.kv.pin(A[:16])
    pinned(sim, A[:12])
    sim.check_counts()


def test_an_id_that_is_not_pinned_is_refused() -> None:
    sim = cached()
    pin = pinned(sim, A[:8])
    unpin(sim, pin)
    for pin_id in (pin.pin_id, 77):
        with pytest.raises(InvalidRequestError, match=f"pin_id {pin_id} is not pinned") as refused:
            sim.kv.unpin(pin_id)
        assert refused.value.parameter == "pin_id"


def test_a_pin_outlives_resets_though_after_a_failure_it_keeps_nothing() -> None:
    sim = cached()
    pin = pinned(sim, A[:8])
    sim.kv.reset_prefix_cache()
    assert sim.run(sim.add(1, A[:9])) == 8
    sim.reset()
    sim.check_counts()
    assert sim.run(sim.add(2, A[:9])) == 0
    unpin(sim, pin)
    sim.drain()
