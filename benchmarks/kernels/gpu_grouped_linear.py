"""A decoder layer's products with 4-bit weights (AWQ, GPTQ) as they are packed, beside bf16.

    python benchmarks/kernels/gpu_grouped_linear.py [--rows 1 8 16] [--groups 128 32] [--cuts]

Llama-3.1-8B's widths, so many layers that no weight stays in the L2 cache, CUDA-graph replays:
norm + QKV, attention output + residual, norm + gate and up + silu, down + residual. First each kind
of weight is compared with float64 on random data; then microseconds a layer and TB/s of weights
read are printed, and for one row each product alone. --cuts: one row cut in other ways, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.bench.roofline import time_calls
from octavo.layers.gpu import GpuGated, GpuLinear, GpuRMSNorm
from octavo.layers.grouped import GroupedWeight
from octavo.layers.quantized_gpu import GroupedGated, GroupedLinear
from octavo.ops import reference
from octavo.ops.gpu import grouped_row_linear as rows_module

EPS, HIDDEN, QKV, INTER, NUM_LAYERS = 1e-5, 4096, 6144, 14336, 8
DEVICE = torch.device("cuda")


def packed(num_rows: int, width: int, group: int, kind: str = "points") -> GroupedWeight:
    """Random words, scales and zeros; kind `point` has one zero for all, `ordered` an order."""
    shape = num_rows, width // group
    words = torch.randint(-(2**31), 2**31, (num_rows, width // 8), device=DEVICE)
    scales = (torch.rand(shape, device=DEVICE) + 0.5).mul_(width**-0.5 / 6).half()
    zeros = None if kind == "point" else torch.randint(0, 16, shape, device=DEVICE).half()
    order = torch.randperm(width, device=DEVICE).int() if kind == "ordered" else None
    return GroupedWeight(
        words.int(), scales, zeros, 4, group, (num_rows, width), kind, zero_point=8, order=order
    )


def row(num_rows: int, width: int) -> Tensor:
    return torch.randn((num_rows, width), device=DEVICE, dtype=torch.bfloat16)


def error(weight: GroupedWeight, num_rows: int) -> float:
    """||out - expected|| / ||expected|| of norm and product."""
    width = weight.shape[1]
    x, norm = row(num_rows, width), GpuRMSNorm(row(1, width)[0], EPS)
    out = torch.full((num_rows, weight.shape[0]), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    GroupedLinear(weight, None).normed(x, norm, x.clone(), out)
    normed = reference.rms_norm(x, norm.weight, EPS).double()
    expected = normed @ weight.dequantize(torch.float64).t()
    return float((out.double() - expected).norm() / expected.norm())


class Layer(NamedTuple):
    qkv: GroupedLinear | GpuLinear
    out: GroupedLinear | GpuLinear
    gate_up: GroupedGated | GpuGated
    down: GroupedLinear | GpuLinear


def four_bits(group: int) -> Layer:
    return Layer(
        GroupedLinear(packed(QKV, HIDDEN, group), None),
        GroupedLinear(packed(HIDDEN, HIDDEN, group), None),
        GroupedGated(packed(2 * INTER, HIDDEN, group), None, "silu"),
        GroupedLinear(packed(HIDDEN, INTER, group), None),
    )


def bf16() -> Layer:
    def weight(num_rows: int, width: int) -> Tensor:
        return row(num_rows, width).mul_(width**-0.5)

    return Layer(
        GpuLinear(weight(QKV, HIDDEN), None),
        GpuLinear(weight(HIDDEN, HIDDEN), None),
        GpuGated(weight(INTER, HIDDEN), weight(INTER, HIDDEN), None, "silu"),
        GpuLinear(weight(HIDDEN, INTER), None),
    )


def parts(layer: Layer, num_rows: int, norm: GpuRMSNorm) -> dict[str, Callable[[], object]]:
    """The calls of a layer, on buffers of their own."""
    x, inner, buffer = row(num_rows, HIDDEN), row(num_rows, INTER), row(num_rows, HIDDEN)
    qkv, attended = row(num_rows, QKV), row(num_rows, HIDDEN)
    return {
        "qkv": partial(layer.qkv.normed, x, norm, buffer, qkv),
        "out": partial(layer.out.add_to, attended, x),
        "gate_up": partial(layer.gate_up.normed, x, norm, buffer, inner),
        "down": partial(layer.down.add_to, inner, x),
    }


def measure(name: str, layers: list[Layer], num_rows: int, alone: bool) -> None:
    norm = GpuRMSNorm((torch.rand(HIDDEN, device=DEVICE) + 0.5).bfloat16(), EPS)
    calls = [parts(layer, num_rows, norm) for layer in layers]
    us = 1e6 * len(calls[0]) * time_calls([c for part in calls for c in part.values()], DEVICE)
    rate = sum(part.num_bytes for part in layers[0]) / us / 1e6
    line = f"{name:14} {num_rows:3} rows {us:7.2f} us a layer, {rate:5.2f} TB/s"
    for part in calls[0] if alone else ():
        line += f"  {part} {1e6 * time_calls([c[part] for c in calls], DEVICE):.2f}"
    print(line, flush=True)


def measure_cuts(layers: list[Layer]) -> None:
    """Other (warps of a multiprocessor, parts, loads ahead) than the kernel's own."""
    own, own_per_sm = rows_module._cut, rows_module._per_sm
    for warps in (16, 32):
        for fewer, ahead in ((1, 4), (1, 2), (2, 4), (2, 2)):

            def cut(
                num_blocks: int, fewer: int = fewer, ahead: int = ahead
            ) -> tuple[int, int, int]:
                num_parts = max(own(num_blocks)[0] // fewer, 1)
                rounds = -(-num_blocks // num_parts)
                return num_parts, rounds, min(rounds, ahead)

            rows_module._cut = cut
            rows_module._per_sm = lambda num_parts, warps=warps: warps // num_parts  # type: ignore[misc]
            measure(f"{warps} / {fewer} / {ahead}", layers, 1, alone=True)
    rows_module._cut, rows_module._per_sm = own, own_per_sm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--groups", type=int, nargs="+", default=[128, 32])
    parser.add_argument("--cuts", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    for kind, group in (("points", 128), ("ordered", 128), ("points", 32), ("point", 64)):
        for width in (HIDDEN, INTER):
            errors = [error(packed(1000, width, group, kind), n) for n in (1, 8)]
            print(
                f"{kind}, groups of {group}, {width} inputs: errors", *map("{:.1e}".format, errors)
            )
            assert max(errors) < 5e-3, "wrong results"
    for group in args.groups:
        layers = [four_bits(group) for _ in range(NUM_LAYERS)]
        for num_rows in args.rows:
            measure(f"groups of {group}", layers, num_rows, alone=num_rows == 1)
        if args.cuts:
            measure_cuts(layers)
    layers = [bf16() for _ in range(NUM_LAYERS)]
    for num_rows in args.rows:
        measure("bf16", layers, num_rows, alone=num_rows == 1)


if __name__ == "__main__":
    main()
