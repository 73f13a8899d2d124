"""Norms and activation on CPU: launcher of csrc/elementwise.c.

All take float32 or bfloat16 rows with any stride between tokens, compute in float32, use several
threads only where there is work for them, and fall back to `octavo.ops.reference`.
"""

from __future__ import annotations

import struct
from typing import NoReturn

import torch

from octavo.ops import reference
from octavo.ops.cpu import native

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# struct norm_args and silu_args of csrc/elementwise.c
_pack_norm = struct.Struct("@4P5q3if").pack
_pack_add = struct.Struct("@2P4q2i2f").pack
_pack_silu = struct.Struct("@2P4q2i").pack


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps), rounded to x's type, times weight.

    Args:
        x: [num_tokens, width].
        weight: [width], contiguous, x's type or float32; float32 is multiplied without rounding
            before.
        eps: added to the mean square.
        out: like x; may be x itself.

    Returns: out, or a new tensor.
    Raises: TypeError for dtypes; ValueError for shapes and strides.
    """
    return _norm(x, None, weight, eps, out)


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual += x in place (rounded), then `rms_norm(residual)`.

    Args:
        x: [num_tokens, width].
        residual: like x, updated.
        weight: [width], contiguous, x's type.
        eps: added to the mean square.
        out: like x; may be x itself.

    Returns: out, or a new tensor.
    Raises: TypeError for dtypes; ValueError for shapes and strides.
    """
    return _norm(x, residual, weight, eps, out)


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_tokens, width = shape = x.shape
    dtype = x.dtype
    x_stride, x_element_stride = x.stride()
    out_stride, out_element_stride = out.stride()
    good = (
        dtype in _DTYPES
        and out.dtype == dtype
        and (weight.dtype == dtype or weight.dtype == torch.float32)
        and out.shape == shape
        and weight.shape == (width,)
        and x_element_stride == out_element_stride == weight.stride(0) == 1
    )
    residual_ptr = residual_stride = 0
    if residual is not None:
        residual_ptr = residual.data_ptr()
        residual_stride, residual_element_stride = residual.stride()
        good = (
            good
            and residual.dtype == dtype
            and residual.shape == shape
            and residual_element_stride == 1
        )
    if not good:
        as_x = weight.to(dtype) if weight.dtype == torch.float32 else weight
        _explain(x, {"out": out, "residual": residual}, {"weight": as_x})
    call = native.function("octavo_rms_norm")
    if call is None:
        return out.copy_(
            reference.rms_norm(x, weight, eps)
            if residual is None
            else reference.fused_add_rms_norm(x, residual, weight, eps)
        )
    call(
        _pack_norm(
            out.data_ptr(), x.data_ptr(), residual_ptr, weight.data_ptr(),
            out_stride, x_stride, residual_stride, num_tokens, width,
            _DTYPES[dtype], torch.get_num_threads(), weight.dtype != dtype, eps,
        )
    )  # fmt: skip
    return out


def add_scaled(x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """x += scale * y in place, rounded once.

    x, y: [num_tokens, width] of one type, not overlapping.
    Returns: x. Raises: TypeError for dtypes; ValueError for shapes and strides.
    """
    return _add(x, 1.0, y, scale)


def scale_rows(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x *= scale in place, rounded once; x as of `add_scaled`."""
    return _add(x, scale, None, 0.0)


def _add(x: torch.Tensor, x_scale: float, y: torch.Tensor | None, y_scale: float) -> torch.Tensor:
    num_tokens, width = x.shape
    if not (
        x.dtype in _DTYPES
        and x.stride(1) == 1
        and (y is None or (y.dtype == x.dtype and y.shape == x.shape and y.stride(1) == 1))
    ):
        _explain(x, {"y": y}, {})
    call = native.function("octavo_add_scaled")
    if call is None:
        return x.mul_(x_scale) if y is None else x.add_(y, alpha=y_scale)
    call(
        _pack_add(
            x.data_ptr(), 0 if y is None else y.data_ptr(),
            x.stride(0), 0 if y is None else y.stride(0), num_tokens, width,
            _DTYPES[x.dtype], torch.get_num_threads(), x_scale, y_scale,
        )
    )  # fmt: skip
    return x


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up, rounded once.

    Args:
        gate_up: [num_tokens, 2 * width], gate first.
        out: [num_tokens, width], gate_up's type; not overlapping gate_up.

    Returns: out, or a new tensor.
    Raises: TypeError for dtypes; ValueError for shapes and strides.
    """
    num_tokens, double_width = gate_up.shape
    dtype, width = gate_up.dtype, double_width // 2
    if out is None:
        out = torch.empty((num_tokens, width), dtype=dtype)
    stride, element_stride = gate_up.stride()
    out_stride, out_element_stride = out.stride()
    if not (
        dtype in _DTYPES
        and out.dtype == dtype
        and double_width % 2 == 0
        and out.shape == (num_tokens, width)
        and element_stride == out_element_stride == 1
    ):
        if double_width % 2:
            raise ValueError(f"gate_up's width must be even: {double_width}")
        _explain(gate_up[:, :width], {"out": out}, {})
    call = native.function("octavo_silu_and_mul")
    if call is None:
        return out.copy_(reference.silu_and_mul(gate_up))
    call(
        _pack_silu(
            out.data_ptr(), gate_up.data_ptr(), out_stride, stride, num_tokens, width,
            _DTYPES[dtype], torch.get_num_threads(),
        )
    )  # fmt: skip
    return out


def _explain(
    x: torch.Tensor, like: dict[str, torch.Tensor | None], vectors: dict[str, torch.Tensor | None]
) -> NoReturn:
    """Raises the error that says which of the tensors does not go with x; `like` have its shape,
    `vectors` that of its last dimension."""
    if x.dtype not in _DTYPES:
        raise TypeError(f"the input must be float32 or bfloat16, not {x.dtype}")
    shapes = {name: (tensor, x.shape) for name, tensor in {"input": x, **like}.items()}
    shapes |= {name: (tensor, x.shape[-1:]) for name, tensor in vectors.items()}
    for name, (tensor, shape) in shapes.items():
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name} must have the input's type {x.dtype}, not {tensor.dtype}")
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)} here: {tuple(tensor.shape)}")
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}'s last dimension must be dense: strides {tensor.stride()}")
    raise AssertionError("arguments refused that _explain finds no fault with")
