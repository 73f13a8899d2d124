"""The pool grows and shrinks under running sequences."""

from __future__ import annotations

import pytest
from kv_sim import Sim

from octavo.errors import CapacityError
from octavo.kv import ContiguousPolicy, KVCacheManager
from octavo.plan import BlockCopy, CopyKind

A, B, C = (list(range(i * 100, i * 100 + 60)) for i in range(1, 4))


def test_a_grown_pool_gives_its_new_blocks_first() -> None:
    sim = Sim(3, 4)
    sim.finish(0, A[:12])
    assert sim.kv.resize(5) == []
    assert sim.kv.num_free_blocks == 5
    assert sim.kv.max_tokens_of_one_sequence == 20
    seq = sim.add(1, B[:8])
    sim.run(seq)
    assert list(sim.kv.block_table(1)) == [3, 4]
    assert sim.run(sim.add(2, A[:8])) == 7
    sim.drain()


def test_blocks_behind_the_new_end_move_and_tables_follow() -> None:
    sim = Sim(8, 4)
    first, second = sim.add(0, A[:8]), sim.add(1, B[:10])
    sim.run(first)
    sim.run(second)
    sim.end(first)
    assert list(sim.kv.block_table(1)) == [2, 3, 4]
    # 3 free ones go, and of the two cached the older, the tail.
    assert sim.kv.resize_shortfall(4) == 0
    moves = sim.kv.resize(4)
    assert moves == [(4, 1)]
    assert sim.kv._pool.copies == [BlockCopy(4, 1)]
    assert list(sim.kv.block_table(1)) == [2, 3, 1]
    assert (sim.kv.num_blocks, sim.kv.num_free_blocks) == (4, 1)
    assert sim.kv.ledger().cached == 4
    sim.kv.check_integrity()
    sim.kv.request_usage("r1")


def test_contents_survive_any_sizes() -> None:
    sim = Sim(12, 4, num_host_blocks=4)
    sim.finish(0, A[:16])
    running = [sim.add(1, B[:10]), sim.add(2, [*A[:8], *C[:3]])]
    for seq in running:
        sim.run(seq)
    child = sim.fork(running[0], 3, C[:2])
    for num_blocks in (9, 8, 5, 20, 9, 13, 10):
        fits = sim.kv.num_blocks - sim.kv.num_free_blocks <= num_blocks
        assert sim.resize(num_blocks) == fits
        sim.check_counts()
        for seq in (*running, child):
            seq.tokens.append(9)
            if sim.kv.num_free_blocks:
                sim.run(seq)
        sim.check_counts()
    sim.end(child)
    assert sim.run(sim.add(4, A[:8])) == 7
    sim.drain()


def test_the_least_recently_used_are_evicted_and_move_to_the_host() -> None:
    sim = Sim(6, 4, num_host_blocks=2)
    sim.finish(0, A[:8])
    sim.finish(1, B[:8])
    sim.kv.begin_step()
    sim.kv.resize(2)
    assert [copy.kind for copy in sim.kv._pool.copies] == [CopyKind.TO_HOST] * 2 + [
        CopyKind.WITHIN
    ] * 2
    sim.execute()
    assert sim.run(sim.add(2, B[:8])) == 7
    sim.end(sim.seqs[2])
    assert sim.run(sim.add(3, A[:8])) >= 4
    sim.drain()


def test_too_many_blocks_in_use_are_refused_with_their_number() -> None:
    sim = Sim(8, 4)
    sim.run(sim.add(0, A[:12]))
    sim.finish(1, B[:8])
    pin = sim.kv.pin(B[:8])
    assert sim.kv.resize_shortfall(4) == 1
    message = r"from 8 to 4 blocks: 5 are in use, 2 of them pinned; 1 must be released first"
    with pytest.raises(CapacityError, match=message):
        sim.kv.resize(4)
    assert sim.kv.num_blocks == 8
    assert sim.kv.resize(5) == []
    sim.kv.unpin(pin.pin_id)
    with pytest.raises(CapacityError, match="at least 1"):
        sim.kv.resize(0)
    sim.kv.check_integrity()


def test_pinned_blocks_move() -> None:
    sim = Sim(8, 4)
    sim.finish(0, A[:8])
    sim.finish(1, B[:8])
    sim.finish(2, C[:16])
    pin = sim.kv.pin(C[:8])
    before = list(sim.kv._pins.blocks[pin.pin_id])
    moves = dict(sim.kv.resize(4))
    assert sim.kv._pins.blocks[pin.pin_id] == [moves.get(i, i) for i in before]
    assert set(before) & set(moves)
    sim.execute()
    sim.kv.check_integrity()
    assert sim.kv.max_tokens_of_one_sequence == 8
    sim.kv.unpin(pin.pin_id)
    assert sim.run(sim.add(3, C[:8])) == 7


def test_pins_keep_to_half_of_a_smaller_pool() -> None:
    sim = Sim(8, 4)
    sim.finish(0, A[:16])
    pin = sim.kv.pin(A[:12])
    assert sim.kv.resize_shortfall(5) == 0
    for refuse in (sim.kv.check_size, sim.kv.resize):
        with pytest.raises(CapacityError, match=r"3 are pinned, .* half, 2; .* at least 6"):
            refuse(5)
    assert sim.kv.num_blocks == 8
    sim.kv.check_size(6)
    sim.kv.resize(6)
    assert sim.kv.num_pinned_blocks == 3
    sim.kv.unpin(pin.pin_id)
    sim.kv.check_size(1)


def test_usage_follows_moved_blocks() -> None:
    sim = Sim(8, 4)
    sim.finish(0, A[:16])
    seq = sim.add(1, B[:10], request_id="r")
    sim.run(seq)
    sim.fork(seq, 2, C[:1])
    assert sim.resize(3)
    sim.kv.check_integrity()
    assert sim.kv.request_usage("r").shared_tokens == 10
    sim.end(sim.seqs[2])
    sim.end(seq)
    sim.drain()


def test_a_policy_that_places_blocks_itself_cannot_be_resized() -> None:
    kv = KVCacheManager(8, 4, ContiguousPolicy(12))
    with pytest.raises(CapacityError, match="--kv-policy contiguous"):
        kv.resize(6)


def test_a_resize_to_the_same_size_changes_nothing() -> None:
    sim = Sim(4, 4)
    sim.finish(0, A[:8])
    order = sim.kv._pool.free_block_ids()
    assert sim.kv.resize(4) == []
    assert sim.kv._pool.free_block_ids() == order
    assert sim.kv._pool.copies == []
