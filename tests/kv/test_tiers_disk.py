"""Blocks on disk: written, read back, bounded, damaged, and found again by another process."""

from __future__ import annotations

import pytest
from kv_sim import Sim

from octavo.kv import cold as cold_module
from octavo.kv.cold import block_digest, root_digest
from octavo.kv.node import block_key
from octavo.plan import BlockCopy, CopyKind

A, B, C = (list(range(i * 100, i * 100 + 60)) for i in range(1, 4))
TO_HOST, TO_DISK, FROM_DISK = CopyKind.TO_HOST, CopyKind.TO_DISK, CopyKind.FROM_DISK


def test_what_the_host_has_no_room_for_moves_to_disk_with_its_label() -> None:
    sim = Sim(2, 4, num_host_blocks=1, max_disk_blocks=8)
    sim.finish(0, A[:8])
    seq = sim.add(1, B[:8])
    sim.kv.begin_step()
    sim.start(seq)
    assert sim.grow(seq, 8)
    out, to_disk, again = sim.kv._pool.copies
    assert (out, again) == (BlockCopy(1, 0, TO_HOST), BlockCopy(0, 0, TO_HOST))
    assert (to_disk.src, to_disk.dst, to_disk.kind) == (0, 0, TO_DISK)
    assert to_disk.label is not None
    assert to_disk.label.token_ids == tuple(A[4:8])
    sim.execute()
    assert list(sim.disk.files) == [0]
    ledger = sim.kv.disk_ledger()
    assert (ledger.cached, ledger.free, ledger.num_blocks) == (1, 7, 8)
    assert "8 blocks" in str(ledger)
    sim.drain()


@pytest.mark.parametrize(("num_void", "num_left"), [(1, 1), (2, 0)])
def test_of_void_plans_nothing_is_kept_on_disk(num_void: int, num_left: int) -> None:
    """Two plans write to it: one block, then two. The last, or both, come to nothing."""
    sim = Sim(2, 4, num_host_blocks=1, max_disk_blocks=8)
    for seq_id, tokens in enumerate((A, B, C)):
        sim.finish(seq_id, tokens[:8])
    assert sim.kv.disk_ledger().cached == len(sim.disk.files) == 3
    sim.kv.reset_cache(num_void)
    assert sim.kv.disk_ledger().cached == len(sim.disk.files) == num_left


def test_blocks_come_back_from_disk() -> None:
    sim = Sim(2, 4, num_host_blocks=1, max_disk_blocks=8)
    sim.finish(0, A[:8])
    sim.finish(1, B[:8])
    sim.finish(2, C[:8])
    assert len(sim.disk.files) == 3
    sim.wait_for_disk()
    seq = sim.add(4, [*A[:4], 1])
    sim.kv.begin_step()
    assert sim.start(seq) == 4
    assert [copy.kind for copy in sim.kv._pool.copies][-1] is FROM_DISK
    assert sim.grow(seq, 5)
    sim.execute()
    assert sim.kv.cache_stats().promotions_from_disk == 1
    sim.drain()


def test_a_block_that_may_not_have_arrived_on_the_disk_is_not_asked_for() -> None:
    sim = Sim(2, 4, num_host_blocks=1, max_disk_blocks=8)
    sim.finish(0, A[:8])
    sim.finish(1, B[:8])
    sim.finish(2, C[:8])
    assert sim.finish(3, [*A[:4], 1]) == 0
    sim.drain()


def test_a_damaged_block_is_a_miss_and_is_forgotten() -> None:
    sim = Sim(2, 4, num_host_blocks=1, max_disk_blocks=8)
    for seq_id, tokens in enumerate((A, B, C)):
        sim.finish(seq_id, tokens[:8])
    sim.wait_for_disk()
    (head,) = (i for i, (label, _) in sim.disk.files.items() if label.token_ids == tuple(A[:4]))
    sim.disk.damaged.update(sim.disk.files)
    assert sim.finish(3, [*A[:4], 1]) == 0
    assert head not in sim.disk.files
    assert len(sim.disk.files) == sim.kv.disk_ledger().cached
    sim.drain()


def test_the_disk_is_bounded_and_forgets_the_oldest() -> None:
    sim = Sim(2, 4, num_host_blocks=1, max_disk_blocks=3)
    for number in range(20):
        sim.wait_for_disk()
        sim.finish(number, [number] * 8)
        assert len(sim.disk.files) <= 3
    assert min(sim.disk.files) > 20
    sim.drain()


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_a_restart_finds_what_was_flushed(salt: str) -> None:
    sim = Sim(8, 4, num_host_blocks=2, max_disk_blocks=20)
    sim.finish(0, A[:16], salt=salt)
    sim.finish(1, [*A[:8], *B[:10]], salt=salt)
    assert sim.kv.flush_to_disk() == 6  # whole blocks only
    sim.execute()
    assert sim.kv.flush_to_disk() == 0
    sim.boot(8)
    assert sim.kv.disk_ledger().cached == 6
    assert sim.finish(2, A[:16]) == (15 if salt == "" else 0)
    assert sim.finish(3, [*A[:8], *B[:9]], salt=salt) == 16
    sim.drain()


def test_flush_keeps_the_most_recently_used() -> None:
    sim = Sim(8, 4, num_host_blocks=1, max_disk_blocks=4)
    sim.finish(0, A[:16])
    sim.finish(1, B[:16])
    assert sim.kv.flush_to_disk() == 4
    sim.execute()
    sim.boot(8)
    assert sim.finish(2, B[:16]) == 15
    assert sim.finish(3, A[:16]) == 0
    sim.drain()


