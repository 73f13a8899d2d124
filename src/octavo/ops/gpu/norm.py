"""RMSNorm, alone and after adding to the residual stream, and LayerNorm: one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.gpu import pdl


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, x_stride, residual_stride, out_stride, width, eps,
    BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[r] = round(x[r] / sqrt(mean(x[r]^2) + eps)) * weight for row r = program, in float32;
    a float32 weight is multiplied without rounding before.

    Under ADD, residual[r] += x[r] first (rounded), and that is normalised.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < width
    scales = tl.load(weight + k, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + row * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        at = residual + row * residual_stride + k
        value += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    normalised = value * factor
    if weight.dtype.element_ty != tl.float32:
        normalised = normalised.to(x.dtype.element_ty).to(tl.float32)
    result = (normalised * scales.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + k, result, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps), rounded to x's type, times weight.

    Args:
        x: [num_rows, width], any stride between rows.
        weight: [width], dense, x's type or float32.
        eps: added to the mean square.
        out: like x; may be x itself.

    Returns: out.
    Raises: TypeError for dtypes; ValueError for shapes and strides.
    """
    return _norm(x, None, weight, eps, out)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor
) -> Tensor:
    """residual += x in place (rounded), then `rms_norm(residual)`.

    For layers that keep the residual apart; the decoder's products add to it themselves.

    Args:
        x: [num_rows, width].
        residual: like x, updated.
        weight: [width], dense, x's type.
        eps: added to the mean square.
        out: like x; may be x itself.

    Returns: out.
    Raises: TypeError for dtypes; ValueError for shapes and strides.
    """
    return _norm(x, residual, weight, eps, out)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    _check(x, residual=residual, out=out, weight=weight)
    num_rows, width = x.shape
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(width)
    added = x if residual is None else residual
    _rms_norm_kernel[(num_rows,)](
        x, added, weight, out, x.stride(0), added.stride(0), out.stride(0), width, eps,
        BLOCK=block, ADD=residual is not None, num_warps=num_warps(block, num_rows),
        **pdl.launch_options(x.device),
    )  # fmt: skip
    return out


@triton.jit
def _layer_norm_kernel(
    x, weight, bias, out, x_stride, out_stride, width, eps,
    BLOCK: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[r] = (x[r] - mean) / sqrt(variance + eps) * weight + bias for row r = program, in
    float32, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < width
    scales = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + row * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
    result = centred * tl.rsqrt(tl.sum(centred * centred, 0) / width + eps) * scales
    if BIAS:
        result += tl.load(bias + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + k, result.to(out.dtype.element_ty), mask=inside)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, in float32, rounded once.

    Args:
        x: [num_rows, width], any stride between rows.
        weight, bias: [width], dense, x's type.
        eps: added to the variance.
        out: like x; may be x itself.

    Returns: out.
    Raises: TypeError for dtypes; ValueError for shapes and strides.
    """
    _check(x, out=out, weight=weight, bias=bias)
    num_rows, width = x.shape
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(width)
    _layer_norm_kernel[(num_rows,)](
        x, weight, weight if bias is None else bias, out, x.stride(0), out.stride(0), width, eps,
        BLOCK=block, BIAS=bias is not None, num_warps=num_warps(block, num_rows),
        **pdl.launch_options(x.device),
    )  # fmt: skip
    return out


def _check(x: Tensor, **others: Tensor | None) -> None:
    """That the others go with x: `weight` and `bias` have its width, the rest its shape."""
    for name, other in others.items():
        if other is None:
            continue
        shape = x.shape[1:] if name in ("weight", "bias") else x.shape
        if other.shape != shape or other.stride(-1) != 1 or x.stride(-1) != 1:
            raise ValueError(
                f"{name} must be {tuple(shape)} and its and x's rows dense: {tuple(other.shape)},"
                f" strides {other.stride()} and {x.stride()}"
            )
        if other.dtype != x.dtype and (name != "weight" or other.dtype != torch.float32):
            raise TypeError(f"{name} must have x's type {x.dtype}: {other.dtype}")


def num_warps(block: int, num_rows: int) -> int:
    """Few elements a thread where the latency of one row counts, more where bandwidth does."""
    per_thread = 8 if num_rows <= 256 else 16
    return min(max(triton.next_power_of_2(block // (32 * per_thread)), 1), 16)
