"""Causal attention of whole prompts over the step's own keys and values, in Triton.

A chunk that begins at position 0 needs nothing from the pool: its K and V lie one token behind the
other where the model's projection wrote them, and whole tiles come by the tensor memory
accelerator, without tables and without an address for each row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from octavo.ops.gpu import pdl
from octavo.ops.gpu.prefill_attention import PrefillShape, hopper_takes, prefill_shape
from octavo.ops.gpu.prefill_parts import (
    fold_tile,
    key_bounds,
    load_tile,
    row_slopes,
    score_factors,
)

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _attend(
    q, acc, best, total, keys, values, key_desc, value_desc, column, chunk, stride, first, end,
    chunk_len, row_positions, slopes, scale, soft_cap, window,
    MASKED: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr,
    DESC: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tiles of keys [first, end) of one chunk; see `fold_tile`."""
    tokens, dims = tl.arange(0, TILE), tl.arange(0, DIM)
    for start in tl.range(first, end, TILE):
        if DESC:
            k = key_desc.load([chunk + start, column])
            v = value_desc.load([chunk + start, column])
        else:
            at = (chunk + start + tokens).to(tl.int64) * stride + column
            at = at[:, None] + dims[None, :]
            # Behind the chunk are the next one's rows, or none.
            k, v = load_tile(keys, values, at, start + tokens < chunk_len, MASKED, HEAD_DIM, DIM)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        acc, best, total = fold_tile(
            scores, v, acc, best, total, start, row_positions, slopes, scale, soft_cap, window,
            MASKED, SOFT_CAP, ALIBI, WINDOW, TILE, PRECISION,
        )  # fmt: skip
    return acc, best, total


