"""Paged attention of sequences that compute one token each, on a GPU.

A context is read once by as many programs as `octavo.attention.work.plan_decode` gives it items;
the query heads that share a KV head are the rows of one product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, NoReturn

import torch
import triton
from torch import Tensor

from octavo.ops.gpu import pdl
from octavo.ops.gpu.decode_kernels import decode_kernel, merge_kernel
from octavo.ops.gpu.launch import Prepared
from octavo.ops.gpu.prefill_parts import score_factors

_NO_WINDOW = 1 << 30
_MAX_ROWS = 64
"""Query heads of one KV head in a product; larger groups take several programs."""
_FEW = 16
"""Up to so many sequences, merging is spread over more programs."""
_MERGED_NUMBERS = 4096
"""float32 numbers of partial results that a program holds at a time."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the kernel is compiled."""

    tile: int
    """Tokens read at a time."""
    num_warps: int = 4
    buffers: int = 2
    """Tiles under way."""
    grouped: bool = True
    """Where a tile is whole blocks or within one: read a block table entry a block, not a token."""
    pdl: bool = True
    """Start while the kernel ahead ends, where the device can."""
    merged_heads: int = 0
    """Query heads whose partial results a program merges; 0: 1 for few sequences, else 4."""


@lru_cache(maxsize=256)
def default_config(head_dim: int, element_bytes: int, group: int) -> DecodeConfig:
    """The fastest on an H200, see `benchmarks/kernels/gpu_decode_attention.py`; group: query heads
    of a KV head."""
    width = triton.next_power_of_2(head_dim)
    if width * element_bytes > 512:
        return DecodeConfig(tile=32, buffers=1)
    # Fewer warps a program, and more programs, where rounds wait for arithmetic and not for memory;
    # registers of two warps have no room for more sums.
    few = (head_dim <= 64 or element_bytes == 1) and _num_rows(group) * width <= 2048
    return DecodeConfig(tile=64, num_warps=2 if few else 4)


def _num_rows(group: int) -> int:
    """Rows of a product: of query heads of one KV head, and tensor cores take 16 at least."""
    return min(max(triton.next_power_of_2(group), 16), _MAX_ROWS)


def paged_decode(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    layer: int,
    block_tables: Tensor,
    table_rows: Tensor | None,
    seq_lens: Tensor,
    items: Tensor,
    item_start: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    config: DecodeConfig | None = None,
    *,
    alibi: Tensor | None = None,
) -> None:
    """Attention of one query token a sequence, its last, over paged keys and values.

    The formula is that of `octavo.ops.reference.paged_attention`. Nothing is allocated, and the
    host does not wait. How a context is cut into items changes the order of sums.

    Args:
        out: [num_seqs, num_heads, head_dim], written; rows of length 0 at the end get zeros.
        query: like out, float32, float16 or bfloat16; both may have any stride between tokens.
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] of query's type,
            or float8_e4m3fn with kv_scales; blocks may be any distance apart (fp8: any even one).
            Beside float8_e4m3fn codes, queries must lie in float16's range.
        kv_scales: float16 [num_blocks, num_layers, 2, num_kv_heads, block_size], or None; at a
            multiple of 4 bytes, as two are read at once.
        layer: which layer of the cache.
        block_tables: int32 [max_rows, max_blocks]; entries of no attended position are not read.
        table_rows: int32 [num_seqs], each sequence's row; None: its own number.
        seq_lens: int32 [num_seqs] (or longer), context lengths, the query's token included.
        items: int32 [max_items, 3] of `octavo.attention.work.plan_decode`, then -1; max_items is at
            least num_seqs.
        item_start: int32 [num_seqs + 1], likewise; for rows of length 0 at the end num_items.
        partial: float32 [at least max_items, num_heads, head_dim], scratch.
        partial_lse: float32 [at least max_items, num_heads], scratch.
        scale: factor of the scores.
        window: positions that are attended to, the last ones; 0 for all.
        soft_cap: c > 0 turns scores s into c tanh(s / c).
        config: how to compile; the fastest known by default.
        alibi: float32 [num_heads], contiguous: slope (j - t) is added to a score; None for none.

    Raises: TypeError for dtypes, ValueError for shapes and strides.
    """
    _check_pool(out, query, kv_cache, kv_scales, layer)
    rows = seq_lens if table_rows is None else table_rows
    if not (block_tables.dtype == rows.dtype == torch.int32 and block_tables.stride(1) == 1):
        raise _wrong_indices(block_tables=block_tables, table_rows=rows)
    _check_work(query, seq_lens, rows, items, item_start, partial, partial_lse)
    _check_slopes(alibi, query.shape[1])
    num_kv_heads, block_size, head_dim = kv_cache.shape[3:]
    group = query.shape[1] // num_kv_heads
    config = config or default_config(head_dim, kv_cache.element_size(), group)
    scale_stride = 0 if kv_scales is None else kv_scales.stride(0)
    _launch(
        out, query, kv_cache, kv_cache, kv_scales, block_tables, table_rows, seq_lens, items,
        item_start, partial, partial_lse, alibi, layer, scale, window, soft_cap,
        kv_cache.stride(0), scale_stride, block_tables.stride(0), num_kv_heads, block_size, True,
        config,
    )  # fmt: skip


