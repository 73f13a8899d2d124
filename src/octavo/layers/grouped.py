"""Weights of small integers that share a scale in groups of inputs: AWQ, GPTQ, and GGUF's kinds.

One packing serves them all: `ops.gpu.grouped`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.layers.quantized import QuantizedWeight
from octavo.ops.gpu.grouped import WORDS, ZeroKind, unpack

_CHUNK_ELEMENTS = 1 << 22
"""Unpacked at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight(QuantizedWeight):
    """w[n, order[k]] = scales[n, g] (code[n, k] - zero) with g = k / group_size.

    zero is zero_point where zeros is None; else zeros[n, g], or, where `offsets`, nothing is
    subtracted and zeros[n, g] is added to the product.
    """

    codes: Tensor
    """[out_features, words] int32, of `ops.gpu.grouped.pack`; zero behind in_features."""
    scales: Tensor
    """[out_features, num_groups], floating point."""
    zeros: Tensor | None
    """[out_features, num_groups], floating point."""
    bits: int
    """4 or 8."""
    group_size: int
    """Inputs that share a scale, a multiple of 16."""
    shape: tuple[int, int]
    """(out_features, in_features)."""
    format: str
    """`awq`, `gptq`, or the name of a GGUF type."""
    zero_point: int = 0
    """Subtracted from codes where zeros is None."""
    offsets: bool = False
    """zeros are added to the product."""
    order: Tensor | None = None
    """[in_features] int32: the input that stands at each place; None: as they come."""

    def __post_init__(self) -> None:
        """Kernels take all parts as dense."""
        assert all(part is None or part.is_contiguous() for part in self._parts()), self.format

    @property
    def block(self) -> int:
        """Inputs of a block."""
        return WORDS * 32 // self.bits

    @property
    def zero_kind(self) -> ZeroKind:
        """What kernels do about zero."""
        if self.zeros is None:
            return "point"
        return "offsets" if self.offsets else "points"

    @property
    def num_bytes(self) -> int:
        """See `QuantizedWeight`."""
        return sum(t.nbytes for t in self._parts() if t is not None)

    @property
    def device(self) -> torch.device:
        """See `QuantizedWeight`."""
        return self.codes.device

    def to(self, device: torch.device) -> GroupedWeight:
        """See `QuantizedWeight`."""
        codes, scales, zeros, order = (
            None if part is None else part.to(device) for part in self._parts()
        )
        assert codes is not None and scales is not None
        return replace(self, codes=codes, scales=scales, zeros=zeros, order=order)

    def rows(self, index: slice | Tensor) -> GroupedWeight:
        """See `QuantizedWeight`."""
        index = index if isinstance(index, slice) else index.to(self.device)
        codes, zeros = self.codes[index], self.zeros
        return replace(
            self,
            codes=codes,
            scales=self.scales[index],
            zeros=None if zeros is None else zeros[index],
            shape=(len(codes), self.shape[1]),
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """See `QuantizedWeight`. Computed in float32, rounded once."""
        num_rows, width = self.shape
        out = torch.empty((num_rows, width), dtype=dtype, device=self.device)
        step = max(1, _CHUNK_ELEMENTS // max(width, 1))
        for first in range(0, num_rows, step):
            part = self.rows(slice(first, first + step))
            values = part._expanded()
            if self.order is None:
                out[first : first + step] = values
            else:
                out[first : first + step, self.order.long()] = values.to(dtype)
        return out

    def joined_with(self, others: Sequence[QuantizedWeight]) -> GroupedWeight | None:
        """See `QuantizedWeight`. None, too, where inputs are in different orders."""
        given = [self]
        for other in others:
            if not isinstance(other, GroupedWeight) or not self._is_like(other):
                return None
            given.append(other)
        zeros = None if self.zeros is None else torch.cat([_not_none(w.zeros) for w in given])
        return replace(
            self,
            codes=torch.cat([w.codes for w in given]),
            scales=torch.cat([w.scales for w in given]),
            zeros=zeros,
            shape=(sum(w.shape[0] for w in given), self.shape[1]),
        )

    def _parts(self) -> tuple[Tensor | None, ...]:
        return (self.codes, self.scales, self.zeros, self.order)

    def _is_like(self, other: GroupedWeight) -> bool:
        same_order = (self.order is None) == (other.order is None)
        if same_order and self.order is not None and other.order is not None:
            same_order = torch.equal(self.order, other.order)
        fields = ("bits", "group_size", "format", "zero_point", "offsets")
        return (
            same_order
            and all(getattr(self, f) == getattr(other, f) for f in fields)
            and self.shape[1] == other.shape[1]
            and (self.zeros is None) == (other.zeros is None)
            and self.scales.dtype == other.scales.dtype
        )

    def _expanded(self) -> Tensor:
        """[out_features, in_features] float32, in the order of places."""
        width = self.shape[1]
        codes = unpack(self.codes, self.bits)[:, :width].float()
        scales = self.scales.float().repeat_interleave(self.group_size, 1)[:, :width]
        if self.zeros is None:
            return (codes - self.zero_point) * scales
        zeros = self.zeros.float().repeat_interleave(self.group_size, 1)[:, :width]
        return codes * scales + zeros if self.offsets else (codes - zeros) * scales


def _not_none(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
