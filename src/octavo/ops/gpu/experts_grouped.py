"""The MLPs of a mixture's experts whose weights are integers in groups (AWQ, GPTQ, GGUF), as
products over groups of rows: `ops.gpu.experts` for `GroupedStack`.

Packed words are read as they are, and become operands of tensor cores in registers. The product is
computed as its transpose: weights, which are many, are the taller operand. Where codes of 4 bits
have zeros, codes less zero, exact, are multiplied, and sums scaled; others are scaled one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.arch import ACTIVATIONS
from octavo.ops.gpu import pdl
from octavo.ops.gpu.activation import activated
from octavo.ops.gpu.experts import tile_of, tiles
from octavo.ops.gpu.grouped import WORDS
from octavo.ops.gpu.grouped_codes import add_product, codes_of
from octavo.ops.gpu.grouped_stack import GroupedStack

_MAX_PARTS = 8
_MAX_SPLIT_PAIRS = 64
"""Pairs of tokens and experts whose last product is cut into parts: of more there are tiles
enough."""
_LEAST_BLOCKS = 4
"""Of a part; with fewer it does little but start."""
_PROGRAMS_PER_SM = 3
_ORDER_ROWS, _ORDER_COLUMNS = 16, 128


@triton.jit
def _of_pair(pair, HALF: tl.constexpr):
    """Scale and zero of an int32 each, [outputs, 1] float32."""
    scale = pair.to(tl.int16).to(HALF, bitcast=True)
    zero = (pair >> 16).to(tl.int16).to(HALF, bitcast=True)
    return scale.to(tl.float32)[:, None], zero.to(tl.float32)[:, None]


@triton.jit
def _experts_kernel(
    x, codes, pairs, order, starts, factors, out, x_stride, num_experts, width, in_features,
    num_words, num_groups, top_k,
    GATED: tl.constexpr, SORTED: tl.constexpr, ACTIVATION: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, ZERO_POINT: tl.constexpr, HALF: tl.constexpr, EVEN_K: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of the rows of each expert e, which belong to pairs of a token and an expert:

    GATED: out[r] = act(x G_e^T) * (x U_e^T) [pairs, width], sorted by expert. Else
    out[p, s] = factors[p] (x D_e^T) [pairs, parts, width], by token, of part s of the inputs.

    x: under SORTED a row a pair, sorted; else a row a token. codes [experts, outputs, num_words],
    pairs [experts, num_groups, outputs] of scale and zero, of type HALF; outputs are those of gate,
    then up. A tile is BLOCK_N outputs, half of them up's under GATED, of BLOCK_M rows. Each round
    takes a block of packed words, and inputs of one scale at a time. float32 inside, rounded once.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, first, end = tile_of(starts, tl.program_id(0), num_experts, EXPERTS, BLOCK_M)
    if first >= end:
        return
    rows = first + tl.arange(0, BLOCK_M)
    inside = rows < end
    taken = tl.load(order + rows, mask=inside, other=0)
    x_rows = rows if SORTED else taken // top_k
    step: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    i = tl.arange(0, BLOCK_N)
    feature = tl.program_id(1) * step + i % step
    wanted = feature < width
    n = feature + i // step * width
    num_outputs = 2 * width if GATED else width
    per_word: tl.constexpr = 32 // BITS
    num_units: tl.constexpr = 16 * per_word // GROUP if 16 * per_word > GROUP else 1
    per_unit: tl.constexpr = per_word // num_units
    # Of many sums, one by one for each of several scales, there would be more than of weights.
    few_sums: tl.constexpr = num_units * BLOCK_M <= 256
    scaled_sums: tl.constexpr = BITS == 4 and ZERO != "offsets" and not EXACT and few_sums
    k = tl.arange(0, 16 * per_unit)
    words_at = codes + expert * num_outputs * num_words + tl.arange(0, 16)[None, :]
    words_at += n.to(tl.int64)[:, None] * num_words
    pairs_at = pairs + expert * num_groups * num_outputs + n
    x_at = x + x_rows.to(tl.int64)[None, :] * x_stride + k[:, None]
    length = tl.cdiv(num_words // 16, tl.num_programs(2)) * 16
    begin = tl.program_id(2) * length
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(begin, min(begin + length, num_words), 16, num_stages=STAGES):
        words = tl.load(words_at + start, mask=wanted[:, None], other=0)
        of_places = words
        if scaled_sums:
            of_places = codes_of(words, x.dtype.element_ty, ASM)
        for unit in tl.static_range(num_units):
            at = start * per_word + unit * 16 * per_unit
            group = at // GROUP
            mask = wanted
            if not EVEN_K:
                mask = mask & (tl.zeros_like(n) + group < num_groups)
            pair = tl.load(pairs_at + group * num_outputs, mask=mask, other=0)
            mask = inside[None, :]
            if not EVEN_K:
                mask = mask & (at + k < in_features)[:, None]
            inputs = tl.load(x_at + at, mask=mask, other=0.0)
            scale, zero = _of_pair(pair, HALF)
            total = add_product(
                total, words, of_places, scale, zero, inputs, unit, per_unit, BITS, ZERO,
                ZERO_POINT, scaled_sums, EXACT, ASM,
            )  # fmt: skip
    if GATED:
        both = tl.permute(tl.reshape(total, (2, step, BLOCK_M)), (1, 2, 0))
        gate, up = tl.split(both)
        value = activated(gate, ACTIVATION) * up
        to = rows.to(tl.int64) * width
    else:
        value = total * tl.load(factors + taken, mask=inside, other=0.0)[None, :]
        to = (taken.to(tl.int64) * tl.num_programs(2) + tl.program_id(2)) * width
    feature = tl.program_id(1) * step + tl.arange(0, step)
    at_out = out + to[None, :] + feature[:, None]
    mask = (feature < width)[:, None] & inside[None, :]
    tl.store(at_out, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _order_kernel(
    x, places, order, starts, out, x_stride, num_experts, width, top_k,
    SORTED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[r, k] = x[row of pair r, places[e, k]] [pairs, width] for expert e of row r, sorted."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, first, end = tile_of(starts, tl.program_id(0), num_experts, EXPERTS, BLOCK_M)
    if first >= end:
        return
    rows = first + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside, wanted = rows < end, k < width
    x_rows = rows if SORTED else tl.load(order + rows, mask=inside, other=0) // top_k
    place = tl.load(places + expert * width + k, mask=wanted, other=0)
    mask = inside[:, None] & wanted[None, :]
    values = tl.load(x + x_rows.to(tl.int64)[:, None] * x_stride + place[None, :], mask=mask)
    tl.store(out + rows.to(tl.int64)[:, None] * width + k[None, :], values, mask=mask)


class Cut(NamedTuple):
    """Of one of the kernel's programs."""

    rows: int
    outputs: int
    num_warps: int
    stages: int
    """Loads under way."""


