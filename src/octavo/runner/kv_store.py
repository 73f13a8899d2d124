"""Where K and V lie: the pool, the host memory behind it, and the copies between them.

One block is one contiguous piece, in the pool and everywhere else, so that every copy of the plan -
copy-on-write, swap, offload, move - is a copy of whole rows of bytes.
"""

from __future__ import annotations

import math
import time
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.errors import CapacityError
from octavo.ops.cpu.memory import give_back
from octavo.ops.gpu.launch import ALIGNMENT
from octavo.ops.gpu.memory import PinnedMemory
from octavo.plan import BlockCopy, BlockLabel, CopyKind
from octavo.runner.pool_memory import DevicePool, HostPool, PoolMemory
from octavo.util import cdiv, human_bytes

if TYPE_CHECKING:
    from octavo.runner.gpu_copies import GpuCopies

PARALLEL_BYTES = 256 << 10
"""A block of at least this is copied by torch, on several threads; a smaller one by numpy, which
needs a microsecond a block and one thread. Measured on a CPU for blocks of 23 KB to 3 MB, both are
two to five times as fast as one index operation over many blocks."""
_PROBE_BYTES = 8 << 20
_GPU_PROBE_BYTES = 64 << 20
_CODES = (torch.float8_e4m3fn, torch.int8)
"""Types of a pool whose blocks have scales behind them."""
MAX_SLOTS = 2**31 - 1
"""Tokens that a pool has room for at most: slots travel to GPUs as 32-bit numbers."""

Bytes = NDArray[np.uint8]


class BlockFiles(Protocol):
    """The disk tier as the store uses it."""

    def put(self, disk_id: int, label: BlockLabel, data: Bytes) -> None:
        """Take a copy of `data` and write it some time."""
        ...

    def take(self, disk_id: int) -> Bytes | None:
        """The bytes of a block that was fetched; None if there are none."""
        ...

    def settle(self) -> None:
        """The copies of a plan are done; called for every plan, with copies or without."""
        ...


class HostTraffic(NamedTuple):
    """What moving blocks to and from host memory cost; zeros where it is not known.

    On a CPU, the copies of the plan that was just carried out. A GPU copies later, and times that
    itself: there, the copies of earlier plans whose end was noticed with this plan, each once.
    """

    num_blocks: int
    seconds: float


