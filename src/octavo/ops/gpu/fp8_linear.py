"""Products in fp8 (e4m3 x e4m3, summed in float32, scaled after).

Few rows, and weights with a scale for each 128 inputs: a kernel of octavo's. Many rows: cuBLAS
multiplies the codes, and the kernel behind it, which adds to the residual or gates, scales.

Measured on an H200, the four products of a layer of Llama-3.1-8B, scales not counted: 69 us for 8
rows by either, and 83 by the first against 68 for 32; cuBLAS with scales of rows in the product
took 102 us for either, and for 1,024 rows 322, without 329.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.gpu import pdl
from octavo.ops.gpu.activation import activated
from octavo.ops.gpu.quantize import GROUP


@triton.jit
def _fp8_kernel(
    x, weight, x_scales, weight_scales, bias, out, num_rows, out_features, in_features, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUPED: tl.constexpr,
    EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[m, n] (+)= x_scales[m] weight_scales[n] sum_k x[m, k] weight[n, k] + bias[n].

    x [num_rows, in_features] and weight [out_features, in_features] e4m3, dense; scales [rows], or
    under GROUPED [rows, in_features / 128], which go with each 128 of k. Program (m, n) has a tile
    of BLOCK_M x BLOCK_N, computed as its transpose: weights are the taller operand.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_inside, n_inside = m < num_rows, n < out_features
    num_groups = in_features // 128
    w_at = weight + n.to(tl.int64)[:, None] * in_features + k[None, :]
    x_at = x + m.to(tl.int64)[None, :] * in_features + k[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
        w_mask, x_mask = n_inside[:, None], m_inside[None, :]
        if not EVEN_K:
            k_inside = start + k < in_features
            w_mask, x_mask = w_mask & k_inside[None, :], x_mask & k_inside[:, None]
        w = tl.load(w_at + start, mask=w_mask, other=0.0)
        rows = tl.load(x_at + start, mask=x_mask, other=0.0)
        if GROUPED:
            g = start // 128
            of_n = tl.load(
                weight_scales + n.to(tl.int64) * num_groups + g, mask=n_inside, other=0.0
            )
            of_m = tl.load(x_scales + m.to(tl.int64) * num_groups + g, mask=m_inside, other=0.0)
            total += tl.dot(w, rows) * of_n[:, None] * of_m[None, :]
        else:
            total = tl.dot(w, rows, total)
    if not GROUPED:
        of_n = tl.load(weight_scales + n, mask=n_inside, other=0.0)
        of_m = tl.load(x_scales + m, mask=m_inside, other=0.0)
        total *= of_n[:, None] * of_m[None, :]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[:, None]
    at = out + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    mask = n_inside[:, None] & m_inside[None, :]
    if RESIDUAL:
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)


def fp8_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: bool = False,
) -> Tensor:
    """`out (+)= (x_scales x) (weight_scales weight)^T + bias`, rounded once.

    Args:
        x: [num_rows, in_features] float8_e4m3fn, contiguous, with its scales: of
            `quantize.quantize_rows`.
        x_scales: float32, [num_rows, 1], or [num_rows, in_features / 128].
        weight: [out_features, in_features] float8_e4m3fn, contiguous.
        weight_scales: float32, [out_features, 1], or [out_features, in_features / 128]: of as many
            columns as x_scales.
        out: [num_rows, out_features], rows dense; float16, bfloat16 or float32.
        bias: [out_features], dense, floating point.
        residual: add to what out holds.

    Returns: out.
    Raises: ValueError for shapes and strides; TypeError for dtypes.
    """
    (num_rows, in_features), out_features = x.shape, len(weight)
    _check(x, x_scales, weight, weight_scales, out, bias)
    if num_rows == 0:
        return out
    grouped = weight_scales.shape[1] > 1
    block_m, block_n, block_k, num_warps, stages = _cut(num_rows, grouped)
    grid = (triton.cdiv(num_rows, block_m), triton.cdiv(out_features, block_n))
    _fp8_kernel[grid](
        x,
        weight,
        x_scales,
        weight_scales,
        x_scales if bias is None else bias,
        out,
        num_rows,
        out_features,
        in_features,
        out.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUPED=grouped,
        EVEN_K=in_features % block_k == 0,
        HAS_BIAS=bias is not None,
        RESIDUAL=residual,
        STAGES=stages,
        num_warps=num_warps,
        **pdl.launch_options(x.device),
    )
    return out


def _cut(num_rows: int, grouped: bool) -> tuple[int, int, int, int, int]:
    """(Rows, outputs, inputs) of a tile, warps, and loads under way."""
    block_m = min(max(triton.next_power_of_2(num_rows), 16), 128)
    if block_m == 128:
        return 128, 128, GROUP, 8, 3
    if block_m == 64 or grouped:
        return block_m, 64, GROUP, 4, 4
    return block_m, 64, 2 * GROUP, 4, 4 if block_m == 16 else 3


_UNIT = 2.0**-8
UNSCALED = _UNIT**-2
"""What `cublas_product` is too small by."""
MANY_ROWS = 512
"""From here on products that are scaled by the way are as fast as plain ones."""
MAX_TILE_ROWS = 16
"""More rows are cuBLAS' where it can."""


def is_cublas_product(
    num_rows: int, out_features: int, in_features: int, grouped: bool, device: torch.device
) -> bool:
    """Whether `cublas_product` is the faster one, and possible."""
    aligned = out_features % 16 == 0 and in_features % 16 == 0
    return device.type == "cuda" and aligned and not grouped and num_rows > MAX_TILE_ROWS


