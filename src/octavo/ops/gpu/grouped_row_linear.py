"""Products of one row with integer weights that share a scale in groups (AWQ, GPTQ, GGUF): the
weight streamed once as it is packed, with norm, gating and residual fused in.

As `ops.gpu.row_linear`, with a quarter or half of the bytes, so that what is done for each weight
counts. Codes become floats two at a time: 4 bits are put into the mantissa of 128 in bfloat16, of
1024 in float16. Tensor cores multiply them, 16 rows of weights by 8 columns that hold one row of
inputs: place i of words has column i to itself, so that places of different groups stay apart until
they have been scaled, and the sum over columns is the product. A code of 8 bits is two of 4.

Layouts are chosen such that nothing moves between lanes or through shared memory on the way: a
thread loads 4 words of a row, and just these are its operands. Were a compiler to lay tensors out
in another way, results would stay right and the kernel would become slow.
"""

# mypy: disable-error-code="assignment, attr-defined, var-annotated"
# ruff: noqa: RUF005 - kernels know no unpacking

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.gpu import pdl
from octavo.ops.gpu.activation import activated
from octavo.ops.gpu.grouped import WORDS, Grouped, check
from octavo.ops.gpu.grouped_codes import codes_of
from octavo.ops.gpu.grouped_row_parts import (
    as_operand,
    column,
    fetch_tile,
    inputs_of,
    moved,
    per_row,
    places_of,
    sides,
)

_MAX_PARTS, _MAX_ROUNDS = 16, 16
_MAX_WORDS = _MAX_PARTS * _MAX_ROUNDS * WORDS
"""Of a row of weights: those of 32768 inputs of 4 bits, or 16384 of 8."""
_MAX_REGISTERS = 128
"""Of a thread, so that a multiprocessor has room for 16 warps."""


