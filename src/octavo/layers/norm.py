"""RMSNorm (Zhang & Sennrich 2019) and LayerNorm (Ba, Kiros & Hinton 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
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
        """[num_rows, size] -> out, of the same shape and dtype; may be x itself."""
        if x.is_cpu:
            return elementwise.rms_norm(x, self.weight, self.eps, out)
        return out.copy_(reference.rms_norm(x, self.weight, self.eps))

    @property
    def replayable(self) -> bool:
        """As `layers.linear.Linear.replayable`."""
        return self.weight.is_cpu

    @property
    def num_bytes(self) -> int:
        """Memory of the weight."""
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension, float32 inside.

    Without a bias none is added.
    """

    weight: Tensor
    """[size]"""
    bias: Tensor | None
    """[size]"""
    eps: float

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """[num_rows, size] -> out, of the same shape and dtype; may be x itself."""
        size = self.weight.shape
        return out.copy_(torch.layer_norm(x, size, self.weight, self.bias, self.eps))

    @property
    def replayable(self) -> bool:
        """As `layers.linear.Linear.replayable`."""
        return False

    @property
    def num_bytes(self) -> int:
        """Memory of weight and bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class HeadLayerNorm:
    """LayerNorm over each head, which has a weight of its own and no bias (StableLM)."""

    weight: Tensor
    """[num_heads, head_dim]"""
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, num_heads, head_dim], in place."""
        normed = torch.layer_norm(x.float(), x.shape[-1:], eps=self.eps)
        return x.copy_(normed.mul_(self.weight))

    @property
    def num_bytes(self) -> int:
        """Memory of the weight."""
        return self.weight.nbytes


Norm: TypeAlias = RMSNorm | LayerNorm


def make_norm(weight: Tensor, eps: float, kind: str = "rms", bias: Tensor | None = None) -> Norm:
    """The fastest norm here for weight [size]; kind: `rms` or `layer`, which alone has a bias."""
    assert kind == "layer" or bias is None, "RMSNorm has no bias"
    if weight.is_cuda:
        from octavo.layers.gpu import GpuLayerNorm, GpuRMSNorm

        return GpuLayerNorm(weight, bias, eps) if kind == "layer" else GpuRMSNorm(weight, eps)
    return LayerNorm(weight, bias, eps) if kind == "layer" else RMSNorm(weight, eps)
