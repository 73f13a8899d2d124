"""Small arrays between host and device, many in one copy, through pinned memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.gpu.launch import ALIGNMENT
from octavo.util import cdiv

_DTYPES: dict[str, torch.dtype] = {
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}


def offsets_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """([start of each], bytes of all) for pieces of these sizes side by side, each aligned."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += cdiv(size, ALIGNMENT) * ALIGNMENT
    return starts, end


class HostBytes:
    """Host memory that a copy on the stream may read or write: pinned for a GPU.

    Whoever takes it keeps it until that copy is known to be done.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._grow(4096)

    def _grow(self, size: int) -> None:
        self._data = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        self.array: NDArray[np.uint8] = self._data.numpy()

    def at_least(self, size: int) -> Tensor:
        """[size] uint8; what was there before is lost if it has to grow."""
        if len(self._data) < size:
            self._grow(2 * size)
        return self._data[:size]

    def read(self, start: int, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        """A view of what lies at byte `start`."""
        return np.ndarray(shape, dtype, self.array, start)


def upload(
    arrays: Mapping[str, NDArray[Any]], host: HostBytes, device: torch.device
) -> dict[str, Tensor]:
    """The arrays as tensors on the device, through one copy that does not wait."""
    starts, size = offsets_of([array.nbytes for array in arrays.values()])
    staged = host.at_least(size)
    for start, array in zip(starts, arrays.values(), strict=True):
        host.read(start, array.dtype, array.shape)[...] = array
    held = torch.empty(size, dtype=torch.uint8, device=device)
    held.copy_(staged, non_blocking=True)
    wide: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    for start, (name, array) in zip(starts, arrays.items(), strict=True):
        kind = array.dtype.name
        if kind not in wide:
            wide[kind] = held.view(_DTYPES[kind])
        first = start // array.itemsize
        piece = wide[kind][first : first + array.size]
        found[name] = piece if array.ndim == 1 else piece.view(array.shape)
    return found
