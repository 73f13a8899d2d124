"""What a GPU carries out, on a CPU under Triton's interpreter: order, runs, and what is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from copy_support import LABEL, NUM, MemoryFiles, copies_of_all_kinds, one_by_one
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from octavo.plan import BlockCopy, CopyKind
from octavo.runner import gpu_copies as module
from octavo.runner.gpu_copies import GpuCopies, untangled

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels run on tensors of the CPU only without a GPU"
)

CPU = torch.device("cpu")


def rows(first: int) -> torch.Tensor:
    return torch.arange(first, first + NUM, dtype=torch.uint8)[:, None].repeat(1, 16)


@settings(max_examples=40)
@given(st.lists(copies_of_all_kinds, max_size=30), st.sampled_from([0, 1, 99]))
def test_all_kinds_in_order(copies: list[BlockCopy], few: int) -> None:
    """Every hazard, with blocks copied by the kernel, one by one, and now so, now so."""
    pool, host = rows(0), rows(10)
    disk = MemoryFiles({i: row.numpy() for i, row in enumerate(rows(20))})
    tiers = {
        name: dict(enumerate(range(first, first + NUM)))
        for name, first in (("pool", 0), ("host", 10), ("disk", 20))
    }
    one_by_one(copies, tiers)
    before = module.FEW_COPIES
    module.FEW_COPIES = few
    try:
        mover = GpuCopies(CPU)
        mover.copy(copies[:20], pool, host, disk)
        mover.copy(copies[20:], pool, host, disk)
    finally:
        module.FEW_COPIES = before
    for name, found in (("pool", pool), ("host", host)):
        assert torch.equal(
            found, torch.tensor([*tiers[name].values()], dtype=torch.uint8)[:, None] + 0 * found
        )
    assert [int(disk.blocks[i][0]) for i in range(NUM)] == [*tiers["disk"].values()]


def test_a_plan_takes_one_upload_and_a_launch_for_each_run(monkeypatch: Any) -> None:
    launches: list[list[list[int]]] = []
    uploads: list[int] = []

    def launch(into: torch.Tensor, out_of: torch.Tensor, pairs: torch.Tensor) -> None:
        launches.append(pairs.tolist())

    def send(ring: Any, data: np.ndarray, into: torch.Tensor | None = None) -> torch.Tensor:
        uploads.append(len(data))
        return torch.from_numpy(data.view(np.uint8).reshape(-1))

    monkeypatch.setattr(module, "FEW_COPIES", 1)
    monkeypatch.setattr(module, "copy_blocks", launch)
    monkeypatch.setattr(module.PinnedRing, "send", send)
    copies = [BlockCopy(i, i + 2, CopyKind.TO_HOST) for i in range(3)]
    copies += [BlockCopy(0, 1), BlockCopy(1, 2), BlockCopy(4, 3)]
    copies += [BlockCopy(0, 0, CopyKind.FROM_HOST)]
    mover = GpuCopies(CPU)
    mover.copy(copies, rows(0), rows(10), None)
    assert uploads == [5]
    assert launches == [[[0, 2], [1, 3], [2, 4]], [[1, 2], [4, 3]]]
    mover.copy([BlockCopy(0, 1), BlockCopy(1, 2)], rows(0), rows(10), None)
    assert uploads == [5]


def test_runs_are_as_long_as_they_can_be() -> None:
    far = [BlockCopy(i, 10 + i) for i in range(5)]
    assert [len(run) for run in untangled(far, same_memory=True)] == [5]
    chain = [BlockCopy(0, 1), BlockCopy(1, 2), BlockCopy(2, 3)]
    assert [len(run) for run in untangled(chain, same_memory=True)] == [1, 1, 1]
    assert [len(run) for run in untangled(chain, same_memory=False)] == [3]
    twice = [BlockCopy(0, 1), BlockCopy(2, 1)]
    assert [len(run) for run in untangled(twice, same_memory=False)] == [1, 1]
    assert [len(run) for run in untangled([BlockCopy(3, 0), BlockCopy(3, 1)], True)] == [2]


class FakeEvent:
    """An event that has happened after so many questions."""

    def __init__(self, at_ms: float, num_asks: int = 0) -> None:
        self.at_ms, self.num_asks, self.num_waits = at_ms, num_asks, 0

    def query(self) -> bool:
        self.num_asks -= 1
        return self.num_asks < 0

    def synchronize(self) -> None:
        self.num_waits += 1

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at_ms - self.at_ms


def test_copies_are_reported_once_and_in_order_when_they_have_ended(monkeypatch: Any) -> None:
    events = iter([FakeEvent(0), FakeEvent(5, num_asks=1), FakeEvent(7), FakeEvent(10)])
    mover = GpuCopies(CPU)
    monkeypatch.setattr(GpuCopies, "_event", lambda self: next(events))
    pool, host = rows(0), rows(10)
    mover.copy([BlockCopy(i, i, CopyKind.TO_HOST) for i in range(3)], pool, host, None)
    mover.copy([BlockCopy(0, 1), BlockCopy(1, 1, CopyKind.FROM_HOST)], pool, host, None)
    assert mover.finished() == (0, 0.0)
    assert mover.finished() == (4, pytest.approx(0.008))
    assert mover.finished() == (0, 0.0)


def test_disk_waits_for_the_last_copy_that_wrote_its_block(monkeypatch: Any) -> None:
    events = [FakeEvent(float(i), num_asks=9) for i in range(8)]
    left = iter(events)
    mover = GpuCopies(CPU)
    monkeypatch.setattr(GpuCopies, "_event", lambda self: next(left))
    pool, host, disk = rows(0), rows(10), MemoryFiles({})
    for block in (0, 1, 2):
        mover.copy([BlockCopy(block, block, CopyKind.TO_HOST)], pool, host, disk)
    mover.copy([BlockCopy(4, 4, CopyKind.FROM_HOST)], pool, host, disk)
    to_disk = [BlockCopy(i, i, CopyKind.TO_DISK, LABEL) for i in (0, 1, 3)]
    mover.copy(to_disk, pool, host, disk)
    assert [event.num_waits for event in events] == [0, 0, 0, 1, 0, 0, 0, 0]
    mover.copy(to_disk[2:], pool, host, disk)
    assert sum(event.num_waits for event in events) == 1 and len(disk.blocks) == 3
