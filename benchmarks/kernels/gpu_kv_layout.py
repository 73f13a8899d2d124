"""What the layout of the KV tensor costs a GPU: blocks over all layers in one piece, or by layer.

    python benchmarks/kernels/gpu_kv_layout.py

A plain Triton paged decode kernel (one program a sequence, KV head and KV split) reads random block
tables through strides, so that both layouts run the very same code. All layers are called in one
CUDA graph: together they are far larger than the L2 cache. Prints microseconds a layer and TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.bench.roofline import time_calls

ROWS = 16  # query heads of a group, padded to what tl.dot takes


@triton.jit
def paged_decode(
    query, kv, tables, seq_lens, out, partial, lse, scale,
    block_stride: tl.int64, value_offset: tl.int64, head_stride: tl.int64, table_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    seq, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    rows, dims, tokens = tl.arange(0, 16), tl.arange(0, HEAD_DIM), tl.arange(0, TILE)
    seq_len = tl.load(seq_lens + seq)
    per_split = tl.cdiv(tl.cdiv(seq_len, SPLITS), TILE) * TILE
    first, last = split * per_split, tl.minimum(split * per_split + per_split, seq_len)
    q_rows = (seq * NUM_HEADS + head * group + rows)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(query + q_rows, mask=(rows < group)[:, None], other=0.0)
    best = tl.full([16], -float("inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, HEAD_DIM], tl.float32)
    for start in range(first, last, TILE):
        position = start + tokens
        inside = position < last
        block_ids = tl.load(tables + seq * table_stride + position // BLOCK, mask=inside, other=0)
        at = block_ids.to(tl.int64) * block_stride + head * head_stride
        at += (position % BLOCK) * HEAD_DIM
        k = tl.load(kv + at[None, :] + dims[:, None], mask=inside[None, :], other=0.0)
        v = tl.load(
            kv + value_offset + at[:, None] + dims[None, :], mask=inside[:, None], other=0.0
        )
        scores = tl.where(inside[None, :], tl.dot(q, k) * scale, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        fade, weights = tl.exp(best - new_best), tl.exp(scores - new_best[:, None])
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v)
        best = new_best
    if SPLITS == 1:
        done = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + q_rows, done, mask=(rows < group)[:, None])
    else:
        part = ((seq * NUM_KV_HEADS + head) * SPLITS + split) * 16 + rows
        tl.store(partial + part[:, None] * HEAD_DIM + dims[None, :], acc)
        tl.store(lse + part, best + tl.log(total))


def pool(layout: str, num_blocks: int, num_layers: int, heads: int, block: int, dim: int) -> Tensor:
    """Random K and V, viewed as [num_layers, num_blocks, 2, heads, block, dim] in either layout."""
    if layout == "block":
        shape, order = (num_blocks, num_layers, 2, heads, block, dim), (1, 0, 2, 3, 4, 5)
    else:
        shape, order = (num_layers, 2, num_blocks, heads, block, dim), (0, 2, 1, 3, 4, 5)
    data = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    for piece in data.view(-1).split(1 << 28):
        piece.normal_()
    return data.permute(order)


def measure(
    kv: Tensor, batch: int, context: int, num_heads: int, splits: int, tile: int
) -> tuple[float, float]:
    """(microseconds a layer, TB/s of K and V)."""
    num_layers, num_blocks, _, kv_heads, block, dim = kv.shape
    per_seq = -(-context // block)
    tables = torch.randperm(num_blocks, device="cuda")[: batch * per_seq].int().view(batch, -1)
    seq_lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    query = torch.randn(batch, num_heads, dim, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(query)
    partial = torch.empty(batch * kv_heads * splits * ROWS * dim, device="cuda")
    lse = torch.empty(batch * kv_heads * splits * ROWS, device="cuda")

    def all_layers() -> None:
        for layer in kv:
            paged_decode[(batch, kv_heads, splits)](
                query, layer, tables, seq_lens, out, partial, lse, dim**-0.5,
                layer.stride(0), layer.stride(1), layer.stride(2), tables.stride(0),
                num_heads, kv_heads, dim, block, tile, splits, num_warps=4, num_stages=3,
            )  # fmt: skip

    micros = 1e6 * time_calls([all_layers], query.device) / num_layers
    return micros, 2 * batch * context * kv_heads * dim * 2 / micros / 1e6


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for num_heads, kv_heads, dim, num_layers in ((32, 8, 128, 32), (9, 3, 64, 30)):
        for batch, context, splits in (
            (1, 4096, 32),
            (32, 1024, 4),
            (128, 1024, 1),
            (256, 1024, 1),
        ):
            cells = []
            for block in (16, 64):
                for layout in ("block", "layer"):
                    num_blocks = batch * -(-context // block) + 64
                    kv = pool(layout, num_blocks, num_layers, kv_heads, block, dim)
                    runs = [measure(kv, batch, context, num_heads, splits, t) for t in (64, 128)]
                    micros, rate = min(runs)
                    cells.append(f"{block}/{layout} {micros:6.1f} us {rate:.2f} TB/s")
                    del kv
                    torch.cuda.empty_cache()
            print(
                f"{num_heads}/{kv_heads} x {dim}, batch {batch:3} at {context}:", *cells, sep="  "
            )


if __name__ == "__main__":
    main()
