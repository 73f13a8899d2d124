"""Each way to corrupt the room is found and named by `check_integrity`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.errors import IntegrityError
from octavo.kv import KVCacheManager, SeqDemand


def make() -> KVCacheManager:
    """Sequence 1 has blocks 0-2, its fork 2 shares 0 and 1; sequence 3 has block 4."""
    kv = KVCacheManager(8, 4)
    kv.start(1, SeqDemand(10, 100), "a")
    kv.grow(1, 10, 0)
    kv.commit(1, 10)
    kv.fork(1, 2)
    kv.grow(2, 11, 10)
    kv.start(3, SeqDemand(4, 100), "b")
    kv.grow(3, 4, 0)
    kv.check_integrity()
    return kv


def leak(kv: KVCacheManager) -> None:
    kv._pool._free.remove(6)


def leak_referenced(kv: KVCacheManager) -> None:
    kv._pool.allocate(1)


def lose_a_reference(kv: KVCacheManager) -> None:
    kv._pool._ref_counts[1] = 1


def add_a_reference(kv: KVCacheManager) -> None:
    kv._pool._ref_counts[4] = 3


def free_while_in_a_table(kv: KVCacheManager) -> None:
    kv._pool._free.push_front([4])


def point_at_a_free_block(kv: KVCacheManager) -> None:
    kv._tables[3].append([7])


def point_outside(kv: KVCacheManager) -> None:
    kv._tables[3].append([8])


def point_twice(kv: KVCacheManager) -> None:
    kv._tables[1].append([0])


def swap_owner(kv: KVCacheManager) -> None:
    kv._tables[3].block_ids[0] = 2


def forget_a_table(kv: KVCacheManager) -> None:
    del kv._tables[3]


def break_capacity(kv: KVCacheManager) -> None:
    kv._tables[1].capacity = 16


def commit_too_much(kv: KVCacheManager) -> None:
    kv._tables[3].num_committed = 5


def report_too_much(kv: KVCacheManager) -> None:
    kv._tables[3].num_reported = 2


def break_the_ring(kv: KVCacheManager) -> None:
    kv._pool._free._next[6] = 5


def miscount_the_free(kv: KVCacheManager) -> None:
    kv._pool._free._num = 2


def claim_exclusive(kv: KVCacheManager) -> None:
    kv._tables[2].exclusive_from = 4


def miscount_a_request(kv: KVCacheManager) -> None:
    del kv._accounts["a"]._entries[3]


def miscount_shared_tokens(kv: KVCacheManager) -> None:
    kv._accounts["a"]._shared_tokens = 10


@pytest.mark.parametrize(
    ("corrupt", "named"),
    [
        (leak, "block 6 leaked: neither free nor in any table"),
        (leak_referenced, "block 5 has reference count 1, expected 0: it is in no table"),
        (lose_a_reference, r"block 1 has reference count 1, expected 2: .*sequences \[1, 2\]"),
        (add_a_reference, r"block 4 has reference count 3, expected 1: .*sequences \[3\]"),
        (free_while_in_a_table, r"block 4 is in the free list and in the tables .* \[3\]"),
        (point_at_a_free_block, r"block 7 has reference count 0, expected 1: .*\[3\]"),
        (point_outside, "sequence 3 has block 8 at entry 1: the pool has blocks 0 to 7"),
        (point_twice, "sequence 1 has block 0 twice, again at entry 3"),
        (swap_owner, r"block 2 has reference count 1, expected 2: .*\[1, 3\]"),
        (forget_a_table, "block 4 has reference count 1, expected 0: it is in no table"),
        (break_capacity, "sequence 1 claims 16 slots, expected 12"),
        (commit_too_much, "sequence 3 claims 5 tokens in 4 slots"),
        (report_too_much, "sequence 3 reported 2 of 1 blocks"),
        (break_the_ring, "block 5 is in the free list twice"),
        (miscount_the_free, "the free list counts 2 blocks, found 3"),
        (claim_exclusive, r"block 1, entry 1 of sequence 2, .*belongs to sequences \[1, 2\]"),
        (miscount_a_request, "request 'a' counts 0 table entries for block 3, expected 1"),
        (miscount_shared_tokens, "request 'a' counts 10 shared tokens, expected 8"),
    ],
)
def test_corruption_is_named(corrupt: Callable[[KVCacheManager], None], named: str) -> None:
    kv = make()
    corrupt(kv)
    with pytest.raises(IntegrityError, match=named):
        kv.check_integrity()