def unit_scale(device: torch.device) -> Tensor:
    """What `cublas_product` multiplies both sides by: sums of codes would overflow float16."""
    return torch.full((), _UNIT, dtype=torch.float32, device=device)


def cublas_product(x: Tensor, weight: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    """x weight^T of e4m3 codes in dtype, for `scale_into`; unit: of `unit_scale`."""
    return torch._scaled_mm(x, weight.t(), unit, unit, out_dtype=dtype, use_fast_accum=True)


def scaled_product(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """(x_scales x) (weight_scales weight)^T of e4m3 codes, rounded once to dtype; into out, which
    must be contiguous, if it is given."""
    return torch._scaled_mm(
        x, weight.t(), x_scales, weight_scales.t(), out_dtype=dtype, use_fast_accum=True, out=out
    )


@triton.jit
def _scale_kernel(
    product, x_scales, weight_scales, bias, out, out_features, product_stride, out_stride, factor,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[m, n] (+)= factor x_scales[m] weight_scales[n] product[m, n] + bias[n], or with an
    ACTIVATION that of gate times up, product's halves; program (m, b) has block b of row m."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < out_features
    of_n = tl.load(weight_scales + n, mask=inside, other=0.0) * factor
    of_up = of_n
    if ACTIVATION != "":
        of_up = tl.load(weight_scales + out_features + n, mask=inside, other=0.0) * factor
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    of_m = tl.load(x_scales + m)
    at = product + m * product_stride + n
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32) * (of_m * of_n)
    if HAS_BIAS:
        value += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        up = tl.load(at + out_features, mask=inside, other=0.0).to(tl.float32) * (of_m * of_up)
        if HAS_BIAS:
            up += tl.load(bias + out_features + n, mask=inside, other=0.0).to(tl.float32)
        value = activated(value, ACTIVATION) * up
    to = out + m * out_stride + n
    if RESIDUAL:
        value += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, value.to(out.dtype.element_ty), mask=inside)


def scale_into(
    product: Tensor,
    x_scales: Tensor,
    weight_scales: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: bool = False,
    activation: str = "",
) -> Tensor:
    """`out (+)= (x_scales weight_scales^T) product + bias`, rounded once more.

    Args:
        product: [num_rows, out_features], rows dense, of `cublas_product`.
        x_scales: [num_rows, 1] float32.
        weight_scales: [out_features, 1] float32.
        out: like product, in any floating type; under an activation half as wide.
        bias: [out_features], dense.
        residual: add to what out holds.
        activation: product is gate beside up, the result activation(gate) * up; or "".

    Returns: out.
    Raises: ValueError for shapes and strides.
    """
    num_rows, width = product.shape
    num_outputs = width // 2 if activation else width
    if out.shape != (num_rows, num_outputs) or out.stride(1) != 1 or product.stride(1) != 1:
        raise ValueError(f"out must be {(num_rows, num_outputs)}, rows dense: {tuple(out.shape)}")
    for name, part, shape in (
        ("x_scales", x_scales, (num_rows, 1)),
        ("weight_scales", weight_scales, (width, 1)),
        ("bias", bias, (width,)),
    ):
        if part is not None and (part.shape != shape or not part.is_contiguous()):
            raise ValueError(f"{name} must be dense {shape}: {tuple(part.shape)}")
    block = 1024
    _scale_kernel[(num_rows, triton.cdiv(num_outputs, block))](
        product,
        x_scales,
        weight_scales,
        x_scales if bias is None else bias,
        out,
        num_outputs,
        product.stride(0),
        out.stride(0),
        UNSCALED,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        RESIDUAL=residual,
        BLOCK=block,
        num_warps=4,
        **pdl.launch_options(out.device),
    )
    return out


def _check(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    out: Tensor,
    bias: Tensor | None,
) -> None:
    (num_rows, in_features), out_features = x.shape, len(weight)
    if weight.shape[1] != in_features or not (weight.is_contiguous() and x.is_contiguous()):
        raise ValueError(
            f"x and weight must be contiguous and of as many features: {tuple(x.shape)}, "
            f"{tuple(weight.shape)}"
        )
    columns = x_scales.shape[1]
    if columns not in (1, in_features / GROUP):
        raise ValueError(f"scales of {in_features} features: {tuple(x_scales.shape)}")
    for scales, rows in ((x_scales, num_rows), (weight_scales, out_features)):
        if scales.shape != (rows, columns) or not scales.is_contiguous():
            raise ValueError(f"scales must be dense {(rows, columns)}: {tuple(scales.shape)}")
        if scales.dtype != torch.float32:
            raise TypeError(f"scales must be float32: {scales.dtype}")
    if out.shape != (num_rows, out_features) or out.stride(1) != 1:
        raise ValueError(f"out must be {(num_rows, out_features)}, rows dense: {tuple(out.shape)}")
    if bias is not None and (bias.shape != (out_features,) or bias.stride(0) != 1):
        raise ValueError(f"bias must be dense [{out_features}]: {tuple(bias.shape)}")
    if x.dtype != torch.float8_e4m3fn or weight.dtype != torch.float8_e4m3fn:
        raise TypeError(f"x and weight must be float8_e4m3fn: {x.dtype}, {weight.dtype}")