class KVStore:
    """K and V of every block.

    Layout `[num_blocks, num_layers, planes, num_kv_heads, block_size, head_dim]`, planes being K
    and V, or one latent: all that belongs to a block, over all layers of a group, is one contiguous
    piece, so that copying it, swapping it out or sending
    it elsewhere is one copy; inside, the tokens of one head lie side by side (HND), which is the
    order in which an attention kernel streams them. Under fp8 and int8 these are
    codes, and the block's scales lie behind them, in the same piece: `[num_layers, 2, num_kv_heads,
    block_size]` float16, filled up to whole 16 bytes.

    num_blocks: size of the pool; kv_dtype: of the numbers, or codes; max_blocks: size up to which
    the pool can grow without moving (addresses are reserved, memory is not; the pool's size where
    the device or the system cannot do that); num_host_blocks: size of the host tier; disk: the tier
    behind that. Raises `MemoryError` where there is no room for the pool, `CapacityError` for the
    host tier, and for a pool of more than `MAX_SLOTS` tokens, up to which it can grow at most.

    `data` has `max_blocks` rows, so that neither its address nor its shape changes with the size.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        kv_dtype: torch.dtype,
        device: torch.device,
        *,
        max_blocks: int | None = None,
        num_host_blocks: int = 0,
        disk: BlockFiles | None = None,
        planes: int = 2,
    ) -> None:
        self._shape = (num_layers, planes, num_kv_heads, block_size, head_dim)
        self._dtype, self._device = kv_dtype, device
        self._codes_bytes = math.prod(self._shape) * kv_dtype.itemsize
        self._scales_bytes = 0
        self.block_bytes = self._codes_bytes
        """Of one block, over all layers, scales included."""
        if kv_dtype in _CODES:
            self._scales_bytes = math.prod(self._shape[:-1]) * torch.float16.itemsize
            self.block_bytes = cdiv(self._codes_bytes + self._scales_bytes, ALIGNMENT) * ALIGNMENT
        self._most = MAX_SLOTS // block_size
        if num_blocks > self._most:
            raise CapacityError(
                f"a KV pool holds at most {MAX_SLOTS:,} tokens: {num_blocks:,} blocks of "
                f"{block_size} are too many; use fewer"
            )
        self.num_blocks = num_blocks
        self._memory = self._make_pool(num_blocks, min(max_blocks or 0, self._most))
        self._set_views()
        self._gpu = self._make_gpu_copies()
        self.add_tiers(num_host_blocks, disk)

    def _make_pool(self, num_blocks: int, max_blocks: int) -> PoolMemory:
        if self._device.type == "cpu":
            return HostPool(num_blocks, max_blocks, self.block_bytes)
        return DevicePool(num_blocks, max_blocks, self.block_bytes, self._device)

    def _make_gpu_copies(self) -> GpuCopies | None:
        if self._device.type == "cpu":
            return None
        from octavo.runner.gpu_copies import GpuCopies

        copies = GpuCopies(self._device)
        copies.prepare(self._memory.rows)
        return copies

    def _set_views(self) -> None:
        rows = self._memory.rows
        self.data = self._codes(rows)
        """[max_blocks, ...a block]: the pool, and the addresses into which it can grow. Blocks are
        `block_bytes` apart."""
        self.scales = self._scales(rows)
        """[max_blocks, num_layers, 2, num_kv_heads, block_size] float16 of codes, else None."""

    def _codes(self, rows: Tensor) -> Tensor:
        return rows[:, : self._codes_bytes].view(self._dtype).unflatten(1, self._shape)

    def _scales(self, rows: Tensor) -> Tensor | None:
        if not self._scales_bytes:
            return None
        scales = rows[:, self._codes_bytes : self._codes_bytes + self._scales_bytes]
        return scales.view(torch.float16).unflatten(1, self._shape[:-1])

    def add_tiers(self, num_host_blocks: int, disk: BlockFiles | None) -> None:
        """Have a host tier of so many blocks, and a disk behind it, in place of those that are.

        Raises `CapacityError` where the system does not give, or pin, so much host memory.
        """
        num_bytes = num_host_blocks * self.block_bytes
        self.disk = disk
        try:
            if self._gpu is None:
                self._pinned = None
                self._host_rows = HostPool(num_host_blocks, 0, self.block_bytes).rows
            else:
                self._pinned = PinnedMemory(num_bytes)
                self._host_rows = self._pinned.tensor.view(num_host_blocks, self.block_bytes)
        except MemoryError as error:
            raise CapacityError(
                f"{human_bytes(num_bytes)} of host memory for the host tier of "
                f"{num_host_blocks:,} KV blocks cannot be had: {error}; lower --swap-space"
            ) from error
        self.host = self._codes(self._host_rows)
        """[num_host_blocks, ...a block]: the host tier."""

    # -- the size of the pool

    @property
    def max_blocks(self) -> int:
        """The size up to which the pool grows in place."""
        return len(self.data)

    @property
    def mapped_bytes(self) -> int:
        """Memory that the pool takes up now (on a CPU, once all of it is written)."""
        return self._memory.mapped_bytes

    def resize(self, num_blocks: int) -> bool:
        """Make the pool larger or smaller; whether `data` has a new address.

        Blocks that stay keep their content; those behind the new end lose it, and their memory goes
        back to the system. Within `max_blocks` the address stays. Raises `MemoryError`, and changes
        nothing, where there is no room.
        """
        if num_blocks > self._most:
            raise MemoryError(f"a KV pool has at most {self._most:,} blocks: {num_blocks:,}")
        moved = self._memory.resize(num_blocks)
        if moved:
            self._set_views()
        self.num_blocks = num_blocks
        return moved

    # -- copies

    def copy(self, copies: list[BlockCopy]) -> HostTraffic:
        """Copy whole blocks, as if one by one: a later copy may read what an earlier one wrote.

        On a GPU they are queued on the current stream.
        """
        if self._gpu is not None:
            traffic = HostTraffic(*self._gpu.finished())
            if copies:
                self._gpu.copy(copies, self._memory.rows, self._host_rows, self.disk)
        else:
            traffic = self._copy_on_cpu(copies)
        if self.disk is not None:
            self.disk.settle()
        return traffic

    def _copy_on_cpu(self, copies: list[BlockCopy]) -> HostTraffic:
        num_blocks, seconds = 0, 0.0
        for kind, group in groupby(copies, key=lambda copy: copy.kind):
            run = list(group)
            begun = time.perf_counter()
            self._copy_run(kind, run)
            if kind in (CopyKind.TO_HOST, CopyKind.FROM_HOST):
                num_blocks += len(run)
                seconds += time.perf_counter() - begun
        return HostTraffic(num_blocks, seconds)

    def _copy_run(self, kind: CopyKind, run: list[BlockCopy]) -> None:
        """Copies of one kind, which follow each other."""
        rows, host = self._memory.rows, self._host_rows
        if kind is CopyKind.WITHIN:
            copy_one_by_one(rows, rows, run)
        elif kind is CopyKind.TO_HOST:
            copy_one_by_one(host, rows, run)
        elif kind is CopyKind.FROM_HOST:
            copy_one_by_one(rows, host, run)
        elif kind is CopyKind.TO_DISK:
            put_on_disk(self.disk, host, run)
        else:
            for copy in run:
                rows[copy.dst].copy_(torch.from_numpy(taken_from_disk(self.disk, copy)))

    def host_copy_speed(self) -> float:
        """Bytes a second between pool and host memory, the mean of both ways; takes a few ms.

        For use before any block holds anything: it writes into both. Without a host tier 0.
        """
        probe_bytes = _PROBE_BYTES if self._gpu is None else _GPU_PROBE_BYTES
        num = min(self.num_blocks, len(self.host), max(1, probe_bytes // self.block_bytes))
        if not num:
            return 0.0
        there = [BlockCopy(i, i, CopyKind.TO_HOST) for i in range(num)]
        back = [BlockCopy(i, i, CopyKind.FROM_HOST) for i in range(num)]
        # Once for nothing: memory that was never written reads as one cached page of zeros.
        self.copy(back + there)
        self._wait()
        begun = time.perf_counter()
        self.copy(there + back)
        self._wait()
        seconds = time.perf_counter() - begun
        if self._gpu is None:
            give_back(self._memory.rows[:num])
            give_back(self._host_rows[:num])
        else:
            self._gpu.finished()  # these are no plan's
        return 2 * num * self.block_bytes / max(seconds, 1e-9)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def put_on_disk(disk: BlockFiles | None, host: Tensor, copies: list[BlockCopy]) -> None:
    """Host blocks to disk blocks. host: [num_host_blocks, block_bytes] uint8."""
    assert disk is not None, "a block is to go to a disk tier that is not there"
    for copy in copies:
        assert copy.label is not None, f"block {copy.dst} goes to disk without a label"
        disk.put(copy.dst, copy.label, host[copy.src].numpy())


def taken_from_disk(disk: BlockFiles | None, copy: BlockCopy) -> Bytes:
    """[block_bytes]: the bytes of a block that was fetched."""
    assert disk is not None, "a block is to come from a disk tier that is not there"
    data = disk.take(copy.src)
    assert data is not None, f"disk block {copy.src} was not fetched before the step"
    return data


def copy_one_by_one(into: Tensor, out_of: Tensor, copies: list[BlockCopy]) -> None:
    """Rows `src` of `out_of` to rows `dst` of `into`, in order; both contiguous, of equal rows,
    on the CPU."""
    row_bytes = into[:1].nbytes
    if row_bytes < PARALLEL_BYTES:
        to, of = _all_bytes(into).numpy(), _all_bytes(out_of).numpy()
        for copy in copies:
            to[copy.dst] = of[copy.src]
        return
    for copy in copies:
        into[copy.dst].copy_(out_of[copy.src])


def _all_bytes(blocks: Tensor) -> Tensor:
    """[num_blocks, bytes of a block] uint8, a view."""
    return blocks.view(len(blocks), -1).view(torch.uint8)
