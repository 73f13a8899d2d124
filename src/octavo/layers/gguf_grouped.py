"""GGUF's quantized blocks repacked as `GroupedWeight`, for GPUs.

Formats of up to 4 bits get codes of 4, all others of 8. Codes and the scales of simple blocks are
the file's own. Scales of super-blocks are products of two numbers, rounded to float16: by less than
a 4,000th, where the weight itself, expanded to bfloat16, would be rounded by a 500th.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.layers.gguf_weight import GGUFWeight
from octavo.layers.grouped import GroupedWeight
from octavo.ops.gpu.grouped import pack

_CHUNK_ELEMENTS = 1 << 22
"""Repacked at a time."""


class _Unpacked(NamedTuple):
    """Of blocks [num_blocks, bytes]."""

    codes: Tensor
    """[num_blocks, weights of a block] uint8."""
    scales: Tensor
    """[num_blocks, groups of a block] float32."""
    offsets: Tensor | None = None
    """Like scales: added to the product."""


class _Kind(NamedTuple):
    unpack: Callable[[Tensor], _Unpacked]
    bytes: int
    """Of a block."""
    bits: int
    group_size: int
    zero_point: int = 0


def grouped_from_gguf(weight: GGUFWeight) -> GroupedWeight:
    """The same matrix, where it lies. Its format must be one of `GROUPED_FORMATS`."""
    kind = _KINDS[weight.format]
    num_rows, width = weight.shape
    step = max(1, _CHUNK_ELEMENTS // width)
    codes, scales, offsets = [], [], []
    for first in range(0, num_rows, step):
        raw = weight.raw[first : first + step].contiguous()
        part = kind.unpack(raw.view(-1, kind.bytes))
        codes.append(pack(part.codes.view(len(raw), width), kind.bits))
        scales.append(part.scales.view(len(raw), -1).half())
        if part.offsets is not None:
            offsets.append(part.offsets.view(len(raw), -1).half())
    return GroupedWeight(
        torch.cat(codes),
        torch.cat(scales),
        torch.cat(offsets) if offsets else None,
        kind.bits,
        kind.group_size,
        (num_rows, width),
        weight.format,
        zero_point=kind.zero_point,
        offsets=bool(offsets),
    )


def _half(raw: Tensor, start: int) -> Tensor:
    """[num_blocks, 1] float32 of the float16 at a byte of each block."""
    return raw[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """Low halves of [num_blocks, n] bytes, then the high ones."""
    return torch.cat((raw & 15, raw >> 4), 1)


def _fifth_bits(raw: Tensor) -> Tensor:
    """Bits of [num_blocks, 4] bytes, lowest first, as 0 or 16: [num_blocks, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return ((raw[:, :, None] >> shifts) & 1).view(len(raw), -1) << 4


def _q4_0(raw: Tensor) -> _Unpacked:
    return _Unpacked(_nibbles(raw[:, 2:]), _half(raw, 0))


def _q4_1(raw: Tensor) -> _Unpacked:
    return _Unpacked(_nibbles(raw[:, 4:]), _half(raw, 0), _half(raw, 2))


def _q5_0(raw: Tensor) -> _Unpacked:
    return _Unpacked(_nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6]), _half(raw, 0))


def _q5_1(raw: Tensor) -> _Unpacked:
    codes = _nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8])
    return _Unpacked(codes, _half(raw, 0), _half(raw, 2))


def _q8_0(raw: Tensor) -> _Unpacked:
    return _Unpacked(raw[:, 2:] ^ 128, _half(raw, 0))


def _six_bits(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of a super-block's 8 groups, out of 12 bytes: float32."""
    first, second, third = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1)
    return scales.float(), minima.float()


def _pairs(raw: Tensor) -> Tensor:
    """128 bytes of 4 bits: 32 bytes hold two groups of 32, the low halves and the high ones."""
    parts = raw.reshape(len(raw), 4, 1, 32)
    return torch.cat((parts & 15, parts >> 4), 2).view(len(raw), 256)


def _q4_k(raw: Tensor) -> _Unpacked:
    scales, minima = _six_bits(raw[:, 4:16])
    return _Unpacked(_pairs(raw[:, 16:]), _half(raw, 0) * scales, -_half(raw, 2) * minima)


def _q5_k(raw: Tensor) -> _Unpacked:
    scales, minima = _six_bits(raw[:, 4:16])
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)
    fifth = ((raw[:, None, 16:48] >> shifts[None, :, None]) & 1).view(len(raw), 256) << 4
    codes = _pairs(raw[:, 48:]) | fifth
    return _Unpacked(codes, _half(raw, 0) * scales, -_half(raw, 2) * minima)


def _q6_k(raw: Tensor) -> _Unpacked:
    low = raw[:, :128].reshape(len(raw), 2, 1, 64)
    low = torch.cat((low & 15, low >> 4), 2).view(len(raw), 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)
    high = (raw[:, 128:192].reshape(len(raw), 2, 1, 32) >> shifts[None, None, :, None]) & 3
    scales = raw[:, 192:208].contiguous().view(torch.int8).float()
    return _Unpacked((low | (high << 4)).view(len(raw), 256), _half(raw, 208) * scales)


def _two_bits(raw: Tensor) -> Tensor:
    """64 bytes: 32 bytes hold 4 x 32 codes of 2 bits, lowest first."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)
    return (raw.reshape(len(raw), 2, 1, 32) >> shifts[None, None, :, None]) & 3


def _q2_k(raw: Tensor) -> _Unpacked:
    both = raw[:, :16]
    scales, minima = _half(raw, 80) * (both & 15), -_half(raw, 82) * (both >> 4)
    return _Unpacked(_two_bits(raw[:, 16:80]).view(len(raw), 256), scales, minima)


def _q3_k(raw: Tensor) -> _Unpacked:
    bits = torch.arange(8, dtype=torch.uint8, device=raw.device).view(1, 2, 4, 1)
    third = (raw[:, None, None, :32] >> bits) & 1
    codes = (_two_bits(raw[:, 32:96]) | (third << 2)).view(len(raw), 256)
    packed = raw[:, 96:108]
    low = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), 1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)
    high = ((packed[:, None, 8:] >> shifts[None, :, None]) & 3).view(len(raw), 16)
    scales = (low | (high << 4)).float() - 32
    return _Unpacked(codes, _half(raw, 108) * scales)


_KINDS = {
    "Q4_0": _Kind(_q4_0, 18, 4, 32, 8),
    "Q4_1": _Kind(_q4_1, 20, 4, 32),
    "Q5_0": _Kind(_q5_0, 22, 8, 32, 16),
    "Q5_1": _Kind(_q5_1, 24, 8, 32),
    "Q8_0": _Kind(_q8_0, 34, 8, 32, 128),
    "Q2_K": _Kind(_q2_k, 84, 4, 16),
    "Q3_K": _Kind(_q3_k, 110, 4, 16, 4),
    "Q4_K": _Kind(_q4_k, 144, 4, 32),
    "Q5_K": _Kind(_q5_k, 176, 8, 32),
    "Q6_K": _Kind(_q6_k, 210, 8, 16, 32),
}

GROUPED_FORMATS = tuple(_KINDS)
"""Names of GGUF types that are repacked."""
