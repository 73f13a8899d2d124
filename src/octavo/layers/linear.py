"""Linear layers: plain torch, oneDNN with prepacked weights, or octavo's packed bf16 kernel.

`make_linear` and `make_gated` pick by what the weights are and what the machine has. A layer takes
its weight once, packs it, and lets the original go. Results go into buffers of the caller.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from octavo.layers.norm import RMSNorm
from octavo.ops import reference
from octavo.ops.cpu import elementwise, gemm


class Linear(Protocol):
    """`x W^T + b` for x [num_tokens, in_features]."""

    num_bytes: int
    """Memory the weights take."""
    replayable: bool
    """Whether a call is one kernel call that `ops.cpu.trace` records, and nothing else."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Into out, [num_tokens, out_features]: in x's dtype, or float32 (logits)."""
        ...

    def normed(self, x: Tensor, norm: RMSNorm, buffer: Tensor, out: Tensor) -> Tensor:
        """The same for `norm(x)`; `buffer`, like x, may be written."""
        ...

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        """`residual += x W^T + b`, in place."""
        ...


class Gated(Protocol):
    """`silu(x Wg^T + bg) * (x Wu^T + bu)`: the first half of a gated MLP."""

    num_bytes: int
    replayable: bool
    """As in `Linear`."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> out, [num_tokens, intermediate_size]."""
        ...

    def normed(self, x: Tensor, norm: RMSNorm, buffer: Tensor, out: Tensor) -> Tensor:
        """As `Linear.normed`."""
        ...


class _Projection:
    """A layer that takes the norm before it as it comes."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        raise NotImplementedError

    def normed(self, x: Tensor, norm: RMSNorm, buffer: Tensor, out: Tensor) -> Tensor:
        return self(norm(x, buffer), out)


class TorchLinear(_Projection):
    """torch's own matrix product; serves every device and dtype."""

    replayable = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self._transposed = weight.t()
        self.num_bytes = _num_bytes(weight, bias)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        if out.dtype != x.dtype:
            return out.copy_(self._product(x))
        return torch.mm(x, self._transposed, out=out) if self.bias is None else self._biased(x, out)

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        residual.add_(self._product(x))

    def _biased(self, x: Tensor, out: Tensor) -> Tensor:
        assert self.bias is not None
        return torch.addmm(self.bias, x, self._transposed, out=out)

    def _product(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class OneDNNLinear(_Projection):
    """bf16 on CPUs without octavo's kernel: oneDNN with the weight packed once for every batch."""

    replayable = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_bytes = _num_bytes(weight, bias)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(self._product(x))

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        residual.add_(self._product(x))

    def _product(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x.contiguous(), self._packed, self._bias, "none", [], ""
        )
        return product


class PackedLinear(_Projection):
    """bf16 through octavo's kernel (AVX512_BF16 or AMX); the residual is added in the same pass."""

    replayable = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = gemm.pack(weight, bias)
        self.num_bytes = self.packed.num_bytes

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return gemm.linear(x, self.packed, out)

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        gemm.linear(x, self.packed, out=residual, residual=residual)


class PlainGated(_Projection):
    """Gate and up as one matrix product, then silu and multiply."""

    replayable = False

    def __init__(self, gate: Tensor, up: Tensor, bias: Tensor | None) -> None:
        self._linear = _make_plain(torch.cat((gate, up)), bias)
        self._width = len(gate)
        self.num_bytes = self._linear.num_bytes

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        both = self._linear(x, x.new_empty((len(x), 2 * self._width)))
        if x.is_cpu:
            return elementwise.silu_and_mul(both, out)
        return out.copy_(reference.silu_and_mul(both))


class PackedGated(_Projection):
    """Gate and up interleaved in one packed weight, so that silu and multiply cost no pass."""

    replayable = True

    def __init__(self, gate: Tensor, up: Tensor, bias: Tensor | None) -> None:
        self._packed = gemm.pack_gate_up(gate, up, bias)
        self.num_bytes = self._packed.num_bytes

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return gemm.linear_silu_mul(x, self._packed, out)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest layer here for weight [out_features, in_features] and bias [out_features]."""
    if weight.is_cuda:
        from octavo.layers.gpu import GpuLinear

        return GpuLinear(weight, bias)
    return PackedLinear(weight, bias) if _packs(weight) else _make_plain(weight, bias)


def make_gated(gate: Tensor, up: Tensor, bias: Tensor | None = None) -> Gated:
    """The fastest gated layer for gate and up [intermediate, hidden]; bias is gate's, then up's."""
    if gate.is_cuda:
        from octavo.layers.gpu import GpuGated

        return GpuGated(gate, up, bias)
    return PackedGated(gate, up, bias) if _packs(gate) else PlainGated(gate, up, bias)


def _is_cpu_bf16(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype == torch.bfloat16


def _packs(weight: Tensor) -> bool:
    return _is_cpu_bf16(weight) and gemm.is_available() and gemm.supports(weight.shape[1])


def _make_plain(weight: Tensor, bias: Tensor | None) -> Linear:
    if _is_cpu_bf16(weight) and torch.backends.mkldnn.is_available():
        return OneDNNLinear(weight, bias)
    return TorchLinear(weight, bias)


def _num_bytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
