"""Paged attention over latents (DeepSeek-V2's, absorbed) on a GPU.

A token has one row in the pool, [rotated key | latent]: the key of all heads, and from `ROTATED` on
their value. So the rows of a product are heads (and, of prompts, tokens), every one of which reads
the same tile of the pool once, as key and as value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.gpu.decode_kernels import merge_kernel
from octavo.ops.gpu.prefill_parts import LOG2_E

_MAX_ROWS, _MAX_ROWS_FLOAT32 = 64, 16
"""Rows of a product: [rows, latent] float32 sums have to stay in registers."""
_NO_WINDOW = 1 << 30
_MERGED_NUMBERS = 4096
"""As in `decode_attention`."""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """How the kernels are compiled."""

    rows: int = _MAX_ROWS
    """Rows of a product, at most; fewer are filled up to 16."""
    tile: int = 32
    """Tokens read at a time."""
    num_warps: int = 4
    num_stages: int = 2


@triton.jit
def _over_latents(
    query, q_offsets, row_mask, row_positions, pool, table, low, end, scale_log2,
    BLOCK_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROTATED: tl.constexpr,
    LATENT: tl.constexpr, ROTATED_PAD: tl.constexpr, LATENT_PAD: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Running softmax of ROWS query rows over positions [low, end) up to each row's own.

    Returns: sums [ROWS, LATENT_PAD], largest scores and total weights [ROWS], scores in base 2.
    """
    width: tl.constexpr = ROTATED + LATENT
    front, back = tl.arange(0, ROTATED_PAD), tl.arange(0, LATENT_PAD)
    front_ok, back_ok = (front < ROTATED)[None, :], (back < LATENT)[None, :]
    at = query + q_offsets[:, None]
    q_front = tl.load(at + front[None, :], mask=row_mask[:, None] & front_ok, other=0.0)
    q_back = tl.load(at + ROTATED + back[None, :], mask=row_mask[:, None] & back_ok, other=0.0)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, LATENT_PAD], tl.float32)
    tokens = tl.arange(0, TILE)
    for start in tl.range(low, end, TILE, num_stages=STAGES):
        position = start + tokens
        inside = position < end
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        row = pool + block * BLOCK_STRIDE + (position % BLOCK_SIZE) * width
        keys = tl.load(row[:, None] + front[None, :], mask=inside[:, None] & front_ok, other=0.0)
        latents = tl.load(
            row[:, None] + ROTATED + back[None, :], mask=inside[:, None] & back_ok, other=0.0
        )
        scores = tl.dot(q_front, tl.trans(keys), input_precision="ieee")
        scores = tl.dot(q_back, tl.trans(latents), scores, input_precision="ieee") * scale_log2
        seen = inside[None, :] & (position[None, :] <= row_positions[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        fade, weights = tl.exp2(best - new_best), tl.exp2(scores - new_best[:, None])
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latents.dtype), latents, acc * fade[:, None],
                     input_precision="ieee")  # fmt: skip
        best = new_best
    return acc, best, total


