"""The pool on a GPU: in place at any size, under recorded steps, and every copy without waiting."""

from __future__ import annotations

import gc
import logging
from typing import Any

import numpy as np
import pytest
import torch

from octavo.ops.gpu import memory as memory_module
from octavo.plan import BlockCopy, BlockLabel, CopyKind
from octavo.runner import gpu_copies, pool_memory
from octavo.runner.gpu_memory import gpu_memory
from octavo.runner.kv_store import KVStore

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LABEL = BlockLabel(b"d" * 16, b"p" * 16, (1, 2))
KINDS = list(CopyKind)
MIB = 1 << 20
GIB = 1 << 30


class MemoryFiles:
    """Stands for the disk: what was put can be taken at once."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.blocks = {i: np.full(block_bytes, i, dtype=np.uint8) for i in range(num_blocks)}

    def put(self, disk_id: int, label: BlockLabel, data: np.ndarray) -> None:
        self.blocks[disk_id] = data.copy()

    def take(self, disk_id: int) -> np.ndarray | None:
        return self.blocks.get(disk_id)

    def settle(self) -> None: ...


def random_store(device: str, dtype: torch.dtype, head_dim: int, **options: Any) -> KVStore:
    """6 pool and 6 host blocks of random bytes, and 6 on disk."""
    store = KVStore(6, 3, 2, 4, head_dim, dtype, torch.device(device), **options)
    store.add_tiers(6, MemoryFiles(6, store.block_bytes))
    generator = torch.Generator().manual_seed(0)
    for blocks in (store._memory.rows[:6], store._host_rows):
        blocks.copy_(torch.randint(0, 256, blocks.shape, dtype=torch.uint8, generator=generator))
    return store


def mib_store(num_blocks: int, max_blocks: int) -> KVStore:
    """Blocks of 1 MiB."""
    return KVStore(num_blocks, 8, 8, 32, 64, torch.float32, CUDA, max_blocks=max_blocks)


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("few", [0, 1, 99], ids=["kernel", "both", "one by one"])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.float8_e4m3fn, 80), (torch.float32, 2048)]
)
def test_all_kinds_in_order(
    dtype: torch.dtype, head_dim: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same copies as on a CPU, of small blocks and of large ones."""
    monkeypatch.setattr(gpu_copies, "FEW_COPIES", few)
    in_memory, on_gpu = (random_store(device, dtype, head_dim) for device in ("cpu", "cuda"))
    generator = np.random.default_rng(0)
    copies = [
        BlockCopy(int(src), int(dst), KINDS[kind // 8 % len(KINDS)], LABEL)
        for kind, (src, dst) in enumerate(generator.integers(0, 6, (400, 2)))
    ]
    for first in range(0, 400, 100):
        in_memory.copy(copies[first : first + 100])
        on_gpu.copy(copies[first : first + 100])
    torch.cuda.synchronize()
    assert torch.equal(in_memory._memory.rows[:6], on_gpu._memory.rows[:6].cpu())
    assert on_gpu.host.is_pinned() and torch.equal(in_memory._host_rows, on_gpu._host_rows)
    assert isinstance(in_memory.disk, MemoryFiles) and isinstance(on_gpu.disk, MemoryFiles)
    for i in range(6):
        assert (in_memory.disk.blocks[i] == on_gpu.disk.blocks[i]).all()


def test_copies_are_queued_and_timed_by_the_gpu() -> None:
    store = random_store("cuda", torch.float32, 64)
    there = [BlockCopy(i, i, CopyKind.TO_HOST) for i in range(6)]
    back = [BlockCopy(i, 5 - i, CopyKind.FROM_HOST) for i in range(6)]
    store.copy(there + back)
    torch.cuda.synchronize()
    assert store.copy([]).num_blocks == 12
    expected = store.data[:6].cpu()
    torch.cuda._sleep(500_000_000)
    event = torch.cuda.Event()
    event.record()
    traffic = store.copy([*there, BlockCopy(0, 1), *back])
    assert not event.query(), "it was waited for what the GPU does"
    assert traffic == store.copy([]) == (0, 0.0)
    torch.cuda.synchronize()
    traffic = store.copy([])
    assert traffic.num_blocks == 12 and 0 < traffic.seconds < 0.1
    moved, expected = (x.contiguous().view(torch.uint8) for x in (store.data[:6].cpu(), expected))
    assert torch.equal(moved, expected.flip(0))  # random bytes: NaNs are among the numbers
    assert store.host_copy_speed() > 1e8
    assert store.copy([]).num_blocks == 0


def test_disk_waits_for_copies_to_the_host() -> None:
    store = random_store("cuda", torch.float32, 64)
    torch.cuda._sleep(200_000_000)
    store.copy([BlockCopy(0, 3, CopyKind.TO_HOST), BlockCopy(3, 9, CopyKind.TO_DISK, LABEL)])
    assert isinstance(store.disk, MemoryFiles)
    written = torch.from_numpy(store.disk.blocks[9])
    assert torch.equal(written, store._memory.rows[0].cpu())


def test_it_grows_and_shrinks_in_place() -> None:
    store = mib_store(1, 1 << 20)  # a TiB of addresses
    address, shape, start = store.data.data_ptr(), store.data.shape, free_bytes()
    assert shape[0] == store.max_blocks == 1 << 20
    store.data[0].fill_(1.0)
    assert not store.resize(3000) and store.num_blocks == 3000
    assert 2900 * MIB < start - free_bytes() < 3400 * MIB
    assert 3000 * MIB <= store.mapped_bytes < 3400 * MIB
    assert not store.data[1:3000].any(), "new memory is not zero"
    store.data[2999].fill_(3.0)
    store.copy([BlockCopy(2999, 2000)])
    assert not store.resize(10) and start - free_bytes() < 400 * MIB
    assert (store.data[0] == 1.0).all()
    assert not store.resize(2500) and not store.data[2000].any()
    assert (store.data.data_ptr(), store.data.shape) == (address, shape)
    data = store.data[:1]
    del store
    gc.collect()
    assert (data == 1.0).all()  # a view keeps it
    del data
    gc.collect()
    assert free_bytes() > start


def test_recorded_steps_reach_blocks_that_come_later() -> None:
    store = mib_store(1, 5000)
    block = torch.zeros(1, dtype=torch.int64, device=CUDA)
    out = torch.empty_like(store.data[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(store.data.index_select(0, block)[0])
        store.data[:, 0, 0, 0, 0, 0].index_fill_(0, block, 9.0)
    store.resize(4500)
    for number in (4499, 17):
        store.data[number] = float(number)
        block.fill_(number)
        graph.replay()
        assert (out == number).all() and store.data[number].flatten()[0] == 9.0
    store.resize(20)
    store.resize(4500)
    block.fill_(4499)
    graph.replay()
    assert not out.any()


def test_a_block_beyond_four_gigabytes() -> None:
    store = KVStore(40_001, 2, 8, 16, 128, torch.bfloat16, CUDA)
    assert 40_000 * store.block_bytes > 1 << 32
    store.data[40_000] = 1.0
    store.copy([BlockCopy(40_000, 39_999), BlockCopy(39_999, 7)])
    assert (store.data[7] == 1.0).all() and not store.data[8].any()


def test_too_much_is_refused_and_changes_nothing() -> None:
    total = gpu_memory(CUDA).total_bytes
    store = mib_store(10, 2 * total // MIB)
    store.data[:10] = 1.0
    start = free_bytes()
    with pytest.raises(MemoryError, match="out of memory"):
        store.resize(2 * total // MIB)
    assert store.num_blocks == 10 and abs(start - free_bytes()) < 64 * MIB
    assert (store.data[:10] == 1.0).all()
    assert not store.resize(100) and (store.data[:10] == 1.0).all()


def test_beyond_its_addresses_it_moves() -> None:
    store = mib_store(4, 600)
    store.data[:4] = torch.arange(4.0, device=CUDA).view(4, 1, 1, 1, 1, 1)
    assert store.resize(700) and store.max_blocks == store.num_blocks == 700
    assert [store.data[i].mean().item() for i in range(5)] == [0.0, 1.0, 2.0, 3.0, 0.0]


def test_without_virtual_memory_it_moves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: Any) -> None:
        raise memory_module.DriverError("the device has none")

    monkeypatch.setattr(pool_memory, "ReservedMemory", refuses)
    with caplog.at_level(logging.WARNING, logger="octavo"):
        store = mib_store(4, 100)
    assert "cannot grow in place" in caplog.text
    assert store.max_blocks == 4 and store.mapped_bytes == 4 * MIB
    store.data[:4] = torch.arange(4.0, device=CUDA).view(4, 1, 1, 1, 1, 1)
    assert not store.resize(4)
    assert store.resize(6) and store.max_blocks == 6 and store.resize(3)
    assert [store.data[i].mean().item() for i in range(3)] == [0.0, 1.0, 2.0]
    with pytest.raises(MemoryError):
        store.resize(10_000_000)
    assert store.num_blocks == len(store.data) == 3


def test_what_is_free_adds_up() -> None:
    before = gpu_memory(CUDA)
    held = torch.empty(GIB, dtype=torch.uint8, device=CUDA)
    store = mib_store(1024, 2048)
    after = gpu_memory(CUDA)
    assert before.free_bytes - after.free_bytes >= 2 * GIB
    assert after.own_bytes - before.own_bytes >= 2 * GIB - 64 * MIB
    assert after.torch_bytes >= GIB and after.own_bytes >= after.torch_bytes
    assert after.free_bytes + after.others_bytes + after.own_bytes == after.total_bytes
    del held, store