def contiguous_decode(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seq_lens: Tensor,
    items: Tensor,
    item_start: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    config: DecodeConfig | None = None,
) -> None:
    """`paged_decode` by the same kernel over keys and values [num_seqs, num_kv_heads, max_len,
    head_dim], dense: what paging costs. Compiled anew for each max_len."""
    _, num_kv_heads, max_len, head_dim = keys.shape
    assert keys.is_contiguous() and values.is_contiguous() and keys.shape == values.shape
    assert query.dtype == keys.dtype == values.dtype
    _check_work(query, seq_lens, seq_lens, items, item_start, partial, partial_lse)
    group = query.shape[1] // num_kv_heads
    config = config or default_config(head_dim, keys.element_size(), group)
    _launch(
        out, query, keys, values, None, items, None, seq_lens, items, item_start, partial,
        partial_lse, None, 0, scale, window, soft_cap, keys.stride(0), 0, 0, num_kv_heads,
        max_len, False, config,
    )  # fmt: skip


def _launch(
    out: Tensor, query: Tensor, keys: Tensor, values: Tensor, kv_scales: Tensor | None,
    block_tables: Tensor, table_rows: Tensor | None, seq_lens: Tensor, items: Tensor,
    item_start: Tensor, partial: Tensor, partial_lse: Tensor, alibi: Tensor | None, layer: int,
    scale: float, window: int, soft_cap: float, block_stride: int, scale_stride: int,
    table_stride: int, num_kv_heads: int, block_size: int, paged: bool, config: DecodeConfig,
) -> None:  # fmt: skip
    num_seqs, num_heads, head_dim = query.shape
    if not num_seqs:
        return
    max_items = items.shape[0]
    if num_seqs == 1:
        config = _without_pdl(config)
    shape = num_heads, num_kv_heads, head_dim, block_size
    strides = out.stride(0), query.stride(0), block_stride, scale_stride, table_stride
    types = query.dtype, keys.dtype, kv_scales is None, table_rows is None, alibi is None
    kernels = _kernels(
        shape, strides, types, paged, soft_cap > 0.0, num_seqs > _FEW, config, query.device
    )
    factors = score_factors(scale, soft_cap)
    window = window or _NO_WINDOW
    kernels.decode(
        (kernels.programs, max_items, 1), out, query, keys, values, kv_scales, block_tables,
        table_rows, seq_lens, items, partial, partial_lse, alibi, layer, num_seqs, window, *factors,
    )  # fmt: skip
    if max_items > num_seqs:
        kernels.merge(
            (kernels.merge_programs, num_seqs, 1), out, partial, partial_lse, seq_lens, items,
            item_start, window,
        )  # fmt: skip


