"""Prefill attention for Hopper GPUs (H100, H200), in Gluon: warps with roles of their own.

Triton lays one program's work over all its warps, which then wait for each other: while they take
exponentials, the tensor cores idle. Here one warp only moves keys and values into shared memory by
the tensor memory accelerator, a block of the pool being a box, and two groups of four warps have
64 rows of queries each and drift apart, so that one's softmax meets the other's products. Programs
stay for many tiles of queries, and the mover is ahead of them into the next one.

Only for what most models do: bfloat16 and float16, heads of 128, no window, no soft cap. Everything
else, and everywhere else, is `prefill_attention` and `fresh_attention`, whose results these are but
for the order of sums.
"""

import inspect
from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.ops.gpu import pdl
from octavo.ops.gpu.hopper_parts import compute, move
from octavo.ops.gpu.prefill_parts import LOG2_E

_ROWS = 128
_HEAD_DIM = 128
# Its arguments changed between versions of Triton.
_LISTED = gl.constexpr("functions_and_args" in inspect.signature(gl.warp_specialize).parameters)


@gluon.jit
def _part_one(
    bars, buffers, queries, out, out_stride, desc_q, desc_k, desc_v, tables, table_stride,
    table_rows, seq_lens, query_start, tiles, total, scale, layer_row, block_rows,
    PAGED: gl.constexpr, ROWED: gl.constexpr, GROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    PACK: gl.constexpr, BLOCK: gl.constexpr, BOX: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    compute(
        bars, buffers, queries, out, out_stride, seq_lens, query_start, tiles, total, scale, PAGED,
        GROUP, NUM_KV_HEADS, PACK, TILE, STAGES, 0,
    )  # fmt: skip


@gluon.jit
def _part_two(
    bars, buffers, queries, out, out_stride, desc_q, desc_k, desc_v, tables, table_stride,
    table_rows, seq_lens, query_start, tiles, total, scale, layer_row, block_rows,
    PAGED: gl.constexpr, ROWED: gl.constexpr, GROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    PACK: gl.constexpr, BLOCK: gl.constexpr, BOX: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    compute(
        bars, buffers, queries, out, out_stride, seq_lens, query_start, tiles, total, scale, PAGED,
        GROUP, NUM_KV_HEADS, PACK, TILE, STAGES, 1,
    )  # fmt: skip


@gluon.jit
def _mover(
    bars, buffers, queries, out, out_stride, desc_q, desc_k, desc_v, tables, table_stride,
    table_rows, seq_lens, query_start, tiles, total, scale, layer_row, block_rows,
    PAGED: gl.constexpr, ROWED: gl.constexpr, GROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    PACK: gl.constexpr, BLOCK: gl.constexpr, BOX: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    move(
        bars, buffers, queries, desc_q, desc_k, desc_v, tables, table_stride, table_rows, seq_lens,
        query_start, tiles, total, layer_row, block_rows, PAGED, ROWED, GROUP, NUM_KV_HEADS, PACK,
        BLOCK, BOX, TILE, STAGES,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["layer", "total"])
def _prefill_kernel(
    out, desc_q, desc_k, desc_v, tables, table_rows, seq_lens, query_start, tiles, total, scale,
    layer, out_stride, layer_rows, block_rows, table_stride,
    PAGED: gl.constexpr, ROWED: gl.constexpr, GROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    PACK: gl.constexpr, BLOCK: gl.constexpr, BOX: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """out_t = sum_j softmax_j(scale q_t . k_j) v_j over j <= t; `scale` includes log2 e.

    Item i is tile i // GROUPS for the PACK heads from (i % GROUPS) PACK on; the items of program p
    are p, p + num_programs, ... desc_q: query [num_tokens, num_heads, 128] in boxes of 64 rows and
    64 elements; desc_k, desc_v: the pool (PAGED) or the step's K and V as rows, BOX rows a box.
    """
    layout: gl.constexpr = desc_k.layout
    dtype: gl.constexpr = desc_k.dtype
    k0 = gl.allocate_shared_memory(dtype, [STAGES, TILE, 64], layout)
    k1 = gl.allocate_shared_memory(dtype, [STAGES, TILE, 64], layout)
    v0 = gl.allocate_shared_memory(dtype, [STAGES, TILE, 64], layout)
    v1 = gl.allocate_shared_memory(dtype, [STAGES, TILE, 64], layout)
    queries = gl.allocate_shared_memory(dtype, [8, 64 // PACK, PACK, 64], desc_q.layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    tail = gl.allocate_shared_memory(gl.int64, [1], bar)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    mbarrier.init(tail, count=1)
    fence_async_shared()
    bars = (k_ready, k_empty, v_ready, v_empty, q_ready, q_empty, tail)
    buffers = (k0, k1, v0, v1)
    if _LISTED:
        gl.warp_specialize([
            (_part_one, (
            bars, buffers, queries, out, out_stride, desc_q, desc_k, desc_v, tables, table_stride,
            table_rows, seq_lens, query_start, tiles, total, scale, layer * layer_rows, block_rows,
            PAGED, ROWED, GROUP, NUM_KV_HEADS, PACK, BLOCK, BOX, TILE, STAGES,
        )),
            (_part_two, (
            bars, buffers, queries, out, out_stride, desc_q, desc_k, desc_v, tables, table_stride,
            table_rows, seq_lens, query_start, tiles, total, scale, layer * layer_rows, block_rows,
            PAGED, ROWED, GROUP, NUM_KV_HEADS, PACK, BLOCK, BOX, TILE, STAGES,
        )),
            (_mover, (
            bars, buffers, queries, out, out_stride, desc_q, desc_k, desc_v, tables, table_stride,
            table_rows, seq_lens, query_start, tiles, total, scale, layer * layer_rows, block_rows,
            PAGED, ROWED, GROUP, NUM_KV_HEADS, PACK, BLOCK, BOX, TILE, STAGES,
        )),
        ], [4, 1], [232, 40])  # fmt: skip
    else:
        gl.warp_specialize(
            (
            bars, buffers, queries, out, out_stride, desc_q, desc_k, desc_v, tables, table_stride,
            table_rows, seq_lens, query_start, tiles, total, scale, layer * layer_rows, block_rows,
            PAGED, ROWED, GROUP, NUM_KV_HEADS, PACK, BLOCK, BOX, TILE, STAGES,
        ), _part_one,
            (
            bars, buffers, queries, out, out_stride, desc_q, desc_k, desc_v, tables, table_stride,
            table_rows, seq_lens, query_start, tiles, total, scale, layer * layer_rows, block_rows,
            PAGED, ROWED, GROUP, NUM_KV_HEADS, PACK, BLOCK, BOX, TILE, STAGES,
        ), [_part_two, _mover], [4, 1], [232, 40],
        )  # fmt: skip


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def supports(query: Tensor, group: int, block_size: int = _ROWS) -> bool:
    """Whether `prefill` takes such queries [num_tokens, num_heads, head_dim] and blocks."""
    return (
        _is_hopper(query.device)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[2] == _HEAD_DIM
        and group in (1, 2, 4, 8, 16, 32, 64)
        and block_size % 8 == 0
        and (_ROWS % block_size == 0 or block_size % _ROWS == 0)
        and query.data_ptr() % 16 == 0
        and query.stride(0) % 8 == 0
    )


def prefill(
    out: Tensor,
    query: Tensor,
    kv: Tensor | tuple[Tensor, Tensor],
    layer: int,
    block_tables: Tensor | None,
    table_rows: Tensor | None,
    seq_lens: Tensor | None,
    query_start_loc: Tensor,
    tiles: Tensor,
    scale: float,
    tile: int = 128,
    stages: int = 2,
) -> None:
    """What `paged_prefill` (kv is the pool) and `fresh_prefill` (kv is key and value) do, where
    `supports` says yes; the callers check shapes. `tile` keys an iteration, `stages` in flight.
    """
    num_heads = query.shape[1]
    if isinstance(kv, Tensor):
        num_blocks, _, _, num_kv_heads, block, _ = kv.shape
        block_rows, layer_rows = kv.stride(0) // _HEAD_DIM, kv.stride(1) // _HEAD_DIM
        num_rows = (num_blocks - 1) * block_rows + kv.shape[1] * layer_rows
        box = min(block, tile)
        rows = kv.as_strided((num_rows, _HEAD_DIM), (_HEAD_DIM, 1))
        desc_k = desc_v = TensorDescriptor.from_tensor(rows, [box, 64], _layout(2))
    else:
        num_kv_heads = kv[0].shape[1]
        block, box, block_rows, layer_rows = tile, tile, 0, 0
        desc_k, desc_v = (
            TensorDescriptor.from_tensor(
                x.as_strided((len(x), num_kv_heads * _HEAD_DIM), (x.stride(0), 1)),
                [box, 64],
                _layout(2),
            )
            for x in kv
        )
    group = num_heads // num_kv_heads
    desc_q = TensorDescriptor.from_tensor(query, [64 // group, group, 64], _layout(3))
    total = num_kv_heads * len(tiles)
    tables = tiles if block_tables is None else block_tables
    _prefill_kernel[(min(total, pdl.num_sms(query.device)),)](
        out, desc_q, desc_k, desc_v, tables, tiles if table_rows is None else table_rows,
        query_start_loc if seq_lens is None else seq_lens, query_start_loc, tiles, total,
        scale * LOG2_E, layer, out.stride(0), layer_rows, block_rows, tables.stride(0),
        PAGED=isinstance(kv, Tensor), ROWED=table_rows is not None, GROUP=group,
        NUM_KV_HEADS=num_kv_heads, PACK=group, BLOCK=block, BOX=box, TILE=tile, STAGES=stages,
        num_warps=4, maxnreg=168,
    )  # fmt: skip


@cache
def _layout(rank: int) -> gl.NVMMASharedLayout:
    """Rows of 64 16-bit elements, as products read them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)