def test_a_restart_with_less_room_forgets_the_oldest() -> None:
    sim = Sim(8, 4, num_host_blocks=1, max_disk_blocks=8)
    sim.finish(0, A[:16])
    sim.kv.flush_to_disk()
    sim.execute()
    sim.max_disk_blocks = 3
    sim.boot(8)
    assert len(sim.disk.files) == 3
    sim.kv.check_integrity()


def test_orphans_are_found_when_their_parent_is_computed_again() -> None:
    sim = Sim(8, 4, num_host_blocks=1, max_disk_blocks=8)
    sim.finish(0, A[:16])
    sim.kv.flush_to_disk()
    sim.execute()
    first = next(i for i, (label, _) in sim.disk.files.items() if label.token_ids == tuple(A[:4]))
    sim.disk.delete(first)
    sim.boot(8)
    assert sim.finish(1, A[:4]) == 0
    assert sim.finish(2, A[:16]) == 15
    sim.drain()


def left_on_disk(num_prompts: int, num_blocks: int, **more: object) -> Sim:
    """A new process over a disk with prompts that begin differently, and agree from then on."""
    most = num_prompts * num_blocks
    sim = Sim(most + 1, 4, num_host_blocks=2, max_disk_blocks=most)
    for number in range(num_prompts):
        sim.finish(number, [number, *A[: 4 * num_blocks - 1]], **more)
    assert sim.kv.flush_to_disk() == most
    sim.execute()
    sim.boot(most + 1)
    return sim


def test_only_what_is_looked_for_enters_the_tree() -> None:
    sim = left_on_disk(10, 5)
    tree, disk = sim.kv._cache.tree, sim.kv._cache.cold.disk
    assert not tree.roots and len(disk) == 50
    seq = sim.add(99, [3, *A[:12], 1])
    assert sim.can_admit(seq)
    assert sim.kv.can_admit(seq.demand(), keep_free=50) is False
    assert not tree.roots, "a question changed something"
    assert sim.run(seq) == 12
    assert len(list(tree.walk())) == 3  # no other prompt, and not what follows
    assert sum(len(siblings) for siblings in disk.orphans.values()) == 50 - 3
    # A beginning is found too, if it is at least half of a block.
    assert sim.run(sim.add(98, [4, A[0], A[1], 7, 7])) == 3
    assert sim.run(sim.add(97, [5, 7, 7, 7, 7])) == 0
    assert sim.finish(96, [50, *A[:6]]) == 0
    sim.drain()


def test_a_root_is_not_made_for_what_is_not_on_disk() -> None:
    sim = left_on_disk(2, 2)
    seq = sim.add(99, B[:9])
    sim.kv.begin_step()
    assert sim.start(seq) == 0
    assert not sim.kv._cache.tree.roots
    sim.end(seq)
    sim.drain()


def test_a_block_that_an_earlier_process_left_is_not_written_again() -> None:
    sim = left_on_disk(1, 3)
    cold = sim.kv._cache.cold
    # Registered without being looked for: it must not be a second file.
    sim.finish(99, [0, *A[:11]], max_hit_tokens=0)
    assert len(cold.disk.orphans) == 3
    assert sim.kv.flush_to_disk() == 0
    assert not cold.disk.orphans and len(sim.disk.files) == 3
    sim.drain()


def test_a_step_reads_a_bounded_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_module, "MAX_FETCH_BYTES", 2 * 4)  # a token is a byte here
    sim = left_on_disk(3, 5)
    first, second = (sim.add(i, [i, *A[:19]]) for i in (0, 1))
    sim.kv.begin_step()
    assert sim.start(first) == 8
    assert sim.disk.num_reads == 2
    assert sim.start(second) == 0
    assert sim.disk.num_reads == 2
    assert sim.grow(first, 20) and sim.grow(second, 20)
    sim.execute()
    assert sim.run(sim.add(2, [2, *A[:19]])) == 8  # another step
    assert sim.disk.num_reads == 4
    misses = sim.kv.request_usage("r2").misses
    assert [(miss.first_block, miss.num_blocks) for miss in misses] == [(2, 3)]
    sim.drain()


def test_damaged_blocks_count_as_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_module, "MAX_FETCH_BYTES", 1)  # one block at least
    sim = left_on_disk(3, 5)
    sim.disk.damaged.update(sim.disk.files)
    sim.kv.begin_step()
    for number in range(3):
        assert sim.start(sim.add(number, [number, *A[:19]])) == 0
    assert sim.disk.num_reads == 1
    assert sim.kv.check_integrity() is None


def test_no_salt_has_the_digest_of_a_block() -> None:
    """A salt whose bytes are what a block's digest is made of."""
    root = root_digest("")
    for number in range(100_000):
        tokens = [number, 1, 2, 3]
        parent, key = block_digest(root, block_key(tokens, 0, 4)), block_key(A, 0, 4)
        try:
            salt = (parent + key).decode()
        except UnicodeDecodeError:
            continue
        break
    else:
        raise AssertionError("no digest is UTF-8")
    assert root_digest(salt) != block_digest(parent, key)
    sim = Sim(8, 4, num_host_blocks=2, max_disk_blocks=8)
    sim.finish(0, [*tokens, *A[:4], *B[:4]])
    assert sim.kv.flush_to_disk() == 3
    sim.execute()
    sim.boot(8)
    assert sim.finish(1, B[:5], salt=salt) == 0
    assert sim.finish(2, [*tokens, *A[:4], *B[:4]]) == 11
    sim.drain()


def test_a_salt_that_is_no_text_has_a_digest() -> None:
    assert root_digest("\ud800") != root_digest("\udfff")
