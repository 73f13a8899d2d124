"""Layers of weights that stay quantized on a CPU, beside the same weights expanded."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from torch import Tensor

from octavo.layers.embedding import TableEmbedding, make_embedding
from octavo.layers.gguf_weight import GGUFWeight
from octavo.layers.linear import make_gated, make_joined, make_linear
from octavo.layers.norm import make_norm
from octavo.layers.quantized_cpu import (
    QuantizedGated,
    QuantizedLinear,
    QuantizedPlainGated,
    QuantizedRows,
    codes_of,
)
from octavo.ops.cpu import qgemm
from octavo.ops.cpu.qcodes import Codes4, rounded

sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))
import kquants

pytestmark = pytest.mark.skipif(not qgemm.is_available(), reason="needs the C library")
FOUR = (Quant.Q4_0, Quant.Q4_1, Quant.Q4_K)
EIGHT = (Quant.Q8_0, Quant.Q5_0, Quant.Q5_1, Quant.Q5_K, Quant.Q6_K)


def matrix(seed: int, n: int, k: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, k, generator=generator)
    return rows * torch.rand(n, 1, generator=generator)


def packed(kind: Quant, seed: int, n: int, k: int = 256) -> GGUFWeight:
    raw = kquants.quantize(matrix(seed, n, k).numpy(), kind)
    return GGUFWeight.of(torch.from_numpy(raw), int(kind), k)


@pytest.mark.parametrize("kind", [*FOUR, *EIGHT], ids=lambda kind: kind.name)
def test_codes_stand_for_what_the_file_says(kind: Quant) -> None:
    """Within the int8 grid of each row, of which 4-bit formats use two roundings."""
    weight = packed(kind, 1, 70)
    exact = torch.from_numpy(gguf.dequantize(weight.raw.numpy(), kind).astype(np.float32))
    codes = codes_of(weight)
    assert isinstance(codes, Codes4) == (kind in FOUR)
    wide = codes.widened() if isinstance(codes, Codes4) else codes
    steps = (wide.values() - exact) / wide.scales[:, None]
    assert steps.abs().max() < (1.6 if kind in FOUR else 0.501)
    assert (wide.values() - exact).norm() < 0.02 * exact.norm()


def test_codes_are_made_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = packed(Quant.Q4_1, 2, 50)
    at_once = codes_of(weight)
    monkeypatch.setattr("octavo.layers.quantized_cpu._CHUNK_ELEMENTS", 256 * 7)
    in_parts = codes_of(weight)
    assert isinstance(at_once, Codes4) and isinstance(in_parts, Codes4)
    for name in ("q", "a", "c", "scales"):
        assert torch.equal(getattr(at_once, name), getattr(in_parts, name))


@pytest.mark.parametrize("kind", [Quant.Q4_K, Quant.Q8_0], ids=lambda kind: kind.name)
def test_linear_of_a_file(kind: Quant) -> None:
    weight, bias = packed(kind, 3, 40), torch.randn(40)
    layer = make_linear(weight, bias)
    assert isinstance(layer, QuantizedLinear) and layer.replayable
    x = matrix(4, 9)
    exact = x @ weight.dequantize(torch.float32).T + bias
    out = layer(x, torch.empty(9, 40))
    assert (out - exact).norm() < 0.02 * exact.norm()
    residual = torch.ones(9, 40)
    layer.add_to(x, residual)
    assert torch.allclose(residual, out + 1, atol=1e-5)
    norm = make_norm(torch.rand(256), 1e-5)
    normed = layer.normed(x.clone(), norm, torch.empty_like(x), torch.empty(9, 40))
    assert torch.equal(normed, layer(norm(x, torch.empty_like(x)), torch.empty(9, 40)))


def test_weights_take_little_memory() -> None:
    """With scales and sums of channels: 4.5 and 8 bits a weight and little more."""
    four = make_linear(packed(Quant.Q4_1, 5, 512, 1024))
    eight = make_linear(matrix(5, 512, 1024), quantize="int8")
    assert 4.5 <= four.num_bytes * 8 / (512 * 1024) < 4.6
    assert 8 <= eight.num_bytes * 8 / (512 * 1024) < 8.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_made_of_plain_weights(dtype: torch.dtype) -> None:
    weight = matrix(6, 40).to(dtype)
    layer = make_linear(weight, quantize="int8")
    x = matrix(7, 5).to(dtype)
    out = layer(x, torch.empty(5, 40))
    of_codes = qgemm.linear(x, qgemm.pack(rounded(weight)), torch.empty(5, 40))
    assert torch.equal(out, of_codes)
    plain = make_linear(weight)(x, torch.empty(5, 40))
    assert 0 < (out - plain).norm() < 0.02 * plain.norm()


@pytest.mark.parametrize("kinds", [(Quant.Q4_1, Quant.Q4_1), (Quant.Q4_K, Quant.Q6_K)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
def test_gated(activation: str, kinds: tuple[Quant, Quant]) -> None:
    gate, up = packed(kinds[0], 8, 24), packed(kinds[1], 9, 24)
    bias = torch.randn(48)
    layer = make_gated(gate, up, bias, activation)
    fused = activation != "relu2"
    assert isinstance(layer, QuantizedGated if fused else QuantizedPlainGated)
    assert layer.replayable == fused
    expanded = [weight.dequantize(torch.float32) for weight in (gate, up)]
    x = matrix(10, 7) / 4
    exact = make_gated(*expanded, bias, activation)(x, torch.empty(7, 24))
    assert (layer(x, torch.empty(7, 24)) - exact).norm() < 0.03 * exact.norm()


def test_gated_of_a_file_and_a_plain_weight() -> None:
    gate, up = packed(Quant.Q4_1, 8, 24), matrix(9, 24)
    layer = make_gated(gate, up, None, "silu", "int8")
    x = matrix(10, 7) / 4
    exact = make_gated(gate.dequantize(torch.float32), up)(x, torch.empty(7, 24))
    assert (layer(x, torch.empty(7, 24)) - exact).norm() < 0.03 * exact.norm()


def test_parts_of_different_formats_are_one_layer_in_eight_bits() -> None:
    parts = [packed(Quant.Q5_0, 11, 24), packed(Quant.Q5_0, 12, 8), packed(Quant.Q8_0, 13, 8)]
    x, bias = matrix(14, 6), torch.randn(40)
    layer = make_joined(parts, bias)
    assert isinstance(layer, QuantizedLinear)
    out = layer(x, torch.empty(6, 40))
    exact = x @ torch.cat([part.dequantize(torch.float32) for part in parts]).T + bias
    assert (out - exact).norm() < 0.02 * exact.norm()


def test_parts_of_four_and_eight_bits_stay_apart() -> None:
    parts = [packed(Quant.Q4_K, 11, 24), packed(Quant.Q4_K, 12, 8), packed(Quant.Q6_K, 13, 8)]
    x, bias = matrix(14, 6), torch.randn(40)
    out = make_joined(parts, bias)(x, torch.empty(6, 40))
    exact = x @ torch.cat([part.dequantize(torch.float32) for part in parts]).T + bias
    assert (out - exact).norm() < 0.02 * exact.norm()
    first = make_linear(parts[0], bias[:24])(x, torch.empty(6, 24))
    assert torch.equal(out[:, :24], first)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [Quant.Q8_0, Quant.Q4_0, None])
def test_embedding(kind: Quant | None, tied: bool) -> None:
    """A tied head's codes are read in place; kind None: a plain table, rounded to int8."""
    table = matrix(15, 70) if kind is None else packed(kind, 15, 70)
    quantize = "int8" if kind is None else None
    head = make_linear(table, None, quantize) if tied else None
    embedding = make_embedding(table, head, quantize)
    assert isinstance(embedding, QuantizedRows) and embedding.replayable
    assert (embedding.num_bytes == 0) == tied
    ids = torch.tensor([3, 69, 3, 0])
    exact = table[ids] if isinstance(table, Tensor) else table.dequantize(torch.float32)[ids]
    found = embedding(ids, torch.empty(4, 256))
    assert (found - exact).norm() < 0.02 * exact.norm()
    assert torch.equal(found[0], found[2])


def test_a_plain_table_beside_a_plain_head_stays_as_it_is() -> None:
    assert isinstance(make_embedding(matrix(16, 8)), TableEmbedding)
