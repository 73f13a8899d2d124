"""TFLOP/s of prefill attention over the pool, over the step's own keys and values, and of torch.

    python benchmarks/kernels/gpu_prefill_attention.py

Every shape is checked against float64 first, on random data. Then CUDA graphs are replayed over
inputs that rotate, so that they come from memory and not from the L2 cache. FLOPs: 4 heads head_dim
for each pair of a token and one that it sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from octavo.attention.work import plan_prefill, prefill_tile_tokens
from octavo.bench.roofline import time_calls
from octavo.ops.gpu.fresh_attention import fresh_prefill
from octavo.ops.gpu.prefill_attention import paged_prefill

ROUNDS = 4
CASES = [(8, 1024, 0), (1, 2048, 0), (1, 8192, 0), (8, 512, 0), (1, 512, 4096)]
"""(chunks, tokens of each, tokens of context before them)"""


@dataclass(frozen=True)
class Inputs:
    """A step of `batch` chunks; `rounds` layers of K and V and two buffers of q, k and v."""

    qkv: list[tuple[Tensor, Tensor, Tensor]]
    kv_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    starts: Tensor
    tiles: Tensor
    out: Tensor
    scale: float

    def paged(self, i: int) -> None:
        query = self.qkv[i % 2][0]
        paged_prefill(
            self.out, query, self.kv_cache, None, i, self.block_tables, None, self.seq_lens,
            self.starts, self.tiles, self.scale,
        )  # fmt: skip

    def fresh(self, i: int) -> None:
        fresh_prefill(self.out, *self.qkv[i % 2], self.starts, self.tiles, self.scale)

    def keys_and_values(self, seq: int, layer: int) -> tuple[Tensor, Tensor]:
        """Of one sequence in the pool: [length, kv_heads, head_dim] each."""
        length, block_size = int(self.seq_lens[seq]), self.kv_cache.shape[4]
        at = torch.arange(length, device="cuda")
        blocks = self.block_tables[seq].long()[at // block_size]
        kv = self.kv_cache[blocks, layer, :, :, at % block_size]
        return kv[:, 0], kv[:, 1]


def make(
    heads: tuple[int, int, int], block_size: int, batch: int, tokens: int, prefix: int
) -> Inputs:
    num_heads, num_kv_heads, dim = heads
    length = tokens + prefix
    per_seq = -(-length // block_size)
    num_blocks = batch * per_seq + 5
    shape = (num_blocks, ROUNDS, 2, num_kv_heads, block_size, dim)
    widths = [num_heads * dim, num_kv_heads * dim, num_kv_heads * dim]
    qkv = []
    for _ in range(2):
        both = torch.randn(batch * tokens, sum(widths), dtype=torch.bfloat16, device="cuda")
        q, k, v = (x.view(batch * tokens, -1, dim) for x in both.split(widths, 1))
        qkv.append((q, k, v))
    tiles = plan_prefill(
        [tokens] * batch, [length] * batch, 0, prefill_tile_tokens(num_heads // num_kv_heads, dim)
    )
    blocks = torch.randperm(num_blocks, device="cuda")[: batch * per_seq].int()
    return Inputs(
        qkv,
        torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(),
        blocks.view(batch, -1).contiguous(),
        torch.full((batch,), length, dtype=torch.int32, device="cuda"),
        torch.from_numpy(np.arange(batch + 1, dtype=np.int32) * np.int32(tokens)).cuda(),
        torch.from_numpy(tiles).cuda(),
        torch.full((batch * tokens, num_heads, dim), math.nan, dtype=torch.bfloat16, device="cuda"),
        dim**-0.5,
    )


def error(inputs: Inputs, fresh: bool) -> float:
    """||out - expected|| / ||expected|| over the last chunk."""
    inputs.out.fill_(math.nan)
    inputs.fresh(1) if fresh else inputs.paged(1)
    seq = len(inputs.seq_lens) - 1
    part = slice(int(inputs.starts[seq]), int(inputs.starts[seq + 1]))
    query, key, value = (x[part] for x in inputs.qkv[1])
    keys, values = (key, value) if fresh else inputs.keys_and_values(seq, 1)
    group = query.shape[1] // keys.shape[1]
    difference = total = 0.0
    hidden = torch.ones(len(query), len(keys), dtype=torch.bool, device="cuda")
    hidden = hidden.triu(len(keys) - len(query) + 1)
    for head in range(query.shape[1]):
        k, v = (x[:, head // group].double() for x in (keys, values))
        scores = (query[:, head].double() @ k.T * inputs.scale).masked_fill(hidden, -math.inf)
        expected = scores.softmax(-1) @ v
        difference += float((inputs.out[part, head].double() - expected).square().sum())
        total += float(expected.square().sum())
    return math.sqrt(difference / total)


def micros(call: Callable[[int], object]) -> float:
    """Median time of one call, microseconds."""
    return 1e6 * time_calls([partial(call, i) for i in range(ROUNDS)], torch.device("cuda"))


def sdpa(batch: int, tokens: int, heads: tuple[int, int, int]) -> Callable[[int], object]:
    """torch's cuDNN attention over keys and values of equal length, contiguous by head."""
    num_heads, num_kv_heads, dim = heads
    q, k, v = (
        torch.randn(ROUNDS, batch, n, tokens, dim, dtype=torch.bfloat16, device="cuda")
        for n in (num_heads, num_kv_heads, num_kv_heads)
    )

    def call(i: int) -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q[i], k[i], v[i], is_causal=True, enable_gqa=True)

    return call


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for heads in ((32, 8, 128), (9, 3, 64)):
        for batch, tokens, prefix in CASES:
            pairs = batch * (tokens * prefix + tokens * (tokens + 1) // 2)
            flops = 4 * heads[0] * heads[2] * pairs
            cells = []
            for block_size in (16, 64):
                inputs = make(heads, block_size, batch, tokens, prefix)
                wrong, took = error(inputs, False), micros(inputs.paged)
                rate = f"{flops / took / 1e6:4.0f} TFLOP/s"
                cells.append(f"block {block_size} {took:6.1f} us {rate} (error {wrong:.1e})")
            if not prefix:
                wrong, took = error(inputs, True), micros(inputs.fresh)
                rate = f"{flops / took / 1e6:4.0f} TFLOP/s"
                cells.append(f"fresh {took:6.1f} us {rate} (error {wrong:.1e})")
                took = micros(sdpa(batch, tokens, heads))
                cells.append(f"cuDNN {took:6.1f} us {flops / took / 1e6:4.0f} TFLOP/s")
            what = f"{heads[0]}/{heads[1]} x {heads[2]}, {batch} x {tokens} behind {prefix}:"
            print(what, *cells, sep="  ", flush=True)


if __name__ == "__main__":
    main()
