"""Linear layers: plain torch, oneDNN with prepacked weights, or octavo's packed bf16 kernel.

`make_linear` and `make_gated` pick by what the weights are and what the machine has. A layer takes
its weight once, packs it, and lets the original go.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from octavo.layers.norm import RMSNorm
from octavo.ops import reference
from octavo.ops.cpu import elementwise, gemm


class Linear(Protocol):
    """`y = x W^T + b` for x [num_tokens, in_features]; with a norm, of `norm(x)`."""

    num_bytes: int
    """Memory the weights take."""

    def __call__(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features], in x's dtype."""
        ...

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        """`residual += x W^T + b`, in place."""
        ...

    def to_float(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """The same product as float32: for logits."""
        ...


class Gated(Protocol):
    """`silu(x Wg^T + bg) * (x Wu^T + bu)`, the first half of a gated MLP; of `norm(x)`."""

    num_bytes: int

    def __call__(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, intermediate_size]."""
        ...


class TorchLinear:
    """torch's own matrix product; serves every device and dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.num_bytes = _num_bytes(weight, bias)

    def __call__(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        return functional.linear(x if norm is None else norm(x), self.weight, self.bias)

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        residual.add_(self(x))

    def to_float(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        return self(x, norm).float()


class OneDNNLinear(TorchLinear):
    """bf16 on CPUs without octavo's kernel: oneDNN with the weight packed once for every batch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.to_mkldnn(), None)
        self.bias = bias
        self.num_bytes = _num_bytes(weight, bias)

    def __call__(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        h = x.contiguous() if norm is None else norm(x)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(h, self.weight, self.bias, "none", [], "")
        return out


class PackedLinear:
    """bf16 through octavo's own kernel (AVX512_BF16 or AMX); norm and residual in one pass."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = gemm.pack(weight, bias)
        self.num_bytes = self.packed.num_bytes

    def __call__(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        if norm is None:
            return gemm.linear(x, self.packed)
        return gemm.linear(x, self.packed, norm_weight=norm.weight, norm_eps=norm.eps)

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        gemm.linear(x, self.packed, out=residual, residual=residual)

    def to_float(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        h = x if norm is None else norm(x)
        return gemm.linear(h, self.packed, out_dtype=torch.float32)


class TorchGated:
    """Gate and up as one matrix product, then silu and multiply."""

    def __init__(self, gate: Tensor, up: Tensor, bias: Tensor | None) -> None:
        self.linear = _make_plain(torch.cat((gate, up)), bias)
        self.num_bytes = self.linear.num_bytes

    def __call__(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        kernels = elementwise if x.is_cpu else reference
        return kernels.silu_and_mul(self.linear(x, norm))


class PackedGated:
    """Gate and up interleaved in one packed weight, so that silu and multiply cost no pass."""

    def __init__(self, gate: Tensor, up: Tensor, bias: Tensor | None) -> None:
        self.packed = gemm.pack_gate_up(gate, up, bias)
        self.num_bytes = self.packed.num_bytes

    def __call__(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        if norm is None:
            return gemm.linear_silu_mul(x, self.packed)
        return gemm.linear_silu_mul(x, self.packed, norm_weight=norm.weight, norm_eps=norm.eps)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest layer here for weight [out_features, in_features] and bias [out_features]."""
    return PackedLinear(weight, bias) if _packs(weight) else _make_plain(weight, bias)


def make_gated(gate: Tensor, up: Tensor, bias: Tensor | None = None) -> Gated:
    """The fastest gated layer for gate and up [intermediate, hidden]; bias is gate's, then up's."""
    return PackedGated(gate, up, bias) if _packs(gate) else TorchGated(gate, up, bias)


def _packs(weight: Tensor) -> bool:
    is_bf16 = weight.is_cpu and weight.dtype == torch.bfloat16
    return is_bf16 and gemm.is_available() and gemm.supports(weight.shape[1])


def _make_plain(weight: Tensor, bias: Tensor | None) -> Linear:
    is_bf16 = weight.is_cpu and weight.dtype == torch.bfloat16
    if is_bf16 and torch.backends.mkldnn.is_available():
        return OneDNNLinear(weight, bias)
    return TorchLinear(weight, bias)


def _num_bytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
