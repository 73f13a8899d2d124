"""Causal attention of prompt chunks over the paged pool, in Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from octavo.ops.gpu import pdl
from octavo.ops.gpu.prefill_parts import (
    fold_tile,
    key_bounds,
    load_tile,
    row_slopes,
    score_factors,
)

if TYPE_CHECKING:
    from torch import Tensor

USE_HOPPER = True
"""Whether `hopper_attention` serves where it can."""


@triton.jit
def _block_ids(
    table, start, floor, seq_len, WINDOW: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The table's entry of each token of a tile; or only one if a block holds whole tiles.

    Entries of no token in [floor, seq_len) are never read: the nearest one stands for them.
    """
    index = start // BLOCK if BLOCK % TILE == 0 else (start + tl.arange(0, TILE)) // BLOCK
    if WINDOW:
        index = tl.maximum(index, floor // BLOCK)
    return tl.load(table + tl.minimum(index, (seq_len - 1) // BLOCK))


@triton.jit
def _attend(
    q, acc, best, total, keys, values, key_scales, value_scales, desc, desc_key, desc_value,
    table, first, end, floor, seq_len, row_positions, slopes, scale, soft_cap, window,
    block_stride, scale_stride,
    MASKED: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr,
    FP8: tl.constexpr,
    DESC: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tiles of keys [first, end) of one sequence; see `fold_tile`. No row sees what lies before
    `floor`: blocks there may have been given back."""
    tokens, dims = tl.arange(0, TILE), tl.arange(0, DIM)
    # A tile's entries are loaded one tile ahead, so that its keys do not wait for them.
    ids = _block_ids(table, first, floor, seq_len, WINDOW, BLOCK, TILE)
    for start in tl.range(first, end, TILE):
        if DESC:
            row = ids * (block_stride // HEAD_DIM).to(tl.int32) + start % BLOCK
            k = desc.load([row + desc_key, 0])
            v = desc.load([row + desc_value, 0])
        else:
            blocks = ids.to(tl.int64)
            within = (start + tokens) % BLOCK
            at = (blocks * block_stride + within * HEAD_DIM)[:, None] + dims[None, :]
            # What lies behind the context, or before the window, may be anything.
            inside = start + tokens < seq_len
            if WINDOW:
                inside = inside & (start + tokens >= floor)
            k, v = load_tile(keys, values, at, inside, MASKED, HEAD_DIM, DIM)
        if FP8:
            scale_at = blocks * scale_stride + within
            k_scale = tl.load(key_scales + scale_at).to(tl.float32)
            v_scale = tl.load(value_scales + scale_at).to(tl.float32)
            if MASKED:
                v_scale = tl.where(inside, v_scale, 0.0)
            v = (v.to(tl.float32) * v_scale[:, None]).to(q.dtype)
            scores = tl.dot(q, k.to(q.dtype).T, input_precision=PRECISION) * k_scale[None, :]
        else:
            scores = tl.dot(q, k.T, input_precision=PRECISION)
        ids = _block_ids(table, start + TILE, floor, seq_len, WINDOW, BLOCK, TILE)
        acc, best, total = fold_tile(
            scores, v, acc, best, total, start, row_positions, slopes, scale, soft_cap, window,
            MASKED, SOFT_CAP, ALIBI, WINDOW, TILE, PRECISION,
        )  # fmt: skip
    return acc, best, total


@triton.jit(do_not_specialize=["layer", "window"])
def _paged_prefill(
    out, query, kv, kv_scales, desc, tables, table_rows, seq_lens, query_start, tiles, alibi,
    scale, soft_cap, window, layer, out_stride, query_stride,
    block_stride: tl.int64, layer_stride: tl.int64, table_stride,
    scale_stride: tl.int64, scale_layer_stride: tl.int64,
    SOFT_CAP: tl.constexpr, WINDOW: tl.constexpr, FP8: tl.constexpr, DESC: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PACK: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, MASK_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out_t = sum_j softmax_j(scale q_t . k_j) v_j over j <= t (and j > t - window if WINDOW);
    scores may have a soft cap and, by `alibi` [NUM_HEADS], slopes.

    Program (h, i) takes tile i of a chunk for PACK heads of one KV head. Row r of its ROWS is
    token r // PACK of the tile and head r % PACK; rows left over are idle.

    out, query [num_tokens, NUM_HEADS, HEAD_DIM], any token stride; kv [num_blocks, num_layers, 2,
    NUM_KV_HEADS, BLOCK, HEAD_DIM]; kv_scales the same without HEAD_DIM; desc: kv as rows of
    HEAD_DIM, TILE rows a box, if DESC; tables [rows, max_blocks]; tiles [num_tiles, 2]: sequence
    (-1: nothing to do) and the tile's first token in its chunk.
    """
    pack, tile = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles + 2 * tile)
    if seq >= 0:
        first = tl.load(tiles + 2 * tile + 1)
        chunk = tl.load(query_start + seq)
        chunk_len = tl.load(query_start + seq + 1) - chunk
        seq_len = tl.load(seq_lens + seq)
        table_row = seq
        if table_rows is not None:
            table_row = tl.load(table_rows + seq)
        table = tables + table_row.to(tl.int64) * table_stride

        rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
        tile_tokens: tl.constexpr = ROWS // PACK
        row_tokens = first + rows // PACK
        valid = (row_tokens < chunk_len) & (rows < tile_tokens * PACK)
        valid = valid[:, None] & (dims < HEAD_DIM)[None, :]
        heads = pack * PACK + rows % PACK
        token_at = (chunk + row_tokens).to(tl.int64)
        within = (heads * HEAD_DIM)[:, None] + dims[None, :]
        q = tl.load(query + (token_at * query_stride)[:, None] + within, mask=valid, other=0.0)

        lowest = seq_len - chunk_len + first
        highest = tl.minimum(lowest + tile_tokens, seq_len) - 1
        row_positions = tl.minimum(seq_len - chunk_len + row_tokens, highest)
        best = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)

        kv_head = pack * PACK // (NUM_HEADS // NUM_KV_HEADS)
        keys = kv + layer * layer_stride + kv_head * (BLOCK * HEAD_DIM)
        values = keys + NUM_KV_HEADS * BLOCK * HEAD_DIM
        desc_key = (layer * (layer_stride // HEAD_DIM)).to(tl.int32) + kv_head * BLOCK
        desc_value = desc_key + NUM_KV_HEADS * BLOCK
        key_scales = kv_scales
        value_scales = kv_scales
        if FP8:
            key_scales = kv_scales + layer * scale_layer_stride + kv_head * BLOCK
            value_scales = key_scales + NUM_KV_HEADS * BLOCK

        ALIBI: tl.constexpr = alibi is not None
        slopes = 0.0
        if alibi is not None:
            slopes = row_slopes(alibi, heads)
        low, begin, full = key_bounds(lowest, highest, window, WINDOW, TILE, MASK_TILE)
        floor = 0
        if WINDOW:
            floor = tl.maximum(lowest - window + 1, 0)
        if WINDOW:
            acc, best, total = _attend(
                q, acc, best, total, keys, values, key_scales, value_scales, desc, desc_key,
                desc_value, table, low, begin, floor, seq_len, row_positions, slopes, scale,
                soft_cap, window, block_stride, scale_stride, True, SOFT_CAP, ALIBI, WINDOW,
                FP8, False, HEAD_DIM, DIM, BLOCK, MASK_TILE, PRECISION,
            )  # fmt: skip
        acc, best, total = _attend(
            q, acc, best, total, keys, values, key_scales, value_scales, desc, desc_key,
            desc_value, table, begin, full, floor, seq_len, row_positions, slopes, scale, soft_cap,
            window, block_stride, scale_stride, False, SOFT_CAP, ALIBI, WINDOW, FP8, DESC,
            HEAD_DIM, DIM, BLOCK, TILE, PRECISION,
        )  # fmt: skip
        acc, best, total = _attend(
            q, acc, best, total, keys, values, key_scales, value_scales, desc, desc_key,
            desc_value, table, full, highest + 1, floor, seq_len, row_positions, slopes, scale,
            soft_cap, window, block_stride, scale_stride, True, SOFT_CAP, ALIBI, WINDOW, FP8,
            False, HEAD_DIM, DIM, BLOCK, MASK_TILE, PRECISION,
        )  # fmt: skip
        done = (acc * (1.0 / total)[:, None]).to(out.dtype.element_ty)
        tl.store(out + (token_at * out_stride)[:, None] + within, done, mask=valid)


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """How the kernel is cut; what is best depends on the GPU and the shapes."""

    rows: int
    """Rows of queries a program takes: tokens x packed heads."""
    tile: int
    """Keys of one iteration."""
    num_warps: int
    num_stages: int
    pack: bool = True
    """Whether a tile's rows are all heads of the group (else the tokens of one head)."""
    mask_tile: int = 0
    """Keys of one iteration where masks are needed; 0: `tile`."""
    max_registers: int | None = None
    """Registers a thread may take, so that more programs fit a multiprocessor."""
    descriptors: bool = False
    """Whether whole tiles within a block come by tensor descriptors."""

    def tile_tokens(self, group: int) -> int:
        """Tokens a program takes, with `group` query heads a KV head."""
        return self.rows // group if self.pack else self.rows


def paged_prefill(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    layer: int,
    block_tables: Tensor,
    table_rows: Tensor | None,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    tiles: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    shape: PrefillShape | None = None,
    *,
    alibi: Tensor | None = None,
) -> None:
    """Attention of the chunks that `tiles` names, each over its context in the pool.

    Args:
        out, query: [num_tokens, num_heads, head_dim] of the whole step, any token stride. Rows of
            sequences that are in no tile are left alone.
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], in query's type
            or float8_e4m3fn; blocks may lie apart.
        kv_scales: float16 [num_blocks, num_layers, 2, num_kv_heads, block_size] under float8.
        block_tables: int32 [rows, max_blocks].
        table_rows: int32 [num_seqs], each sequence's row of block_tables; None: its own number.
        seq_lens: int32 [num_seqs], the chunk's tokens included.
        query_start_loc: int32 [num_seqs + 1].
        tiles: int32 [num_tiles, 2]: (sequence or -1, first token within its chunk), from
            `attention.work.plan_prefill` with `prefill_tile_tokens`.
        scale: positive factor of the scores.
        window: positions a token attends to, itself included; 0 for all.
        soft_cap: scores s become soft_cap tanh(s / soft_cap); 0 for none.
        shape: how the kernel is cut, for measurements; `tiles` must fit it.
        alibi: float32 [num_heads], contiguous: slope (j - t) is added to a score; None for none.
    """
    _check(out, query, kv_cache, kv_scales, layer, alibi)
    rows = seq_lens if table_rows is None else table_rows
    indices = (block_tables, rows, seq_lens, query_start_loc, tiles)
    assert all(x.dtype == torch.int32 and x.stride(-1) == 1 for x in indices), "int32, dense"
    assert tiles.is_contiguous() and scale > 0.0
    if not len(tiles):
        return
    num_kv_heads, block_size, head_dim = kv_cache.shape[3:]
    num_heads = query.shape[1]
    group = num_heads // num_kv_heads
    plain = not window and not soft_cap and alibi is None and kv_scales is None
    if shape is None and plain and hopper_takes(query, group, block_size, kv_cache.stride(0)):
        from octavo.ops.gpu import hopper_attention

        hopper_attention.prefill(
            out, query, kv_cache, layer, block_tables, table_rows, seq_lens, query_start_loc,
            tiles, scale,
        )  # fmt: skip
        return
    if shape is None:
        many = num_heads // group * len(tiles) > pdl.num_sms(query.device)
        shape = prefill_shape(group, head_dim, query.dtype, many and kv_scales is None)
    descriptor = _descriptor(kv_cache, shape)
    pack = group if shape.pack else 1
    assert pack <= shape.rows
    _paged_prefill[(num_heads // pack, len(tiles))](
        out, query, kv_cache, kv_scales, descriptor, block_tables, table_rows, seq_lens,
        query_start_loc, tiles, alibi,
        *score_factors(scale, soft_cap), window, layer, out.stride(0), query.stride(0),
        kv_cache.stride(0), kv_cache.stride(1), block_tables.stride(0),
        0 if kv_scales is None else kv_scales.stride(0),
        0 if kv_scales is None else kv_scales.stride(1),
        SOFT_CAP=soft_cap > 0.0, WINDOW=window > 0, FP8=kv_scales is not None,
        DESC=descriptor is not None, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, PACK=pack,
        HEAD_DIM=head_dim, DIM=triton.next_power_of_2(head_dim), BLOCK=block_size,
        ROWS=shape.rows, TILE=shape.tile, MASK_TILE=shape.mask_tile or shape.tile,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=shape.num_warps, num_stages=shape.num_stages, maxnreg=shape.max_registers,
    )  # fmt: skip


def _check(
    out: Tensor, query: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, layer: int,
    alibi: Tensor | None,
) -> None:  # fmt: skip
    """What the attention backends guarantee."""
    _, num_layers, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_heads = query.shape[1]
    assert query.shape == out.shape and query.shape[2] == head_dim
    assert query.stride()[1:] == (head_dim, 1) and out.stride()[1:] == (head_dim, 1)
    assert num_heads % num_kv_heads == 0 and 0 <= layer < num_layers
    assert kv_cache.stride()[2:] == _inner_strides(num_kv_heads, block_size, head_dim)
    assert kv_cache.stride(1) == 2 * kv_cache.stride(2)
    assert (kv_scales is not None) == (kv_cache.dtype == torch.float8_e4m3fn)
    assert kv_scales is None or (
        kv_scales.dtype == torch.float16
        and kv_scales.stride()[2:] == (num_kv_heads * block_size, block_size, 1)
        and kv_scales.stride(1) == 2 * kv_scales.stride(2)
    )
    assert kv_scales is not None or kv_cache.dtype == query.dtype == out.dtype
    assert alibi is None or (alibi.dtype == torch.float32 and alibi.shape == (num_heads,))


def hopper_takes(query: Tensor, group: int, block_size: int = 128, block_stride: int = 128) -> bool:
    """Whether `hopper_attention` serves such queries and blocks."""
    if not USE_HOPPER or query.device.type != "cuda":
        return False
    from octavo.ops.gpu import hopper_attention

    return block_stride % 128 == 0 and hopper_attention.supports(query, group, block_size)


def _inner_strides(num_kv_heads: int, block_size: int, head_dim: int) -> tuple[int, ...]:
    """Of K or V, head, token and element in a block."""
    head = block_size * head_dim
    return num_kv_heads * head, head, head_dim, 1


def _descriptor(kv_cache: Tensor, shape: PrefillShape) -> object:
    """The pool as rows of one token and head, a tile in one box; None where that cannot be."""
    *_, block_size, head_dim = kv_cache.shape
    if not shape.descriptors or block_size % shape.tile or kv_cache.stride(0) % head_dim:
        return None
    if head_dim & (head_dim - 1):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows = (len(kv_cache) - 1) * kv_cache.stride(0) // head_dim + kv_cache[0].numel() // head_dim
    pool = kv_cache.as_strided((rows, head_dim), (head_dim, 1))
    return TensorDescriptor.from_tensor(pool, [shape.tile, head_dim])


def prefill_shape(group: int, head_dim: int, dtype: torch.dtype, many: bool) -> PrefillShape:
    """What was fastest on an H200, see `benchmarks/kernels/gpu_prefill_attention.py`.

    Where there are `many` programs, two on a multiprocessor hide each other's softmax and start,
    though few registers make products wait; a program alone is faster with all registers. Tiles
    begin at multiples of one length, masked or not, so that a row's arithmetic depends neither on
    that nor on how its prompt was cut. `attention.work.prefill_tile_tokens` must fit the rows.
    """
    rows = 64 if head_dim <= 64 and group <= 64 else 128
    if dtype == torch.float32:
        return PrefillShape(rows, tile=32, num_warps=8, num_stages=2)
    if head_dim > 128:
        return PrefillShape(rows, tile=64, num_warps=8, num_stages=2)
    if rows == 64:
        return PrefillShape(rows, tile=64, num_warps=4, num_stages=2)
    if many:
        return PrefillShape(rows, tile=64, num_warps=8, num_stages=2, max_registers=128)
    return PrefillShape(rows, tile=64, num_warps=8, num_stages=3)