@triton.jit(do_not_specialize=["window"])
def _fresh_prefill(
    out, query, key, value, key_desc, value_desc, query_start, tiles, alibi, scale, soft_cap,
    window,
    out_stride, query_stride, stride,
    SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, DESC: tl.constexpr,
    GROUP: tl.constexpr, PACK: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, MASK_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out_t = sum_j softmax_j(scale q_t . k_j) v_j over the chunk's j <= t (and j > t - window);
    scores may have a soft cap and, by `alibi` [num_heads], slopes.

    Programs, rows and tiles as in `prefill_attention`. out, query [num_tokens, heads, HEAD_DIM],
    key, value [num_tokens, kv_heads, HEAD_DIM], any token stride, one for key and value;
    key_desc, value_desc: the same as [num_tokens, kv_heads HEAD_DIM], TILE rows a box, if DESC.
    """
    pack, tile = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles + 2 * tile)
    if seq >= 0:
        first = tl.load(tiles + 2 * tile + 1)
        chunk = tl.load(query_start + seq)
        chunk_len = tl.load(query_start + seq + 1) - chunk

        rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
        tile_tokens: tl.constexpr = ROWS // PACK
        row_tokens = first + rows // PACK
        valid = (row_tokens < chunk_len) & (rows < tile_tokens * PACK)
        valid = valid[:, None] & (dims < HEAD_DIM)[None, :]
        token_at = (chunk + row_tokens).to(tl.int64)
        heads = pack * PACK + rows % PACK
        within = (heads * HEAD_DIM)[:, None] + dims[None, :]
        q = tl.load(query + (token_at * query_stride)[:, None] + within, mask=valid, other=0.0)

        highest = tl.minimum(first + tile_tokens, chunk_len) - 1
        row_positions = tl.minimum(row_tokens, highest)
        best = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        column = pack * PACK // GROUP * HEAD_DIM

        ALIBI: tl.constexpr = alibi is not None
        slopes = 0.0
        if alibi is not None:
            slopes = row_slopes(alibi, heads)
        low, begin, full = key_bounds(first, highest, window, WINDOW, TILE, MASK_TILE)
        if WINDOW:
            acc, best, total = _attend(
                q, acc, best, total, key, value, key_desc, value_desc, column, chunk, stride,
                low, begin, chunk_len, row_positions, slopes, scale, soft_cap, window,
                True, SOFT_CAP, ALIBI, WINDOW, False, HEAD_DIM, DIM, MASK_TILE, PRECISION,
            )  # fmt: skip
        acc, best, total = _attend(
            q, acc, best, total, key, value, key_desc, value_desc, column, chunk, stride,
            begin, full, chunk_len, row_positions, slopes, scale, soft_cap, window,
            False, SOFT_CAP, ALIBI, WINDOW, DESC, HEAD_DIM, DIM, TILE, PRECISION,
        )  # fmt: skip
        acc, best, total = _attend(
            q, acc, best, total, key, value, key_desc, value_desc, column, chunk, stride,
            full, highest + 1, chunk_len, row_positions, slopes, scale, soft_cap, window,
            True, SOFT_CAP, ALIBI, WINDOW, False, HEAD_DIM, DIM, MASK_TILE, PRECISION,
        )  # fmt: skip
        done = (acc * (1.0 / total)[:, None]).to(out.dtype.element_ty)
        tl.store(out + (token_at * out_stride)[:, None] + within, done, mask=valid)


def fresh_prefill(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    tiles: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    shape: PrefillShape | None = None,
    *,
    alibi: Tensor | None = None,
) -> None:
    """Attention of the chunks that `tiles` names, each of which begins at position 0.

    Args:
        out, query: [num_tokens, num_heads, head_dim] of the whole step, any token stride. Rows of
            sequences that are in no tile are left alone.
        key, value: [num_tokens, num_kv_heads, head_dim], rotated, in query's type, with one token
            stride for both: views of what the projection wrote.
        query_start_loc: int32 [num_seqs + 1].
        tiles, scale, window, soft_cap, shape, alibi: as for `prefill_attention.paged_prefill`.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    assert query.shape == out.shape and key.shape == value.shape
    assert key.shape[0] == num_tokens and key.shape[2] == head_dim and scale > 0.0
    assert all(x.stride()[1:] == (head_dim, 1) for x in (out, query, key, value))
    assert key.stride(0) == value.stride(0) and num_heads % num_kv_heads == 0
    assert query.dtype == key.dtype == value.dtype == out.dtype and tiles.is_contiguous()
    assert query_start_loc.dtype == tiles.dtype == torch.int32 and query_start_loc.stride(0) == 1
    if not len(tiles):
        return
    group = num_heads // num_kv_heads
    plain = not window and not soft_cap and alibi is None
    if shape is None and plain and hopper_takes(query, group):
        from octavo.ops.gpu import hopper_attention

        hopper_attention.prefill(
            out, query, (key, value), 0, None, None, None, query_start_loc, tiles, scale
        )
        return
    if shape is None:
        many = num_kv_heads * len(tiles) > pdl.num_sms(query.device)
        shape = replace(prefill_shape(group, head_dim, query.dtype, many), descriptors=True)
    pack = group if shape.pack else 1
    assert pack <= shape.rows
    key_desc, value_desc = (_descriptor(x, shape) for x in (key, value))
    _fresh_prefill[(num_heads // pack, len(tiles))](
        out, query, key, value, key_desc, value_desc, query_start_loc, tiles, alibi,
        *score_factors(scale, soft_cap), window, out.stride(0), query.stride(0), key.stride(0),
        SOFT_CAP=soft_cap > 0.0, WINDOW=window > 0, DESC=key_desc is not None,
        GROUP=group, PACK=pack, HEAD_DIM=head_dim, DIM=triton.next_power_of_2(head_dim),
        ROWS=shape.rows, TILE=shape.tile, MASK_TILE=shape.mask_tile or shape.tile,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=shape.num_warps, num_stages=shape.num_stages, maxnreg=shape.max_registers,
    )  # fmt: skip


def _descriptor(x: Tensor, shape: PrefillShape) -> object:
    """[num_tokens, heads head_dim] in boxes of a tile of one head; None where that cannot be."""
    num_tokens, num_heads, head_dim = x.shape
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    if not (shape.descriptors and aligned) or head_dim & (head_dim - 1):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    flat = x.as_strided((num_tokens, num_heads * head_dim), (x.stride(0), 1))
    return TensorDescriptor.from_tensor(flat, [shape.tile, head_dim])
