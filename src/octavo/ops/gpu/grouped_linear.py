"""Products of several rows with integer weights that share a scale in groups, and their expansion.

Few rows read the weight as it is packed and expand it in registers. For many rows it is cheaper to
expand it once, into memory that all layers share, and leave the product to cuBLAS.

Measured on an H200, a layer of Llama-3.1-8B of 4 bits in groups of 128: 75.6 us for 8 rows (in
bfloat16 126), 80.8 for 32 (131), 138 for 64 (136); expanded, in an earlier run, 318 for 64 and 792
for 1,024 (612).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.gpu import pdl
from octavo.ops.gpu.grouped import WORDS, Grouped, check
from octavo.ops.gpu.grouped_codes import add_product, codes_of, value_of


@triton.jit
def _of_group(table, n, n_inside, first, num_groups, GROUP: tl.constexpr):
    """[outputs, 1]: what a table [outputs, groups] holds for input `first`."""
    g = tl.zeros_like(n) + first // GROUP
    at = table + n.to(tl.int64) * num_groups + g
    return tl.load(at, mask=n_inside & (g < num_groups), other=0.0).to(tl.float32)[:, None]


@triton.jit
def _grouped_kernel(
    x, codes, scales, zeros, bias, out, num_rows, out_features, in_features, num_words, num_groups,
    x_stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, ZERO_POINT: tl.constexpr, EVEN_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, SPLIT: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[m, n] (+)= sum_k x[m, k] w[n, k] + bias[n], w rounded to x's type unless its codes of 4
    bits have zeros, summed in float32.

    Program (m, n, s) has a tile of BLOCK_M x BLOCK_N, computed as its transpose: weights are the
    taller operand. Each round takes a block of packed words, and inputs of one scale at a time.
    Under SPLIT program s sums a part of k only, into out[s, m, n].
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, 16)
    m_inside, n_inside = m < num_rows, n < out_features
    per_word: tl.constexpr = 32 // BITS
    block: tl.constexpr = 16 * per_word
    num_units: tl.constexpr = block // GROUP if block > GROUP else 1
    per_unit: tl.constexpr = per_word // num_units
    # Of many sums, one by one for each of several scales, there would be more than of weights.
    few_sums: tl.constexpr = num_units * BLOCK_M <= 256
    scaled_sums: tl.constexpr = BITS == 4 and ZERO != "offsets" and not EXACT and few_sums
    k = tl.arange(0, 16 * per_unit)
    codes_at = codes + n.to(tl.int64)[:, None] * num_words + j[None, :]
    x_at = x + m.to(tl.int64)[None, :] * x_stride + k[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    begin, end = 0, num_words
    if SPLIT:
        length = tl.cdiv(num_words // 16, tl.num_programs(2)) * 16
        begin = tl.program_id(2) * length
        end = min(begin + length, num_words)
        out += tl.program_id(2).to(tl.int64) * num_rows * out_stride
    for start in tl.range(begin, end, 16, num_stages=STAGES):
        first = start * per_word
        words = tl.load(codes_at + start, mask=n_inside[:, None], other=0)
        of_places = words
        if scaled_sums:
            of_places = codes_of(words, x.dtype.element_ty, ASM)
        for unit in tl.static_range(num_units):
            scale = _of_group(scales, n, n_inside, first + unit * GROUP, num_groups, GROUP)
            zero = scale
            if ZERO != "point":
                zero = _of_group(zeros, n, n_inside, first + unit * GROUP, num_groups, GROUP)
            here = first + unit * 16 * per_unit
            mask = m_inside[None, :]
            if not EVEN_K:
                mask = mask & (here + k < in_features)[:, None]
            rows = tl.load(x_at + here, mask=mask, other=0.0)
            total = add_product(
                total, words, of_places, scale, zero, rows, unit, per_unit, BITS, ZERO, ZERO_POINT,
                scaled_sums, EXACT, ASM,
            )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n_inside, other=0.0).to(tl.float32)[:, None]
    at = out + m.to(tl.int64)[None, :] * out_stride + n[:, None]
    mask = n_inside[:, None] & m_inside[None, :]
    if RESIDUAL:
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _join_kernel(
    parts, bias, out, num_rows, out_features, out_stride, num_parts,
    HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[m, n] (+)= sum_s parts[s, m, n] + bias[n]; program (m, b) has block b of row m."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < out_features
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK,), tl.float32)
    at = parts + m * out_features + n
    for s in range(num_parts):
        total += tl.load(
            at + tl.cast(s, tl.int64) * num_rows * out_features, mask=inside, other=0.0
        )
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    to = out + m * out_stride + n
    if RESIDUAL:
        total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _expand_kernel(
    codes, scales, zeros, out, out_features, in_features, num_words, num_groups,
    BLOCK_N: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    ZERO_POINT: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[n, k] = w[n, k], rounded to out's type; program (b, n) has block b of BLOCK_N outputs."""
    start = tl.program_id(0) * 16
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, 16)
    n_inside = n < out_features
    per_word: tl.constexpr = 32 // BITS
    block: tl.constexpr = 16 * per_word
    num_units: tl.constexpr = block // GROUP if block > GROUP else 1
    per_unit: tl.constexpr = per_word // num_units
    first = start * per_word
    at = codes + n.to(tl.int64)[:, None] * num_words + start + j[None, :]
    words = tl.load(at, mask=n_inside[:, None], other=0, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for unit in tl.static_range(num_units):
        scale = _of_group(scales, n, n_inside, first + unit * GROUP, num_groups, GROUP)
        zero = scale
        if ZERO != "point":
            zero = _of_group(zeros, n, n_inside, first + unit * GROUP, num_groups, GROUP)
        for i in tl.static_range(unit * per_unit, (unit + 1) * per_unit):
            k = first + i * 16 + j
            w = value_of(words, scale, zero, i, BITS, ZERO, ZERO_POINT, True, ASM)
            out_at = out + n.to(tl.int64)[:, None] * in_features + k[None, :]
            tl.store(
                out_at,
                w.to(out.dtype.element_ty),
                mask=n_inside[:, None] & (k < in_features)[None, :],
            )


def grouped_linear(
    x: Tensor,
    weight: Grouped,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: bool = False,
) -> Tensor:
    """`out (+)= x weight^T + bias`, accumulated in float32 and rounded once.

    Args:
        x: [num_rows, in_features], rows dense.
        weight: [out_features, in_features]; rounded to x's type while it is multiplied.
        out: [num_rows, out_features], rows dense, in x's type or float32.
        bias: [out_features], dense, x's type.
        residual: add to what out holds.

    Returns: out.
    Raises: ValueError for shapes and strides; TypeError for dtypes.
    """
    (num_rows, in_features), out_features = x.shape, len(weight.codes)
    check(x, weight, out, out_features, bias)
    if num_rows == 0:
        return out
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    exact = x.dtype == torch.float32
    block_m, block_n, num_warps, stages = _cut(num_rows, exact)
    num_words = weight.codes.shape[1]
    num_tiles = triton.cdiv(num_rows, block_m), triton.cdiv(out_features, block_n)
    num_parts = _num_parts(num_tiles[0] * num_tiles[1], num_words // WORDS, pdl.num_sms(x.device))
    split, target = num_parts > 1, out
    if split:
        target = x.new_empty((num_parts, num_rows, out_features), dtype=torch.float32)
    _grouped_kernel[(*num_tiles, num_parts)](
        x,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        x if bias is None else bias,
        target,
        num_rows,
        out_features,
        in_features,
        num_words,
        weight.scales.shape[1],
        x.stride(0),
        out_features if split else out.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BITS=weight.bits,
        GROUP=weight.group_size,
        ZERO=weight.zero_kind,
        ZERO_POINT=weight.zero_point,
        EVEN_K=num_words * 32 // weight.bits == in_features,
        HAS_BIAS=bias is not None and not split,
        RESIDUAL=residual and not split,
        SPLIT=split,
        EXACT=exact,
        STAGES=stages,
        ASM=x.is_cuda,
        num_warps=num_warps,
        **pdl.launch_options(x.device),
    )
    if split:
        _join(target, bias, out, residual)
    return out


def _join(parts: Tensor, bias: Tensor | None, out: Tensor, residual: bool) -> None:
    num_parts, num_rows, out_features = parts.shape
    block = 512
    _join_kernel[(num_rows, triton.cdiv(out_features, block))](
        parts, parts if bias is None else bias, out, num_rows, out_features, out.stride(0),
        num_parts, HAS_BIAS=bias is not None, RESIDUAL=residual, BLOCK=block, num_warps=4,
        **pdl.launch_options(out.device),
    )  # fmt: skip


def _cut(num_rows: int, exact: bool) -> tuple[int, int, int, int]:
    """(Rows, outputs) of a tile, warps, and loads under way. exact: without tensor cores, where
    tiles of more rows spill registers."""
    return min(max(triton.next_power_of_2(num_rows), 16), 16 if exact else 64), 64, 4, 3


_TILES_PER_SM = 5
_MAX_PARTS = 8
_LEAST_BLOCKS = 4
"""Of a part; with fewer it does little but start."""


def _num_parts(num_tiles: int, num_blocks: int, num_sms: int) -> int:
    """Parts that inputs are cut into, so that all multiprocessors have enough to wait for."""
    wanted = _TILES_PER_SM * num_sms // num_tiles
    return max(1, min(wanted, num_blocks // _LEAST_BLOCKS, _MAX_PARTS))


def expand(weight: Grouped, out: Tensor) -> Tensor:
    """The whole weight into out.

    Args:
        weight: [out_features, in_features], in some order of inputs, which is kept.
        out: [out_features, in_features], contiguous, floating point.

    Returns: out.
    Raises: ValueError for another shape.
    """
    out_features, in_features = weight.shape
    if out.shape != (out_features, in_features) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {weight.shape}: {tuple(out.shape)}")
    num_words, block_n = weight.codes.shape[1], 64
    _expand_kernel[(num_words // WORDS, triton.cdiv(out_features, block_n))](
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        out,
        out_features,
        in_features,
        num_words,
        weight.scales.shape[1],
        BLOCK_N=block_n,
        BITS=weight.bits,
        GROUP=weight.group_size,
        ZERO=weight.zero_kind,
        ZERO_POINT=weight.zero_point,
        ASM=out.is_cuda,
        num_warps=4,
        **pdl.launch_options(out.device),
    )
    return out
