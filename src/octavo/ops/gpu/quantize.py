"""Rows rounded to fp8 (e4m3) with a scale each, alone and behind a norm: what fp8 products read."""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - kernels know no unpacking

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.arch import ACTIVATIONS
from octavo.ops.gpu import pdl
from octavo.ops.gpu.activation import activated
from octavo.ops.gpu.norm import num_warps

GROUP = 128
"""Inputs that share a scale, where weights have blocks."""
_GATED_WARPS = 32
"""Of a row. On an H200 1,280 rows of 14,336 take 26.8 us, and 28.0 to 30.4 by fewer."""
_GATED_BLOCK = 32 * _GATED_WARPS * 8
"""Numbers at a time: 16 bytes of each half for a thread."""


@triton.jit
def _largest_scale(largest):
    """The scale that maps `largest` to the largest e4m3 number; never 0."""
    return tl.maximum(largest, 1e-12) / 448.0


@triton.jit
def _codes(value, scale, BY_HAND: tl.constexpr):
    """value / scale as e4m3: the nearest, ties to even, saturating."""
    x = value * (1.0 / scale)
    if BY_HAND:  # Triton's interpreter cuts off; converting what is exact is right everywhere
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
        bits = x.to(tl.int32, bitcast=True)
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # 3 bits of mantissa stay
        tiny = (x + 24576.0) - 24576.0  # multiples of 2^-9: float32's step at 1.5 * 2^14
        x = tl.where(tl.abs(x) < 0.015625, tiny, normal.to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)


