"""Paged decode attention: microseconds a layer and TB/s of K and V, and what paging costs.

    python benchmarks/kernels/gpu_decode_attention.py

Each case is first compared with float64, then timed in CUDA graphs over so many layers that the L2
cache holds none. Contiguous is the same kernel over one region a sequence; fp8 has a scale for each
token and head. Takes about 40 s on an H200.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from octavo.attention.work import max_decode_items, plan_decode
from octavo.bench.roofline import time_calls
from octavo.ops.gpu.decode_attention import contiguous_decode, paged_decode

L2_BYTES = 130e6
SHAPES = ((32, 8, 128), (9, 3, 64), (40, 40, 128))  # Llama-3.1-8B, SmolLM2-135M, Llama-2-13B


def pool(
    num_blocks: int, layers: int, heads: int, block: int, dim: int, fp8: bool
) -> tuple[Tensor, Tensor | None]:
    """Random K and V in the engine's layout; under fp8 each block's scales follow its codes."""
    shape = (num_blocks, layers, 2, heads, block, dim)
    if not fp8:
        kv = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        for piece in kv.view(-1).split(1 << 28):
            piece.normal_()
        return kv, None
    rows = layers * 2 * heads * block
    data = torch.empty((num_blocks, rows * (dim + 2)), dtype=torch.uint8, device="cuda")
    codes = data[:, : rows * dim].view(torch.float8_e4m3fn).view(shape)
    scales = data[:, rows * dim :].view(torch.float16).view(shape[:-1])
    for i in range(layers):
        values = 100 * torch.randn_like(codes[:, i], dtype=torch.float16)
        codes[:, i] = values.clamp_(-448, 448).to(codes.dtype)  # some versions of torch overflow
    return codes, scales.uniform_(0.005, 0.015)


@dataclass
class Case:
    """A batch, its pool, and the cutting of its contexts."""

    lens: list[int]
    shape: tuple[int, int, int]
    block: int
    fp8: bool = False

    def __post_init__(self) -> None:
        num_heads, kv_heads, dim = self.shape
        batch, row_bytes = len(self.lens), dim + 2 if self.fp8 else 2 * dim
        self.num_bytes = 2 * sum(self.lens) * kv_heads * row_bytes
        self.layers = max(2, min(64, int(L2_BYTES / self.num_bytes) + 1))
        counts = [-(-length // self.block) for length in self.lens]
        num_blocks = sum(counts)
        self.kv, self.scales = pool(num_blocks, self.layers, kv_heads, self.block, dim, self.fp8)
        order = torch.randperm(num_blocks, device="cuda").int().split(counts)
        self.tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
        self.seq_lens = torch.tensor(self.lens, dtype=torch.int32, device="cuda")
        qkv = torch.randn(batch, num_heads + 2 * kv_heads, dim, device="cuda").bfloat16()
        self.query = qkv[:, :num_heads]
        self.out = torch.full_like(self.query, torch.nan)
        max_items = max_decode_items(batch, kv_heads, _num_sms())
        items, starts = plan_decode(self.lens, max_items)
        self.items = torch.full((max_items, 3), -1, dtype=torch.int32, device="cuda")
        self.items[: len(items)] = torch.from_numpy(items)
        self.starts = torch.from_numpy(starts).cuda()
        self.partial = torch.empty((max_items, num_heads, dim), device="cuda")
        self.lse = torch.empty((max_items, num_heads), device="cuda")

    def paged(self, layer: int) -> None:
        paged_decode(
            self.out, self.query, self.kv, self.scales, layer, self.tables, None, self.seq_lens,
            self.items, self.starts, self.partial, self.lse, self.shape[2] ** -0.5,
        )  # fmt: skip

    def contiguous(self) -> Callable[[int], None]:
        """The same, with one region a sequence in place of blocks."""
        _, kv_heads, dim = self.shape
        shape = (self.layers, 2, len(self.lens), kv_heads, max(self.lens), dim)
        kv = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        for piece in kv.view(-1).split(1 << 28):
            piece.normal_()
        return lambda layer: contiguous_decode(
            self.out, self.query, *kv[layer], self.seq_lens, self.items, self.starts, self.partial,
            self.lse, dim**-0.5,
        )  # fmt: skip

    def error(self) -> float:
        """||out - exact|| / ||exact|| over the first and the last sequence."""
        self.paged(1)
        pairs = []
        for i in {0, len(self.lens) - 1}:
            at = torch.arange(self.lens[i], device="cuda")
            blocks, slots = self.tables[i].long()[at // self.block], at % self.block
            kv = self.kv[blocks, 1, :, :, slots].float().double()
            if self.scales is not None:
                kv *= self.scales[blocks, 1, :, :, slots].double()[..., None]
            keys, values = kv.repeat_interleave(self.shape[0] // self.shape[1], 2).unbind(1)
            scores = torch.einsum("hd,khd->hk", self.query[i].double(), keys)
            weights = (scores * self.shape[2] ** -0.5).softmax(-1)
            pairs.append((self.out[i].double(), torch.einsum("hk,khd->hd", weights, values)))
        out, exact = (torch.stack(rows) for rows in zip(*pairs, strict=True))
        return float((out - exact).norm() / exact.norm())


def _num_sms() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def micros(call: Callable[[int], None], layers: int) -> float:
    """Microseconds a layer: median of graph replays."""
    for layer in range(layers):
        call(layer)
    rounds = max(1, 32 // layers)
    calls = [partial(call, i % layers) for i in range(rounds * layers)]
    return 1e6 * time_calls(calls, torch.device("cuda"))


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    draw = random.Random(0)
    uneven = [min(2048, int(draw.lognormvariate(5.6, 0.9)) + 8) for _ in range(256)]
    batches = {
        "1 x 512": [512], "1 x 4096": [4096], "8 x 1024": [1024] * 8, "32 x 1024": [1024] * 32,
        "128 x 1024": [1024] * 128, "256 x 1024": [1024] * 256, "256 uneven": uneven,
    }  # fmt: skip
    print("heads    D  batch           block  us/layer  TB/s  contiguous  paging   error")
    for shape in SHAPES:
        for label, lens in batches.items():
            if sum(lens) * shape[1] * shape[2] > 3e8:
                continue  # more than one GPU's worth of 40 KV heads
            for block, fp8 in ((16, False), (64, False), (16, True)):
                case = Case(lens, shape, block, fp8)
                error = case.error()
                assert error < 1e-2, f"{shape}, {label}, block {block}, fp8 {fp8}: error {error}"
                time = micros(case.paged, case.layers)
                line = f"{shape[0]:2}/{shape[1]:<2}  {shape[2]:4}  {label:14}"
                line += f"  {'fp8' if fp8 else '':3}{block:3}  {time:8.2f}"
                line += f"  {case.num_bytes / time / 1e6:4.2f}"
                if block == 16 and not fp8:
                    flat = micros(case.contiguous(), case.layers)
                    line += f"  {flat:10.2f}  {time / flat - 1:+6.1%}"
                else:
                    line += " " * 20
                print(f"{line}  {error:.1e}", flush=True)
                del case
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