@triton.jit
def _inputs(
    x, order, norm_weight, in_features, eps,
    PARTS: tl.constexpr, ROUNDS: tl.constexpr, BITS: tl.constexpr, PERMUTED: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """For each round inputs [parts, 16, 8] that go with its words and places in them, and their
    sums over words, float32 [parts, 16, 8], the same for each of 16 rows.

    Of codes of 8 bits the upper half goes with x, the lower with x / 16.
    """
    i = tl.arange(0, PARTS * 128)
    place = i if BITS == 4 else i // 32 * 16 + i % 16
    rows, places, insides = (), (), ()
    squares = tl.zeros((PARTS * 128,), tl.float32)
    for turn in tl.static_range(ROUNDS):
        k = turn * PARTS * (512 // BITS) + place
        inside = k < in_features
        at = tl.load(order + k, mask=inside, other=0) if PERMUTED else k
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        squares += values * values
        rows, places, insides = rows + (values,), places + (at,), insides + (inside,)
    factor = 1.0
    if NORM:  # codes of 8 bits have each input twice
        factor = tl.rsqrt(tl.sum(squares) * (4 / BITS) / in_features + eps)
    inputs, sums = (), ()
    ones = tl.full((PARTS, 16, 16), 1.0, x.dtype.element_ty)
    for turn in tl.static_range(ROUNDS):
        values = rows[turn]
        if NORM:
            values *= factor
            if norm_weight.dtype.element_ty != tl.float32:
                values = values.to(x.dtype.element_ty).to(tl.float32)
            weights = tl.load(norm_weight + places[turn], mask=insides[turn], other=0.0)
            values = (values * weights.to(tl.float32)).to(x.dtype.element_ty).to(tl.float32)
        if BITS == 8:
            values *= tl.where(i // 16 % 2 == 0, 0.0625, 1.0)
        values = inputs_of(values.to(x.dtype.element_ty), PARTS)
        total = tl.reshape(tl.dot(ones, values), (PARTS, 2, 8, 8))
        first, _ = tl.split(tl.permute(total, (0, 2, 3, 1)))
        inputs, sums = inputs + (values,), sums + (sides(first, first, 8),)
    return inputs, sums


@triton.jit
def _product(
    tile, inputs, sums, BITS: tl.constexpr, ZERO: tl.constexpr, ZERO_POINT: tl.constexpr,
    COLUMNS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """[parts, 16, 8], whose sum over parts and columns is the product of a round of 16 rows, of
    `fetch_tile`."""
    words, scale, zero, far_scale, far_zero = tile
    num_parts: tl.constexpr = inputs.shape[0]
    dtype: tl.constexpr = inputs.dtype
    lift: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
    # Of 8 bits, x counts a 16th, and sums hold 17 of it.
    unit: tl.constexpr = 1.0 if BITS == 4 else 16.0
    share: tl.constexpr = 1.0 if BITS == 4 else 17.0
    total = tl.zeros((num_parts, 16, 8), tl.float32)
    codes = codes_of(words, dtype, ASM)
    for i in tl.static_range(8):
        w = as_operand(codes[i].to(dtype, bitcast=True), num_parts)
        total = tl.dot(w, column(inputs, i, ASM), total)
    if ZERO == "points":
        total -= (per_row(zero, far_zero, num_parts, COLUMNS) / share + lift) * sums
    else:
        total -= (ZERO_POINT / share + lift) * sums
    total *= per_row(scale, far_scale, num_parts, COLUMNS) * unit
    if ZERO == "offsets":
        total += per_row(zero, far_zero, num_parts, COLUMNS) * (unit / share) * sums
    return total


@triton.jit
def _added(
    start, last, bias, out, out_features,
    STEP: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """What is added to STEP sums of a tile, and under GATED to up's: bias, residual."""
    n = start + tl.arange(0, STEP)
    inside = n < last
    value = tl.zeros((STEP,), tl.float32)
    up, before = value, value
    if HAS_BIAS:
        value = tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(bias + out_features + n, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        before = tl.load(out + n, mask=inside, other=0.0).to(tl.float32)
    return value, up, before


@triton.jit
def _finish(values, added, start, last, out, GATED: tl.constexpr):
    """Store the 16 sums of a tile and what is added; under GATED those are gate's and up's 8."""
    if GATED:
        value, up = tl.split(tl.permute(tl.reshape(values, (2, 8)), (1, 0)))
        value += added[0]
        value = activated(value, "silu") * (up + added[1])
    else:
        value = values + added[0]
    n = start + tl.arange(0, value.shape[0])
    tl.store(out + n, (value + added[2]).to(out.dtype.element_ty), mask=n < last)


@triton.jit
def _grouped_row_kernel(
    x, order, codes, scales, zeros, bias, norm_weight, out, out_features, in_features, num_words,
    num_groups, eps,
    PARTS: tl.constexpr, ROUNDS: tl.constexpr, AHEAD: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, ZERO_POINT: tl.constexpr, PERMUTED: tl.constexpr,
    EVEN_K: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[n] (+)= sum_k w[n, k] x[k] + bias[n] in float32, w and its packing as in
    `grouped.Grouped`.

    x [in_features], in the order that `order` names under PERMUTED, normalised first under NORM;
    codes [out_features, num_words], or gate over up, twice as many rows, under GATED, whose result
    is silu(gate) * up. A tile is 16 rows of weights: of 16 features, or gate and up of 8. Program p
    of P has the tiles [p T / P, (p + 1) T / P) of T. Warp w has block PARTS i + w in round i of
    ROUNDS, and loads AHEAD rounds before it needs them.
    """
    step: tl.constexpr = 8 if GATED else 16
    # Two columns have the same scale, unless groups end between them.
    columns: tl.constexpr = 4 if GROUP % (128 // BITS) == 0 else 8
    num_tiles = tl.cdiv(out_features, step)
    first = tl.program_id(0) * num_tiles // tl.num_programs(0) * step
    last = min((tl.program_id(0) + 1) * num_tiles // tl.num_programs(0) * step, out_features)
    # The second half of a tile: up's rows, or those behind.
    begin = places_of(
        (codes, scales, zeros), out_features if GATED else 8, num_words, num_groups,
        PARTS, BITS, GROUP, columns,
    )  # fmt: skip
    after = moved(begin, first, num_words, num_groups)
    coming = ()
    for i in tl.static_range(AHEAD):
        tile = fetch_tile(
            after, last - first, num_words, num_groups, i,
            PARTS, BITS, GROUP, ZERO, columns, EVEN_K, GATED,
        )  # fmt: skip
        coming = coming + (tile,)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    inputs, sums = _inputs(
        x, order, norm_weight, in_features, eps, PARTS, ROUNDS, BITS, PERMUTED, NORM
    )
    for start in tl.range(first, last, step, num_stages=1):
        here = after
        # Loads return in the order in which they were asked for: these before the next weights.
        added = _added(start, last, bias, out, out_features, step, GATED, HAS_BIAS, RESIDUAL)
        after = moved(begin, start + step, num_words, num_groups)
        total = tl.zeros((PARTS, 16, 8), tl.float32)
        for i in tl.static_range(ROUNDS):
            # Registers hold the next rounds while this is summed.
            at, left = here, last - start
            if i + AHEAD >= ROUNDS:
                at, left = after, last - start - step
            tile = fetch_tile(
                at, left, num_words, num_groups, (i + AHEAD) % ROUNDS,
                PARTS, BITS, GROUP, ZERO, columns, EVEN_K, GATED,
            )  # fmt: skip
            coming = coming + (tile,)
            total += _product(coming[i], inputs[i], sums[i], BITS, ZERO, ZERO_POINT, columns, ASM)
        coming = coming[ROUNDS:]
        values = tl.sum(tl.sum(total, 2), 0)
        _finish(values, added, start, last, out, GATED)


def is_row_product(x: Tensor, weight: Grouped) -> bool:
    """Whether `grouped_row_linear` takes them: others are for `grouped_linear`."""
    return len(x) == 1 and x.element_size() == 2 and weight.codes.shape[1] <= _MAX_WORDS


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
        x: [1, in_features], dense, of 16 bits.
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
    in_features, num_outputs = x.shape[1], len(weight.codes) // (2 if gated else 1)
    check(x, weight, out, num_outputs, bias)
    if not is_row_product(x, weight):
        raise ValueError(
            f"this kernel takes 1 row of 16-bit numbers and at most {_MAX_WORDS} words of a row of "
            f"weights: {tuple(x.shape)}, {x.dtype}, {weight.codes.shape[1]} words"
        )
    if norm_weight is not None and (
        norm_weight.shape != (in_features,) or norm_weight.dtype not in (x.dtype, torch.float32)
    ):
        raise ValueError(
            f"norm_weight must be {x.dtype} or float32 [{in_features}]: {norm_weight.dtype}, "
            f"{tuple(norm_weight.shape)}"
        )
    num_words = weight.codes.shape[1]
    parts, rounds, ahead = _cut(num_words // WORDS)
    num_tiles = triton.cdiv(num_outputs, 8 if gated else 16)
    num_programs = min(num_tiles, _per_sm(parts) * pdl.num_sms(x.device))
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
        PARTS=parts,
        ROUNDS=rounds,
        AHEAD=ahead,
        BITS=weight.bits,
        GROUP=weight.group_size,
        ZERO=weight.zero_kind,
        ZERO_POINT=weight.zero_point,
        PERMUTED=weight.order is not None,
        EVEN_K=parts * rounds * WORDS * 32 // weight.bits == in_features,
        GATED=gated,
        NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        RESIDUAL=residual,
        ASM=x.is_cuda,
        num_warps=parts,
        maxnreg=_MAX_REGISTERS,
        **pdl.launch_options(x.device),
    )
    return out


def _cut(num_blocks: int) -> tuple[int, int, int]:
    """Parts of a row, which are as many warps; rounds of each; and loads ahead, in rounds.

    As many loads as registers have room for.
    """
    parts = min(triton.next_power_of_2(triton.cdiv(num_blocks, 4)), _MAX_PARTS)
    rounds = triton.cdiv(num_blocks, parts)
    return parts, rounds, min(rounds, 4 if rounds <= 4 else 3 if rounds <= 8 else 2)


def _per_sm(parts: int) -> int:
    """Programs of a multiprocessor."""
    return _MAX_PARTS // parts
