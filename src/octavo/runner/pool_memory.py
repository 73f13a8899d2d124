"""The bytes of the KV pool: rows of equal length, of which there can be more or fewer later.

On both devices addresses are reserved for more rows than have memory, so that the pool grows and
shrinks in place; where that cannot be had it moves.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from octavo.ops.cpu.memory import give_back, reserve, use_huge_pages
from octavo.ops.gpu.driver import DriverError
from octavo.ops.gpu.memory import ReservedMemory

logger = logging.getLogger("octavo")


class PoolMemory(Protocol):
    """The rows of a pool."""

    rows: Tensor
    """[max_blocks, block_bytes] uint8, contiguous: the pool, and the addresses into which it can
    grow in place."""

    @property
    def mapped_bytes(self) -> int:
        """Memory that the rows take up, or will once all are written."""
        ...

    def resize(self, num_blocks: int) -> bool:
        """Have so many rows; whether `rows` is another tensor now.

        Rows that stay keep their content. Raises `MemoryError`, and changes nothing.
        """
        ...


class HostPool:
    """Rows in the host's memory, zeros at first; pages are taken as they are written."""

    def __init__(self, num_blocks: int, max_blocks: int, block_bytes: int) -> None:
        self._num_blocks = num_blocks
        try:
            self.rows = self._make(max(num_blocks, max_blocks), block_bytes)
        except MemoryError:
            self.rows = self._make(num_blocks, block_bytes)

    def _make(self, num_blocks: int, block_bytes: int) -> Tensor:
        flat = reserve(num_blocks * block_bytes)
        use_huge_pages(flat)
        return flat.view(num_blocks, block_bytes)

    @property
    def mapped_bytes(self) -> int:
        """See `PoolMemory`."""
        return self._num_blocks * self.rows.shape[1]

    def resize(self, num_blocks: int) -> bool:
        """See `PoolMemory`."""
        moves = num_blocks > len(self.rows)
        if moves:
            rows = self._make(num_blocks, self.rows.shape[1])
            rows[: self._num_blocks].copy_(self.rows[: self._num_blocks])
            self.rows = rows
        else:
            give_back(self.rows[num_blocks:])
        self._num_blocks = num_blocks
        return moves


class DevicePool:
    """Rows in a GPU's memory, zeros at first.

    Kernels leave out the slots that a sequence has not written, and need no zeros; but other
    processes left anything in this memory, and one NaN that a kernel multiplies by a weight of 0
    would be an answer that nobody can repeat. It costs 30 ms for 100 GiB.

    Where the driver has no virtual memory, rows have memory as long as they exist, and any change
    of their number moves them.
    """

    def __init__(
        self, num_blocks: int, max_blocks: int, block_bytes: int, device: torch.device
    ) -> None:
        self._device, self._block_bytes = device, block_bytes
        self._num_blocks = num_blocks
        self._reserved: ReservedMemory | None = None
        try:
            self._reserve(num_blocks, max(num_blocks, max_blocks))
        except DriverError as error:
            logger.warning(
                "the KV pool cannot grow in place, the driver has no virtual memory: %s", error
            )
            self.rows = self._plain(num_blocks)

    def _reserve(self, num_blocks: int, max_blocks: int) -> None:
        reserved = ReservedMemory(max(1, max_blocks) * self._block_bytes, self._device)
        self._map(reserved, max(1, num_blocks))
        flat = reserved.tensor()
        flat[: reserved.mapped_bytes].zero_()
        rows = flat[: max_blocks * self._block_bytes].view(max_blocks, self._block_bytes)
        self._reserved, self.rows = reserved, rows

    def _map(self, reserved: ReservedMemory, num_blocks: int) -> None:
        try:
            reserved.map_to(num_blocks * self._block_bytes)
        except MemoryError:
            torch.cuda.empty_cache()  # what torch keeps and does not use
            reserved.map_to(num_blocks * self._block_bytes)

    def _plain(self, num_blocks: int) -> Tensor:
        shape = (num_blocks, self._block_bytes)
        try:
            return torch.zeros(shape, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    @property
    def mapped_bytes(self) -> int:
        """See `PoolMemory`."""
        return self.rows.nbytes if self._reserved is None else self._reserved.mapped_bytes

    def resize(self, num_blocks: int) -> bool:
        """See `PoolMemory`."""
        kept = min(num_blocks, self._num_blocks)
        before = self.rows
        reserved = self._reserved
        if reserved is not None and num_blocks <= len(before):
            had = reserved.mapped_bytes
            self._map(reserved, max(1, num_blocks))
            if reserved.mapped_bytes > had:
                reserved.tensor()[had : reserved.mapped_bytes].zero_()
        elif reserved is not None:
            self._reserve(num_blocks, num_blocks)
        elif num_blocks != len(before):
            self.rows = self._plain(num_blocks)
        self._num_blocks = num_blocks
        if self.rows is before:
            return False
        self.rows[:kept].copy_(before[:kept])
        return True
