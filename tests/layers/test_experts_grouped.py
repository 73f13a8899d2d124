"""Experts of packed integers in stacks, by the GPU's kernels, against experts that are expanded."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.arch import MoEConfig
from octavo.layers.experts import SeparateExperts, route
from octavo.layers.gguf_weight import GGUFWeight
from octavo.layers.grouped import GroupedWeight
from octavo.layers.quantized import QuantizedWeight
from octavo.ops.gpu.grouped import pack

pytest.importorskip("triton")
from octavo.layers.experts_grouped import GroupedExperts, grouped_of

HIDDEN, SIZE, EXPERTS = 64, 32, 3

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def packed(
    num_rows: int, width: int, generator: torch.Generator, *, bits: int = 4, group: int = 32,
    dtype: torch.dtype = torch.float16, order: Tensor | None = None,
) -> GroupedWeight:  # fmt: skip
    codes = torch.randint(0, 2**bits, (num_rows, width), generator=generator)
    size = num_rows, -(-width // group)
    scales = (torch.rand(size, generator=generator) + 0.5) / (2**bits * width**0.5)
    zeros = torch.randint(0, 2**bits, size, generator=generator)
    return GroupedWeight(
        pack(codes, bits), scales.to(dtype), zeros.to(dtype), bits, group, (num_rows, width), "awq",
        order=order,
    )  # fmt: skip


def awq(generator: torch.Generator, **fields: Any) -> list[QuantizedWeight]:
    """Gate, up and down of an expert."""
    shapes = (SIZE, HIDDEN), (SIZE, HIDDEN), (HIDDEN, SIZE)
    return [packed(*shape, generator, **fields) for shape in shapes]


def compared(experts: list[list[QuantizedWeight]]) -> GroupedExperts:
    """Experts made of these weights, after their results were found right."""
    hidden, size = experts[0][0].shape[1], experts[0][0].shape[0]
    moe = MoEConfig(len(experts), 2, size, normalize=True)
    made, wide = GroupedExperts(moe, hidden, "silu"), SeparateExperts(moe, hidden, "silu")
    for expert in reversed(range(len(experts))):  # any order will do
        gate, up, down = experts[expert]
        made.set_down(expert, down)
        made.set_gate_up(expert, gate, up)
        gate, up, down = (w.dequantize(torch.float32) for w in experts[expert])
        wide.set_gate_up(expert, gate, up)
        wide.set_down(expert, down)
    torch.manual_seed(2)
    x, logits = torch.randn((5, hidden)), torch.randn((5, len(experts)))
    chosen = route(logits, moe)
    out, expected = made(x, *chosen), wide(x, *chosen)
    # on CPUs layers of one expert are rounded to int8
    assert (out - expected).norm() < (3e-6 if made.capturable else 3e-2) * expected.norm()
    return made


def test_integers_of_a_checkpoint() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [awq(generator) for _ in range(EXPERTS)]
    made = compared(weights)
    assert made.capturable
    assert made.num_bytes == sum(w.num_bytes for expert in weights for w in expert)
    assert made.transient_bytes(10, 2) > made.transient_bytes(1, 2) > 0


def test_inputs_of_each_expert_in_an_order_of_its_own() -> None:
    """GPTQ's act-order, with the same order for gate and up."""
    generator = torch.Generator().manual_seed(0)
    plain = compared([awq(generator) for _ in range(EXPERTS)])
    weights: list[list[QuantizedWeight]] = []
    for _ in range(EXPERTS):
        of_hidden, of_size = (torch.randperm(n, generator=generator).int() for n in (HIDDEN, SIZE))
        shapes = (SIZE, HIDDEN, of_hidden), (SIZE, HIDDEN, of_hidden), (HIDDEN, SIZE, of_size)
        weights.append([packed(n, k, generator, order=order) for n, k, order in shapes])
    made = compared(weights)
    assert made.capturable
    assert made.num_bytes == plain.num_bytes + EXPERTS * (HIDDEN + SIZE) * 4
    assert made.transient_bytes(10, 2) > plain.transient_bytes(10, 2)


def test_integers_of_8_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    assert compared([awq(generator, bits=8) for _ in range(EXPERTS)]).capturable


@pytest.mark.parametrize("which", [0, 1, 2], ids=["gate", "up", "down"])
@pytest.mark.parametrize("expert", [0, EXPERTS - 1])
def test_one_of_another_kind(expert: int, which: int) -> None:
    """All are called one by one then, whether it comes first or last."""
    generator = torch.Generator().manual_seed(0)
    weights = [awq(generator) for _ in range(EXPERTS)]
    old = weights[expert][which]
    weights[expert][which] = packed(*old.shape, generator, bits=8)
    made = compared(weights)
    assert not made.capturable
    assert made.num_bytes == pytest.approx(sum(w.num_bytes for e in weights for w in e), rel=0.3)
    assert made.transient_bytes(10, 4) > 0


def test_gate_and_up_in_different_orders() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [awq(generator) for _ in range(EXPERTS)]
    for gate_up in weights:
        for i in range(2):
            order = torch.randperm(HIDDEN, generator=generator).int()
            gate_up[i] = packed(SIZE, HIDDEN, generator, order=order)
    assert not compared(weights).capturable


def raw(name: str, num_rows: int, width: int, rng: np.random.Generator) -> GGUFWeight:
    kind = gguf.GGMLQuantizationType[name]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (num_rows, width // block, block_bytes), dtype=np.uint8)
    for start in {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}[name]:
        halves = (rng.random((num_rows, width // block, 1)) * 0.0004).astype(np.float16)
        blocks[..., start : start + 2] = halves.view(np.uint8)
    return GGUFWeight.of(torch.from_numpy(blocks.reshape(num_rows, -1)), kind.value, width)


@pytest.mark.parametrize(("gate_up", "down"), [("Q4_K", "Q8_0"), ("Q6_K", "Q4_0")])
def test_blocks_of_a_gguf_file(gate_up: str, down: str) -> None:
    """Down may be of another type than gate and up."""
    rng, hidden, size = np.random.default_rng(0), 256, 32
    weights: list[list[QuantizedWeight]] = [
        [
            raw(gate_up, size, hidden, rng),
            raw(gate_up, size, hidden, rng),
            raw(down, hidden, size, rng),
        ]
        for _ in range(2)
    ]
    grouped = [[grouped_of(w) for w in expert] for expert in weights]
    assert all(w is not None for expert in grouped for w in expert)
    assert compared([[w for w in expert if w is not None] for expert in grouped]).capturable
    made = GroupedExperts(MoEConfig(2, 2, size), hidden, "silu")
    for expert, (gate, up, last) in enumerate(weights):
        made.set_gate_up(expert, gate, up)
        made.set_down(expert, last)
    assert made.capturable and made.num_bytes > 0


def test_what_makes_no_stack() -> None:
    assert grouped_of(torch.ones(4, 4)) is None
    generator = torch.Generator().manual_seed(0)
    assert grouped_of(packed(8, 64, generator, dtype=torch.float32)) is None
    assert grouped_of(packed(8, 64, generator)) is not None
