"""Products of several rows with integer weights that share a scale in groups, and their expansion.

Few rows read the weight as it is packed and expand it in registers. For many rows it is cheaper to
expand it once, into memory that all layers share, and leave the product to cuBLAS.

Measured on an H200 when codes of 4 bits were still scaled one by one, a layer of Llama-3.1-8B in
groups of 128: 111 us for 8 rows (in bfloat16 128), 158 for 32 (133), 216 for 64 (139); expanded 318
for 64 and 792 for 1,024 (612).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.gpu import pdl
from octavo.ops.gpu.grouped import WORDS, Grouped, check
from octavo.ops.gpu.grouped_codes import codes_of, lift, lifted_code


@triton.jit
def _values(
    words, scale, zero, i: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    ZERO_POINT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Weight i of each word, in float32."""
    code = lifted_code(words, i, BITS, ASM)
    if ZERO == "point":
        return (code - (lift(i, BITS) + ZERO_POINT)) * scale
    if ZERO == "points":
        return (code - (lift(i, BITS) + zero)) * scale
    return (code - lift(i, BITS)) * scale + zero


@triton.jit
def _centred(codes, zero, TYPE: tl.constexpr, ASM: tl.constexpr):
    """codes of `codes_of` less 128 (or 1024) and zero, whole numbers, exact: in TYPE."""
    codes = codes.to(TYPE, bitcast=True)
    lifted: tl.constexpr = 128.0 if TYPE.is_bf16() else 1024.0
    offset = (-lifted - zero).to(TYPE)
    if ASM:  # two at once
        add: tl.constexpr = (
            "{ .reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }"
            if TYPE.is_bf16()
            else "add.rn.f16x2 $0, $1, $2;"
        )
        return tl.inline_asm_elementwise(
            add, "=r,r,r", [codes, offset], dtype=codes.dtype, is_pure=True, pack=2
        )
    else:
        return codes + offset


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
    taller operand. Each round takes a block of packed words and, in turn, the 16 inputs that go
    with the same bits of all of them. Under SPLIT program s sums a part of k only, into
    out[s, m, n].
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, 16)
    m_inside, n_inside = m < num_rows, n < out_features
    per_word: tl.constexpr = 32 // BITS
    block: tl.constexpr = 16 * per_word
    num_units: tl.constexpr = block // GROUP if block > GROUP else 1
    per_unit: tl.constexpr = per_word // num_units
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    # Codes less zero, exact, are multiplied, and their sums scaled; else scaled weights, rounded.
    pairs: tl.constexpr = BITS == 4 and ZERO != "offsets" and not EXACT
    codes_at = codes + n.to(tl.int64)[:, None] * num_words + j[None, :]
    x_at = x + m.to(tl.int64)[None, :] * x_stride + j[:, None]
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
        if pairs:
            of_places = codes_of(words, x.dtype.element_ty, ASM)
        for unit in tl.static_range(num_units):
            scale = _of_group(scales, n, n_inside, first + unit * GROUP, num_groups, GROUP)
            zero = scale
            if ZERO != "point":
                zero = _of_group(zeros, n, n_inside, first + unit * GROUP, num_groups, GROUP)
            elif pairs:
                zero = tl.full((BLOCK_N, 1), ZERO_POINT, tl.float32)
            if pairs:
                before = total
                total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for i in tl.static_range(unit * per_unit, (unit + 1) * per_unit):
                mask = m_inside[None, :]
                if not EVEN_K:
                    mask = mask & (first + i * 16 + j < in_features)[:, None]
                rows = tl.load(x_at + (first + i * 16), mask=mask, other=0.0)
                if pairs:
                    w = _centred(of_places[i], zero, x.dtype.element_ty, ASM)
                else:
                    w = _values(words, scale, zero, i, BITS, ZERO, ZERO_POINT, ASM)
                    w = w.to(x.dtype.element_ty)
                total = tl.dot(w, rows, total, input_precision=precision)
            if pairs:
                total = before + total * scale
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
            w = _values(words, scale, zero, i, BITS, ZERO, ZERO_POINT, ASM).to(out.dtype.element_ty)
            out_at = out + n.to(tl.int64)[:, None] * in_features + k[None, :]
            tl.store(out_at, w, mask=n_inside[:, None] & (k < in_features)[None, :])


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
    block_m, block_n, num_warps, stages = _cut(num_rows)
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
        EXACT=x.dtype == torch.float32,
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


def _cut(num_rows: int) -> tuple[int, int, int, int]:
    """(Rows, outputs) of a tile, warps, and loads under way."""
    return min(max(triton.next_power_of_2(num_rows), 16), 64), 64, 4, 3


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
