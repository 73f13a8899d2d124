"""Integer weights that share a scale in groups of inputs: how they are packed for kernels.

A block is 16 words of 32 bits, and code i of word j is that of the block's input 16 i + j: 128
inputs of 4 bits, or 64 of 8. So a kernel unpacks words without moving anything between lanes, and
16 neighbouring inputs at a time go with them.

No Triton here: CPUs, which may have none, read checkpoints of such weights too.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

WORDS = 16
"""Words of a block."""

ZeroKind = Literal["point", "points", "offsets"]
"""A number for all, one for each group, or nothing is subtracted and one a group is added."""


class Grouped(Protocol):
    """w[n, order[k]] = scales[n, g] (code[n, k] - zero) with g = k / group_size.

    zero is zero_point, or zeros[n, g]; of the kind `offsets` it is
    scales[n, g] code[n, k] + zeros[n, g].
    """

    @property
    def codes(self) -> Tensor:
        """[out_features, words] int32, packed as told above."""

    @property
    def scales(self) -> Tensor:
        """[out_features, num_groups], floating point."""

    @property
    def zeros(self) -> Tensor | None:
        """[out_features, num_groups], floating point; of the kind `points` whole numbers."""

    @property
    def bits(self) -> int:
        """4 or 8."""

    @property
    def group_size(self) -> int:
        """Inputs that share a scale, a multiple of 16."""

    @property
    def zero_kind(self) -> ZeroKind:
        """What is done about zero."""

    @property
    def zero_point(self) -> int:
        """Of the kind `point`."""

    @property
    def order(self) -> Tensor | None:
        """[in_features] int32: the input that stands at each place; None: as they come."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""


def pack(codes: Tensor, bits: int) -> Tensor:
    """[rows, in_features] integers of 0 .. 2^bits - 1 -> [rows, words] int32, padded with zeros."""
    num_rows, width = codes.shape
    per_word = 32 // bits
    block = WORDS * per_word
    padded = torch.nn.functional.pad(codes.to(torch.int32), (0, -width % block))
    parts = padded.view(num_rows, -1, per_word, WORDS)
    words = torch.zeros_like(parts[:, :, 0], memory_format=torch.contiguous_format)
    for i in range(per_word):
        words |= parts[:, :, i] << (bits * i)
    return words.reshape(num_rows, -1)


def unpack(words: Tensor, bits: int) -> Tensor:
    """What `pack` packed, with its padding: [rows, words * 32 / bits] int32."""
    num_rows, per_word = len(words), 32 // bits
    blocks = words.view(num_rows, -1, 1, WORDS)
    shifts = bits * torch.arange(per_word, dtype=torch.int32, device=words.device)
    codes = (blocks >> shifts.view(1, 1, -1, 1)) & ((1 << bits) - 1)
    return codes.reshape(num_rows, -1)


def check(x: Tensor, weight: Grouped, out: Tensor, num_outputs: int, bias: Tensor | None) -> None:
    """Raise ValueError for shapes and strides, TypeError for dtypes, of a product by weight."""
    num_rows, in_features = x.shape
    if weight.shape[1] != in_features or x.stride(1) != 1:
        raise ValueError(
            f"x must be dense [num_rows, {weight.shape[1]}]: {tuple(x.shape)}, strides {x.stride()}"
        )
    if out.shape != (num_rows, num_outputs) or out.stride(1) != 1:
        raise ValueError(f"out must be {(num_rows, num_outputs)}, rows dense: {tuple(out.shape)}")
    if bias is not None and (bias.shape != (weight.shape[0],) or bias.stride(0) != 1):
        raise ValueError(f"bias must be dense [{weight.shape[0]}]: {tuple(bias.shape)}")
    if bias is not None and bias.dtype != x.dtype:
        raise TypeError(f"bias must have x's type {x.dtype}: {bias.dtype}")
    if out.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"out must have x's type {x.dtype} or float32: {out.dtype}")
    for part in (weight.codes, weight.scales, weight.zeros, weight.order):
        assert part is None or part.is_contiguous()
