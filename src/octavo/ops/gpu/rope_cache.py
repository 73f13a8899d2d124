"""Norm of heads, rotary embedding and the write to the KV pool, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.gpu import pdl


@triton.jit
def _load_heads(x, heads, num_heads, dims, end, HEAD_DIM: tl.constexpr):
    """[heads, dims] of one token in float32, 0 outside num_heads and end."""
    inside = (heads < num_heads)[:, None] & (dims < end)[None, :]
    at = x + heads[:, None] * HEAD_DIM + dims[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _scaled(x, factor, weight, dims, end, dtype: tl.constexpr):
    """x times factor, rounded to dtype (unless weight is float32), times weight, rounded again."""
    scales = tl.load(weight + dims, mask=dims < end, other=0.0).to(tl.float32)
    value = x * factor
    if weight.dtype.element_ty != tl.float32:
        value = value.to(dtype).to(tl.float32)
    return (value * scales[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _store_heads(
    pointer, value, heads, num_heads, dims, end, HEAD_STRIDE: tl.constexpr
):  # fmt: skip
    inside = (heads < num_heads)[:, None] & (dims < end)[None, :]
    at = pointer + heads[:, None] * HEAD_STRIDE + dims[None, :]
    tl.store(at, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _rotated(HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Which elements turn together, [BLOCK_HALF] each, and the end of the first ones."""
    i = tl.arange(0, BLOCK_HALF)
    if PAIRS:
        return 2 * i, 2 * i + 1, 2 * HALF
    else:
        return i, HALF + i, HALF


