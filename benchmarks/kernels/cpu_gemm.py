"""Times the bf16 linear layers of a whole model on CPU: octavo's kernel, torch and oneDNN.

Every step runs the model's linears in their order, each layer with weights of its own, so that
weights come from memory as they do when a model runs. Variants take turns, in random order; a
layer's time is its minimum over the steps, and what is printed is the mean over the layers.

    python benchmarks/kernels/cpu_gemm.py --rows 1 8 32 64 512 --threads 1 2
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.ops.cpu import gemm, native

BF16 = torch.bfloat16
Call = Callable[[Tensor], Tensor]


def shapes(args: argparse.Namespace) -> dict[str, tuple[int, int, int]]:
    """Name to (n, k, how many of them)."""
    h, i, q, kv = args.hidden, args.intermediate, args.q_size, args.kv_size
    return {
        "qkv": (q + 2 * kv, h, args.layers),
        "out": (h, q, args.layers),
        "gate_up": (2 * i, h, args.layers),
        "down": (h, i, args.layers),
        "head": (args.vocab, h, 1),
    }


def variants(names: list[str], weights: list[Tensor]) -> dict[str, list[Call]]:
    """Per variant one callable a weight."""
    made: dict[str, list[Call]] = {}
    if "torch" in names:
        made["torch"] = [lambda x, w=w: torch.nn.functional.linear(x, w) for w in weights]
    if "onednn" in names:
        ops = torch.ops.mkldnn
        packed = [ops._reorder_linear_weight(w, None) for w in weights]
        made["onednn"] = [
            lambda x, w=w: ops._linear_pointwise(x, w, None, "none", [], "") for w in packed
        ]
    levels = [name for name in names if name in native.ISA_LEVELS]
    if levels:
        ours = [gemm.pack(w) for w in weights]
        for name in levels:
            made[name] = [lambda x, w=w: gemm.linear(x, w) for w in ours]
    return made


def measure(
    calls: dict[str, dict[str, list[Call]]],
    sizes: dict[str, tuple[int, int, int]],
    names: list[str],
    rows: int,
    repeats: int,
) -> dict[tuple[str, str], float]:
    """(variant, linear) to seconds."""
    inputs = {k: torch.randn(rows, k).to(BF16) for _, k, _ in sizes.values()}
    layers = max(count for _, _, count in sizes.values())
    best = {(v, s): [float("inf")] * sizes[s][2] for v in names for s in sizes}
    for _ in range(repeats):
        for name in random.sample(names, len(names)):
            if name in native.ISA_LEVELS:
                native.set_isa(name)
            for layer in range(layers):
                for linear, (_, k, count) in sizes.items():
                    if layer < layers - count:
                        continue
                    call, at = calls[linear][name][layer - (layers - count)], layer % count
                    start = time.perf_counter()
                    call(inputs[k])
                    took = time.perf_counter() - start
                    best[name, linear][at] = min(best[name, linear][at], took)
    return {key: sum(times) / len(times) for key, times in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 512])
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--variants", nargs="+", default=["torch", "onednn", native.isa()])
    for name, size in (
        ("hidden", 576), ("intermediate", 1536), ("q-size", 576), ("kv-size", 192),
        ("layers", 30), ("vocab", 49152),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    sizes = shapes(args)
    calls = {}
    for linear, (n, k, count) in sizes.items():
        weights = [torch.randn(n, k).div_(k**0.5).to(BF16) for _ in range(count)]
        calls[linear] = variants(args.variants, weights)
    names = list(next(iter(calls.values())))
    macs = sum(n * k * count for n, k, count in sizes.values())
    header = "".join(f"{linear:>10}" for linear in sizes)
    print(f"threads  rows  variant      {header}   model ms  GB/s  GF/s")
    for threads in args.threads:
        torch.set_num_threads(threads)
        for rows in args.rows:
            times = measure(calls, sizes, names, rows, args.repeats)
            for name in names:
                each = "".join(f"{times[name, s] * 1e3:>10.4f}" for s in sizes)
                step = sum(times[name, s] * sizes[s][2] for s in sizes)
                print(
                    f"{threads:>7} {rows:>5}  {name:<13}{each} {step * 1e3:>10.2f}"
                    f" {macs * 2 / step / 1e9:>5.1f} {macs * 2 * rows / step / 1e9:>5.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
