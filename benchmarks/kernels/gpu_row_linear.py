"""A decoder layer's matrix products of one row: octavo's streaming kernels beside cuBLAS.

    python benchmarks/kernels/gpu_row_linear.py [--model llama8b|smollm2-135m]

A chain is norm + QKV, attention output + residual, norm + gate and up + silu, down + residual,
of so many layers that no weight stays in the L2 cache, in one CUDA graph. First the results are
compared with float64 on random data; then microseconds a layer, TB/s of weights read, and the
largest error are printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo.bench.roofline import time_calls
from octavo.ops import reference
from octavo.ops.gpu import activation, norm
from octavo.ops.gpu.row_linear import row_gated, row_linear

EPS = 1e-5
SHAPES = {  # (hidden, rows of QKV, intermediate, layers)
    "llama8b": (4096, 6144, 14336, 8),
    "smollm2-135m": (576, 960, 1536, 30),
}


class Layers:
    """Random weights of some layers, and the buffers of one step."""

    def __init__(self, shape: tuple[int, int, int, int]) -> None:
        hidden, qkv, inter, self.num_layers = shape

        def weights(rows: int, width: int) -> list[Tensor]:
            size = (rows, width)
            return [
                torch.randn(size, device="cuda", dtype=torch.bfloat16).mul_(width**-0.5)
                for _ in range(self.num_layers)
            ]

        def row(width: int) -> Tensor:
            return torch.randn((1, width), device="cuda", dtype=torch.bfloat16)

        self.w_qkv, self.w_out = weights(qkv, hidden), weights(hidden, hidden)
        self.w_gate_up, self.w_down = weights(2 * inter, hidden), weights(hidden, inter)
        self.norm = (torch.rand(hidden, device="cuda") + 0.5).bfloat16()
        self.x, self.attended, self.normed = row(hidden), row(hidden), row(hidden)
        self.qkv, self.both, self.gated = row(qkv), row(2 * inter), row(inter)
        self.num_bytes = 2 * sum(
            w[0].numel() for w in (self.w_qkv, self.w_out, self.w_gate_up, self.w_down)
        )

    def cublas(self, i: int) -> None:
        """One layer by cuBLAS, with kernels for norm and activation."""
        norm.rms_norm(self.x, self.norm, EPS, self.normed)
        torch.mm(self.normed, self.w_qkv[i].t(), out=self.qkv)
        self.x.addmm_(self.attended, self.w_out[i].t())
        norm.rms_norm(self.x, self.norm, EPS, self.normed)
        torch.mm(self.normed, self.w_gate_up[i].t(), out=self.both)
        activation.gated(self.both, self.gated, "silu")
        self.x.addmm_(self.gated, self.w_down[i].t())

    def octavo(self, i: int) -> None:
        """One layer by octavo's kernels."""
        row_linear(self.x, self.w_qkv[i], self.qkv, norm_weight=self.norm, eps=EPS)
        row_linear(self.attended, self.w_out[i], self.x, residual=True)
        row_gated(self.x, self.w_gate_up[i], self.gated, norm_weight=self.norm, eps=EPS)
        row_linear(self.gated, self.w_down[i], self.x, residual=True)

    def error(self) -> float:
        """||x - expected|| / ||expected|| after one layer, the change of the residual alone."""
        before = self.x.double()
        out = before + self.attended.double() @ self.w_out[0].double().t()
        h = reference.rms_norm(out.bfloat16(), self.norm, EPS).double()
        gated = reference.silu_and_mul(h @ self.w_gate_up[0].double().t())
        expected = out + gated @ self.w_down[0].double().t()
        self.octavo(0)
        return float((self.x.double() - expected).norm() / (expected - before).norm())


def layer_us(layers: Layers, call: Callable[[int], None]) -> float:
    """Median over replays of a graph of all layers."""
    calls = [partial(call, i) for i in range(layers.num_layers)]
    return 1e6 * time_calls(calls, torch.device("cuda"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="llama8b")
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = Layers(SHAPES[args.model])
    error = layers.error()
    assert error < 1e-2, f"wrong results: relative error {error}"
    print(f"{args.model}, one row: relative error {error:.1e}")
    for name, call in (("cuBLAS", layers.cublas), ("octavo", layers.octavo)):
        layers.x.normal_()
        us = layer_us(layers, call)
        print(f"{name} {us:7.2f} us a layer, {layers.num_bytes / us / 1e6:5.2f} TB/s", flush=True)


if __name__ == "__main__":
    main()
