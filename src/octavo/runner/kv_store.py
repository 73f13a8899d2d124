"""Where K and V lie: the pool, the host memory behind it, and the copies between them.

One block is one contiguous piece, in the pool and everywhere else, so that every copy of the plan -
copy-on-write, swap, offload, move - is a copy of whole rows of bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.cpu.memory import give_back, reserve, use_huge_pages
from octavo.plan import BlockCopy, BlockLabel, CopyKind

PARALLEL_BYTES = 256 << 10
"""A block of at least this is copied by torch, on several threads; a smaller one by numpy, which
needs a microsecond a block and one thread. Measured on a CPU for blocks of 23 KB to 3 MB, both are
two to five times as fast as one index operation over many blocks."""
_PROBE_BYTES = 8 << 20

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
    """What moving blocks to and from host memory cost in one plan; zeros where it is not known."""

    num_blocks: int
    seconds: float


class KVStore:
    """K and V of every block.

    Layout `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`: all that belongs to a
    block, over all layers, is one contiguous piece, so that copying it, swapping it out or sending
    it elsewhere is one copy; inside, the tokens of one head lie side by side (HND), which is the
    order in which an attention kernel streams them.

    num_blocks: size of the pool; max_blocks: size up to which it can grow without moving (addresses
    are reserved, memory is not; the pool's size where the device or the system cannot do that);
    num_host_blocks: size of the host tier; disk: the tier behind that.

    `data` has `max_blocks` rows, so that neither its address nor its shape changes with the size.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_blocks: int | None = None,
        num_host_blocks: int = 0,
        disk: BlockFiles | None = None,
    ) -> None:
        self._shape = (num_layers, 2, num_kv_heads, block_size, head_dim)
        self._dtype, self._device = dtype, device
        self._on_cpu = device.type == "cpu"
        self.block_bytes = int(np.prod(self._shape)) * dtype.itemsize
        self.num_blocks = num_blocks
        self.disk = disk
        self.host = self._make_host(num_host_blocks)
        """[num_host_blocks, ...a block]: the host tier."""
        try:
            most = max(num_blocks, max_blocks or 0) if self._on_cpu else num_blocks
            self._set_data(self._make_pool(most))
        except MemoryError:
            self._set_data(self._make_pool(num_blocks))

    def _set_data(self, data: Tensor) -> None:
        self.data = data
        """[max_blocks, ...a block]: the pool, and the addresses into which it can grow."""

    @property
    def max_blocks(self) -> int:
        """The size up to which the pool grows in place."""
        return len(self.data)

    def _make_pool(self, num_blocks: int) -> Tensor:
        # Unwritten slots are never read, so the memory needs no initial value; on a CPU the
        # operating system hands out pages only as blocks are first written.
        if self._on_cpu:
            return self._lazy(num_blocks)
        return torch.empty((num_blocks, *self._shape), dtype=self._dtype, device=self._device)

    def _make_host(self, num_blocks: int) -> Tensor:
        if self._on_cpu:
            return self._lazy(num_blocks)
        pinned = self._device.type == "cuda"
        return torch.empty((num_blocks, *self._shape), dtype=self._dtype, pin_memory=pinned)

    def _lazy(self, num_blocks: int) -> Tensor:
        flat = reserve(num_blocks * self.block_bytes)
        use_huge_pages(flat)
        return flat.view(self._dtype).view(num_blocks, *self._shape)

    # -- the size of the pool

    def resize(self, num_blocks: int) -> bool:
        """Make the pool larger or smaller; whether `data` has a new address.

        Blocks that stay keep their content; those behind the new end lose it, and their memory goes
        back to the system. Within `max_blocks` the address stays. Raises `MemoryError`, and changes
        nothing, where there is no room for a new address.
        """
        kept = min(num_blocks, self.num_blocks)
        before = self.data
        moves = num_blocks > len(before) or (not self._on_cpu and num_blocks < len(before))
        if moves:
            self._set_data(self._make_pool(num_blocks))
            self.data[:kept].copy_(before[:kept])
        elif self._on_cpu:
            give_back(before[num_blocks:])
        self.num_blocks = num_blocks
        return moves

    # -- copies

    def copy(self, copies: list[BlockCopy]) -> HostTraffic:
        """Copy whole blocks, as if one by one: a later copy may read what an earlier one wrote.

        On a CPU the answer says what was moved to and from the host and how long that took. On a
        GPU copies are only queued, and the seconds of that say nothing: zeros, so that what
        `host_copy_speed` has measured, waiting for the end, remains the estimate.
        """
        num_blocks, seconds = 0, 0.0
        for kind, group in groupby(copies, key=lambda copy: copy.kind):
            run = list(group)
            begun = time.perf_counter()
            self._copy_run(kind, run)
            if self._on_cpu and kind in (CopyKind.TO_HOST, CopyKind.FROM_HOST):
                num_blocks += len(run)
                seconds += time.perf_counter() - begun
        if self.disk is not None:
            self.disk.settle()
        return HostTraffic(num_blocks, seconds)

    def _copy_run(self, kind: CopyKind, run: list[BlockCopy]) -> None:
        """Copies of one kind, which follow each other."""
        if kind is CopyKind.WITHIN:
            copy_rows = copy_one_by_one if self._on_cpu else copy_by_index
            copy_rows(self.data, self.data, run)
        elif kind is CopyKind.TO_HOST:
            copy_one_by_one(self.host, self.data, run)
        elif kind is CopyKind.FROM_HOST:
            copy_one_by_one(self.data, self.host, run)
        elif kind is CopyKind.TO_DISK:
            self._to_disk(run)
        else:
            self._from_disk(run)

    def _to_disk(self, run: list[BlockCopy]) -> None:
        assert self.disk is not None, "a block is to go to a disk tier that is not there"
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # for copies to host under way
        for copy in run:
            assert copy.label is not None, f"block {copy.dst} goes to disk without a label"
            self.disk.put(copy.dst, copy.label, _row_bytes(self.host, copy.src).numpy())

    def _from_disk(self, run: list[BlockCopy]) -> None:
        assert self.disk is not None, "a block is to come from a disk tier that is not there"
        for copy in run:
            data = self.disk.take(copy.src)
            assert data is not None, f"disk block {copy.src} was not fetched before the step"
            _row_bytes(self.data, copy.dst).copy_(torch.from_numpy(data))

    def host_copy_speed(self) -> float:
        """Bytes a second between pool and host memory, the mean of both ways; takes a few ms.

        For use before any block holds anything: it writes into both. Without a host tier 0.
        """
        num = min(self.num_blocks, len(self.host), max(1, _PROBE_BYTES // self.block_bytes))
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
        if self._on_cpu:
            give_back(self.data[:num])
            give_back(self.host[:num])
        return 2 * num * self.block_bytes / max(seconds, 1e-9)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def copy_one_by_one(into: Tensor, out_of: Tensor, copies: list[BlockCopy]) -> None:
    """Rows `src` of `out_of` to rows `dst` of `into`, in order; both contiguous, of equal rows."""
    row_bytes = into[:1].nbytes
    on_cpu = into.device.type == out_of.device.type == "cpu"
    if on_cpu and row_bytes < PARALLEL_BYTES:
        to, of = _all_bytes(into).numpy(), _all_bytes(out_of).numpy()
        for copy in copies:
            to[copy.dst] = of[copy.src]
        return
    for copy in copies:
        into[copy.dst].copy_(out_of[copy.src], non_blocking=True)


def copy_by_index(into: Tensor, out_of: Tensor, copies: list[BlockCopy]) -> None:
    """The same by one index operation for each run of copies that do not touch each other's rows.

    For devices where an operation's start costs as much as copying many blocks.
    """
    for run in untangled(copies, same_memory=into is out_of):
        src = torch.tensor([copy.src for copy in run], device=out_of.device)
        dst = torch.tensor([copy.dst for copy in run], device=into.device)
        into.index_copy_(0, dst, out_of.index_select(0, src))


def untangled(copies: list[BlockCopy], same_memory: bool) -> Iterator[list[BlockCopy]]:
    """Cut into consecutive runs, in which no block is written that the run reads or writes.

    same_memory: `src` and `dst` number the same blocks.
    """
    run: list[BlockCopy] = []
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        clash = copy.dst in written or (
            same_memory and (copy.dst in read or copy.src in written or copy.src == copy.dst)
        )
        if clash and run:
            yield run
            run, read, written = [], set(), set()
        run.append(copy)
        read.add(copy.src)
        written.add(copy.dst)
    if run:
        yield run


def _all_bytes(blocks: Tensor) -> Tensor:
    """[num_blocks, bytes of a block] uint8, a view."""
    return blocks.view(len(blocks), -1).view(torch.uint8)


def _row_bytes(blocks: Tensor, row: int) -> Tensor:
    return blocks[row].view(-1).view(torch.uint8)
