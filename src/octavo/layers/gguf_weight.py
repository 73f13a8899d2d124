"""A matrix as a GGUF file packs it: blocks of quantized values, a whole number of them a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.layers.quantized import QuantizedWeight

CHUNK_ELEMENTS = 1 << 15
"""Elements dequantized at a time. They stay in the cache, and torch converts so few on the calling
thread: with more it wakes its pool for each chunk, which took 5 to 15 times as long where other
processes were busy."""


def expand(raw: npt.NDArray[np.uint8], type_id: int, out: Tensor) -> None:
    """Dequantize packed blocks into `out`, contiguous on the CPU, converting to its dtype.

    raw: [num_bytes]; type_id: a `gguf.GGMLQuantizationType` (plain float types, too).
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(type_id)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    flat, step = out.view(-1), CHUNK_ELEMENTS // block
    for first in range(0, flat.numel() // block, step):
        chunk = raw[first * block_bytes : (first + step) * block_bytes]
        # copied: torch takes no read-only memory. One long row: gguf works in groups of 16
        # rows, which are short in small models
        values = torch.from_numpy(dequantize(chunk.copy().reshape(1, -1), kind)).reshape(-1)
        flat[first * block : first * block + len(values)] = values


@dataclass(frozen=True, slots=True, eq=False)
class GGUFWeight(QuantizedWeight):
    """A quantized matrix in GGUF's own packing; rows may be taken in any order."""

    raw: Tensor
    """[out_features, bytes a row] uint8."""
    type_id: int
    """A `gguf.GGMLQuantizationType`."""
    shape: tuple[int, int]
    """(out_features, in_features)."""
    format: str
    """The type's name: `Q4_1`."""

    @classmethod
    def of(cls, raw: Tensor, type_id: int, in_features: int) -> GGUFWeight:
        """raw: [out_features, bytes a row] uint8."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        kind = GGMLQuantizationType(type_id)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        assert raw.dtype == torch.uint8 and raw.shape[1] * block == in_features * block_bytes
        return cls(raw, type_id, (raw.shape[0], in_features), kind.name)

    @property
    def num_bytes(self) -> int:
        """See `QuantizedWeight`."""
        return self.raw.numel()

    @property
    def device(self) -> torch.device:
        """See `QuantizedWeight`."""
        return self.raw.device

    def to(self, device: torch.device) -> GGUFWeight:
        """See `QuantizedWeight`."""
        return GGUFWeight(self.raw.to(device), self.type_id, self.shape, self.format)

    def rows(self, index: slice | Tensor) -> GGUFWeight:
        """See `QuantizedWeight`."""
        raw = self.raw[index if isinstance(index, slice) else index.to(self.raw.device)]
        return GGUFWeight(raw, self.type_id, (raw.shape[0], self.shape[1]), self.format)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """See `QuantizedWeight`. Computed on the CPU by package `gguf`, wherever the bytes are."""
        out = torch.empty(self.shape, dtype=dtype)
        expand(self.raw.contiguous().cpu().numpy().reshape(-1), self.type_id, out)
        return out.to(self.raw.device)

    def joined_with(self, others: Sequence[QuantizedWeight]) -> GGUFWeight | None:
        """See `QuantizedWeight`."""
        parts, count = [self.raw], self.shape[0]
        for other in others:
            if not isinstance(other, GGUFWeight) or other.type_id != self.type_id:
                return None
            if other.shape[1] != self.shape[1]:
                return None
            parts.append(other.raw)
            count += other.shape[0]
        return GGUFWeight(torch.cat(parts), self.type_id, (count, self.shape[1]), self.format)
