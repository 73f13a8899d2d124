"""The host behind the pool: offload and promotion; and what resets do to all tiers."""

from __future__ import annotations

import pytest
from kv_sim import Sim

from octavo.errors import ConfigError
from octavo.kv import KVCacheManager
from octavo.kv.node import Node
from octavo.kv.tiers import HostTier
from octavo.plan import BlockCopy, CopyKind

A, B, C, D = (list(range(i * 100, i * 100 + 60)) for i in range(1, 5))
TO_HOST, FROM_HOST = CopyKind.TO_HOST, CopyKind.FROM_HOST


def test_an_evicted_block_moves_to_the_host_and_back_when_it_is_found() -> None:
    sim = Sim(2, 4, num_host_blocks=3)
    sim.finish(0, A[:8])
    sim.kv.begin_step()
    seq = sim.add(1, B[:8])
    sim.start(seq)
    assert sim.grow(seq, 8)
    assert sim.kv._pool.copies == [BlockCopy(1, 0, TO_HOST), BlockCopy(0, 1, TO_HOST)]
    sim.execute()
    sim.end(seq)
    assert sim.host_terms() == (0, 2, 1)
    sim.kv.begin_step()
    again = sim.add(2, [*A[:4], 1])
    assert sim.start(again) == 4
    # The tail of B goes out for the head of A, which keeps its host block.
    assert sim.kv._pool.copies == [BlockCopy(0, 2, TO_HOST), BlockCopy(1, 0, FROM_HOST)]
    assert sim.grow(again, 5)
    # Its host copy was the first to go for B's other block.
    assert sim.kv._pool.copies[2:] == [BlockCopy(1, 1, TO_HOST)]
    sim.execute()
    stats = sim.kv.cache_stats()
    assert (stats.evictions, stats.offloads_to_host, stats.promotions_from_host) == (4, 4, 1)
    sim.drain()


def test_a_block_that_is_on_the_host_too_is_evicted_without_a_copy() -> None:
    sim = Sim(2, 4, num_host_blocks=8)
    for seq_id, tokens in enumerate((A, B, A, B, A, B)):
        sim.finish(seq_id, tokens[:8])
    stats = sim.kv.cache_stats()
    assert stats.evictions > 6
    assert stats.offloads_to_host <= 6
    sim.drain()


def test_a_beginning_comes_from_the_host_into_a_block_of_its_own() -> None:
    sim = Sim(2, 4, num_host_blocks=4)
    sim.finish(0, A[:8])
    sim.finish(1, B[:8])
    seq = sim.add(2, [*A[:2], 1, 2, 3])
    assert sim.run(seq) == 2
    assert sim.host_terms()[1] == 4
    sim.end(seq)
    assert sim.finish(3, A[:4]) == 3
    sim.drain()


def test_the_host_tier_forgets_the_least_recently_used() -> None:
    host = HostTier(2)
    first, second, third = (Node(None, b"") for _ in range(3))
    assert (host.put(first), host.put(second)) == (0, 1)
    assert host.oldest() is first
    host.touch(first)
    assert host.oldest() is second
    host.touch(first, last=False)
    assert host.oldest() is first
    host.hold(first)
    host.hold(second)
    assert (host.oldest(), host.room) == (None, 0)
    host.unhold(first)
    assert (host.oldest(), host.room) == (first, 1)
    host.remove(first)
    assert host.put(third) == 0
    host.check_integrity()


def test_resetting_the_cache_empties_all_tiers_but_what_waits() -> None:
    sim = Sim(2, 4, num_host_blocks=3, max_disk_blocks=8)
    for seq_id, tokens in enumerate((A, B, C, D)):
        sim.finish(seq_id, tokens[:8])
    victim = sim.add(9, A[20:28])
    sim.run(victim)
    sim.preempt(victim, True)
    sim.execute()
    sim.kv.reset_prefix_cache()
    assert sim.host_terms() == (2, 0, 1)
    assert sim.disk.files == {}
    assert sim.kv.ledger().cached == 0
    assert sim.run(victim) == 7
    sim.drain()


def test_a_failed_step_empties_the_host_with_its_holds_and_keeps_the_disk() -> None:
    sim = Sim(2, 4, num_host_blocks=3, max_disk_blocks=8)
    for seq_id, tokens in enumerate((A, B, C)):
        sim.finish(seq_id, tokens[:8])
    victim = sim.add(9, D[:8])
    sim.run(victim)
    sim.preempt(victim, True)
    sim.execute()
    sim.wait_for_disk()
    num_files = len(sim.disk.files)
    assert num_files
    sim.reset()
    assert sim.host_terms() == (0, 0, 3)
    assert len(sim.disk.files) == num_files
    sim.check_counts()
    assert sim.run(victim) == 0
    sim.drain()


def test_tiers_that_cannot_be_used_are_refused() -> None:
    sim = Sim(2, 4)
    for more in ({"num_host_blocks": 0}, {"enable_prefix_caching": False}):
        options = {"enable_prefix_caching": True, "num_host_blocks": 2, **more}
        with pytest.raises(ConfigError, match="--swap-space"):
            KVCacheManager(2, 4, disk=sim.disk, max_disk_blocks=1, **options)
    with pytest.raises(ConfigError, match="num_host_blocks=-1"):
        KVCacheManager(2, 4, num_host_blocks=-1)