@triton.jit(do_not_specialize=["layer", "num_seqs"])
def _decode_kernel(
    out, query, pool, block_tables, table_rows, seq_lens, items, partial, partial_lse, layer,
    num_seqs, scale_log2, OUT_STRIDE: tl.constexpr, QUERY_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr, NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROTATED: tl.constexpr, LATENT: tl.constexpr,
    ROTATED_PAD: tl.constexpr, LATENT_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One item and ROWS heads a program; results, partial results and padding as in
    `decode_kernels.decode_kernel`, with HEAD_DIM = LATENT for what is written."""
    item = tl.program_id(1)
    heads = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, LATENT_PAD)
    head_ok = heads < NUM_HEADS
    mask = head_ok[:, None] & (dims < LATENT)[None, :]
    cells = heads[:, None] * LATENT + dims[None, :]
    seq = tl.load(items + item * 3)
    first = tl.load(items + item * 3 + 1)
    end = tl.load(items + item * 3 + 2)
    if seq < 0:
        # The last of the unused items stand for the last sequences: padding, which has none.
        padding = num_seqs - tl.num_programs(1) + item
        if tl.load(seq_lens + padding, mask=padding >= 0, other=1) == 0:
            at = padding.to(tl.int64) * OUT_STRIDE + cells
            tl.store(out + at, tl.zeros_like(cells).to(out.dtype.element_ty), mask=mask)
        return
    seq_len, wide_seq = tl.load(seq_lens + seq), seq.to(tl.int64)
    if table_rows is None:
        table = block_tables + wide_seq * TABLE_STRIDE
    else:
        table = block_tables + tl.load(table_rows + seq).to(tl.int64) * TABLE_STRIDE
    pool += layer.to(tl.int64) * (BLOCK_SIZE * (ROTATED + LATENT))
    acc, best, total = _over_latents(
        query, wide_seq * QUERY_STRIDE + heads * (ROTATED + LATENT), head_ok,
        tl.zeros([ROWS], tl.int32) + seq_len, pool, table, first, end, scale_log2,
        BLOCK_STRIDE, BLOCK_SIZE, ROTATED, LATENT, ROTATED_PAD, LATENT_PAD, ROWS, TILE, STAGES,
    )  # fmt: skip
    total = tl.where(total > 0.0, total, 1.0)
    acc /= total[:, None]
    if (first == 0) & (end == seq_len):
        at = wide_seq * OUT_STRIDE + cells
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
    else:
        before = item.to(tl.int64) * NUM_HEADS
        tl.store(partial + before * LATENT + cells, acc, mask=mask)
        tl.store(partial_lse + before + heads, best + tl.log2(total), mask=head_ok)


@triton.jit(do_not_specialize=["layer"])
def _prefill_kernel(
    out, query, pool, block_tables, table_rows, seq_lens, query_start, tiles, layer, scale_log2,
    OUT_STRIDE: tl.constexpr, QUERY_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr, NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr, ROTATED: tl.constexpr, LATENT: tl.constexpr,
    ROTATED_PAD: tl.constexpr, LATENT_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """ROWS of the (token, head) pairs of one tile of a prompt's chunk a program, heads fastest."""
    seq = tl.load(tiles + tl.program_id(0) * 2)
    if seq < 0:
        return
    begin, stop = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    heads, within = rows % NUM_HEADS, rows // NUM_HEADS
    tokens = begin + tl.load(tiles + tl.program_id(0) * 2 + 1) + within
    row_ok = (within < TILE_TOKENS) & (tokens < stop)
    positions = tl.load(seq_lens + seq) - stop + tokens
    end = tl.max(tl.where(row_ok, positions, -1), 0) + 1
    if end == 0:
        return
    if table_rows is None:
        table = block_tables + seq.to(tl.int64) * TABLE_STRIDE
    else:
        table = block_tables + tl.load(table_rows + seq).to(tl.int64) * TABLE_STRIDE
    pool += layer.to(tl.int64) * (BLOCK_SIZE * (ROTATED + LATENT))
    wide = tokens.to(tl.int64)
    acc, _, total = _over_latents(
        query, wide * QUERY_STRIDE + heads * (ROTATED + LATENT), row_ok, positions, pool, table,
        0, end, scale_log2,
        BLOCK_STRIDE, BLOCK_SIZE, ROTATED, LATENT, ROTATED_PAD, LATENT_PAD, ROWS, TILE, STAGES,
    )  # fmt: skip
    dims = tl.arange(0, LATENT_PAD)
    at = out + (wide * OUT_STRIDE + heads * LATENT)[:, None] + dims[None, :]
    mask = row_ok[:, None] & (dims < LATENT)[None, :]
    tl.store(at, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def latent_decode(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    table_rows: Tensor | None,
    seq_lens: Tensor,
    items: Tensor,
    item_start: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    scale: float,
    config: LatentConfig | None = None,
) -> None:
    """Attention of one query token a sequence, its last, over the pool's latents.

    The formula is that of `octavo.ops.reference.paged_attention` with one plane. Arguments as of
    `decode_attention.paged_decode`, except:

    Args:
        out: [num_seqs, num_heads, latent], written.
        query: [num_seqs, num_heads, rotated + latent], in the pool's type.
        kv_cache: [num_blocks, num_layers, 1, 1, block_size, rotated + latent]; blocks may be any
            distance apart.
        partial: float32 [at least max_items, num_heads, latent], scratch.

    Raises: TypeError for dtypes, ValueError for shapes and strides.
    """
    num_seqs, num_heads, latent = out.shape
    _check(out, query, kv_cache, layer, (seq_lens, items, item_start, block_tables, table_rows))
    max_items = len(items)
    if partial.shape[1:] != (num_heads, latent) or len(partial) < max_items:
        raise ValueError(
            f"partial must be [{max_items}, {num_heads}, {latent}] or longer: "
            f"{tuple(partial.shape)}"
        )
    if not num_seqs:
        return
    config = config or _fastest(query.dtype, num_heads)
    shape = _constants(out, query, kv_cache, block_tables, config, num_heads)
    _decode_kernel[(triton.cdiv(num_heads, shape["ROWS"]), max_items)](
        out, query, kv_cache, block_tables, table_rows, seq_lens, items, partial, partial_lse,
        layer, num_seqs, scale * LOG2_E, **shape,
    )  # fmt: skip
    if max_items > num_seqs:
        pad = triton.next_power_of_2(latent)
        merge_kernel[(num_heads, num_seqs)](
            out, partial, partial_lse, seq_lens, items, item_start, _NO_WINDOW,
            out.stride(0), num_heads, latent, pad, 1, max(1, min(32, _MERGED_NUMBERS // pad)),
            False, num_warps=4,
        )  # fmt: skip


def latent_prefill(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    layer: int,
    block_tables: Tensor,
    table_rows: Tensor | None,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    tiles: Tensor,
    tile_tokens: int,
    scale: float,
    config: LatentConfig | None = None,
) -> None:
    """Attention of chunks of prompts over the pool's latents, their own included.

    Args:
        out, query, kv_cache: as of `latent_decode`, of num_tokens rows; rows of no tile stay.
        layer, block_tables, table_rows, seq_lens: likewise.
        query_start_loc: int32 [num_seqs + 1].
        tiles: int32 [num_tiles, 2]: (sequence, first token of the tile within its chunk), of
            tile_tokens each; sequence -1 where there are fewer.

    Raises: TypeError for dtypes, ValueError for shapes and strides.
    """
    num_heads = out.shape[1]
    _check(
        out, query, kv_cache, layer, (seq_lens, query_start_loc, tiles, block_tables, table_rows)
    )
    if not len(tiles):
        return
    pairs = tile_tokens * num_heads
    config = config or _fastest(query.dtype, pairs)
    shape = _constants(out, query, kv_cache, block_tables, config, pairs)
    _prefill_kernel[(len(tiles), triton.cdiv(pairs, shape["ROWS"]))](
        out, query, kv_cache, block_tables, table_rows, seq_lens, query_start_loc, tiles, layer,
        scale * LOG2_E, TILE_TOKENS=tile_tokens, **shape,
    )  # fmt: skip


def _fastest(dtype: torch.dtype, num_rows: int) -> LatentConfig:
    """The fastest of those tried on an H200 that keep 576 numbers a row in registers."""
    if dtype.itemsize == 4:
        return LatentConfig(rows=_MAX_ROWS_FLOAT32, tile=16, num_warps=8, num_stages=1)
    return LatentConfig(num_stages=3) if num_rows <= 16 else LatentConfig(num_warps=8)


def _constants(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    config: LatentConfig,
    num_rows: int,
) -> dict[str, int]:
    latent = out.shape[2]
    rotated = query.shape[2] - latent
    return {
        "OUT_STRIDE": out.stride(0),
        "QUERY_STRIDE": query.stride(0),
        "BLOCK_STRIDE": kv_cache.stride(0),
        "TABLE_STRIDE": block_tables.stride(0),
        "NUM_HEADS": out.shape[1],
        "BLOCK_SIZE": kv_cache.shape[4],
        "ROTATED": rotated,
        "LATENT": latent,
        "ROTATED_PAD": max(16, triton.next_power_of_2(rotated)),
        "LATENT_PAD": max(16, triton.next_power_of_2(latent)),
        "ROWS": min(max(triton.next_power_of_2(num_rows), 16), config.rows),
        "TILE": config.tile,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


def _check(
    out: Tensor, query: Tensor, kv_cache: Tensor, layer: int, indices: tuple[Tensor | None, ...]
) -> None:
    num_tokens, num_heads, width = query.shape
    if query.dtype != out.dtype or kv_cache.dtype != query.dtype:
        raise TypeError(
            f"out and kv_cache must have query's type {query.dtype}: {out.dtype}, {kv_cache.dtype}"
        )
    if any(x is not None and (x.dtype != torch.int32 or x.stride(-1) != 1) for x in indices):
        told = ", ".join(f"{x.dtype} {x.stride()}" for x in indices if x is not None)
        raise TypeError(f"indices must be int32 with dense rows: {told}")
    _, num_layers, planes, heads, block_size, cache_width = kv_cache.shape
    dense = (block_size * width, block_size * width, block_size * width, width, 1)
    if (planes, heads, cache_width) != (1, 1, width) or kv_cache.stride()[1:] != dense:
        raise ValueError(
            f"kv_cache must be [blocks, layers, 1, 1, block_size, {width}], dense within a block: "
            f"{tuple(kv_cache.shape)}, strides {kv_cache.stride()}"
        )
    if out.shape[:2] != (num_tokens, num_heads) or not 0 < out.shape[2] < width:
        raise ValueError(f"out {tuple(out.shape)} does not fit a query {tuple(query.shape)}")
    if query.stride()[1:] != (width, 1) or out.stride()[1:] != (out.shape[2], 1):
        raise ValueError(f"heads must be dense: strides {query.stride()}, {out.stride()}")
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer must be in [0, {num_layers}): {layer}")
