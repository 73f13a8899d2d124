"""Layers on an NVIDIA GPU: cuBLAS for many rows, octavo's streaming kernels for few."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.layers.embedding import TableEmbedding
from octavo.layers.linear import TorchLinear
from octavo.layers.norm import RMSNorm
from octavo.ops.gpu import activation, embedding, linear, norm


@dataclass(frozen=True, slots=True)
class GpuRMSNorm(RMSNorm):
    """`RMSNorm` as one kernel."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """See `RMSNorm`."""
        return norm.rms_norm(x, self.weight, self.eps, out)


class GpuLinear(TorchLinear):
    """Few rows read the weight once through a kernel that takes norm and residual along; for many
    rows cuBLAS is the better matrix product."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        if self._is_skinny(x):
            return linear.skinny_linear(x, self.weight, out, bias=self.bias)
        if out.dtype == x.dtype:
            return super().__call__(x, out)
        # Logits: the product is summed in float32 anyway, and stays so.
        torch.mm(x, self._transposed, out_dtype=out.dtype, out=out)
        return out if self.bias is None else out.add_(self.bias)

    def normed(self, x: Tensor, norm: RMSNorm, buffer: Tensor, out: Tensor) -> Tensor:
        if self._is_skinny(x):
            return linear.skinny_linear(
                x, self.weight, out, bias=self.bias, norm_weight=norm.weight, eps=norm.eps
            )
        return self(norm(x, buffer), out)

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        if self._is_skinny(x):
            linear.skinny_linear(x, self.weight, residual, bias=self.bias, residual=True)
            return
        residual.addmm_(x, self._transposed)
        if self.bias is not None:
            residual.add_(self.bias)

    def _is_skinny(self, x: Tensor) -> bool:
        out_features, in_features = self.weight.shape
        return linear.is_skinny(len(x), in_features, out_features, x.dtype)


class GpuGated:
    """Gate and up as one matrix product, then silu and multiply; few rows in one kernel."""

    replayable = False

    def __init__(self, gate: Tensor, up: Tensor, bias: Tensor | None) -> None:
        self._linear = GpuLinear(torch.cat((gate, up)), bias)
        self.num_bytes = self._linear.num_bytes

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        weight = self._linear.weight
        if linear.is_skinny(len(x), weight.shape[1], len(weight), x.dtype):
            return linear.skinny_gated(x, weight, out, bias=self._linear.bias)
        return activation.silu_and_mul(self._linear(x, x.new_empty((len(x), len(weight)))), out)

    def normed(self, x: Tensor, norm: RMSNorm, buffer: Tensor, out: Tensor) -> Tensor:
        weight = self._linear.weight
        if linear.is_skinny(len(x), weight.shape[1], len(weight), x.dtype):
            return linear.skinny_gated(
                x, weight, out, bias=self._linear.bias, norm_weight=norm.weight, eps=norm.eps
            )
        return self(norm(x, buffer), out)


class GpuEmbedding(TableEmbedding):
    """Rows of the table by one kernel."""

    def __call__(self, token_ids: Tensor, out: Tensor) -> Tensor:
        return embedding.embed(self.table, token_ids, out)