def gated(
    x: Tensor, weight: GroupedStack, order: Tensor, starts: Tensor, out: Tensor, top_k: int,
    activation: str = "silu",
) -> Tensor:  # fmt: skip
    """`act(gate(x)) * up(x)` of each pair's expert, rows sorted by expert.

    Args:
        x: [num_tokens, hidden_size]; rows dense, at any distance.
        weight: [num_experts, 2 * width, hidden_size], gate first.
        order, starts: of `experts.sort_by_expert`.
        out: [num_tokens * top_k, width], contiguous, x's type.
        activation: one of `octavo.arch.ACTIVATIONS`.

    Returns: out.
    Raises: TypeError for dtypes; ValueError for shapes, strides and activations.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}: {activation}")
    if x.stride(1) != 1 or len(order) != len(x) * top_k:
        raise ValueError(f"x must have dense rows, and a {top_k}th of the {len(order)} pairs")
    _check(weight, (len(starts) - 1, 2 * out.shape[1], x.shape[1]), out, len(order))
    if out.dtype != x.dtype:
        raise TypeError(f"out must have x's type {x.dtype}: {out.dtype}")
    if len(x):
        _launch(x, weight, order, starts, x, out, top_k, activation)
    return out


def down(
    x: Tensor, weight: GroupedStack, order: Tensor, starts: Tensor, scales: Tensor, out: Tensor
) -> Tensor:
    """Each row through its expert's last layer, times its weight, back to the order of tokens.

    Args:
        x: [num_tokens * top_k, width], contiguous: what `gated` made.
        weight: [num_experts, hidden_size, width].
        order, starts: of `experts.sort_by_expert`.
        scales: [num_tokens, top_k] float32, contiguous.
        out: [num_tokens, top_k * parts, hidden_size], contiguous, of x's type or float32: sums over
            as many parts of the inputs, `num_parts` of them being fastest.

    Returns: out. Raises: as `gated`.
    """
    if scales.dtype != torch.float32:
        raise TypeError(f"scales must be float32: {scales.dtype}")
    if not (x.is_contiguous() and scales.is_contiguous()) or scales.numel() != len(x):
        raise ValueError(f"x and scales must be contiguous, a scale a row: {tuple(scales.shape)}")
    if len(scales) != len(out) or out.shape[1] % scales.shape[1]:
        raise ValueError(f"out must have parts for all of {tuple(scales.shape)}: {out.shape[:2]}")
    parts = out.shape[1] // scales.shape[1]
    _check(weight, (len(starts) - 1, out.shape[-1], x.shape[1]), out.flatten(0, 1), len(x) * parts)
    if out.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"out must have x's type {x.dtype} or float32: {out.dtype}")
    if len(x):
        _launch(x, weight, order, starts, scales, out, 1, None, parts)
    return out


def num_parts(num_pairs: int, weight: GroupedStack) -> int:
    """Parts that the inputs of `down` are cut into, so that all multiprocessors have work."""
    num_experts, width, _ = weight.shape
    if not 0 < num_pairs <= _MAX_SPLIT_PAIRS:
        return 1
    programs = tiles(num_pairs, num_experts)[1] * triton.cdiv(width, _cut(16).outputs)
    wanted = _PROGRAMS_PER_SM * pdl.num_sms(weight.codes.device) // programs
    num_blocks = weight.codes.shape[2] // WORDS
    return max(1, min(wanted, num_blocks // _LEAST_BLOCKS, _MAX_PARTS))


def _launch(
    x: Tensor, weight: GroupedStack, order: Tensor, starts: Tensor, scales: Tensor, out: Tensor,
    top_k: int, activation: str | None, parts: int = 1,
) -> None:  # fmt: skip
    """activation None: as `down`."""
    num_experts, in_features = len(starts) - 1, x.shape[1]
    width, is_sorted = out.shape[-1], activation is None
    exact = x.dtype == torch.float32  # without tensor cores: tiles of more rows spill registers
    block_m, num_tiles = tiles(len(order), num_experts, 16 if exact else None)
    experts = triton.next_power_of_2(num_experts)
    if weight.order is not None:
        x = _in_order(x, weight.order, order, starts, top_k, is_sorted)
        is_sorted = True
    cut, num_words = _cut(block_m), weight.codes.shape[2]
    step = cut.outputs if activation is None else cut.outputs // 2
    _experts_kernel[(num_tiles, triton.cdiv(width, step), parts)](
        x,
        weight.codes,
        weight.pairs.view(torch.int32),
        order,
        starts,
        scales,
        out,
        x.stride(0),
        num_experts,
        width,
        in_features,
        num_words,
        weight.pairs.shape[1],
        top_k,
        GATED=activation is not None,
        SORTED=is_sorted,
        ACTIVATION=activation,
        EXPERTS=experts,
        BLOCK_M=cut.rows,
        BLOCK_N=cut.outputs,
        BITS=weight.bits,
        GROUP=weight.group_size,
        ZERO=weight.zero_kind,
        ZERO_POINT=weight.zero_point,
        HALF=tl.bfloat16 if weight.pairs.dtype == torch.bfloat16 else tl.float16,
        EVEN_K=num_words * 32 // weight.bits == in_features,
        EXACT=exact,
        STAGES=cut.stages,
        ASM=x.is_cuda,
        num_warps=cut.num_warps,
        **pdl.launch_options(x.device),
    )


def _in_order(
    x: Tensor, places: Tensor, order: Tensor, starts: Tensor, top_k: int, is_sorted: bool
) -> Tensor:
    """[num_pairs, width]: each pair's row in the order of its expert's inputs, sorted by expert."""
    num_experts, width = places.shape
    num_tiles = tiles(len(order), num_experts, _ORDER_ROWS)[1]
    out = x.new_empty((len(order), width))
    _order_kernel[(num_tiles, triton.cdiv(width, _ORDER_COLUMNS))](
        x, places, order, starts, out, x.stride(0), num_experts, width, top_k, SORTED=is_sorted,
        EXPERTS=triton.next_power_of_2(num_experts), BLOCK_M=_ORDER_ROWS, BLOCK_K=_ORDER_COLUMNS,
        num_warps=4, **pdl.launch_options(x.device),
    )  # fmt: skip
    return out


def _cut(block_m: int) -> Cut:
    """Fewer rows need more loads under way: weights come from memory, and there is less to do."""
    return {
        16: Cut(16, 64, 4, 6), 32: Cut(32, 64, 4, 5), 64: Cut(64, 64, 4, 4), 128: Cut(128, 64, 4, 3)
    }[block_m]  # fmt: skip


def _check(weight: GroupedStack, shape: tuple[int, int, int], out: Tensor, rows: int) -> None:
    if weight.shape != shape:
        raise ValueError(f"weight must be {shape}: {weight.shape}")
    if len(out) != rows or not out.is_contiguous():
        raise ValueError(f"out must be contiguous, of {rows} rows: {tuple(out.shape)}")
    for part in (weight.codes, weight.pairs, weight.order):
        assert part is None or part.is_contiguous()
