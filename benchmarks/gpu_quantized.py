"""Quantized linear layers on a GPU beside bfloat16: a Llama-3.1-8B layer's four products.

    python benchmarks/gpu_quantized.py [--rows 1,8,32,128,256,1024]

Each is timed as the decoder calls it: norm before QKV and gate and up, activation behind those, the
residual added by the others; of so many layers that no weight stays in the L2 cache, in one CUDA
graph. First every result is compared with float64. Prints microseconds of the four together.

  fp8   made of the bfloat16 weights, inputs rounded to fp8 by token
  int4  random codes with scales and zero points for groups of 128, as AWQ has them
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.bench.roofline import time_calls
from octavo.layers.fp8 import Fp8Weight
from octavo.layers.gpu import GpuGated, GpuLinear, GpuRMSNorm
from octavo.layers.grouped import GroupedWeight
from octavo.layers.quantized_gpu import Fp8Gated, Fp8Linear, GroupedGated, GroupedLinear

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
NUM_LAYERS, GROUP = 6, 128
DEVICE = torch.device("cuda")


def grouped(num_rows: int, width: int) -> GroupedWeight:
    """Random codes."""
    size = (num_rows, width // GROUP)
    codes = torch.randint(-(2**31), 2**31, (num_rows, width // 8), device=DEVICE, dtype=torch.int32)
    scales = (torch.rand(size, device=DEVICE) + 0.5).half() * (0.2 * width**-0.5)
    zeros = torch.randint(0, 16, size, device=DEVICE).half()
    return GroupedWeight(codes, scales, zeros, 4, GROUP, (num_rows, width), "awq")


def layers_of(name: str) -> dict[str, tuple[list[Any], Tensor]]:
    """Kind -> layers, and what the first one's weight is."""
    num_rows, width = SHAPES[name]
    plain = [
        torch.randn(num_rows, width, device=DEVICE).mul_(width**-0.5).bfloat16()
        for _ in range(NUM_LAYERS)
    ]
    fp8 = [Fp8Weight.quantized(weight) for weight in plain]
    int4 = [grouped(num_rows, width) for _ in plain]
    half = num_rows // 2
    kinds: dict[str, list[Any]]
    if name == "gate_up":
        kinds = {
            "bf16": [GpuGated(w[:half], w[half:], None) for w in plain],
            "fp8": [Fp8Gated(w, None, "silu") for w in fp8],
            "int4": [GroupedGated(w, None, "silu") for w in int4],
        }
    else:
        kinds = {
            "bf16": [GpuLinear(w, None) for w in plain],
            "fp8": [Fp8Linear(w, None) for w in fp8],
            "int4": [GroupedLinear(w, None) for w in int4],
        }
    wide = {
        "bf16": plain[0],
        "fp8": fp8[0].dequantize(torch.float32),
        "int4": int4[0].dequantize(torch.float32),
    }
    return {kind: (made, wide[kind]) for kind, made in kinds.items()}


def call(name: str, layer: Any, x: Tensor, norm: GpuRMSNorm, buffer: Tensor, out: Tensor) -> None:
    """As the decoder calls it."""
    if name in ("o", "down"):
        layer.add_to(x, out)
    else:
        layer.normed(x, norm, buffer, out)


def error(name: str, layer: Any, wide: Tensor, x: Tensor, norm: GpuRMSNorm, out: Tensor) -> float:
    """||result - float64's|| / ||float64's||."""
    out = torch.zeros_like(out)
    call(name, layer, x, norm, torch.empty_like(x), out)
    inputs = x if name in ("o", "down") else norm(x, torch.empty_like(x))
    expected = inputs.double() @ wide.double().t()
    if name == "gate_up":
        gate, up = expected.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
    return float((out.double() - expected).norm() / expected.norm())


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,8,32,128,256,1024")
    rows = [int(n) for n in parser.parse_args().rows.split(",")]
    times: dict[str, dict[int, float]] = {}
    worst: dict[str, float] = {}
    for name, (num_rows, width) in SHAPES.items():
        norm = GpuRMSNorm((torch.rand(width, device=DEVICE) + 0.5).bfloat16(), 1e-5)
        for kind, (layers, wide) in layers_of(name).items():
            for count in rows:
                x = torch.randn(count, width, device=DEVICE, dtype=torch.bfloat16)
                size = num_rows // 2 if name == "gate_up" else num_rows
                out = torch.empty(count, size, device=DEVICE, dtype=torch.bfloat16)
                if count <= 256:
                    found = error(name, layers[0], wide, x, norm, out)
                    worst[kind] = max(worst.get(kind, 0.0), found)
                buffer = torch.empty_like(x)
                calls: list[Callable[[], None]] = [
                    partial(call, name, layer, x, norm, buffer, out) for layer in layers
                ]
                of_kind = times.setdefault(kind, {})
                of_kind[count] = of_kind.get(count, 0.0) + time_calls(calls, DEVICE) * 1e6
    print(f"{'rows':>8}" + "".join(f"{kind:>10}" for kind in times))
    for count in rows:
        print(f"{count:>8,}" + "".join(f"{of_kind[count]:>10.1f}" for of_kind in times.values()))
    print(f"{'error':>8}" + "".join(f"{value:>10.1e}" for value in worst.values()))


if __name__ == "__main__":
    main()
