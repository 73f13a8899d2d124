"""Linear layers: plain torch, oneDNN with prepacked weights, or octavo's packed bf16 kernel; of
quantized weights in `quantized_cpu` and `quantized_gpu`.

`make_linear` and `make_gated` pick by what the weights are and what the machine has. A layer takes
its weight once, packs it, and lets the original go. Results go into buffers of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from octavo.layers.activation import gated
from octavo.layers.norm import Norm
from octavo.layers.quantized import QuantizedWeight, Weight, join_rows
from octavo.ops.cpu import gemm


class Linear(Protocol):
    """`x W^T + b` for x [num_tokens, in_features]."""

    num_bytes: int
    """Memory the weights take."""
    replayable: bool
    """Whether a call is one kernel call that `ops.cpu.trace` records, and nothing else."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Into out, [num_tokens, out_features]: in x's dtype, or float32 (logits)."""
        ...

    def normed(self, x: Tensor, norm: Norm, buffer: Tensor, out: Tensor) -> Tensor:
        """The same for `norm(x)`; `buffer`, like x, may be written."""
        ...

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        """`residual += x W^T + b`, in place."""
        ...


class Gated(Protocol):
    """`act(x Wg^T + bg) * (x Wu^T + bu)`: the first half of a gated MLP."""

    num_bytes: int
    replayable: bool
    """As in `Linear`."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> out, [num_tokens, intermediate_size]."""
        ...

    def normed(self, x: Tensor, norm: Norm, buffer: Tensor, out: Tensor) -> Tensor:
        """As `Linear.normed`."""
        ...


def normed(
    layer: Linear | Gated, x: Tensor, norm: Norm | None, buffer: Tensor, out: Tensor
) -> Tensor:
    """A layer of `norm(x)`, or of x where there is no norm; as `Linear.normed`."""
    return layer(x, out) if norm is None else layer.normed(x, norm, buffer, out)


class _Projection:
    """A layer that takes the norm before it as it comes."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        raise NotImplementedError

    def normed(self, x: Tensor, norm: Norm, buffer: Tensor, out: Tensor) -> Tensor:
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


class StackedLinear(_Projection):
    """Layers whose results lie side by side: weights of different formats that have one input."""

    def __init__(self, layers: Sequence[Linear], sizes: Sequence[int]) -> None:
        self._layers, self._sizes = layers, list(sizes)
        self.num_bytes = sum(layer.num_bytes for layer in layers)
        self.replayable = all(layer.replayable for layer in layers)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        for layer, part in zip(self._layers, out.split(self._sizes, dim=-1), strict=True):
            layer(x, part)
        return out

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        for layer, part in zip(self._layers, residual.split(self._sizes, dim=-1), strict=True):
            layer.add_to(x, part)


class PlainGated(_Projection):
    """Gate and up as one matrix product, then activation and multiply."""

    replayable = False

    def __init__(
        self, gate: Tensor, up: Tensor, bias: Tensor | None, activation: str = "silu"
    ) -> None:
        both = torch.cat((gate, up))
        self._linear = PackedLinear(both, bias) if _packs(both) else _make_plain(both, bias)
        self._width, self._activation = len(gate), activation
        self.num_bytes = self._linear.num_bytes

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        both = self._linear(x, x.new_empty((len(x), 2 * self._width)))
        return gated(both, self._activation, out)


class PackedGated(_Projection):
    """Gate and up interleaved in one packed weight, so that activation and multiply cost no pass.

    activation: one of `gemm.GATED`.
    """

    replayable = True

    def __init__(
        self, gate: Tensor, up: Tensor, bias: Tensor | None, activation: str = "silu"
    ) -> None:
        self._packed = gemm.pack_gate_up(gate, up, bias, activation)
        self.num_bytes = self._packed.num_bytes

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return gemm.linear_gated(x, self._packed, out)


def make_linear(weight: Weight, bias: Tensor | None = None, quantize: str | None = None) -> Linear:
    """The fastest layer here for weight [out_features, in_features] and bias [out_features].

    quantize: how to quantize a plain weight (`int8`, `fp8`); None leaves it as it is. A weight that
    comes quantized stays so whatever it says.
    """
    if isinstance(weight, QuantizedWeight) or quantize is not None:
        if weight.device.type == "cuda":
            from octavo.layers.quantized_gpu import make_quantized_linear
        else:
            from octavo.layers.quantized_cpu import make_quantized_linear
        return make_quantized_linear(weight, bias, quantize)
    if weight.is_cuda:
        from octavo.layers.gpu import GpuLinear

        return GpuLinear(weight, bias)
    return PackedLinear(weight, bias) if _packs(weight) else _make_plain(weight, bias)


def make_joined(
    weights: Sequence[Weight], bias: Tensor | None = None, quantize: str | None = None
) -> Linear:
    """One layer of weights [out_features, in_features] one below the other; bias is of all rows.

    Where their formats do not allow it they stay layers of their own, side by side.
    """
    joined = join_rows(weights)
    if joined is not None:
        return make_linear(joined, bias, quantize)
    if all(
        isinstance(weight, QuantizedWeight) and weight.device.type == "cpu" for weight in weights
    ):
        from octavo.layers.quantized_cpu import make_quantized_joined

        layer = make_quantized_joined(weights, bias)
        if layer is not None:
            return layer
    sizes = [weight.shape[0] for weight in weights]
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    layers = [make_linear(w, b, quantize) for w, b in zip(weights, biases, strict=True)]
    return StackedLinear(layers, sizes)


def make_gated(
    gate: Weight,
    up: Weight,
    bias: Tensor | None = None,
    activation: str = "silu",
    quantize: str | None = None,
) -> Gated:
    """The fastest gated layer for gate and up [intermediate, hidden]; bias is gate's, then up's.

    activation: one of `octavo.arch.ACTIVATIONS`; quantize: as for `make_linear`. If only one of
    gate and up comes quantized, or they do so in different formats, the layer sees to it.
    """
    given = (gate, up)
    if quantize is not None or any(isinstance(weight, QuantizedWeight) for weight in given):
        if gate.device.type == "cuda":
            from octavo.layers.quantized_gpu import make_quantized_gated
        else:
            from octavo.layers.quantized_cpu import make_quantized_gated
        return make_quantized_gated(gate, up, bias, activation, quantize)
    assert isinstance(gate, Tensor) and isinstance(up, Tensor)
    if gate.is_cuda:
        from octavo.layers.gpu import GpuGated

        return GpuGated(gate, up, bias, activation)
    if activation in gemm.GATED and _packs(gate):
        return PackedGated(gate, up, bias, activation)
    return PlainGated(gate, up, bias, activation)


def add_through(up: Gated | Linear, down: Linear, x: Tensor, norm: Norm, buffer: Tensor) -> bool:
    """`x += down(up(norm(x)))` where the two layers do it in fewer passes than one after the other;
    False where they do not, and nothing was done. buffer, like x, may be written."""
    through: Callable[[Linear, Tensor, Norm, Tensor], bool] | None
    through = getattr(up, "add_through", None)
    return through is not None and through(down, x, norm, buffer)


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
