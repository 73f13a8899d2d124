"""Frames of a pool whose layers are in groups: what each holds, and what it gave back."""

from __future__ import annotations

import pytest
from watch_support import Follower, slow_picture

from octavo.lab.config import SimConfig
from octavo.lab.costs import FixedCosts
from octavo.lab.prompts import PromptMaker
from octavo.lab.replica import Replica
from octavo.lab.trace import TraceRequest
from octavo.sched.watch import PoolWatch


def replica_of(windows: tuple[int, ...]) -> Replica:
    config = SimConfig(
        num_blocks=160, block_size=4, max_model_len=200, max_num_seqs=8,
        max_num_batched_tokens=32, enable_prefix_caching=True, watermark=0.0, windows=windows,
    )  # fmt: skip
    replica = Replica(config, FixedCosts(), prompts=PromptMaker(unique=True))
    for index, (num_input, n) in enumerate([(60, 1), (7, 3), (33, 1), (80, 2)]):
        replica.add(TraceRequest(num_input=num_input, num_output=60, n=n), 0.0, index)
    return replica


@pytest.mark.parametrize("windows", [(8,), (0, 8, 8), (0, 0, 24)], ids=str)
def test_groups_are_those_of_the_tables(windows: tuple[int, ...]) -> None:
    replica = replica_of(windows)
    kv = replica.kv
    watch, follower = PoolWatch(kv, replica.scheduler), Follower()
    most_behind = most_shared = 0
    while replica.has_work:
        replica.advance(float("inf"), float("inf"))
        frame = watch.frame(replica.now_s)
        follower.take(frame)
        assert follower.picture(frame) == slow_picture(kv)
        held = kv.held_by_group()
        assert frame["groups"] == [
            [one.num_blocks, one.num_behind // kv.block_size] for one in held
        ]
        most_behind = max(most_behind, *(one[1] for one in frame["groups"]))
        most_shared = max(most_shared, frame["ledger"]["shared_saved"])
    assert most_behind > 10 and most_shared > 0
    watch.close()


def test_one_plain_group_is_not_told_of() -> None:
    replica = replica_of((0,))
    replica.advance(float("inf"), float("inf"))
    watch = PoolWatch(replica.kv, replica.scheduler)
    assert "groups" not in watch.frame(0.0)
    watch.close()


def test_a_block_names_its_group_and_positions() -> None:
    replica = replica_of((0, 8, 8))
    for _ in range(20):
        replica.advance(float("inf"), float("inf"))
    watch = PoolWatch(replica.kv, replica.scheduler)
    seen = set()
    for table in replica.kv.tables():
        for index in range(table.num_dropped, len(table.block_ids)):
            (owner, *_) = watch.block(table.block_ids[index])["owners"]
            first = 4 * index
            assert (owner["group"], owner["start"]) == (table.group, first)
            assert owner["end"] == max(first, min(first + 4, table.num_committed))
            seen.add(table.group)
    assert seen == {0, 1, 2}