@lru_cache(maxsize=256)
def _without_pdl(config: DecodeConfig) -> DecodeConfig:
    """For a single sequence: the row products around it start early themselves, and crowd it out if
    it lets them (Llama-3.1-8B's step on an H200: 4.49 ms with, 4.00 without)."""
    return replace(config, pdl=False)


class _Kernels(NamedTuple):
    decode: Prepared
    programs: int
    """Of an item."""
    merge: Prepared
    merge_programs: int
    """Of a sequence."""


@lru_cache(maxsize=256)
def _kernels(
    shape: tuple[int, int, int, int],
    strides: tuple[int, int, int, int, int],
    types: tuple[torch.dtype, torch.dtype, bool, bool, bool],
    paged: bool,
    soft_capped: bool,
    many: bool,
    config: DecodeConfig,
    device: torch.device,
) -> _Kernels:
    """shape: num_heads, num_kv_heads, head_dim, block_size; strides: of out, query, blocks, their
    scales, tables; types: of query and cache, whether scales, table_rows and slopes are None."""
    num_heads, num_kv_heads, head_dim, block_size = shape
    query_type, cache_type, no_scales, no_rows, no_slopes = types
    group, tile = num_heads // num_kv_heads, config.tile
    rows = _num_rows(group)
    dim_pad = max(32, triton.next_power_of_2(head_dim))
    # The compiler gives each level of indirection its share of the stages.
    stages = config.buffers * (2 if paged else 1) + 1
    grouped = config.grouped and paged and not (tile % block_size and block_size % tile)
    options = pdl.launch_options(device) if config.pdl else {"PDL": False}
    has_pdl = options.pop("PDL")

    def like(dtype: torch.dtype) -> Tensor:
        return torch.empty(0, dtype=dtype, device=device)

    x, kv, whole, wide = map(like, (query_type, cache_type, torch.int32, torch.float32))
    scales, table_rows = None if no_scales else like(torch.float16), None if no_rows else whole
    decode = Prepared(
        decode_kernel,
        (x, x, kv, kv, scales, whole, table_rows, whole, whole, wide, wide,
         None if no_slopes else wide, 0, 1, 1, 1.0, 1.0),
        (*strides, *shape, dim_pad, rows, tile, stages, paged, grouped, soft_capped,
         device.type == "cuda", has_pdl),
        num_warps=config.num_warps,
        **options,
    )  # fmt: skip
    heads = config.merged_heads or (4 if many else 1)
    chunk = max(1, min(32, _MERGED_NUMBERS // (heads * dim_pad)))
    merge = Prepared(
        merge_kernel,
        (x, wide, wide, whole, whole, whole, 1),
        (strides[0], num_heads, head_dim, dim_pad, heads, chunk, has_pdl),
        num_warps=4,
        **options,
    )
    return _Kernels(decode, num_kv_heads * -(-group // rows), merge, -(-num_heads // heads))


@lru_cache(maxsize=256)
def _dense(shape: torch.Size) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _check_pool(
    out: Tensor, query: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, layer: int
) -> None:
    """Raises what is wrong with queries, results and the pool; one look where nothing is."""
    _, num_heads, head_dim = shape = query.shape
    _, num_layers, two, num_kv_heads, _, cache_dim = kv_cache.shape
    if not (
        shape == out.shape
        and query.dtype == out.dtype
        and kv_cache.dtype == (query.dtype if kv_scales is None else torch.float8_e4m3fn)
        and (
            kv_scales is None
            or (kv_scales.dtype == torch.float16 and kv_scales.data_ptr() % 4 == 0)
        )
        and query.stride()[1:] == out.stride()[1:] == (head_dim, 1)
        and cache_dim == head_dim
        and two == 2
        and num_heads % num_kv_heads == 0
        and 0 <= layer < num_layers
        and kv_cache.stride()[1:] == _dense(kv_cache.shape[1:])
        and (
            kv_scales is None
            or (
                kv_scales.shape == kv_cache.shape[:5]
                and kv_scales.stride()[1:] == _dense(kv_cache.shape[1:5])
            )
        )
    ):
        _explain(out, query, kv_cache, kv_scales, layer)


def _explain(
    out: Tensor, query: Tensor, kv_cache: Tensor, kv_scales: Tensor | None, layer: int
) -> NoReturn:
    """Raises the error that says which argument is wrong."""
    _, num_heads, head_dim = query.shape
    num_kv_heads, num_layers = kv_cache.shape[3], kv_cache.shape[1]
    if query.dtype != out.dtype:
        raise TypeError(f"out must have query's type {query.dtype}, not {out.dtype}")
    wanted = query.dtype if kv_scales is None else torch.float8_e4m3fn
    if kv_cache.dtype != wanted or (kv_scales is not None and kv_scales.dtype != torch.float16):
        raise TypeError(
            f"kv_cache must have query's type {query.dtype}, or be float8_e4m3fn with float16"
            f" kv_scales: {kv_cache.dtype}, scales {None if kv_scales is None else kv_scales.dtype}"
        )
    if query.shape != out.shape or head_dim != kv_cache.shape[5] or num_heads % num_kv_heads:
        raise ValueError(
            f"query {tuple(query.shape)}, out {tuple(out.shape)} and kv_cache"
            f" {tuple(kv_cache.shape)} do not fit each other"
        )
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer must be in [0, {num_layers}): {layer}")
    raise ValueError(
        f"heads must be dense, and kv_cache within a block: strides of query {query.stride()}, out"
        f" {out.stride()}, kv_cache {kv_cache.stride()} for {tuple(kv_cache.shape)}; and kv_scales"
        f" alike, at a multiple of 4 bytes:"
        f" {None if kv_scales is None else (tuple(kv_scales.shape), kv_scales.stride())}"
    )


def _check_slopes(alibi: Tensor | None, num_heads: int) -> None:
    if alibi is not None and (
        alibi.dtype != torch.float32 or alibi.shape != (num_heads,) or not alibi.is_contiguous()
    ):
        raise ValueError(
            f"alibi must be contiguous float32 [{num_heads}]: {alibi.dtype} {alibi.shape}"
        )


def _check_work(
    query: Tensor, seq_lens: Tensor, table_rows: Tensor, items: Tensor, item_start: Tensor,
    partial: Tensor, partial_lse: Tensor,
) -> None:  # fmt: skip
    """Raises what is wrong with how the work is cut up."""
    num_seqs, num_heads, head_dim = query.shape
    max_items = items.shape[0]
    if not (
        seq_lens.dtype == items.dtype == item_start.dtype == torch.int32
        and partial.dtype == partial_lse.dtype == torch.float32
        and seq_lens.stride() == table_rows.stride() == item_start.stride() == (1,)
        and items.is_contiguous()
        and partial.is_contiguous()
        and partial_lse.is_contiguous()
    ):
        raise _wrong_indices(
            seq_lens=seq_lens, table_rows=table_rows, items=items, item_start=item_start,
            partial=partial, partial_lse=partial_lse,
        )  # fmt: skip
    if not (
        items.shape == (max_items, 3)
        and num_seqs <= min(max_items, len(seq_lens), len(table_rows), len(item_start) - 1)
        and max_items <= min(len(partial), len(partial_lse))
        and partial.shape[1:] == (num_heads, head_dim)
        and partial_lse.shape[1:] == (num_heads,)
    ):
        raise ValueError(
            f"items must have room for {num_seqs} sequences, and partial and partial_lse for all"
            f" items, of {num_heads} heads: items {tuple(items.shape)}, seq_lens {len(seq_lens)},"
            f" table_rows {len(table_rows)}, item_start {len(item_start)}, partial"
            f" {tuple(partial.shape)}, partial_lse {tuple(partial_lse.shape)}"
        )


def _wrong_indices(**tensors: Tensor) -> TypeError:
    told = (f"{name} {x.dtype} strides {x.stride()}" for name, x in tensors.items())
    return TypeError(
        "indices must be int32 (partial results float32), all but the rows of block_tables dense: "
        + ", ".join(told)
    )
