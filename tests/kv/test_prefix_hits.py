"""What a start finds, in exact numbers and block ids: whole blocks, beginnings of blocks."""

from __future__ import annotations

from typing import Any

import pytest
from kv_sim import Sim

from octavo.kv import NO_GROWTH, Growth, KVCacheManager, SeqDemand
from octavo.kv.node import Node
from octavo.outputs import RequestKVUsage
from octavo.plan import BlockCopy

A, B, C = list(range(100, 140)), list(range(200, 240)), list(range(300, 340))


def cached(*prompts: list[int], num_blocks: int = 12) -> Sim:
    """Each prompt ran and ended, in blocks of 4."""
    sim = Sim(num_blocks, 4)
    for number, tokens in enumerate(prompts):
        sim.finish(100 + number, tokens)
    return sim


def free_order(sim: Sim) -> list[int]:
    return sim.kv._pool.free_block_ids()


def test_unregistered_blocks_go_first_then_cached_ones_tail_before_head() -> None:
    sim = cached(A[:10], B[:8], num_blocks=7)
    # A has blocks 0-2 (a tail of two tokens), B has 3 and 4; 5 and 6 were never used.
    assert free_order(sim) == [5, 6, 2, 1, 0, 4, 3]
    assert sim.kv.ledger().cached == 5 * 4
    assert sim.kv.num_free_blocks == 7
    seq = sim.add(0, C[:16])
    assert sim.run(seq) == 0
    assert list(sim.kv.block_table(0)) == [5, 6, 2, 1]
    assert sim.kv.cache_stats().evictions == 2


def test_a_hit_takes_blocks_out_of_the_order_and_the_end_puts_them_back_as_the_latest() -> None:
    sim = cached(A[:8], B[:8], num_blocks=4)
    seq = sim.add(0, A[:9])
    assert sim.kv.can_admit(seq.demand())
    assert free_order(sim) == [1, 0, 3, 2], "asking changes the order"
    sim.kv.begin_step()
    assert sim.start(seq) == 8
    assert free_order(sim) == [3, 2]
    sim.end(seq)
    assert free_order(sim) == [3, 2, 1, 0]


def test_running_sequences_share_whole_blocks() -> None:
    sim = Sim(8, 4)
    sim.run(sim.add(0, A[:10]))
    sim.kv.begin_step()
    second = sim.add(1, [*A[:8], *B[:3]])
    assert sim.start(second) == 8
    assert sim.kv.grow(1, 11, 8) == Growth((0, 1, 3), None)
    assert [sim.kv.ref_count(b) for b in range(4)] == [2, 2, 1, 1]
    ledger = sim.kv.ledger()
    assert (ledger.num_logical_blocks, ledger.num_physical_blocks) == (6, 4)
    assert ledger.tokens == 10 + 8 - 8
    assert sim.kv.request_ledger("r1").tokens == 8
    sim.kv.check_integrity()


def test_a_partial_hit_copies_a_block_that_somebody_writes() -> None:
    sim = Sim(8, 4)
    first = sim.add(0, A[:10])
    sim.run(first)
    sim.end(first)
    # The tail of two tokens is exactly what is found: the block is taken as it is.
    again = sim.add(1, [*A[:10], 1, 2, 3])
    sim.kv.begin_step()
    assert sim.start(again) == 10
    assert sim.kv.take_copies() == []
    assert sim.grow(again, 13)
    assert list(sim.kv.block_table(1)) == [0, 1, 2, 3]
    sim.execute()
    # Now it has grown beyond: whoever comes gets a copy of its beginning.
    third = sim.add(2, [*A[:10], 1, 7])
    sim.kv.begin_step()
    assert sim.start(third) == 11
    assert sim.kv._pool.copies == [BlockCopy(2, 4)]
    assert sim.grow(third, 12)
    sim.execute()
    stats = sim.kv.cache_stats()
    assert (stats.partial_hits, stats.partial_hit_tokens) == (2, 2 + 3)
    sim.drain()


@pytest.mark.parametrize("num_same", range(1, 8))
def test_the_longest_common_beginning_is_found(num_same: int) -> None:
    sim = cached(A[:12], [*A[:5], *B[:7]], C[:12])
    seq = sim.add(0, [*A[:num_same], *range(1000, 1010)])
    assert sim.run(seq) == num_same
    sim.drain()


def test_an_exact_tail_is_not_written_over() -> None:
    """Its owner goes on in the block; the registered tokens stay, and are found meanwhile."""
    sim = cached(A[:6])
    owner = sim.add(0, [*A[:6], *B[:1]])
    assert sim.run(owner) == 6
    owner.tokens.append(7)
    sim.run(owner)  # the block is full now: a whole one is found
    other = sim.add(1, [*A[:6], *C[:4]])
    assert sim.run(other) == 6
    whole = sim.add(2, [*A[:6], *B[:1], 7, 8])
    assert sim.run(whole) == 8
    assert sim.kv.block_table(2)[1] == sim.kv.block_table(0)[1]
    sim.kv.check_integrity()
    sim.drain()


