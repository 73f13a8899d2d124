"""Times one layer of paged attention on CPU, bf16, 9/3 heads of 64 and 32/8 heads of 128.

    python benchmarks/kernels/cpu_attention.py [--isa avx2] [--threads 1 2] [--seconds 1]

Each figure is the fastest call within --seconds; every call goes to another layer, so that keys
and values come from memory and not from a cache. "read" is the time a plain sum over the same
bytes takes on one thread: the floor for one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.ops.cpu import native
from octavo.ops.cpu.attention import paged_attention

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    batch: int
    context: int
    new_tokens: int = 1
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64

    @property
    def name(self) -> str:
        work = f"prefill {self.new_tokens}" if self.new_tokens > 1 else f"decode {self.batch}"
        return f"{work} ctx {self.context} {self.heads}/{self.kv_heads}x{self.head_dim}"

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.context * self.kv_heads * self.head_dim * 2 * 2


CASES = [
    *(Case(batch, 512) for batch in (1, 8, 32, 64)),
    Case(1, 8192),
    Case(1, 512, new_tokens=512),
    Case(1, 4096, new_tokens=512),
    Case(8, 512, heads=32, kv_heads=8, head_dim=128),
]


def fastest(call: Callable[[int], object], layers: int, seconds: float) -> float:
    """Milliseconds of the fastest of the calls call(0), call(1), ... that fit into `seconds`."""
    best, end, layer = float("inf"), time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        start = time.perf_counter()
        call(layer)
        best = min(best, time.perf_counter() - start)
        layer = (layer + 1) % layers
    return best * 1e3


def measure(case: Case, threads: list[int], seconds: float) -> dict[str, float]:
    """Milliseconds by number of threads, and "read"."""
    layers = max(2, min(64, 200_000_000 // case.kv_bytes))
    blocks = case.context // BLOCK_SIZE
    shape = (case.batch * blocks, layers, 2, case.kv_heads, BLOCK_SIZE, case.head_dim)
    kv_cache = torch.empty(shape, dtype=torch.bfloat16).uniform_(-1, 1)
    tables = torch.randperm(shape[0], dtype=torch.int32).view(case.batch, blocks)
    tokens = case.batch * case.new_tokens
    query = torch.randn(tokens, case.heads, case.head_dim).bfloat16()
    starts = torch.arange(0, tokens + 1, case.new_tokens, dtype=torch.int32)
    lengths = torch.full((case.batch,), case.context, dtype=torch.int32)
    out = torch.empty_like(query)
    result = {}
    for count in threads:
        torch.set_num_threads(count)
        result[str(count)] = fastest(
            lambda layer: paged_attention(
                out, query, kv_cache, layer, tables, lengths, starts, case.head_dim**-0.5
            ),
            layers,
            seconds,
        )
    torch.set_num_threads(1)
    pieces = kv_cache.view(torch.float32).view(layers, -1)
    result["read"] = fastest(lambda layer: pieces[layer].sum(), layers, seconds / 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--isa", choices=native.ISA_LEVELS)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    if options.isa:
        native.set_isa(options.isa)
    results = {}
    for case in CASES:
        results[case.name] = times = measure(case, options.threads, options.seconds)
        text = "  ".join(f"{name}: {ms:7.3f} ms" for name, ms in times.items())
        rate = case.kv_bytes / times[str(options.threads[0])] / 1e6
        print(f"{case.name:32} {text}  {rate:5.1f} GB/s")
    print(json.dumps({"isa": native.isa(), "ms": results}))


if __name__ == "__main__":
    main()
