"""RMSNorm (Zhang & Sennrich 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.ops import reference
from octavo.ops.cpu import elementwise


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, float32 inside."""

    weight: Tensor
    """[size]"""
    eps: float

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """[num_rows, size] -> out, of the same shape and dtype."""
        if x.is_cpu:
            return elementwise.rms_norm(x, self.weight, self.eps, out)
        return out.copy_(reference.rms_norm(x, self.weight, self.eps))

    @property
    def num_bytes(self) -> int:
        """Memory of the weight."""
        return self.weight.numel() * self.weight.element_size()


def make_norm(weight: Tensor, eps: float) -> RMSNorm:
    """The fastest norm here for weight [size]."""
    if weight.is_cuda:
        from octavo.layers.gpu import GpuRMSNorm

        return GpuRMSNorm(weight, eps)
    return RMSNorm(weight, eps)