@triton.jit
def _rotate(
    x, heads, num_heads, weight, angles, eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Norms and rotates heads of one token in place.

    Returns their elements `_rotated` and those from 2 HALF on, rounded, in float32.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    low, high, low_end = _rotated(HALF, BLOCK_HALF, PAIRS)
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    angle = tl.arange(0, BLOCK_HALF)
    cos = tl.load(angles + angle, mask=angle < HALF, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(angles + HALF + angle, mask=angle < HALF, other=0.0).to(tl.float32)[None, :]
    first = _load_heads(x, heads, num_heads, low, low_end, HEAD_DIM)
    second = _load_heads(x, heads, num_heads, high, 2 * HALF, HEAD_DIM)
    third = _load_heads(x, heads, num_heads, rest, HEAD_DIM, HEAD_DIM)
    if NORM:
        total = tl.sum(first * first + second * second, 1) + tl.sum(third * third, 1)
        factor = tl.rsqrt(total / HEAD_DIM + eps)[:, None]
        first = _scaled(first, factor, weight, low, low_end, dtype)
        second = _scaled(second, factor, weight, high, 2 * HALF, dtype)
        third = _scaled(third, factor, weight, rest, HEAD_DIM, dtype)
    # Small tiles may be loaded by several threads: all loads come before the first store.
    tl.debug_barrier()
    turned = (first * cos - second * sin).to(dtype).to(tl.float32)
    second = (second * cos + first * sin).to(dtype).to(tl.float32)
    _store_heads(x, turned, heads, num_heads, low, low_end, HEAD_DIM)
    _store_heads(x, second, heads, num_heads, high, 2 * HALF, HEAD_DIM)
    if NORM and 2 * HALF < HEAD_DIM:
        _store_heads(x, third, heads, num_heads, rest, HEAD_DIM, HEAD_DIM)
    return turned, second, third


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _amax(x):
    """Of each row; NaN where a number is NaN (`tl.max` passes over those)."""
    bad = tl.max((x != x).to(tl.int32), 1)
    return tl.where(bad > 0, float("nan"), tl.max(tl.abs(x), 1))


@triton.jit
def _fp8_scale(amax):
    """amax / 448 rounded up to a normal float16; 1 for 0, NaN for NaN, inf beyond 65504.

    A damaged or overflowing model thus stays one that computes NaN or infinity, and is found out.
    """
    exact = tl.maximum(amax / 448.0, 6.103515625e-05)
    nearest = exact.to(tl.float16)
    bits = nearest.to(tl.int16, bitcast=True)
    bits = tl.where(nearest.to(tl.float32) < exact, bits + 1, bits).to(tl.int16)
    scale = tl.where(amax == 0.0, 1.0, bits.to(tl.float16, bitcast=True))
    return tl.where(amax != amax, float("nan"), scale).to(tl.float16)


@triton.jit
def _codes(x, scale):
    """x / scale, rounded to what e4m3 holds, to nearest and to even.

    Rounded here because Triton's interpreter converts wrongly; a conversion of exact values is
    right everywhere. Where the scale is no number, codes are anything of x's sign.
    """
    divisor = tl.where(scale < float("inf"), scale.to(tl.float32), 1.0)[:, None]
    x = tl.minimum(tl.maximum(x / divisor, -448.0), 448.0)
    bits = x.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # 3 bits of mantissa stay
    tiny = (x + 24576.0) - 24576.0  # multiples of 2^-9: float32's step at 1.5 * 2^14
    return tl.where(tl.abs(x) < 0.015625, tiny, normal.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["layer"])
def _rope_cache_kernel(
    query, key, value, rope_rows, cos_sin, slot_mapping, kv_cache, kv_scales,
    q_weight, k_weight, query_stride, key_stride, value_stride, cache_stride, scale_stride,
    layer, num_heads, num_kv_heads, eps,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PLANES: tl.constexpr, PAIRS: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, group of BLOCK_H heads); groups are query's, then key's, then value's.

    With h = HALF, c and s the halves of cos_sin[rope_rows[token]]: x_i and x_{h+i} (PAIRS: x_2i and
    x_{2i+1}) become x_i c_i - x_{h+i} s_i and x_{h+i} c_i + x_i s_i. Slot s of the pool
    [num_blocks, num_layers, PLANES, num_kv_heads, BLOCK_SIZE, HEAD_DIM] is slot s % BLOCK_SIZE of
    block s // BLOCK_SIZE; of one plane, there are no values.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    query_groups = tl.cdiv(num_heads, BLOCK_H)
    kv_groups = tl.cdiv(num_kv_heads, BLOCK_H)
    angles = cos_sin + tl.load(rope_rows + token).to(tl.int64) * (2 * HALF)
    if group < query_groups:
        heads = group * BLOCK_H + tl.arange(0, BLOCK_H)
        x = query + token * query_stride
        _rotate(x, heads, num_heads, q_weight, angles, eps,
                HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, PAIRS, Q_NORM)  # fmt: skip
    else:
        slot = tl.load(slot_mapping + token)
        part = (group >= query_groups + kv_groups).to(tl.int32)
        heads = (group - query_groups - part * kv_groups) * BLOCK_H + tl.arange(0, BLOCK_H)
        block = slot // BLOCK_SIZE
        lane = (layer * PLANES + part).to(tl.int64) * num_kv_heads * BLOCK_SIZE + slot % BLOCK_SIZE
        cache = kv_cache + block * cache_stride + lane * HEAD_DIM
        scales = kv_scales + block * scale_stride + lane + heads * BLOCK_SIZE
        step: tl.constexpr = BLOCK_SIZE * HEAD_DIM
        if part == 0:
            x = key + token * key_stride
            first, second, third = _rotate(
                x, heads, num_kv_heads, k_weight, angles, eps,
                HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST, PAIRS, K_NORM,
            )  # fmt: skip
            if slot >= 0:
                if FP8:
                    amax = _larger(_amax(_larger(tl.abs(first), tl.abs(second))), _amax(third))
                    scale = _fp8_scale(amax)
                    tl.store(scales, scale, mask=heads < num_kv_heads)
                    first, second = _codes(first, scale), _codes(second, scale)
                    third = _codes(third, scale)
                low, high, low_end = _rotated(HALF, BLOCK_HALF, PAIRS)
                _store_heads(cache, first, heads, num_kv_heads, low, low_end, step)
                _store_heads(cache, second, heads, num_kv_heads, high, 2 * HALF, step)
                if 2 * HALF < HEAD_DIM:
                    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
                    _store_heads(cache, third, heads, num_kv_heads, rest, HEAD_DIM, step)
        elif slot >= 0:
            dims = tl.arange(0, BLOCK_D)
            x = value + token * value_stride
            whole = _load_heads(x, heads, num_kv_heads, dims, HEAD_DIM, HEAD_DIM)
            if FP8:
                scale = _fp8_scale(_amax(whole))
                tl.store(scales, scale, mask=heads < num_kv_heads)
                whole = _codes(whole, scale)
            _store_heads(cache, whole, heads, num_kv_heads, dims, HEAD_DIM, step)


def rope_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    rope_rows: Tensor,
    cos_sin: Tensor | None,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    layer: int,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    interleaved: bool = False,
) -> None:
    """Norms (where a weight is given) and rotates (where there is a table) query and key in place,
    then writes key and value to their slots.

    Formulas: `octavo.ops.reference.rope` and `rms_norm`. Under an fp8 pool each token's head is
    divided by its scale, amax / 448 rounded up to a float16 (1 for zeros), and stored as e4m3;
    the scale is NaN or inf where the head is not finite or its scale no float16.

    Args:
        query: [num_tokens, num_heads, head_dim], rotated in place.
        key: [num_tokens, num_kv_heads, head_dim], rotated in place.
        value: like key. The three may have any stride between tokens, the last two dense. None
            where the pool has one plane.
        rope_rows: int64 or int32 [num_tokens]: each token's row in cos_sin.
        cos_sin: float32 [rows, rotary_dim], contiguous, cosines first; the first rotary_dim (even)
            elements of a head are rotated. None: no rotation.
        slot_mapping: int64 [num_tokens]: block id * block_size + offset; negative: not written.
        kv_cache: [num_blocks, num_layers, 2 (or 1), num_kv_heads, block_size, head_dim], contiguous
            within a block; query's type or float8_e4m3fn.
        kv_scales: float16 [num_blocks, num_layers, 2 (or 1), num_kv_heads, block_size], contiguous
            within a block, for an fp8 pool; else None.
        layer: which layer of the cache.
        q_norm_weight: [head_dim] RMS norm of each query head before the rotation, or None.
        k_norm_weight: the same for keys.
        eps: of the norms.
        interleaved: rotate pairs (2 i, 2 i + 1) instead of halves.

    Raises: TypeError for dtypes; ValueError for shapes and strides. Rows of cos_sin and slots are
        not checked: they lie on the device.
    """
    num_tokens, num_heads, head_dim = query.shape
    _, _, planes, num_kv_heads, block_size, _ = kv_cache.shape
    _check_heads(query, key, value, kv_cache)
    _check_pool(query.dtype, kv_cache, kv_scales, layer, num_planes=1 if value is None else 2)
    _check_rows(num_tokens, rope_rows, slot_mapping)
    _check_angles(cos_sin, head_dim)
    if num_tokens == 0:
        return
    block_h = 4 if num_tokens <= 64 else 8
    groups = triton.cdiv(num_heads, block_h) + planes * triton.cdiv(num_kv_heads, block_h)
    scales = kv_cache if kv_scales is None else kv_scales
    half = 0 if cos_sin is None else cos_sin.shape[1] // 2
    _rope_cache_kernel[(num_tokens, groups)](
        query, key, key if value is None else value, rope_rows,
        query if cos_sin is None else cos_sin, slot_mapping, kv_cache, scales,
        query if q_norm_weight is None else q_norm_weight,
        key if k_norm_weight is None else k_norm_weight,
        query.stride(0), key.stride(0), 0 if value is None else value.stride(0),
        kv_cache.stride(0), scales.stride(0),
        layer, num_heads, num_kv_heads, eps,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), HALF=half,
        BLOCK_HALF=triton.next_power_of_2(max(half, 1)),
        BLOCK_REST=triton.next_power_of_2(max(head_dim - 2 * half, 1)), BLOCK_H=block_h,
        BLOCK_SIZE=block_size, PLANES=planes, PAIRS=interleaved, Q_NORM=q_norm_weight is not None,
        K_NORM=k_norm_weight is not None, FP8=kv_scales is not None,
        num_warps=2, **pdl.launch_options(query.device),
    )  # fmt: skip


