"""The pool and its host tier: every kind of copy in order, sizes, and memory given back."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from copy_support import LABEL, NUM, MemoryFiles, copies_of_all_kinds, one_by_one
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import CapacityError
from octavo.kv.shape import KVShape
from octavo.ops.cpu import memory as memory_module
from octavo.plan import BlockCopy, CopyKind
from octavo.runner import kv_store as module
from octavo.runner import pool_memory
from octavo.runner.kv_store import KVStore, copy_one_by_one

CPU = torch.device("cpu")
MIB = 1 << 20


def small_store(num_blocks: int, num_host_blocks: int, **options: Any) -> KVStore:
    """A block is one float32 number times 8: [1, 2, 1, 2, 2]."""
    return KVStore(
        num_blocks, 1, 1, 2, 2, torch.float32, CPU, num_host_blocks=num_host_blocks, **options
    )


def block_values(blocks: torch.Tensor) -> list[float]:
    """The number in each block, which must be the same all over it."""
    rows = blocks.flatten(1)
    assert (rows == rows[:, :1]).all()
    return rows[:, 0].tolist()


@given(st.lists(copies_of_all_kinds, max_size=40))
def test_all_kinds_in_order(copies: list[BlockCopy]) -> None:
    """Bombs of copies with every hazard, over pools so small that hazards are the rule."""
    disk = MemoryFiles()
    store = small_store(NUM, NUM, disk=disk)
    for i in range(NUM):
        store.data[i], store.host[i] = float(i), float(10 + i)
        disk.blocks[i] = np.full(8, 20 + i, dtype=np.float32).view(np.uint8)
    tiers = {
        "pool": dict(enumerate(block_values(store.data))),
        "host": dict(enumerate(block_values(store.host))),
        "disk": {i: float(20 + i) for i in range(NUM)},
    }
    traffic = store.copy(copies)
    one_by_one(copies, tiers)
    assert block_values(store.data) == [tiers["pool"][i] for i in range(NUM)]
    assert block_values(store.host) == [tiers["host"][i] for i in range(NUM)]
    for i, value in tiers["disk"].items():
        assert (disk.blocks[i].view(np.float32) == value).all()
    moved = [c for c in copies if c.kind in (CopyKind.TO_HOST, CopyKind.FROM_HOST)]
    assert traffic.num_blocks == len(moved) and (traffic.seconds > 0) == bool(moved)
    assert disk.num_settled == 1


pairs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30)


@given(pairs, st.booleans(), st.booleans())
def test_rows_are_copied_in_order(
    numbers: list[tuple[int, int]], within: bool, threaded: bool
) -> None:
    copies = [BlockCopy(src, dst) for src, dst in numbers]
    into = torch.arange(7.0)[:, None].repeat(1, 3)
    other = into if within else into + 100
    expected = into.clone()
    for src, dst in numbers:
        expected[dst] = (expected if within else other)[src].clone()
    before = module.PARALLEL_BYTES
    module.PARALLEL_BYTES = 0 if threaded else before
    try:
        copy_one_by_one(into, other, copies)
    finally:
        module.PARALLEL_BYTES = before
    assert torch.equal(into, expected)


def test_every_plan_is_settled() -> None:
    """Copies or none: blocks that were fetched and not taken age by plans."""
    store = small_store(2, 2, disk=MemoryFiles())
    for copies in ([], [BlockCopy(0, 1)], []):
        assert store.copy(copies).num_blocks == 0
    assert store.disk.num_settled == 3


def test_a_missing_tier_or_block_is_an_invariant() -> None:
    store = small_store(2, 2)
    with pytest.raises(AssertionError, match="disk tier"):
        store.copy([BlockCopy(0, 0, CopyKind.TO_DISK, LABEL)])
    store.disk = MemoryFiles()
    with pytest.raises(AssertionError, match="not fetched"):
        store.copy([BlockCopy(7, 0, CopyKind.FROM_DISK)])


def mib_store(num_blocks: int, max_blocks: int, **options: Any) -> KVStore:
    """Blocks of 1 MiB."""
    store = KVStore(num_blocks, 8, 8, 32, 64, torch.float32, CPU, max_blocks=max_blocks, **options)
    assert store.block_bytes == MIB
    return store


def resident(address: int, num_bytes: int) -> int:
    """Bytes of memory behind a range of addresses: the process as a whole has other things, too."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if re.fullmatch("[0-9a-f]+-[0-9a-f]+", name):
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin < address + num_bytes and end > address
        elif inside and name == "Rss:":
            total += int(values[0]) << 10
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back later elsewhere")
def test_growing_takes_no_memory_and_shrinking_gives_it_back() -> None:
    store = mib_store(64, 1 << 16)  # 64 GiB of addresses
    if store.max_blocks == 64:
        pytest.skip("the system wants memory behind all addresses")
    address, shape = store.data.data_ptr(), store.data.shape
    reserved = address, store.max_blocks * MIB
    store.data[:64].fill_(1.0)
    full = resident(*reserved)
    assert full > 60 * MIB
    assert not store.resize(60_000) and store.num_blocks == 60_000
    assert resident(*reserved) == full
    store.data[59_999].fill_(3.0)
    assert not store.resize(16) and store.num_blocks == 16
    assert resident(*reserved) < 24 * MIB
    assert (store.data[:16] == 1.0).all()
    store.resize(32)  # the addresses still work
    store.data[31].fill_(2.0)
    assert (store.data[31] == 2.0).all() and (store.data[:16] == 1.0).all()
    assert (store.data.data_ptr(), store.data.shape) == (address, shape)
    data = store.data[:16]
    del store
    assert (data == 1.0).all()  # a view keeps it
    del data
    assert resident(*reserved) < 8 * MIB  # others may lie there now


