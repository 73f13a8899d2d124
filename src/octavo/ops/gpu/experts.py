"""The MLPs of a mixture's experts as products over groups of rows.

The (token, expert) pairs are sorted by expert on the device; each product then gives every program
one tile of rows of one expert, which it finds from where the experts' rows begin. There are as many
programs as there can be tiles, whatever the router chose, so a step can be recorded; those that are
too many end at once. (Gale et al. 2023 have the idea; no row is dropped or padded in memory.)

Weights in fp8 are read as they are and multiplied in the type of the inputs, which holds e4m3
exactly; their scales are applied to sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.arch import ACTIVATIONS
from octavo.ops.gpu import pdl
from octavo.ops.gpu.activation import activated

_BLOCK_N, _BLOCK_K = 64, 64
_GROUP = 128
"""Inputs that share a scale of a weight, where rows have several."""
_SORT_BLOCK = 1024
_SUM_BLOCK = 1024


@triton.jit
def _sort_kernel(
    ids, order, starts, num_pairs, num_experts, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Program e: starts[e] = number of ids below e, and order from there on = where ids are e, in
    rising order; starts[num_experts] = num_pairs."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    below = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, num_pairs, BLOCK):
        chosen = tl.load(ids + first + lanes, mask=first + lanes < num_pairs, other=num_experts)
        below += (chosen < expert).to(tl.int32)
    place = tl.sum(below, 0)
    tl.store(starts + expert, place)
    if expert == num_experts - 1:
        tl.store(starts + num_experts, num_pairs)
    for first in range(0, num_pairs, BLOCK):
        chosen = tl.load(ids + first + lanes, mask=first + lanes < num_pairs, other=num_experts)
        mine = (chosen == expert).to(tl.int32)
        rank = tl.cumsum(mine, 0) - mine
        tl.store(order + place + rank, first + lanes, mask=mine == 1)
        place += tl.sum(mine, 0)


@triton.jit
def tile_of(starts, tile, num_experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(Expert, its first row of this tile, end of its rows); past the last tile the end is 0."""
    lanes = tl.arange(0, EXPERTS)
    real = lanes < num_experts
    low = tl.load(starts + lanes, mask=real, other=0)
    high = tl.load(starts + lanes + 1, mask=real, other=0)
    tiles = (high - low + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    here = lanes == expert
    first = tl.sum(tl.where(here, low + (tile - ends + tiles) * BLOCK_M, 0), 0)
    return expert.to(tl.int64), first, tl.sum(tl.where(here, high, 0), 0)


@triton.jit
def _add_product(
    total, a, weight_at, mask, scales_at, start, wanted, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """total + a b for b of the weight, under GROUP times the scales of inputs from `start` on."""
    b = tl.load(weight_at, mask=mask, other=0.0).to(a.dtype)
    if GROUP:
        scales = tl.load(scales_at + start // GROUP, mask=wanted, other=0.0)
        return total + tl.dot(a, b, input_precision=PRECISION) * scales
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _scaled(total, scales_at, wanted, GROUP: tl.constexpr):
    """total times scales of whole rows of the weight, if there are some."""
    if scales_at is not None and not GROUP:
        total *= tl.load(scales_at, mask=wanted, other=0.0)
    return total


@triton.jit
def _gated_kernel(
    x, weight, weight_scales, order, starts, out, x_stride, num_experts, width, in_features, top_k,
    ACTIVATION: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[r] = act(x[t] G_e^T) * (x[t] U_e^T), for the token t of the pair at row r of expert e.

    x [tokens, in_features]; weight [experts, 2 width, in_features], gate first, times
    weight_scales [experts, 2 width, 1 or in_features / GROUP] where there are any; out [pairs,
    width], sorted by expert. float32 inside, rounded once.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, first, end = tile_of(starts, tl.program_id(0), num_experts, EXPERTS, BLOCK_M)
    if first >= end:
        return
    rows = first + tl.arange(0, BLOCK_M)
    inside = rows < end
    tokens = (tl.load(order + rows, mask=inside, other=0) // top_k).to(tl.int64)
    features = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = (features < width)[None, :]
    k = tl.arange(0, BLOCK_K)
    at_x = x + tokens[:, None] * x_stride + k[None, :]
    at_gate = weight + expert * 2 * width * in_features
    at_gate += features[None, :].to(tl.int64) * in_features + k[:, None]
    at_up = at_gate + width.to(tl.int64) * in_features
    gate_scales = weight_scales
    up_scales = weight_scales
    if weight_scales is not None:
        num_groups = in_features // GROUP if GROUP else 1
        gate_scales = weight_scales + (expert * 2 * width + features[None, :]) * num_groups
        up_scales = gate_scales + width.to(tl.int64) * num_groups
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        left = in_features - start
        a = tl.load(at_x + start, mask=inside[:, None] & (k < left)[None, :], other=0.0)
        mask = wanted & (k < left)[:, None]
        gate = _add_product(
            gate, a, at_gate + start, mask, gate_scales, start, wanted, GROUP, PRECISION
        )
        up = _add_product(up, a, at_up + start, mask, up_scales, start, wanted, GROUP, PRECISION)
    gate = _scaled(gate, gate_scales, wanted, GROUP)
    up = _scaled(up, up_scales, wanted, GROUP)
    value = activated(gate, ACTIVATION) * up
    at_out = out + rows[:, None].to(tl.int64) * width + features[None, :]
    tl.store(at_out, value.to(out.dtype.element_ty), mask=inside[:, None] & wanted)


@triton.jit
def _down_kernel(
    x, weight, weight_scales, order, starts, scales, out, num_experts, out_features, in_features,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[p] = scales[p] (x[r] D_e^T), for the pair p = order[r] of expert e.

    x [pairs, in_features], sorted by expert; weight [experts, out_features, in_features], and
    weight_scales, as of `_gated_kernel`; scales [pairs] float32; out [pairs, out_features], by
    token. float32 inside, rounded once.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, first, end = tile_of(starts, tl.program_id(0), num_experts, EXPERTS, BLOCK_M)
    if first >= end:
        return
    rows = first + tl.arange(0, BLOCK_M)
    inside = rows < end
    pairs = tl.load(order + rows, mask=inside, other=0)
    features = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = (features < out_features)[None, :]
    k = tl.arange(0, BLOCK_K)
    at_x = x + rows[:, None].to(tl.int64) * in_features + k[None, :]
    at_weight = weight + expert * out_features * in_features
    at_weight += features[None, :].to(tl.int64) * in_features + k[:, None]
    scales_at = weight_scales
    if weight_scales is not None:
        num_groups = in_features // GROUP if GROUP else 1
        scales_at = weight_scales + (expert * out_features + features[None, :]) * num_groups
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        left = in_features - start
        a = tl.load(at_x + start, mask=inside[:, None] & (k < left)[None, :], other=0.0)
        mask = wanted & (k < left)[:, None]
        total = _add_product(
            total, a, at_weight + start, mask, scales_at, start, wanted, GROUP, PRECISION
        )
    total = _scaled(total, scales_at, wanted, GROUP)
    total *= tl.load(scales + pairs, mask=inside, other=0.0)[:, None]
    at_out = out + pairs[:, None].to(tl.int64) * out_features + features[None, :]
    tl.store(at_out, total.to(out.dtype.element_ty), mask=inside[:, None] & wanted)


@triton.jit
def _sum_kernel(parts, out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out[t] = sum_j parts[t, j] in float32, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = features < width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in range(TOP_K):
        at = parts + (token * TOP_K + j) * width + features
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + features, total.to(out.dtype.element_ty), mask=inside)


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The pairs of token and chosen expert in the order of experts, and where each expert begins.

    ids: [num_tokens, top_k] int64 or int32, contiguous, each in [0, num_experts). Pair p is choice
    p % top_k of token p // top_k; those of one expert keep their order.

    Returns: [num_tokens * top_k] int32 pairs, and [num_experts + 1] int32.
    Raises: ValueError for ids that are not contiguous.
    """
    if ids.dim() != 2 or not ids.is_contiguous():
        raise ValueError(f"ids must be contiguous [num_tokens, top_k]: {tuple(ids.shape)}")
    order = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    _sort_kernel[(num_experts,)](
        ids, order, starts, ids.numel(), num_experts, BLOCK=_SORT_BLOCK, num_warps=4,
        **pdl.launch_options(ids.device),
    )  # fmt: skip
    return order, starts


def gated(
    x: Tensor, weight: Tensor, order: Tensor, starts: Tensor, out: Tensor, top_k: int,
    activation: str = "silu", weight_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`act(gate(x)) * up(x)` of each pair's expert, rows sorted by expert.

    Args:
        x: [num_tokens, hidden_size]; rows dense, at any distance.
        weight: [num_experts, 2 * width, hidden_size], contiguous, gate first, x's type, or
            float8_e4m3fn with weight_scales.
        order, starts: of `sort_by_expert`.
        out: [num_tokens * top_k, width], contiguous, x's type.
        activation: one of `octavo.arch.ACTIVATIONS`.
        weight_scales: float32 [num_experts, 2 * width, 1 or hidden_size / 128], contiguous.

    Returns: out.
    Raises: TypeError for dtypes; ValueError for shapes, strides and activations.
    """
    num_experts, width = len(starts) - 1, out.shape[1]
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}: {activation}")
    if x.stride(1) != 1 or len(order) != len(x) * top_k:
        raise ValueError(f"x must have dense rows, and a {top_k}th of the {len(order)} pairs")
    _check(weight, weight_scales, (num_experts, 2 * width, x.shape[1]), x, out, len(order))
    if not len(x):
        return out
    block_m, num_tiles = tiles(len(order), num_experts)
    _gated_kernel[(num_tiles, triton.cdiv(width, _BLOCK_N))](
        x, weight, weight_scales, order, starts, out, x.stride(0), num_experts, width, x.shape[1],
        top_k, ACTIVATION=activation, **_constants(num_experts, block_m, x, weight_scales),
    )  # fmt: skip
    return out


def down(
    x: Tensor, weight: Tensor, order: Tensor, starts: Tensor, scales: Tensor, out: Tensor,
    weight_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Each row through its expert's last layer, times its weight, back to the order of tokens.

    Args:
        x: [num_tokens * top_k, width], contiguous: what `gated` made.
        weight: [num_experts, hidden_size, width], contiguous, and weight_scales: as of `gated`.
        order, starts: of `sort_by_expert`.
        scales: [num_tokens, top_k] float32, contiguous.
        out: [num_tokens, top_k, hidden_size], contiguous, x's type.

    Returns: out. Raises: as `gated`.
    """
    num_experts, features = len(starts) - 1, out.shape[-1]
    if scales.dtype != torch.float32:
        raise TypeError(f"scales must be float32: {scales.dtype}")
    if not (x.is_contiguous() and scales.is_contiguous()) or scales.shape != out.shape[:2]:
        raise ValueError(f"x and scales must be contiguous, scales {tuple(out.shape[:2])}")
    shape = num_experts, features, x.shape[1]
    _check(weight, weight_scales, shape, x, out.flatten(0, 1), len(x))
    if not len(x):
        return out
    block_m, num_tiles = tiles(len(x), num_experts)
    _down_kernel[(num_tiles, triton.cdiv(features, _BLOCK_N))](
        x, weight, weight_scales, order, starts, scales, out, num_experts, features, x.shape[1],
        **_constants(num_experts, block_m, x, weight_scales),
    )  # fmt: skip
    return out


def combine(parts: Tensor, out: Tensor) -> Tensor:
    """The sum over a token's experts, in the order of its choices, rounded once.

    parts: [num_tokens, top_k, hidden_size], contiguous; out: [num_tokens, hidden_size], contiguous.

    Returns: out. Raises: ValueError for shapes and strides.
    """
    num_tokens, top_k, width = parts.shape
    if out.shape != (num_tokens, width) or not (out.is_contiguous() and parts.is_contiguous()):
        raise ValueError(f"out must be contiguous {(num_tokens, width)}: {tuple(out.shape)}")
    if num_tokens:
        _sum_kernel[(num_tokens, triton.cdiv(width, _SUM_BLOCK))](
            parts, out, width, TOP_K=top_k, BLOCK=_SUM_BLOCK, num_warps=4,
            **pdl.launch_options(out.device),
        )  # fmt: skip
    return out


def tiles(num_pairs: int, num_experts: int, block_m: int | None = None) -> tuple[int, int]:
    """(Rows of a tile, most tiles that there can be): by how many rows an expert has on average,
    or with tiles of block_m rows."""
    if block_m is None:
        mean = num_pairs / num_experts
        block_m = 16 if mean <= 16 else 32 if mean <= 48 else 64 if mean <= 192 else 128
    busy = min(num_experts, num_pairs)
    return block_m, (num_pairs - busy) // block_m + busy


def _constants(
    num_experts: int, block_m: int, x: Tensor, weight_scales: Tensor | None
) -> dict[str, object]:
    grouped = weight_scales is not None and weight_scales.shape[-1] > 1
    return {
        "EXPERTS": triton.next_power_of_2(num_experts),
        "BLOCK_M": block_m,
        "BLOCK_N": _BLOCK_N,
        "BLOCK_K": _BLOCK_K,
        "GROUP": _GROUP if grouped else 0,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": 8 if block_m == 128 else 4,
        "num_stages": 4 if x.element_size() == 2 else 2,
        **pdl.launch_options(x.device),
    }


def _check(
    weight: Tensor, scales: Tensor | None, shape: tuple[int, int, int], x: Tensor, out: Tensor,
    rows: int,
) -> None:  # fmt: skip
    if weight.shape != shape or not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous {shape}: {tuple(weight.shape)}")
    if len(out) != rows or not out.is_contiguous():
        raise ValueError(f"out must be contiguous, of {rows} rows: {tuple(out.shape)}")
    wanted = x.dtype if scales is None else torch.float8_e4m3fn
    if weight.dtype != wanted or out.dtype != x.dtype:
        raise TypeError(
            f"weight must be {wanted}, out have x's type {x.dtype}: {weight.dtype}, {out.dtype}"
        )
    if scales is None:
        return
    counts = (1, shape[2] // _GROUP) if shape[2] % _GROUP == 0 else (1,)
    if scales.dtype != torch.float32 or not scales.is_contiguous():
        raise TypeError(f"weight_scales must be contiguous float32: {scales.dtype}")
    if scales.shape[:2] != shape[:2] or scales.shape[2] not in counts:
        raise ValueError(
            f"weight_scales must be {shape[:2]} with {' or '.join(map(str, counts))} a row:"
            f" {tuple(scales.shape)}"
        )