def _check_heads(query: Tensor, key: Tensor, value: Tensor | None, kv_cache: Tensor) -> None:
    num_tokens = len(query)
    num_kv_heads, _, head_dim = kv_cache.shape[3:]
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x is None:
            continue
        heads = query.shape[1] if name == "query" else num_kv_heads
        if x.shape != (num_tokens, heads, head_dim) or x.stride()[1:] != (head_dim, 1):
            raise ValueError(
                f"{name} must be {(num_tokens, heads, head_dim)} with dense heads here:"
                f" {tuple(x.shape)}, strides {x.stride()}"
            )
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have query's type {query.dtype}: {x.dtype}")


def _check_pool(
    dtype: torch.dtype, kv_cache: Tensor, kv_scales: Tensor | None, layer: int, num_planes: int
) -> None:
    """dtype: of the heads; num_planes: those that are written."""
    _, num_layers, planes, num_kv_heads, block_size, head_dim = kv_cache.shape
    expected = dtype if kv_scales is None else torch.float8_e4m3fn
    if kv_cache.dtype != expected:
        raise TypeError(f"kv_cache must be {expected}: {kv_cache.dtype}")
    dense = (planes * num_kv_heads * block_size, num_kv_heads * block_size, block_size, 1)
    if planes != num_planes or kv_cache.stride()[1:] != (*(n * head_dim for n in dense), 1):
        raise ValueError(
            f"kv_cache must be [num_blocks, num_layers, {num_planes}, num_kv_heads, block_size,"
            f" head_dim], contiguous within a block: {tuple(kv_cache.shape)}, strides"
            f" {kv_cache.stride()}"
        )
    if kv_scales is not None and (
        kv_scales.dtype != torch.float16
        or kv_scales.shape != kv_cache.shape[:-1]
        or kv_scales.stride()[1:] != dense
    ):
        raise ValueError(
            f"kv_scales must be float16 {tuple(kv_cache.shape[:-1])}, contiguous within a block:"
            f" {kv_scales.dtype} {tuple(kv_scales.shape)}, strides {kv_scales.stride()}"
        )
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer must be in [0, {num_layers}): {layer}")


def _check_rows(num_tokens: int, rope_rows: Tensor, slot_mapping: Tensor) -> None:
    if rope_rows.dtype not in (torch.int32, torch.int64) or slot_mapping.dtype != torch.int64:
        raise TypeError(
            "rope_rows must be int32 or int64 and slot_mapping int64:"
            f" {rope_rows.dtype}, {slot_mapping.dtype}"
        )
    for name, x in (("rope_rows", rope_rows), ("slot_mapping", slot_mapping)):
        if x.shape != (num_tokens,) or not x.is_contiguous():
            raise ValueError(
                f"{name} must be [{num_tokens}], contiguous: {tuple(x.shape)}, strides {x.stride()}"
            )


def _check_angles(cos_sin: Tensor | None, head_dim: int) -> None:
    if cos_sin is None:
        return
    if cos_sin.dtype != torch.float32:
        raise TypeError(f"cos_sin must be float32: {cos_sin.dtype}")
    if cos_sin.shape[1] % 2 or cos_sin.shape[1] > head_dim or not cos_sin.is_contiguous():
        raise ValueError(
            f"cos_sin must be contiguous with an even rotary_dim of at most {head_dim}:"
            f" {tuple(cos_sin.shape)}, strides {cos_sin.stride()}"
        )
