"""Paged attention on CPU: launcher of csrc/attention.c."""

from __future__ import annotations

import struct
from typing import NoReturn

import torch

from octavo.ops import reference
from octavo.ops.cpu import native
from octavo.ops.cpu.cache_layout import are_scales_of, is_dense_within_blocks

MAX_HEAD_DIM = 1024
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_INT8 = 2
# struct attn_args of csrc/attention.h
_pack_args = struct.Struct("@8P10q12i2f").pack


def paged_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    sliding_window: int = 0,
    num_threads: int | None = None,
    *,
    soft_cap: float = 0.0,
    alibi: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Causal attention of a flat batch of sequences over their paged keys and values.

    Decodes, prefill chunks and mixtures go in one call. The query tokens of a sequence are its
    last positions; the one at position t attends to positions (t - sliding_window, t], or [0, t].
    A sequence's result does not depend, bit for bit, on what else is in the batch, nor on the
    number of threads. The formula is that of `octavo.ops.reference.paged_attention`.

    Args:
        out: [num_tokens, num_heads, head_dim], written; rows past the last query token are not.
        query: like out, float32 or bfloat16; either may have any stride between tokens, the last
            two dense.
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous within
            a block, of query's type or int8; keys and values of this step's tokens are already in
            it. With one plane for 2, out is [num_tokens, num_heads, value_dim], and a value is the
            last value_dim numbers of its key.
        layer: which layer of the cache.
        block_tables: int32 [num_seqs, max_blocks]; entries that hold no attended position are
            not read.
        seq_lens: int32 [num_seqs], context lengths including this step's tokens.
        query_start_loc: int32 [num_seqs + 1], where each sequence's tokens start in query.
        scale: factor of the scores, usually head_dim ** -0.5.
        sliding_window: positions a token attends to, itself included; 0 for all.
        num_threads: default `torch.get_num_threads()`.
        soft_cap: c > 0 turns scores s into c tanh(s / c).
        alibi: float32 [num_heads], contiguous: slope (j - t) is added to the score of position j.
        kv_scales: float16 [num_blocks, num_layers, 2, num_kv_heads, block_size], contiguous within
            a block, of an int8 cache: what a token's codes are multiplied by; else None.

    Raises: TypeError for dtypes; ValueError for shapes, strides, lengths and block ids.
    """
    cache_shape, cache_strides = kv_cache.shape, kv_cache.stride()
    num_blocks, num_layers, planes, num_kv_heads, block_size, head_dim = cache_shape
    num_tokens, num_heads, query_dim = query.shape
    value_dim = out.shape[2]
    num_seqs, max_blocks = block_tables.shape
    query_strides, out_strides = query.stride(), out.stride()
    table_stride, table_element_stride = block_tables.stride()
    dtype, kv_dtype = query.dtype, kv_cache.dtype
    # One conjunction for speed (this runs once a layer); _explain finds out which part failed.
    if not (
        dtype in _DTYPES
        and out.dtype == dtype
        and (kv_dtype == dtype if kv_scales is None else kv_dtype == torch.int8)
        and block_tables.dtype == seq_lens.dtype == query_start_loc.dtype == torch.int32
        and out.shape[:2] == (num_tokens, num_heads)
        and query_dim == head_dim <= MAX_HEAD_DIM
        and (value_dim == head_dim if planes == 2 else planes == 1 and value_dim <= head_dim)
        and query_strides[1:] == (head_dim, 1)
        and out_strides[1:] == (value_dim, 1)
        and num_heads % num_kv_heads == 0
        and 0 <= layer < num_layers
        and seq_lens.shape == (num_seqs,)
        and query_start_loc.shape == (num_seqs + 1,)
        and table_element_stride == 1
        and sliding_window >= 0
        and soft_cap >= 0.0
        and is_dense_within_blocks(cache_shape, cache_strides)
        and (kv_scales is None or are_scales_of(cache_shape, kv_scales))
        and (alibi is None or _are_slopes(alibi, num_heads))
        and seq_lens.is_contiguous()
        and query_start_loc.is_contiguous()
    ):
        _explain(out, query, kv_cache, layer, block_tables, seq_lens, query_start_loc,
                 sliding_window, soft_cap, alibi, kv_scales)  # fmt: skip
    call = native.function("octavo_paged_attention")
    if call is None:
        end = int(query_start_loc[-1])
        out[:end] = reference.gather_attention(
            query[:end], kv_cache, layer, block_tables, seq_lens, query_start_loc, scale,
            sliding_window, soft_cap=soft_cap, alibi=alibi, kv_scales=kv_scales,
            value_dim=value_dim,
        )  # fmt: skip
        return
    # Numbers, then scales, of one plane of one layer.
    plane, scale_plane = num_kv_heads * block_size * head_dim, num_kv_heads * block_size
    first, last = planes * layer, planes * layer + planes - 1
    status = call(
        _pack_args(
            out.data_ptr(), query.data_ptr(), kv_cache.data_ptr(), block_tables.data_ptr(),
            seq_lens.data_ptr(), query_start_loc.data_ptr(),
            0 if alibi is None else alibi.data_ptr(),
            0 if kv_scales is None else kv_scales.data_ptr(),
            out_strides[0], query_strides[0], table_stride,
            num_blocks, cache_strides[0], first * plane, last * plane + head_dim - value_dim,
            0 if kv_scales is None else kv_scales.stride(0),
            first * scale_plane, last * scale_plane,
            num_tokens, num_seqs, max_blocks, num_heads, num_kv_heads, head_dim, value_dim,
            block_size, sliding_window, _DTYPES[dtype],
            _DTYPES[dtype] if kv_scales is None else _INT8,
            num_threads or torch.get_num_threads(),
            scale, soft_cap,
        )
    )  # fmt: skip
    if status:
        _raise_status(status, query, kv_cache, block_tables, seq_lens, query_start_loc)


def _are_slopes(alibi: torch.Tensor, num_heads: int) -> bool:
    return alibi.dtype == torch.float32 and alibi.shape == (num_heads,) and alibi.is_contiguous()


def _explain(
    out: torch.Tensor,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    sliding_window: int,
    soft_cap: float,
    alibi: torch.Tensor | None,
    kv_scales: torch.Tensor | None,
) -> NoReturn:
    """Raises the error that says which argument is wrong, its limit and its value."""
    dtype = query.dtype
    if dtype not in _DTYPES:
        raise TypeError(f"query must be float32 or bfloat16, not {dtype}")
    if out.dtype != dtype:
        raise TypeError(f"out must have query's type {dtype}, not {out.dtype}")
    if kv_cache.dtype != (dtype if kv_scales is None else torch.int8):
        raise TypeError(
            f"kv_cache must have query's type {dtype}, or be int8 with kv_scales, not"
            f" {kv_cache.dtype} {'without' if kv_scales is None else 'with'} kv_scales"
        )
    for name, x in (
        ("block_tables", block_tables),
        ("seq_lens", seq_lens),
        ("query_start_loc", query_start_loc),
    ):
        if x.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, not {x.dtype}")
    _, num_layers, planes, num_kv_heads, _, head_dim = kv_cache.shape
    num_seqs = block_tables.shape[0]
    if planes not in (1, 2) or not is_dense_within_blocks(kv_cache.shape, kv_cache.stride()):
        raise ValueError(
            "kv_cache must be [num_blocks, num_layers, 2 or 1, num_kv_heads, block_size, head_dim],"
            f" contiguous within a block, not {tuple(kv_cache.shape)} with strides"
            f" {kv_cache.stride()}"
        )
    if kv_scales is not None and not are_scales_of(kv_cache.shape, kv_scales):
        raise ValueError(
            f"kv_scales must be float16 {tuple(kv_cache.shape[:-1])}, contiguous within a block:"
            f" {kv_scales.dtype} {tuple(kv_scales.shape)}, strides {kv_scales.stride()}"
        )
    if alibi is not None and not _are_slopes(alibi, query.shape[1]):
        raise ValueError(
            f"alibi must be contiguous float32 [{query.shape[1]}]: {alibi.dtype}"
            f" {tuple(alibi.shape)}"
        )
    if soft_cap < 0.0:
        raise ValueError(f"soft_cap must be 0 or positive: {soft_cap}")
    if out.shape[:2] != query.shape[:2] or (planes == 2 and out.shape != query.shape):
        raise ValueError(f"out must have query's shape {tuple(query.shape)}: {tuple(out.shape)}")
    if out.shape[2] > head_dim:
        raise ValueError(f"out's values have at most the keys' {head_dim} numbers: {out.shape[2]}")
    if query.shape[2] != head_dim or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"query's head_dim must be kv_cache's {head_dim} and at most {MAX_HEAD_DIM}:"
            f" {query.shape[2]}"
        )
    if query.shape[1] % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of {num_kv_heads}: {query.shape[1]}")
    for name, x in (("query", query), ("out", out)):
        if x.stride()[1:] != (x.shape[2], 1):
            raise ValueError(f"{name}'s heads must be dense, its strides are {x.stride()}")
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer must be in [0, {num_layers}): {layer}")
    if sliding_window < 0:
        raise ValueError(f"sliding_window must be 0 or positive: {sliding_window}")
    if block_tables.stride(1) != 1:
        raise ValueError(f"block_tables' rows must be dense: strides {block_tables.stride()}")
    for name, x, size in (
        ("seq_lens", seq_lens, num_seqs),
        ("query_start_loc", query_start_loc, num_seqs + 1),
    ):
        if x.shape != (size,) or not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous [{size}] here: {tuple(x.shape)}")
    raise AssertionError("paged_attention refused arguments that _explain finds no fault with")


def _raise_status(
    status: int,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> NoReturn:
    """Raises what the C function found wrong with a sequence: codes of attention.c's check()."""
    code, seq = status % 8, status // 8
    if code == 1:
        raise ValueError(
            f"query_start_loc must start at 0, never fall and end within query's {query.shape[0]}"
            f" tokens; sequence {seq}: {query_start_loc.tolist()}"
        )
    if code == 2:
        limit = block_tables.shape[1] * kv_cache.shape[4]
        raise ValueError(
            f"seq_lens[{seq}] must be at least the sequence's query tokens and at most {limit}"
            f" (max_blocks x block_size): {int(seq_lens[seq])}"
        )
    if code == 3:
        raise ValueError(
            f"block_tables[{seq}] must hold ids in [0, {kv_cache.shape[0]}) for all positions"
            f" attended to: {block_tables[seq].tolist()}"
        )
    raise MemoryError("no memory for the attention kernel's scratch space")