def test_partial_hits_want_a_finished_step() -> None:
    sim = Sim(8, 4)
    first, second = sim.add(0, A[:8]), sim.add(1, [*A[:7], 1, 2])
    sim.kv.begin_step()
    sim.start(first)
    assert sim.grow(first, 8)
    assert sim.start(second) == 4
    assert sim.grow(second, 9)
    sim.execute()
    third = sim.add(2, [*A[:7], 3])
    assert sim.run(third) == 7
    sim.drain()


def test_equal_blocks_that_are_computed_at_once_are_kept_once() -> None:
    """Both are under way, chunk by chunk: the second's blocks are never found, and go first."""
    sim = Sim(8, 4)
    first, second = sim.add(0, A[:8]), sim.add(1, A[:8])
    for end in (2, 4, 8):
        sim.kv.begin_step()
        for seq in (first, second):
            if not seq.is_running:
                assert sim.start(seq) == 0
            assert sim.grow(seq, end)
        sim.execute()
    assert sim.kv.num_free_blocks == 4
    sim.end(first)
    sim.end(second)
    assert sim.kv.ledger().cached == 2 * 4
    assert free_order(sim)[-2:] == [2, 0]
    sim.drain()


def test_room_for_a_sequence_counts_what_it_shares() -> None:
    sim = Sim(5, 4)
    sim.run(sim.add(0, A[:12]))
    demand = SeqDemand(20, 100, token_ids=[*A[:12], *B[:8]])
    assert sim.kv.can_admit(demand)  # two of its five blocks are missing, and two are free
    assert not sim.kv.can_admit(demand, keep_free=1)
    assert not sim.kv.can_admit(SeqDemand(20, 100, token_ids=[*A[:8], *B[:12]]))
    assert not sim.kv.can_admit(SeqDemand(20, 100, token_ids=demand.token_ids, salt="x"))
    sim.end(sim.seqs[0])
    # Nobody holds them any more: the cached blocks are among the free ones.
    assert sim.kv.can_admit(demand)
    assert not sim.kv.can_admit(demand, keep_free=1)


def test_the_last_free_block_is_the_one_that_was_to_be_copied() -> None:
    sim = cached(A[:8], num_blocks=2)
    seq = sim.add(0, A[:8])
    sim.kv.begin_step()
    assert sim.start(seq) == 7
    assert sim.kv.take_copies() == []
    assert sim.grow(seq, 8)
    sim.execute()
    sim.end(seq)
    assert sim.run(sim.add(1, A[:8])) == 7
    sim.drain()


def test_registered_tokens_are_never_overwritten() -> None:
    """Computing the last token of a full block again needs a copy, though it has one owner."""
    sim = Sim(6, 4)
    sim.run(sim.add(0, A[:8]))
    assert sim.kv.grow(0, 8, 7) == Growth((), (1, 2))
    assert sim.kv.take_copies() == [BlockCopy(1, 2)]
    assert sim.kv.grow(0, 8, 7) is NO_GROWTH
    assert sim.kv.ledger().cached == 4
    sim.kv.check_integrity()


def test_a_child_registers_its_own_tokens() -> None:
    sim = Sim(12, 4)
    parent = sim.add(0, A[:6])
    sim.run(parent)
    child = sim.fork(parent, 1, B[:5])
    sim.run(child)
    sim.end(child)
    sim.end(parent)
    assert sim.run(sim.add(2, [*A[:6], *B[:6]])) == 11
    assert sim.kv.cache_stats().forked_tokens == 6
    sim.drain()


def test_a_child_of_unknown_tokens_registers_nothing() -> None:
    kv = KVCacheManager(8, 4, enable_prefix_caching=True)
    kv.start(0, SeqDemand(6, 100, token_ids=A[:6]), "r")
    kv.grow(0, 6, 0)
    kv.commit(0, 6)
    kv.fork(0, 1)
    kv.grow(1, 12, 6)
    kv.commit(1, 12)
    kv.release(1)
    assert kv.ledger().cached == 0
    kv.release(0)
    assert kv.ledger().cached == 8
    kv.check_integrity()


def test_what_was_found_is_told_by_whose_it_was() -> None:
    sim = cached(A[:12])
    seq = sim.add(0, A[:10], request_id="r")
    sim.run(seq)
    sim.fork(seq, 1, B[:1])
    usage = sim.kv.request_usage("r")
    assert (usage.cached_tokens, usage.resumed_tokens, usage.forked_tokens) == (9, 0, 10)
    sim.preempt(seq, to_host=False)
    seq.tokens.append(5)
    assert sim.run(seq) == 10
    usage = sim.kv.request_usage("r")
    assert (usage.cached_tokens, usage.resumed_tokens, usage.forked_tokens) == (9, 10, 10)
    stats = sim.kv.cache_stats()
    assert (stats.queries, stats.query_tokens, stats.hit_tokens) == (2, 12 + 10, 9)
    assert (stats.resumed_tokens, stats.forked_tokens) == (10, 10)
    assert stats.hit_rate == 9 / 22
    sim.drain()