def test_growing_past_the_reserve_moves() -> None:
    store = mib_store(4, 6)
    store.data[:4] = torch.arange(4.0).view(4, 1, 1, 1, 1, 1)
    assert not store.resize(6)
    store.data[5].fill_(5.0)
    assert store.resize(9) and store.num_blocks == store.max_blocks == 9
    assert block_values(store.data[:6])[:4] == [0.0, 1.0, 2.0, 3.0]
    assert block_values(store.data[:6])[5] == 5.0


def test_slots_are_32_bit_numbers() -> None:
    for num_blocks, options in ((2**30, {}), (2**31, {"max_blocks": 2**32})):
        with pytest.raises(CapacityError, match=r"at most 2,147,483,647 tokens: .* blocks of 2"):
            small_store(num_blocks, 0, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_SLOTS", 21)
        store = small_store(3, 0, max_blocks=100)
        assert store.max_blocks == 10
        assert not store.resize(10)
        with pytest.raises(MemoryError, match="at most 10 blocks: 11"):
            store.resize(11)
        assert store.num_blocks == 10


def test_no_room_for_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system wants memory behind all addresses, the pool starts without a reserve."""
    reserve = memory_module.reserve

    def strict(num_bytes: int) -> torch.Tensor:
        if num_bytes > 8 * MIB:
            raise MemoryError
        return reserve(num_bytes)

    monkeypatch.setattr(pool_memory, "reserve", strict)
    store = mib_store(4, 100)
    assert store.max_blocks == store.num_blocks == 4
    with pytest.raises(MemoryError):
        store.resize(9)
    assert store.num_blocks == 4 and len(store.data) == 4
    assert store.resize(8) and store.max_blocks == 8


def test_reserving_more_than_there_is_is_refused() -> None:
    with pytest.raises(MemoryError, match="address space"):
        memory_module.reserve(1 << 60)
    assert memory_module.reserve(0).numel() == 0


def test_copy_speed_is_measured_and_leaves_nothing_behind() -> None:
    store = mib_store(64, 64, num_host_blocks=32)
    tensors = store.data, store.host
    speed = store.host_copy_speed()
    assert 1e6 < speed < 1e12  # bytes a second, on a machine that may be busy
    if sys.platform == "linux":
        assert sum(resident(t.data_ptr(), t.nbytes) for t in tensors) < 3 * MIB
    assert mib_store(4, 4).host_copy_speed() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes(dtype: torch.dtype) -> None:
    store = KVStore(3, 2, 4, 8, 16, dtype, CPU, num_host_blocks=5)
    assert store.data.shape == (3, 2, 2, 4, 8, 16) and store.host.shape == (5, 2, 2, 4, 8, 16)
    assert store.data.dtype == store.host.dtype == dtype and store.data.is_contiguous()
    assert store.block_bytes == store.data[0].nbytes
    assert KVStore(3, 2, 4, 8, 16, dtype, CPU).host.shape[0] == 0


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("shape", [(2, 3, 4, 16), (1, 1, 1, 2), (3, 1, 5, 6)])
def test_scales_lie_behind_the_codes_of_their_block(shape: tuple[int, ...]) -> None:
    layers, heads, size, dim = shape
    store = KVStore(3, *shape, FP8, CPU, max_blocks=5, num_host_blocks=2)
    assert store.scales is not None
    assert store.data.shape == (5, layers, 2, heads, size, dim) and store.data.dtype == FP8
    assert store.scales.shape == store.data.shape[:-1] and store.scales.dtype == torch.float16
    assert store.block_bytes == KVShape(layers, heads, dim, 1, 2).bytes_per_block(size)
    num_codes = store.data[0].numel()
    for block in range(3):
        codes, scales = store.data[block], store.scales[block]
        assert codes.is_contiguous() and scales.is_contiguous()
        assert codes.data_ptr() - store.data.data_ptr() == block * store.block_bytes
        assert codes.data_ptr() % 16 == 0 and scales.data_ptr() == codes.data_ptr() + num_codes
    assert store.block_bytes % 16 == 0 and num_codes + scales.nbytes <= store.block_bytes
    assert KVStore(3, *shape, torch.bfloat16, CPU).scales is None


def test_codes_and_scales_travel_together() -> None:
    disk = MemoryFiles()
    store = KVStore(4, 2, 3, 4, 16, FP8, CPU, max_blocks=4, num_host_blocks=2, disk=disk)
    generator = torch.Generator().manual_seed(0)
    codes, scales = store.data.view(torch.uint8), store.scales
    assert scales is not None
    codes[0] = torch.randint(0, 120, codes[0].shape, dtype=torch.uint8, generator=generator)
    scales[0] = torch.rand(scales[0].shape, generator=generator).half()
    kinds = [CopyKind.WITHIN, CopyKind.TO_HOST, CopyKind.TO_DISK, CopyKind.FROM_DISK]
    where = [(0, 1), (1, 0), (0, 7), (7, 2)]
    store.copy([BlockCopy(*at, kind, LABEL) for at, kind in zip(where, kinds, strict=True)])
    store.copy([BlockCopy(0, 3, CopyKind.FROM_HOST)])
    assert disk.blocks[7].nbytes == store.block_bytes
    for block in (1, 2, 3):
        assert torch.equal(codes[block], codes[0]) and torch.equal(scales[block], scales[0])
    assert store.resize(6) and store.scales is not None and store.scales.shape[0] == 6
    assert torch.equal(store.scales[3], scales[0])
    assert torch.equal(store.data[3].view(torch.uint8), codes[0])


def test_tiers_are_added_later() -> None:
    store = small_store(2, 0)
    assert len(store.host) == 0 and store.disk is None and store.host_copy_speed() == 0.0
    disk = MemoryFiles()
    store.add_tiers(3, disk)
    assert store.disk is disk and store.host.shape == (3, 1, 2, 1, 2, 2)
    store.data[1] = 5.0
    store.copy([BlockCopy(1, 2, CopyKind.TO_HOST), BlockCopy(2, 0, CopyKind.FROM_HOST)])
    assert block_values(store.data[:2]) == [5.0, 5.0]
    with pytest.raises(CapacityError, match="lower --swap-space"):
        store.add_tiers(1 << 55, None)
