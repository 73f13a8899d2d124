"""Norm of heads, rotary embedding and the write to the KV cache on CPU: launcher of
csrc/elementwise.c's octavo_rope_and_cache.

float32 or bfloat16 in, arithmetic in float32; falls back to `octavo.ops.reference`.
"""

from __future__ import annotations

import struct
from typing import NoReturn

import torch

from octavo.ops import reference
from octavo.ops.cpu import native
from octavo.ops.cpu.cache_layout import are_scales_of, is_dense_within_blocks

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# struct rope_args of csrc/elementwise.c
_pack_rope = struct.Struct("@10P12q10if").pack


def rope_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    interleaved: bool = False,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Rotates query and key in place and writes key and value to their slots.

    Formulas: `octavo.ops.reference.rope`, `rms_norm` and `int8_codes`; the norm comes first, per
    head.

    Args:
        query: [num_tokens, num_heads, head_dim], rotated in place.
        key: [num_tokens, num_kv_heads, head_dim], rotated in place.
        value: like key. The three may have any stride between tokens, the last two dense. None
            where the cache has one plane.
        positions: int64 or int32 [num_tokens].
        cos_sin: float32 [max_positions, rotary_dim], contiguous, cosines first; rotary_dim even
            and at most head_dim, of which the first rotary_dim elements are rotated. None: no
            rotation.
        slot_mapping: int64 [num_tokens]: block id * block_size + offset; negative: not written.
        kv_cache: [num_blocks, num_layers, 2 (or 1), num_kv_heads, block_size, head_dim],
            contiguous within a block; of query's type, or int8.
        layer: which layer of the cache.
        q_norm_weight: [head_dim] RMS norm of each query head before the rotation, of query's type
            or float32, or None.
        k_norm_weight: the same for keys.
        eps: of the norms.
        interleaved: rotate pairs (2 i, 2 i + 1) instead of halves.
        kv_scales: float16 [num_blocks, num_layers, 2 (or 1), num_kv_heads, block_size], contiguous
            within a block, of an int8 cache; else None.

    Raises: TypeError for dtypes; ValueError for shapes, strides, positions and slots. Nothing is
        written then.
    """
    cache_shape, cache_strides = kv_cache.shape, kv_cache.stride()
    num_blocks, num_layers, planes, num_kv_heads, block_size, head_dim = cache_shape
    num_tokens, num_heads, query_dim = query.shape
    max_positions, rotary_dim = (0, 0) if cos_sin is None else cos_sin.shape
    query_strides, key_strides = query.stride(), key.stride()
    value_strides = key_strides if value is None else value.stride()
    dtype = query.dtype
    norm_weight = k_norm_weight if q_norm_weight is None else q_norm_weight
    wide = norm_weight is not None and norm_weight.dtype != dtype
    if not (
        dtype in _DTYPES
        and key.dtype == dtype
        and kv_cache.dtype == (dtype if kv_scales is None else torch.int8)
        and (cos_sin is None or (cos_sin.dtype == torch.float32 and cos_sin.is_contiguous()))
        and slot_mapping.dtype == torch.int64
        and (positions.dtype == torch.int64 or positions.dtype == torch.int32)
        and query_dim == head_dim
        and key.shape == (num_tokens, num_kv_heads, head_dim)
        and (value is None or (value.dtype == dtype and value.shape == key.shape))
        and query_strides[1:] == key_strides[1:] == value_strides[1:] == (head_dim, 1)
        and positions.shape == slot_mapping.shape == (num_tokens,)
        and planes == (1 if value is None else 2)
        and 0 <= layer < num_layers
        and rotary_dim % 2 == 0
        and rotary_dim <= head_dim
        and is_dense_within_blocks(cache_shape, cache_strides)
        and (kv_scales is None or are_scales_of(cache_shape, kv_scales))
        and positions.is_contiguous()
        and slot_mapping.is_contiguous()
        and _is_norm_weight(q_norm_weight, head_dim, dtype, wide)
        and _is_norm_weight(k_norm_weight, head_dim, dtype, wide)
    ):
        _explain(query, key, value, positions, cos_sin, slot_mapping, kv_cache, layer,
                      q_norm_weight, k_norm_weight, kv_scales)  # fmt: skip
    call = native.function("octavo_rope_and_cache")
    if call is None:
        reference.rope_and_cache(query, key, value, positions, cos_sin, slot_mapping, kv_cache,
                                 layer, q_norm_weight, k_norm_weight, eps, interleaved=interleaved,
                                 kv_scales=kv_scales)  # fmt: skip
        return
    plane, scale_plane = num_kv_heads * block_size * head_dim, num_kv_heads * block_size
    first, last = planes * layer, planes * layer + planes - 1
    status = call(
        _pack_rope(
            query.data_ptr(), key.data_ptr(), 0 if value is None else value.data_ptr(),
            positions.data_ptr(), 0 if cos_sin is None else cos_sin.data_ptr(),
            slot_mapping.data_ptr(), kv_cache.data_ptr(),
            0 if kv_scales is None else kv_scales.data_ptr(),
            0 if q_norm_weight is None else q_norm_weight.data_ptr(),
            0 if k_norm_weight is None else k_norm_weight.data_ptr(),
            query_strides[0], key_strides[0], value_strides[0], num_tokens, max_positions,
            num_blocks, cache_strides[0], first * plane, last * plane,
            0 if kv_scales is None else kv_scales.stride(0),
            first * scale_plane, last * scale_plane,
            num_heads, num_kv_heads, head_dim, rotary_dim, block_size,
            _DTYPES[dtype], positions.dtype == torch.int64, torch.get_num_threads(), interleaved,
            wide, eps,
        )
    )  # fmt: skip
    if status:
        token = status // 8
        if status % 8 == 1:
            raise ValueError(
                f"positions[{token}] must be in [0, {max_positions}), the rows of cos_sin:"
                f" {int(positions[token])}"
            )
        raise ValueError(
            f"slot_mapping[{token}] must be below {num_blocks * block_size}"
            f" (num_blocks x block_size): {int(slot_mapping[token])}"
        )


def _is_norm_weight(
    weight: torch.Tensor | None, head_dim: int, dtype: torch.dtype, wide: bool
) -> bool:
    return weight is None or (
        weight.dtype == (torch.float32 if wide else dtype)
        and weight.shape == (head_dim,)
        and weight.stride(0) == 1
    )


def _explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    kv_scales: torch.Tensor | None,
) -> NoReturn:
    """Raises the error that says which argument of rope_and_cache is wrong."""
    dtype = query.dtype
    _, num_layers, planes, num_kv_heads, _, head_dim = kv_cache.shape
    num_tokens = query.shape[0]
    if dtype not in _DTYPES:
        raise TypeError(f"query must be float32 or bfloat16, not {dtype}")
    if kv_cache.dtype != (dtype if kv_scales is None else torch.int8):
        raise TypeError(
            f"kv_cache must have query's type {dtype}, or be int8 with kv_scales, not"
            f" {kv_cache.dtype} {'without' if kv_scales is None else 'with'} kv_scales"
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x is None:
            continue
        heads = query.shape[1] if name == "query" else num_kv_heads
        if x.dtype != dtype:
            raise TypeError(f"{name} must have query's type {dtype}, not {x.dtype}")
        if x.shape != (num_tokens, heads, head_dim) or x.stride()[1:] != (head_dim, 1):
            raise ValueError(
                f"{name} must be {(num_tokens, heads, head_dim)} with dense heads here:"
                f" {tuple(x.shape)}, strides {x.stride()}"
            )
    if cos_sin is not None and cos_sin.dtype != torch.float32:
        raise TypeError(f"cos_sin must be float32, not {cos_sin.dtype}")
    if positions.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"positions must be int64 or int32, not {positions.dtype}")
    if slot_mapping.dtype != torch.int64:
        raise TypeError(f"slot_mapping must be int64, not {slot_mapping.dtype}")
    for name, x in (("positions", positions), ("slot_mapping", slot_mapping)):
        if x.shape != (num_tokens,) or not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous [{num_tokens}] here: {tuple(x.shape)}")
    if cos_sin is not None and (
        not cos_sin.is_contiguous() or cos_sin.shape[1] % 2 or cos_sin.shape[1] > head_dim
    ):
        raise ValueError(
            f"cos_sin must be contiguous with an even rotary_dim of at most {head_dim}:"
            f" {tuple(cos_sin.shape)}, strides {cos_sin.stride()}"
        )
    wanted = 1 if value is None else 2
    if planes != wanted or not is_dense_within_blocks(kv_cache.shape, kv_cache.stride()):
        raise ValueError(
            f"kv_cache must be [num_blocks, num_layers, {wanted}, num_kv_heads, block_size,"
            f" head_dim], contiguous within a block, not {tuple(kv_cache.shape)} with strides"
            f" {kv_cache.stride()}"
        )
    if kv_scales is not None and not are_scales_of(kv_cache.shape, kv_scales):
        raise ValueError(
            f"kv_scales must be float16 {tuple(kv_cache.shape[:-1])}, contiguous within a block:"
            f" {kv_scales.dtype} {tuple(kv_scales.shape)}, strides {kv_scales.stride()}"
        )
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer must be in [0, {num_layers}): {layer}")
    for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
        if not any(_is_norm_weight(weight, head_dim, dtype, wide) for wide in (False, True)):
            raise ValueError(
                f"{name} must be dense [{head_dim}] of query's type {dtype}, or float32"
            )
    types = {w.dtype for w in (q_norm_weight, k_norm_weight) if w is not None}
    if len(types) > 1:
        raise TypeError(f"q_norm_weight and k_norm_weight must be of one type: {types}")
    raise AssertionError("arguments refused that _explain finds no fault with")
