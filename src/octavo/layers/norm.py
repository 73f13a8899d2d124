"""RMSNorm (Zhang & Sennrich 2019): its weight, and the pass of its own where nothing fuses it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.ops import reference
from octavo.ops.cpu import elementwise


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, float32 inside.

    A linear layer takes it as an argument and fuses it where its kernel can.
    """

    weight: Tensor
    """[size]"""
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, size] -> a new tensor of the same shape and dtype."""
        kernels = elementwise if x.is_cpu else reference
        return kernels.rms_norm(x, self.weight, self.eps)

    @property
    def num_bytes(self) -> int:
        """Memory of the weight."""
        return self.weight.numel() * self.weight.element_size()