def test_what_a_sibling_finds_that_starts_later_counts_as_forked() -> None:
    sim = Sim(12, 4)
    first = sim.add(0, A[:10], request_id="r")
    sim.run(first)
    sim.run(sim.add(1, A[:10], request_id="r"))
    usage = sim.kv.request_usage("r")
    assert (usage.cached_tokens, usage.resumed_tokens, usage.forked_tokens) == (0, 0, 8)
    sim.preempt(first, to_host=False)
    sim.run(first)
    assert sim.kv.request_usage("r").resumed_tokens == 9
    stats = sim.kv.cache_stats()
    assert (stats.queries, stats.hit_tokens, stats.forked_tokens) == (1, 0, 8)
    sim.drain()


def test_a_waiting_prompt_is_compared_once() -> None:
    """Asked again, its way down the tree is looked at and not searched."""
    sim = Sim(50, 4)
    tokens = A[:40] * 4
    runs = sim.add(0, [*tokens, 1])
    sim.run(runs)
    waits = sim.add(1, [*tokens, *B[:100]])
    searched: list[object] = []
    children = {node: node.children for node in sim.kv._cache.tree.walk()}

    class Spy(dict[bytes, Node]):
        def get(self, key: bytes, default: object = None) -> Any:
            searched.append(key)
            return super().get(key, default)

    for node, known in children.items():
        node.children = Spy(known)
    assert not sim.kv.can_admit(waits.demand())
    assert len(searched) == 40  # not of the root, whose children are no spy
    searched.clear()
    for _ in range(10):
        sim.kv.begin_step()
        assert not sim.kv.can_admit(waits.demand())
    assert len(searched) == 10
    sim.end(runs)
    assert sim.kv._cache.num_shared(waits.demand(), ("", "")) == 0  # there, but nobody's
    assert sim.run(waits) == 160
    sim.drain()


def test_a_way_that_was_forgotten_and_grew_again_is_found() -> None:
    sim = Sim(8, 4)
    first = sim.add(0, A[:17])
    sim.run(first)
    waits = sim.add(1, [*A[:16], *B[:24]])
    assert not sim.can_admit(waits)
    sim.end(first)
    sim.reset()
    again = sim.add(2, A[:17])
    sim.run(again)
    assert not sim.can_admit(waits)
    assert sim.kv._cache.num_shared(waits.demand(), ("", "")) == 4
    sim.kv.resize(11)
    assert sim.can_admit(waits)
    assert sim.run(waits) == 16
    sim.drain()


def test_without_the_cache_only_relatives_share_and_nothing_stays() -> None:
    sim = Sim(8, 4, caching=False)
    seq = sim.add(0, A[:8], request_id="r")
    sim.run(seq)
    assert sim.run(sim.add(1, A[:8])) == 0
    sibling = sim.add(2, A[:8], request_id="r")
    assert sim.run(sibling) == 7
    sim.end(seq)
    sim.end(sibling)
    assert sim.kv.ledger().cached == 0
    assert sim.kv.cache_stats().queries == 0
    sim.drain()
    assert sim.kv._cache.tree.roots == {}


def test_nothing_is_remembered_of_salts_without_blocks() -> None:
    sim = Sim(2, 4)
    for number in range(100):
        sim.finish(number, A[:8], salt=f"tenant {number}")
    tree = sim.kv._cache.tree
    assert tree.num_ghosts == tree.max_ghosts == 8
    assert len(tree.roots) <= 2 + 8
    sim.kv.reset_prefix_cache()
    assert sim.kv.ledger().free == 8
    sim.drain()


def test_forgetting_the_cache_keeps_what_runs() -> None:
    sim = cached(A[:8], B[:8])
    seq = sim.add(0, A[:9])
    sim.run(seq)
    assert sim.kv.reset_prefix_cache() == 2
    assert sim.run(sim.add(1, B[:8])) == 0
    assert sim.run(sim.add(2, A[:9])) == 8
    sim.drain()


def test_after_a_failed_step_nothing_is_found() -> None:
    sim = cached(A[:8], B[:8])
    seq = sim.add(0, A[:9])
    sim.run(seq)
    sim.reset()
    assert sim.kv.ledger().cached == 0
    sim.check_counts()
    assert sim.run(sim.add(1, B[:8])) == 0
    assert sim.run(sim.add(2, A[:9])) == 0
    seq.tokens += C[:8]
    sim.run(seq)  # what it still computes is not found either: its beginning is unknown
    sim.drain()
    assert sim.kv.request_usage("r0") == RequestKVUsage()
