"""Linear layers of quantized weights on an NVIDIA GPU.

fp8: inputs are rounded to fp8, too, in the pass that normalises them (W8A8). Small integers in
groups (AWQ, GPTQ, GGUF): read as they are packed while rows are few; for more, expanded into memory
that all layers use in turn.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from octavo.layers.fp8 import Fp8Weight
from octavo.layers.gguf_grouped import GROUPED_FORMATS, grouped_from_gguf
from octavo.layers.gguf_weight import GGUFWeight
from octavo.layers.gpu import GpuGated, GpuLinear
from octavo.layers.grouped import GroupedWeight
from octavo.layers.linear import Gated, Linear
from octavo.layers.norm import Norm, RMSNorm
from octavo.layers.quantized import QuantizedWeight, Weight
from octavo.ops.gpu import activation as activations
from octavo.ops.gpu import fp8_linear
from octavo.ops.gpu.grouped_linear import expand, grouped_linear
from octavo.ops.gpu.grouped_row_linear import grouped_row_linear, is_row_product
from octavo.ops.gpu.quantize import GROUP, quantize_gated, quantize_rows
from octavo.quantization import PLAIN_TYPES, Quantization

_MAX_PACKED_ROWS = 64
"""More rows are multiplied by the expanded weight: measured on an H200."""


class Fp8Linear:
    """`round(x) W^T + b` for fp8 weights and inputs rounded to fp8."""

    replayable = False

    def __init__(self, weight: Fp8Weight, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.unit = fp8_linear.unit_scale(weight.device)
        self.is_grouped = weight.scales.shape[1] > 1
        self.num_bytes = weight.num_bytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return self.into(*self.rounded(x, None, x), out)

    def normed(self, x: Tensor, norm: Norm, buffer: Tensor, out: Tensor) -> Tensor:
        rounded = self.rounded(x, norm, buffer)
        return self.into(*rounded, out)

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        self.add_rounded(*self.rounded(x, None, x), residual)

    def add_rounded(self, codes: Tensor, scales: Tensor, residual: Tensor) -> None:
        """`add_to` for inputs that are rounded already, as `rounded` would."""
        self.into(codes, scales, residual, residual=True)

    def product(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """codes W^T by cuBLAS, and whether it is scaled. There is no bias in it."""
        weight = self.weight
        if len(codes) >= fp8_linear.MANY_ROWS:
            return fp8_linear.scaled_product(
                codes, scales, weight.codes, weight.scales, dtype
            ), True
        return fp8_linear.cublas_product(codes, weight.codes, self.unit, dtype), False

    def rounded(self, x: Tensor, norm: Norm | None, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """x, behind a norm if there is one, as codes and scales; buffer may be written."""
        if norm is not None and not isinstance(norm, RMSNorm):
            x, norm = norm(x, buffer), None
        return quantize_rows(
            x,
            norm_weight=None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            static_scale=self.weight.input_scale,
            groups=self.is_grouped,
        )

    def is_cublas(self, num_rows: int) -> bool:
        """Whether so many rows are multiplied by cuBLAS."""
        return fp8_linear.is_cublas_product(
            num_rows, *self.weight.shape, self.is_grouped, self.weight.device
        )

    def into(self, codes: Tensor, scales: Tensor, out: Tensor, residual: bool = False) -> Tensor:
        """`out (+)= codes W^T + b`, scaled."""
        weight = self.weight
        if not self.is_cublas(len(codes)):
            return fp8_linear.fp8_linear(
                codes, scales, weight.codes, weight.scales, out, bias=self.bias, residual=residual
            )
        plain = not residual and self.bias is None and out.is_contiguous()
        if plain and len(codes) >= fp8_linear.MANY_ROWS:
            return fp8_linear.scaled_product(
                codes, scales, weight.codes, weight.scales, out.dtype, out
            )
        product = fp8_linear.cublas_product(codes, weight.codes, self.unit, out.dtype)
        return fp8_linear.scale_into(
            product, scales, weight.scales, out, bias=self.bias, residual=residual
        )


class Fp8Gated:
    """Gate and up in fp8 as one product, then activation and multiply."""

    replayable = False

    def __init__(self, both: Fp8Weight, bias: Tensor | None, activation: str) -> None:
        self._linear, self._activation = Fp8Linear(both, bias), activation
        self.num_bytes = self._linear.num_bytes

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return self._gated(*self._linear.rounded(x, None, x), out)

    def normed(self, x: Tensor, norm: Norm, buffer: Tensor, out: Tensor) -> Tensor:
        return self._gated(*self._linear.rounded(x, norm, buffer), out)

    def add_through(self, down: Linear, x: Tensor, norm: Norm, buffer: Tensor) -> bool:
        """`x += down(self(norm(x)))`, in which what is between is rounded where it is made. False
        where that cannot be done; nothing has been then."""
        linear = self._linear
        if not isinstance(down, Fp8Linear) or down.is_grouped or not linear.is_cublas(len(x)):
            return False
        codes, scales = linear.rounded(x, norm, buffer)
        both, is_scaled = linear.product(codes, scales, x.dtype)
        inner = quantize_gated(
            both,
            self._activation,
            row_scales=None if is_scaled else scales,
            column_scales=None if is_scaled else linear.weight.scales,
            factor=fp8_linear.UNSCALED,
            bias=linear.bias,
            static_scale=down.weight.input_scale,
        )
        down.add_rounded(*inner, x)
        return True

    def _gated(self, codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
        linear, act = self._linear, self._activation
        if linear.is_cublas(len(codes)):
            product = fp8_linear.cublas_product(codes, linear.weight.codes, linear.unit, out.dtype)
            return fp8_linear.scale_into(
                product, scales, linear.weight.scales, out, bias=linear.bias, activation=act
            )
        both = out.new_empty((len(codes), linear.weight.shape[0]))
        linear.into(codes, scales, both)
        return activations.gated(both, out, act)


class GroupedLinear:
    """`x W^T + b` for integers that share scales in groups."""

    replayable = False

    def __init__(self, weight: GroupedWeight, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.num_bytes = weight.num_bytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        if self.is_row(x):
            return grouped_row_linear(x, self.weight, out, bias=self.bias)
        if len(x) <= _MAX_PACKED_ROWS:
            return grouped_linear(x, self.weight, out, bias=self.bias)
        expanded = self._expanded(x)
        return expanded(self._in_order(x), out)

    def normed(self, x: Tensor, norm: Norm, buffer: Tensor, out: Tensor) -> Tensor:
        if self.is_row(x) and isinstance(norm, RMSNorm):
            return grouped_row_linear(
                x, self.weight, out, bias=self.bias, norm_weight=norm.weight, eps=norm.eps
            )
        return self(norm(x, buffer), out)

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        if self.is_row(x):
            grouped_row_linear(x, self.weight, residual, bias=self.bias, residual=True)
        elif len(x) <= _MAX_PACKED_ROWS:
            grouped_linear(x, self.weight, residual, bias=self.bias, residual=True)
        else:
            self._expanded(x).add_to(self._in_order(x), residual)

    def is_row(self, x: Tensor) -> bool:
        """Whether the kernel for one row takes it."""
        return is_row_product(x, self.weight)

    def _expanded(self, x: Tensor) -> GpuLinear:
        """Whose memory is free again once the product is queued."""
        return GpuLinear(expand(self.weight, x.new_empty(self.weight.shape)), self.bias)

    def _in_order(self, x: Tensor) -> Tensor:
        order = self.weight.order
        return x if order is None else x.index_select(1, order)


class GroupedGated:
    """Gate and up as one product, then activation and multiply; with silu one row is one kernel."""

    replayable = False

    def __init__(self, both: GroupedWeight, bias: Tensor | None, activation: str) -> None:
        self._linear, self._activation = GroupedLinear(both, bias), activation
        self.num_bytes = self._linear.num_bytes

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        linear = self._linear
        if self._is_row(x):
            return grouped_row_linear(x, linear.weight, out, bias=linear.bias, gated=True)
        both = linear(x, x.new_empty((len(x), linear.weight.shape[0])))
        return activations.gated(both, out, self._activation)

    def normed(self, x: Tensor, norm: Norm, buffer: Tensor, out: Tensor) -> Tensor:
        linear = self._linear
        if self._is_row(x) and isinstance(norm, RMSNorm):
            return grouped_row_linear(
                x, linear.weight, out, bias=linear.bias, gated=True,
                norm_weight=norm.weight, eps=norm.eps,
            )  # fmt: skip
        return self(norm(x, buffer), out)

    def _is_row(self, x: Tensor) -> bool:
        return self._activation == "silu" and self._linear.is_row(x)


class SeparateGated:
    """Gate and up as products of their own, where their formats differ."""

    replayable = False

    def __init__(self, gate: Linear, up: Linear, activation: str) -> None:
        self._gate, self._up, self._activation = gate, up, activation
        self.num_bytes = gate.num_bytes + up.num_bytes

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        width = out.shape[1]
        both = x.new_empty((len(x), 2 * width))
        self._gate(x, both[:, :width])
        self._up(x, both[:, width:])
        return activations.gated(both, out, self._activation)

    def normed(self, x: Tensor, norm: Norm, buffer: Tensor, out: Tensor) -> Tensor:
        return self(norm(x, buffer), out)


def why_expanded(
    format: str | Quantization, device: torch.device, kinds: Collection[str] = ()
) -> str | None:
    """Why weights of a checkpoint are expanded on a GPU; None: they are not.

    format: what it is called, or what is known of it; kinds: types of tensors in a GGUF file.
    """
    codes = format if isinstance(format, str) else format.codes
    if codes == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        return "this GPU has no fp8 arithmetic (compute capability 8.9 and later have)"
    others = sorted(set(kinds) - {*GROUPED_FORMATS, *PLAIN_TYPES})
    return f"there is no kernel for {', '.join(others)}" if others else None


def make_quantized_linear(
    weight: Weight, bias: Tensor | None = None, quantize: str | None = None
) -> Linear:
    """The fastest layer here for a quantized weight, or one to be quantized to `fp8` now."""
    weight = _prepared(weight, quantize)
    if isinstance(weight, Tensor):
        return GpuLinear(weight, bias)
    if isinstance(weight, Fp8Weight):
        return Fp8Linear(weight, bias)
    return GroupedLinear(weight, bias)


def make_quantized_gated(
    gate: Weight,
    up: Weight,
    bias: Tensor | None = None,
    activation: str = "silu",
    quantize: str | None = None,
) -> Gated:
    """The fastest gated layer here for gate and up, each as for `make_quantized_linear`."""
    gate, up = _prepared(gate, quantize), _prepared(up, quantize)
    if isinstance(gate, Tensor) and isinstance(up, Tensor):
        return GpuGated(gate, up, bias, activation)
    both = None
    if isinstance(gate, QuantizedWeight) and isinstance(up, QuantizedWeight):
        both = gate.joined_with([up])
    if isinstance(both, Fp8Weight):
        return Fp8Gated(both, bias, activation)
    if isinstance(both, GroupedWeight):
        return GroupedGated(both, bias, activation)
    of_gate, of_up = (None, None) if bias is None else bias.split([gate.shape[0], up.shape[0]])
    return SeparateGated(
        make_quantized_linear(gate, of_gate), make_quantized_linear(up, of_up), activation
    )


def _prepared(weight: Weight, quantize: str | None) -> Tensor | Fp8Weight | GroupedWeight:
    if isinstance(weight, Tensor):
        assert quantize in (None, "fp8"), quantize
        return weight if quantize is None else Fp8Weight.quantized(weight)
    if isinstance(weight, GGUFWeight):
        return grouped_from_gguf(weight)
    if isinstance(weight, Fp8Weight):
        blocks = weight.scales.shape[1]
        if blocks == 1 or blocks * GROUP == weight.shape[1]:
            return weight
        # Blocks that reach beyond the last input: no known model has them.
        return Fp8Weight.quantized(weight.dequantize(torch.float32))
    assert isinstance(weight, GroupedWeight), weight.format
    return weight
