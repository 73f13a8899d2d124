"""The miss explainer: for each block that was computed the reason, in exact numbers."""

from __future__ import annotations

import pytest
from kv_sim import Sim

from octavo.outputs import MissReason, PrefixMiss

A, B, C = list(range(100, 140)), list(range(200, 240)), list(range(300, 340))
NEVER, EVICTED = MissReason.NEVER_SEEN, MissReason.EVICTED
DIVERGED, SHORT = MissReason.DIVERGED, MissReason.SHORT
OTHER_SALT, NOT_ASKED = MissReason.OTHER_SALT, MissReason.NOT_ASKED


def run(sim: Sim, seq_id: int, tokens: list[int], **more: object) -> tuple[PrefixMiss, ...]:
    """Run a prompt to its end, in blocks of 4; its misses."""
    seq = sim.add(seq_id, tokens, **more)
    sim.run(seq)
    misses = sim.kv.request_usage(seq.request_id).misses
    sim.end(seq)
    return misses


def test_a_new_prompt_was_never_seen() -> None:
    sim = Sim(20, 4)
    assert run(sim, 0, A[:10]) == (PrefixMiss(0, 3, NEVER),)
    assert run(sim, 1, B[:8]) == (PrefixMiss(0, 2, NEVER),)
    assert run(sim, 2, C[:3]) == (PrefixMiss(0, 1, SHORT),)


@pytest.mark.parametrize("length", [1, 4, 7, 8, 10])
def test_a_prompt_that_is_found_has_no_misses(length: int) -> None:
    sim = Sim(20, 4)
    run(sim, 0, A[:12])
    assert run(sim, 1, A[:length]) == ()


@pytest.mark.parametrize(("num_same", "first"), [(1, 0), (3, 0), (4, 1), (6, 1), (9, 2)])
def test_where_prompts_diverge(num_same: int, first: int) -> None:
    sim = Sim(20, 4)
    run(sim, 0, A[:16])
    expected = PrefixMiss(first, 4 - first, DIVERGED, diverged_at=num_same)
    assert run(sim, 1, [*A[:num_same], *B[: 14 - num_same]]) == (expected,)


def test_the_end_of_what_is_cached_is_no_divergence() -> None:
    sim = Sim(20, 4)
    run(sim, 0, A[:8])
    assert run(sim, 1, A[:20]) == (PrefixMiss(2, 3, NEVER),)
    assert run(sim, 2, [*A[:20], *B[:2]]) == (PrefixMiss(5, 1, SHORT),)


def test_evicted_blocks_tell_since_when_and_what_follows_them_why_else() -> None:
    sim = Sim(5, 4)
    sim.kv.set_time(10.0)
    run(sim, 0, A[:20])
    sim.kv.set_time(12.0)
    run(sim, 1, B[:4])  # takes the last block of A
    sim.kv.set_time(13.0)
    run(sim, 2, C[:4])  # and the one before
    sim.kv.set_time(15.0)
    assert run(sim, 3, [*A[:16], *B[:2]]) == (
        PrefixMiss(3, 1, EVICTED, evicted_s_ago=2.0),
        PrefixMiss(4, 1, SHORT),
    )
    sim.kv.set_time(16.0)
    run(sim, 4, C[:20])
    (miss, *rest) = run(sim, 5, [*A[:8], *C[:8]])
    assert (miss.first_block, miss.num_blocks, miss.reason) == (0, 2, EVICTED)
    assert rest == [PrefixMiss(2, 2, DIVERGED, diverged_at=8)]


def test_another_salt_has_it() -> None:
    sim = Sim(20, 4)
    run(sim, 0, A[:8], salt="x")
    assert run(sim, 1, A[:12]) == (PrefixMiss(0, 2, OTHER_SALT), PrefixMiss(2, 1, NEVER))
    assert run(sim, 2, B[:8]) == (PrefixMiss(0, 2, NEVER),)


def test_prompt_logprobs_ask_for_nothing() -> None:
    sim = Sim(20, 4)
    run(sim, 0, A[:12])
    assert run(sim, 1, A[:12], max_hit_tokens=0) == (PrefixMiss(0, 3, NOT_ASKED),)
    assert run(sim, 2, A[:12], max_hit_tokens=6) == (PrefixMiss(1, 2, NOT_ASKED),)
    assert run(sim, 3, B[:12], max_hit_tokens=6) == (
        PrefixMiss(0, 2, NEVER),
        PrefixMiss(2, 1, NOT_ASKED),
    )
    off = Sim(20, 4, caching=False)
    assert run(off, 0, A[:10]) == (PrefixMiss(0, 3, NOT_ASKED),)


def test_only_the_first_start_is_explained() -> None:
    sim = Sim(20, 4)
    seq = sim.add(0, A[:8])
    sim.run(seq)
    sim.preempt(seq, to_host=False)
    sim.kv.reset_prefix_cache()
    sim.run(seq)
    assert sim.kv.request_usage("r0").misses == (PrefixMiss(0, 2, NEVER),)
    assert sim.kv.request_usage("r0").cached_tokens == 0


def test_a_whole_block_that_comes_too_early_is_not_ready() -> None:
    sim = Sim(20, 4)
    first, second = sim.add(0, A[:8]), sim.add(1, A[:8])
    sim.kv.begin_step()
    for seq in (first, second):
        sim.start(seq)
        assert sim.grow(seq, 8)
    sim.execute()
    assert second.found == 4
    assert sim.kv.request_usage("r1").misses == (PrefixMiss(1, 1, MissReason.NOT_READY),)