@triton.jit
def _rounded(value, TYPE: tl.constexpr, BY_HAND: tl.constexpr):
    """value in TYPE and in float32 again."""
    if TYPE.is_bf16() and not BY_HAND:  # two at once: one alone goes at a quarter of the speed
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xFFFF0000;
            }""",
            "=r,=r,r,r",
            [value],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return value.to(TYPE).to(tl.float32)


@triton.jit
def _quantize_kernel(
    x, norm_weight, static_scale, codes, scales, x_stride, width, eps,
    BLOCK: tl.constexpr, NORM: tl.constexpr, STATIC: tl.constexpr,
    GROUP: tl.constexpr, BY_HAND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """codes[r] = round(v / scales[r]) for v = x[r] or its norm, rounded to x's type; scales[r] =
    max |v| / 448, or that of each GROUP, or a given one.

    Program r has row r. codes and scales are dense.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < width
    if NORM:
        weight = tl.load(norm_weight + k, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + row * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        value *= factor
        if norm_weight.dtype.element_ty != tl.float32:
            value = _rounded(value, x.dtype.element_ty, BY_HAND)
        value = _rounded(value * weight, x.dtype.element_ty, BY_HAND)
    if GROUP > 0:
        num_groups = width // GROUP
        parts = tl.reshape(value, [BLOCK // GROUP, GROUP])
        scale = _largest_scale(tl.max(tl.abs(parts), 1))
        g = tl.arange(0, BLOCK // GROUP)
        tl.store(scales + row * num_groups + g, scale, mask=g < num_groups)
        result = tl.reshape(_codes(parts, scale[:, None], BY_HAND), [BLOCK])
        tl.store(codes + row * width + k, result, mask=inside)
    else:
        scale = tl.load(static_scale) if STATIC else _largest_scale(tl.max(tl.abs(value), 0))
        tl.store(scales + row, scale)
        tl.store(codes + row * width + k, _codes(value, scale, BY_HAND), mask=inside)


@triton.jit
def _gated_quantize_kernel(
    both, row_scales, column_scales, bias, static_scale, codes, scales, both_stride, width, factor,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr, ACTIVATION: tl.constexpr,
    SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, STATIC: tl.constexpr, BY_HAND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `_quantize_kernel` for v = act(gate) * up of the halves of both[r], which under SCALED are
    multiplied by factor row_scales[r] column_scales first; v is not rounded in between."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if SCALED:
        of_row = tl.load(row_scales + row) * factor
    values = ()
    largest = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(BLOCKS):
        k = i * BLOCK + lanes
        inside = None if EVEN else k < width
        at = both + row * both_stride + k
        gate = tl.load(at, mask=inside).to(tl.float32)
        up = tl.load(at + width, mask=inside).to(tl.float32)
        if SCALED:
            gate *= of_row * tl.load(column_scales + k, mask=inside)
            up *= of_row * tl.load(column_scales + width + k, mask=inside)
        if HAS_BIAS:
            gate += tl.load(bias + k, mask=inside).to(tl.float32)
            up += tl.load(bias + width + k, mask=inside).to(tl.float32)
        value = activated(gate, ACTIVATION, not BY_HAND) * up
        if not EVEN:
            value = tl.where(inside, value, 0.0)
        largest = tl.maximum(largest, tl.abs(value))
        values = values + (value,)
    scale = tl.load(static_scale) if STATIC else _largest_scale(tl.max(largest, 0))
    tl.store(scales + row, scale)
    for i in tl.static_range(BLOCKS):
        k = i * BLOCK + lanes
        inside = None if EVEN else k < width
        tl.store(codes + row * width + k, _codes(values[i], scale, BY_HAND), mask=inside)


def quantize_rows(
    x: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    static_scale: Tensor | None = None,
    groups: bool = False,
) -> tuple[Tensor, Tensor]:
    """x in e4m3, and its scales.

    Args:
        x: [num_rows, width], rows dense.
        norm_weight: [width], x's type or float32: x goes through `norm.rms_norm` first, rounded
            as it rounds.
        eps: of the norm.
        static_scale: [1] float32: the scale of all rows.
        groups: a scale for each 128 values, of which width is a multiple.

    Returns: codes [num_rows, width] float8_e4m3fn and scales, float32: [num_rows, 1], or
        [num_rows, width / 128] under groups.
    Raises: ValueError for shapes and strides; TypeError for dtypes.
    """
    num_rows, width = x.shape
    if x.stride(1) != 1:
        raise ValueError(f"rows of x must be dense: {tuple(x.shape)}, strides {x.stride()}")
    if groups and (width % GROUP or static_scale is not None):
        raise ValueError(f"groups are of {GROUP} values, with scales of their own: {width} values")
    for name, other, size, dtypes in (
        ("norm_weight", norm_weight, width, (x.dtype, torch.float32)),
        ("static_scale", static_scale, 1, (torch.float32,)),
    ):
        if other is not None and (other.shape != (size,) or other.stride(0) != 1):
            raise ValueError(f"{name} must be dense [{size}]: {tuple(other.shape)}")
        if other is not None and other.dtype not in dtypes:
            raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}: {other.dtype}")
    codes = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    num_scales = width // GROUP if groups else 1
    scales = torch.empty((num_rows, num_scales), dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return codes, scales
    block = triton.next_power_of_2(width)
    _quantize_kernel[(num_rows,)](
        x,
        x if norm_weight is None else norm_weight,
        x if static_scale is None else static_scale,
        codes,
        scales,
        x.stride(0),
        width,
        eps,
        BLOCK=max(block, GROUP),
        NORM=norm_weight is not None,
        STATIC=static_scale is not None,
        GROUP=GROUP if groups else 0,
        BY_HAND=not x.is_cuda,
        num_warps=num_warps(block, num_rows),
        **pdl.launch_options(x.device),
    )
    return codes, scales


def quantize_gated(
    both: Tensor,
    activation: str,
    *,
    row_scales: Tensor | None = None,
    column_scales: Tensor | None = None,
    factor: float = 1.0,
    bias: Tensor | None = None,
    static_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """activation(gate) * up in e4m3, and its scales.

    Args:
        both: [num_rows, 2 * width], gate first, rows dense.
        activation: one of `octavo.arch.ACTIVATIONS`.
        row_scales: [num_rows, 1] float32: with column_scales [2 * width, 1] and factor, what both
            is multiplied by first; None: nothing.
        column_scales: given together with row_scales.
        factor: see row_scales.
        bias: [2 * width], dense: added then.
        static_scale: [1] float32: the scale of all rows.

    Returns: codes [num_rows, width] float8_e4m3fn and scales [num_rows, 1] float32.
    Raises: ValueError for strides and activations.
    """
    num_rows, width = both.shape[0], both.shape[1] // 2
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}: {activation}")
    if both.stride(1) != 1:
        raise ValueError(f"rows of both must be dense: strides {both.stride()}")
    codes = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=both.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=both.device)
    if num_rows == 0:
        return codes, scales
    _gated_quantize_kernel[(num_rows,)](
        both,
        both if row_scales is None else row_scales,
        both if column_scales is None else column_scales,
        both if bias is None else bias,
        both if static_scale is None else static_scale,
        codes,
        scales,
        both.stride(0),
        width,
        factor,
        BLOCK=_GATED_BLOCK,
        BLOCKS=triton.cdiv(width, _GATED_BLOCK),
        EVEN=width % _GATED_BLOCK == 0,
        ACTIVATION=activation,
        SCALED=row_scales is not None,
        HAS_BIAS=bias is not None,
        STATIC=static_scale is not None,
        BY_HAND=not both.is_cuda,
        num_warps=_GATED_WARPS,
        **pdl.launch_options(both.device),
    )
    return codes, scales
