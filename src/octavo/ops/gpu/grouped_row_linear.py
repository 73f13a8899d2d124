"""Products of one row with integer weights that share a scale in groups (AWQ, GPTQ, GGUF): the
weight streamed once as it is packed, with norm, gating and residual fused in.

As `ops.gpu.row_linear`, with a quarter or half of the bytes.

Measured on an H200: the four products of a layer of Llama-3.1-8B with 4 bits in groups of 128, and
what is fused into them, take 67 to 70 us (1.7 TB/s: unpacking is what takes time), in bfloat16 113.
"""

# mypy: disable-error-code="assignment, attr-defined"
# ruff: noqa: RUF005 - kernels know no unpacking

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.gpu import pdl
from octavo.ops.gpu.grouped import WORDS, Grouped, check, lift, lifted_code

MAX_IN_FEATURES = 32768
_MANY_WEIGHTS = 4 << 20
"""Of fewer, every program reads its own at once."""


@triton.jit
def _words(codes, row, last, words, num_words, EVEN_K: tl.constexpr):
    """[blocks, 16] words of a row of packed weights, zero outside; nobody reads them again."""
    inside = 0 * words + row < last
    if not EVEN_K:
        inside = inside & (words < num_words)
    at = codes + tl.cast(row, tl.int64) * num_words + words
    return tl.load(at, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _of_blocks(table, row, last, first, blocks, num_groups, BLOCK: tl.constexpr,
               GROUP: tl.constexpr):  # fmt: skip
    """[blocks, 1]: what a row of a table [rows, groups] holds for input `first` of each block."""
    g = ((blocks * BLOCK + first) // GROUP)[:, None]
    at = table + tl.cast(row, tl.int64) * num_groups + g
    return tl.load(at, mask=(g < num_groups) & (0 * g + row < last), other=0.0)


@triton.jit
def _row(
    tables, row, last, words, blocks, num_words, num_groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """A row's words, and scales and zeros of each part of a block with its own, as they lie.
    tables: codes, scales, zeros."""
    codes, scales, zeros = tables
    block: tl.constexpr = 512 // BITS
    num_units: tl.constexpr = block // GROUP if block > GROUP else 1
    of_scales, of_zeros = (), ()
    for unit in tl.static_range(num_units):
        scale = _of_blocks(scales, row, last, unit * GROUP, blocks, num_groups, block, GROUP)
        zero = scale
        if ZERO != "point":
            zero = _of_blocks(zeros, row, last, unit * GROUP, blocks, num_groups, block, GROUP)
        of_scales, of_zeros = of_scales + (scale,), of_zeros + (zero,)
    return _words(codes, row, last, words, num_words, EVEN_K), of_scales, of_zeros


@triton.jit
def _products(
    row, inputs, lifts, sums,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """[blocks, 16], whose sum is sum_k w[k] x[k] for a `_row`. inputs: for each place in a word
    those that go with it; of those that share a scale: sums, and lifts, what codes are too large by
    times them, summed.
    """
    per_word: tl.constexpr = 32 // BITS
    block: tl.constexpr = 16 * per_word
    num_units: tl.constexpr = block // GROUP if block > GROUP else 1
    per_unit: tl.constexpr = per_word // num_units
    words, scales, zeros = row
    total = tl.zeros(words.shape, tl.float32)
    for unit in tl.static_range(num_units):
        product = -lifts[unit]
        for i in tl.static_range(unit * per_unit, (unit + 1) * per_unit):
            product += lifted_code(words, i, BITS, ASM) * inputs[i]
        if ZERO == "points":
            product -= zeros[unit].to(tl.float32) * sums[unit]
        total += scales[unit].to(tl.float32) * product
        if ZERO == "offsets":
            total += zeros[unit].to(tl.float32) * sums[unit]
    return total


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _sum4(a, b, c, d, SIZE: tl.constexpr):
    """All four sums, in one go."""
    flat = (
        tl.reshape(a, [SIZE]), tl.reshape(b, [SIZE]), tl.reshape(c, [SIZE]), tl.reshape(d, [SIZE])
    )  # fmt: skip
    return tl.reduce(flat, 0, _add4)


@triton.jit
def _finish(
    value, up, row, last, bias, out, out_features,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    inside = row < last
    if HAS_BIAS:
        value += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        if HAS_BIAS:
            up += tl.load(bias + out_features + row, mask=inside, other=0.0).to(tl.float32)
        value = value / (1.0 + tl.exp(-value)) * up
    if RESIDUAL:
        value += tl.load(out + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _grouped_row_kernel(
    x, order, codes, scales, zeros, bias, norm_weight, out, out_features, in_features, num_words,
    num_groups, eps,
    NUM_BLOCKS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    ZERO_POINT: tl.constexpr, PERMUTED: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr,
    NORM: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[n] (+)= sum_k w[n, k] x[k] + bias[n] in float32, w and its packing as in
    `grouped.Grouped`.

    x [in_features], in the order that `order` names under PERMUTED, normalised first under NORM;
    codes [out_features, num_words], or gate over up, twice as many rows, under GATED, whose result
    is silu(gate) * up. Program p of P has the output features [p N / P, (p + 1) N / P) of N, four
    rows of weights at a time: of four features, or gate and up of two.
    """
    pid = tl.program_id(0).to(tl.int64)
    num_programs = tl.num_programs(0)
    first = (pid * out_features // num_programs).to(tl.int32)
    last = ((pid + 1) * out_features // num_programs).to(tl.int32)
    per_word: tl.constexpr = 32 // BITS
    block: tl.constexpr = 16 * per_word
    num_units: tl.constexpr = block // GROUP if block > GROUP else 1
    per_unit: tl.constexpr = per_word // num_units
    step: tl.constexpr = 2 if GATED else 4
    blocks = tl.arange(0, NUM_BLOCKS)
    words = blocks[:, None] * 16 + tl.arange(0, 16)[None, :]
    # Rows 2 and 3 are up's of 0 and 1, or those behind them.
    wide = tl.cast(out_features if GATED else 2, tl.int64)
    far_zeros = zeros + wide * num_groups if ZERO != "point" else zeros
    near = (codes, scales, zeros)
    far = (codes + wide * num_words, scales + wide * num_groups, far_zeros)
    behind = 0 if GATED else 2
    next_a = _row(
        near, first, last, words, blocks, num_words, num_groups,
        BITS, GROUP, ZERO, EVEN_K,
    )  # fmt: skip
    next_b = _row(
        near, first + 1, last, words, blocks, num_words, num_groups,
        BITS, GROUP, ZERO, EVEN_K,
    )  # fmt: skip
    next_c = _row(
        far, first, last - behind, words, blocks, num_words, num_groups,
        BITS, GROUP, ZERO, EVEN_K,
    )  # fmt: skip
    next_d = _row(
        far, first + 1, last - behind, words, blocks, num_words, num_groups,
        BITS, GROUP, ZERO, EVEN_K,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, places, insides = (), (), ()
    squares = tl.zeros((NUM_BLOCKS, 16), tl.float32)
    for i in tl.static_range(per_word):
        k = blocks[:, None] * block + i * 16 + tl.arange(0, 16)[None, :]
        inside = k < in_features
        at = tl.load(order + k, mask=inside, other=0) if PERMUTED else k
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        squares += values * values
        row, places, insides = row + (values,), places + (at,), insides + (inside,)
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares) / in_features + eps)
    inputs, lifts, sums = (), (), ()
    for unit in tl.static_range(num_units):
        total = tl.zeros((NUM_BLOCKS, 16), tl.float32)
        lifted = tl.zeros((NUM_BLOCKS, 16), tl.float32)
        for i in tl.static_range(unit * per_unit, (unit + 1) * per_unit):
            values = row[i]
            if NORM:
                values *= factor
                if norm_weight.dtype.element_ty != tl.float32:
                    values = values.to(x.dtype.element_ty).to(tl.float32)
                weights = tl.load(norm_weight + places[i], mask=insides[i], other=0.0)
                values = (values * weights.to(tl.float32)).to(x.dtype.element_ty).to(tl.float32)
            total += values
            lifted += values * (lift(i, BITS) + ZERO_POINT)
            inputs = inputs + (values,)
        lifts, sums = lifts + (lifted,), sums + (total,)
    for start in tl.range(first, last, step, num_stages=1):
        n = tl.cast(start, tl.int32)
        # Registers hold the next rows while these are summed.
        a, b, c, d = next_a, next_b, next_c, next_d
        next_a = _row(
            near, n + step, last, words, blocks, num_words, num_groups,
            BITS, GROUP, ZERO, EVEN_K,
        )  # fmt: skip
        next_b = _row(
            near, n + step + 1, last, words, blocks, num_words, num_groups,
            BITS, GROUP, ZERO, EVEN_K,
        )  # fmt: skip
        next_c = _row(
            far, n + step, last - behind, words, blocks, num_words, num_groups,
            BITS, GROUP, ZERO, EVEN_K,
        )  # fmt: skip
        next_d = _row(
            far, n + step + 1, last - behind, words, blocks, num_words, num_groups,
            BITS, GROUP, ZERO, EVEN_K,
        )  # fmt: skip
        va, vb, vc, vd = _sum4(
            _products(a, inputs, lifts, sums, BITS, GROUP, ZERO, ASM),
            _products(b, inputs, lifts, sums, BITS, GROUP, ZERO, ASM),
            _products(c, inputs, lifts, sums, BITS, GROUP, ZERO, ASM),
            _products(d, inputs, lifts, sums, BITS, GROUP, ZERO, ASM),
            NUM_BLOCKS * 16,
        )
        _finish(va, vc, n, last, bias, out, out_features, GATED, HAS_BIAS, RESIDUAL)
        _finish(vb, vd, n + 1, last, bias, out, out_features, GATED, HAS_BIAS, RESIDUAL)
        if not GATED:
            _finish(vc, vc, n + 2, last, bias, out, out_features, GATED, HAS_BIAS, RESIDUAL)
            _finish(vd, vd, n + 3, last, bias, out, out_features, GATED, HAS_BIAS, RESIDUAL)


def grouped_row_linear(
    x: Tensor,
    weight: Grouped,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    residual: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`out (+)= rms_norm(x) weight^T + bias`, accumulated in float32 and rounded once.

    Args:
        x: [1, in_features], dense; in_features at most 32768.
        weight: [out_features, in_features].
        out: [1, out_features], dense, in x's type or float32; under gated half as many.
        bias: [out_features], dense, x's type.
        gated: weight is gate over up, the result silu(gate) * up.
        residual: add to what out holds.
        norm_weight: [in_features], dense, x's type or float32: x is normalised first, rounded as
            `norm.rms_norm` rounds.
        eps: of the norm.

    Returns: out.
    Raises: ValueError for shapes and strides; TypeError for dtypes.
    """
    (num_rows, in_features), num_outputs = x.shape, len(weight.codes) // (2 if gated else 1)
    check(x, weight, out, num_outputs, bias)
    if num_rows != 1 or in_features > MAX_IN_FEATURES:
        raise ValueError(
            f"this kernel takes 1 row of at most {MAX_IN_FEATURES} features: {tuple(x.shape)}"
        )
    if norm_weight is not None and (
        norm_weight.shape != (in_features,) or norm_weight.dtype not in (x.dtype, torch.float32)
    ):
        raise ValueError(
            f"norm_weight must be {x.dtype} or float32 [{in_features}]: {norm_weight.dtype}, "
            f"{tuple(norm_weight.shape)}"
        )
    num_words = weight.codes.shape[1]
    num_blocks = triton.next_power_of_2(num_words // WORDS)
    num_programs = triton.cdiv(num_outputs, 2 if gated else 4)
    if num_outputs * in_features >= _MANY_WEIGHTS:
        num_programs = min(num_programs, _per_sm(num_blocks) * pdl.num_sms(x.device))
    _grouped_row_kernel[(num_programs,)](
        x,
        x if weight.order is None else weight.order,
        weight.codes,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        x if bias is None else bias,
        x if norm_weight is None else norm_weight,
        out,
        num_outputs,
        in_features,
        num_words,
        weight.scales.shape[1],
        eps,
        NUM_BLOCKS=num_blocks,
        BITS=weight.bits,
        GROUP=weight.group_size,
        ZERO=weight.zero_kind,
        ZERO_POINT=weight.zero_point,
        PERMUTED=weight.order is not None,
        EVEN_K=num_blocks * WORDS == num_words,
        GATED=gated,
        NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        RESIDUAL=residual,
        ASM=x.is_cuda,
        num_warps=_num_warps(num_blocks),
        **pdl.launch_options(x.device),
    )
    return out


def _per_sm(num_blocks: int) -> int:
    """Programs of a multiprocessor."""
    return max(1, min(160 // num_blocks, 16))


def _num_warps(num_blocks: int) -> int:
    """So that a thread has four words of each row, or more."""
    return min(max(num_blocks * WORDS // 128, 1), 8)
