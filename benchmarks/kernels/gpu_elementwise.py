"""The small kernels between matrix products: RoPE with cache write, norms, activations, embedding.

    python benchmarks/kernels/gpu_elementwise.py [--tokens 1 32 256 4096]

Llama-3.1-8B's widths, bf16, CUDA-graph replays over several sets of inputs. Prints microseconds and
TB/s (every byte read or written counted once).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.bench.roofline import time_calls
from octavo.ops.gpu import activation, norm
from octavo.ops.gpu.embedding import embed
from octavo.ops.gpu.rope_cache import rope_and_cache

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4096, 14336, 32, 8, 128, 16
CALLS = 8


def call_us(calls: list[Callable[[], object]]) -> float:
    """Median time of a call, of a graph of all calls."""
    return 1e6 * time_calls(calls, torch.device("cuda"))


def rows(num_tokens: int, width: int) -> Tensor:
    return torch.randn((num_tokens, width), device="cuda", dtype=torch.bfloat16)


def rope(num_tokens: int, fp8: bool) -> float:
    """Microseconds of `rope_and_cache` into a bf16 or an fp8 pool."""
    num_blocks = num_tokens // BLOCK_SIZE + 100
    shape = (num_blocks, 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    num_scales = 2 * KV_HEADS * BLOCK_SIZE
    pool = torch.empty((num_blocks, num_scales * (HEAD_DIM + 2)), dtype=torch.uint8, device="cuda")
    codes = pool[:, : num_scales * HEAD_DIM].view(torch.float8_e4m3fn).view(shape)
    scales = pool[:, num_scales * HEAD_DIM :].view(torch.float16).view(shape[:-1])
    cache = codes if fp8 else torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    cos_sin = torch.rand((8192, HEAD_DIM), device="cuda")
    positions = torch.randint(0, 8192, (num_tokens,), device="cuda")
    slots = torch.randperm(num_blocks * BLOCK_SIZE, device="cuda")[:num_tokens]
    sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    calls: list[Callable[[], object]] = []
    for _ in range(CALLS):
        q, k, v = (
            part.view(num_tokens, -1, HEAD_DIM)
            for part in rows(num_tokens, sum(sizes)).split(sizes, dim=1)
        )
        calls.append(
            lambda q=q, k=k, v=v: rope_and_cache(
                q, k, v, positions, cos_sin, slots, cache, scales if fp8 else None, 0
            )
        )
    return call_us(calls)


def measure(n: int, weight: Tensor, table: Tensor) -> dict[str, tuple[float, int]]:
    """Each kernel's microseconds for n tokens, and its bytes a token."""
    x, both = [rows(n, HIDDEN) for _ in range(CALLS)], rows(n, 2 * INTERMEDIATE)
    residual, out, gated = rows(n, HIDDEN), rows(n, HIDDEN), rows(n, INTERMEDIATE)
    ids = torch.randint(0, len(table), (n,), device="cuda")
    norms = [lambda t=t: norm.rms_norm(t, weight, 1e-5, out) for t in x]
    adds = [lambda t=t: norm.fused_add_rms_norm(t, residual, weight, 1e-5, out) for t in x]
    qkv_bytes = 2 * HEAD_DIM * (2 * (HEADS + KV_HEADS) + KV_HEADS)
    return {
        "rope + cache": (rope(n, False), qkv_bytes + 4 * KV_HEADS * HEAD_DIM),
        "rope + fp8 cache": (rope(n, True), qkv_bytes + 2 * KV_HEADS * (HEAD_DIM + 2)),
        "rms_norm": (call_us(norms), 4 * HIDDEN),
        "add + rms_norm": (call_us(adds), 8 * HIDDEN),
        "silu and mul": (
            call_us([lambda: activation.gated(both, gated, "silu")] * CALLS),
            6 * INTERMEDIATE,
        ),
        "embedding": (call_us([lambda: embed(table, ids, out)] * CALLS), 4 * HIDDEN),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 256, 4096])
    args = parser.parse_args()
    weight = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    table = rows(32000, HIDDEN)
    for n in args.tokens:
        for name, (us, num_bytes) in measure(n, weight, table).items():
            rate = n * num_bytes / us / 1e6
            print(f"{n:5d} tokens  {name:17s} {us:8.2f} us  {rate:5.2f} TB/s", flush=True)


if __name__ == "__main__":
    main()
