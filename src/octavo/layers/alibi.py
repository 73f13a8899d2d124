"""Slopes of attention with linear biases (Press, Smith & Lewis 2022)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alibi_slopes(num_heads: int, scale: float, device: torch.device) -> Tensor:
    """[num_heads] float32: by how much a head's scores fall with each token of distance.

    Powers of `2 ** (-8 / n)` for n heads; if n is no power of two, the slopes of the power below
    it, then every other one of the power above. scale multiplies them.
    """
    floor = 2 ** int(math.log2(num_heads))
    slopes = _powers(floor, floor)
    slopes += _powers(2 * floor, 2 * floor)[::2][: num_heads - floor]
    return scale * torch.tensor(slopes, dtype=torch.float32, device=device)


def _powers(num_heads: int, count: int) -> list[float]:
    return [2.0 ** (-8.0 * (i + 1) / num_heads) for i in range(count)]
