"""Layers on an NVIDIA GPU: octavo's streaming kernels for one row, cuBLAS for more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.layers.embedding import TableEmbedding
from octavo.layers.linear import TorchLinear
from octavo.layers.norm import LayerNorm, Norm, RMSNorm
from octavo.ops.gpu import activation, embedding, norm
from octavo.ops.gpu.row_linear import is_row_product, row_gated, row_linear


@dataclass(frozen=True, slots=True)
class GpuRMSNorm(RMSNorm):
    """`RMSNorm` as one kernel."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """See `RMSNorm`."""
        return norm.rms_norm(x, self.weight, self.eps, out)


@dataclass(frozen=True, slots=True)
class GpuLayerNorm(LayerNorm):
    """`LayerNorm` as one kernel."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """See `LayerNorm`."""
        return norm.layer_norm(x, self.weight, self.bias, self.eps, out)


class GpuLinear(TorchLinear):
    """One row reads the weight through a kernel that takes norm and residual along; for more rows
    cuBLAS is the faster one."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        if self._is_row(x):
            return row_linear(x, self.weight, out, bias=self.bias)
        if out.dtype == x.dtype:
            return super().__call__(x, out)
        # Logits: the product is summed in float32 anyway, and stays so.
        torch.mm(x, self._transposed, out_dtype=out.dtype, out=out)
        return out if self.bias is None else out.add_(self.bias)

    def normed(self, x: Tensor, norm: Norm, buffer: Tensor, out: Tensor) -> Tensor:
        if self._is_row(x) and isinstance(norm, RMSNorm):
            return row_linear(
                x, self.weight, out, bias=self.bias, norm_weight=norm.weight, eps=norm.eps
            )
        return self(norm(x, buffer), out)

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        if self._is_row(x):
            row_linear(x, self.weight, residual, bias=self.bias, residual=True)
            return
        residual.addmm_(x, self._transposed)
        if self.bias is not None:
            residual.add_(self.bias)

    def _is_row(self, x: Tensor) -> bool:
        return is_row_product(len(x), x.shape[1], x.dtype)


class GpuGated:
    """Gate and up as one matrix product, then activation and multiply; with silu one row is one
    kernel."""

    replayable = False

    def __init__(
        self, gate: Tensor, up: Tensor, bias: Tensor | None, activation: str = "silu"
    ) -> None:
        self._linear = GpuLinear(torch.cat((gate, up)), bias)
        self._activation = activation
        self.num_bytes = self._linear.num_bytes

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        weight = self._linear.weight
        if self._is_row(x):
            return row_gated(x, weight, out, bias=self._linear.bias)
        both = self._linear(x, x.new_empty((len(x), len(weight))))
        return activation.gated(both, out, self._activation)

    def normed(self, x: Tensor, norm: Norm, buffer: Tensor, out: Tensor) -> Tensor:
        weight = self._linear.weight
        if self._is_row(x) and isinstance(norm, RMSNorm):
            return row_gated(
                x, weight, out, bias=self._linear.bias, norm_weight=norm.weight, eps=norm.eps
            )
        return self(norm(x, buffer), out)

    def _is_row(self, x: Tensor) -> bool:
        return self._activation == "silu" and is_row_product(len(x), x.shape[1], x.dtype)


class GpuEmbedding(TableEmbedding):
    """Rows of the table by one kernel."""

    def __call__(self, token_ids: Tensor, out: Tensor) -> Tensor:
        return embedding.embed(self.table, token_ids, out)
