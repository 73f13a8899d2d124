"""Weights in fp8 (e4m3, Micikevicius et al. 2022) with float32 scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.layers.quantized import QuantizedWeight
from octavo.quantization import BLOCK

E4M3_MAX = 448.0
_CHUNK_ELEMENTS = 1 << 24
"""Converted at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight(QuantizedWeight):
    """w[n, k] = codes[n, k] scales[n, g], g = 0, or k / 128 where there are several."""

    codes: Tensor
    """[out_features, in_features] float8_e4m3fn."""
    scales: Tensor
    """float32: [out_features, 1], or [out_features, in_features / 128 rounded up]."""
    shape: tuple[int, int]
    """(out_features, in_features)."""
    input_scale: Tensor | None = None
    """[1] float32: of the inputs; None: each input has its own."""
    format: str = "fp8"

    @classmethod
    def quantized(cls, weight: Tensor) -> Fp8Weight:
        """From [out_features, in_features] floating point: rows scaled by their largest number."""
        codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
        scales = torch.empty((len(weight), 1), dtype=torch.float32, device=weight.device)
        step = max(1, _CHUNK_ELEMENTS // max(weight.shape[1], 1))
        for first in range(0, len(weight), step):
            rows = weight[first : first + step].float()
            scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / E4M3_MAX
            scales[first : first + step] = scale
            scaled = (rows / scale).clamp_(-E4M3_MAX, E4M3_MAX)
            codes[first : first + step] = scaled.to(torch.float8_e4m3fn)
        return cls(codes, scales, (weight.shape[0], weight.shape[1]))

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor, input_scale: Tensor | None = None) -> Fp8Weight:
        """With a checkpoint's scale: one, one a row, or one for each 128 x 128."""
        num_rows, width = codes.shape
        scale = scale.float()
        if scale.numel() == 1:
            scale = scale.reshape(1, 1).expand(num_rows, 1)
        elif scale.numel() == num_rows and scale.shape[0] == num_rows:
            scale = scale.reshape(num_rows, 1)
        else:
            assert scale.shape == (-(-num_rows // BLOCK), -(-width // BLOCK))
            scale = scale.repeat_interleave(BLOCK, 0)[:num_rows]
        static = None if input_scale is None else input_scale.float().reshape(1)
        return cls(codes.contiguous(), scale.contiguous(), (num_rows, width), static)

    @property
    def num_bytes(self) -> int:
        """See `QuantizedWeight`."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def device(self) -> torch.device:
        """See `QuantizedWeight`."""
        return self.codes.device

    def to(self, device: torch.device) -> Fp8Weight:
        """See `QuantizedWeight`."""
        static = self.input_scale
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            input_scale=None if static is None else static.to(device),
        )

    def rows(self, index: slice | Tensor) -> Fp8Weight:
        """See `QuantizedWeight`."""
        index = index if isinstance(index, slice) else index.to(self.device)
        codes = self.codes.view(torch.uint8)[index].view(torch.float8_e4m3fn)
        shape = (len(codes), self.shape[1])
        return replace(self, codes=codes, scales=self.scales[index], shape=shape)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """See `QuantizedWeight`. Computed in float32, rounded once."""
        num_rows, width = self.shape
        out = torch.empty((num_rows, width), dtype=dtype, device=self.device)
        step = max(1, _CHUNK_ELEMENTS // max(width, 1))
        for first in range(0, num_rows, step):
            scales = self.scales[first : first + step]
            if scales.shape[1] > 1:
                scales = scales.repeat_interleave(BLOCK, 1)[:, :width]
            out[first : first + step] = self.codes[first : first + step].float() * scales
        return out

    def joined_with(self, others: Sequence[QuantizedWeight]) -> Fp8Weight | None:
        """See `QuantizedWeight`. Of several scales of inputs the largest serves all: theirs are of
        the same numbers."""
        given = [self]
        for other in others:
            alike = isinstance(other, Fp8Weight) and (
                other.shape[1] == self.shape[1]
                and other.scales.shape[1] == self.scales.shape[1]
                and (other.input_scale is None) == (self.input_scale is None)
            )
            if not alike or not isinstance(other, Fp8Weight):
                return None
            given.append(other)
        codes = torch.cat([w.codes.view(torch.uint8) for w in given])
        static = [w.input_scale for w in given if w.input_scale is not None]
        return replace(
            self,
            codes=codes.view(torch.float8_e4m3fn),
            scales=torch.cat([w.scales for w in given]),
            shape=(len(codes), self.shape[1]),
            input_scale=torch.cat(static).amax().reshape(1) if static else None,
        )
