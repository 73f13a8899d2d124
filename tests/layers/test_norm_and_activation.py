"""Norms, activations and the pieces of the embedding that families differ in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from octavo.arch import ACTIVATIONS
from octavo.layers.activation import activate, gated
from octavo.layers.alibi import alibi_slopes
from octavo.layers.embedding import QuantizedEmbedding
from octavo.layers.linear import StackedLinear, make_gated, make_joined, make_linear
from octavo.layers.norm import HeadLayerNorm, LayerNorm, RMSNorm, make_norm
from octavo.layers.quantized import QuantizedWeight
from octavo.ops import reference

CPU = torch.device("cpu")


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations(name: str, dtype: torch.dtype) -> None:
    both = normal(3, 80, dtype=dtype) * 3
    gate, up = both.double().chunk(2, dim=1)
    expected = reference.activation(gate, name)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    whole = torch.full((3, 50), torch.nan, dtype=dtype)
    gated(both, name, whole[:, :40])
    torch.testing.assert_close(whole[:, :40].double(), expected * up, rtol=tolerance, atol=1e-5)
    assert whole[:, 40:].isnan().all()
    activate(both[:, :40], name)
    torch.testing.assert_close(both[:, :40].double(), expected, rtol=tolerance, atol=1e-5)
    assert torch.equal(both[:, 40:].double(), up)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_norm(dtype: torch.dtype, biased: bool) -> None:
    x = normal(4, 60, dtype=dtype)[:, :50] + 2
    weight, bias = normal(50, dtype=dtype, seed=1), normal(50, dtype=dtype, seed=2)
    norm = make_norm(weight, 1e-5, "layer", bias if biased else None)
    assert isinstance(norm, LayerNorm)
    assert norm.num_bytes == (2 if biased else 1) * 50 * dtype.itemsize
    expected = reference.layer_norm(x, weight, bias if biased else None, 1e-5)
    norm(x, x)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance)


def test_a_layer_norm_for_each_head() -> None:
    qkv, weight = normal(5, 100), normal(3, 16, seed=1)
    heads = qkv[:, :48].view(5, 3, 16)
    expected = torch.stack(
        [reference.layer_norm(heads[:, i], weight[i], None, 1e-5) for i in range(3)], dim=1
    )
    rest = qkv[:, 48:].clone()
    HeadLayerNorm(weight, 1e-5)(heads)
    torch.testing.assert_close(qkv[:, :48].view(5, 3, 16), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(qkv[:, 48:], rest)


@pytest.mark.parametrize(
    ("num_heads", "expected"),
    [
        (1, [2.0**-8]),
        (8, [2.0**-i for i in range(1, 9)]),
        (6, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]),
    ],
)
def test_alibi_slopes(num_heads: int, expected: list[float]) -> None:
    assert alibi_slopes(num_heads, 1.0, CPU).tolist() == pytest.approx(expected)
    assert alibi_slopes(num_heads, 0.25, CPU).tolist() == pytest.approx([s / 4 for s in expected])


class Halves(QuantizedWeight):
    """Float16 codes, as a format of its own."""

    def __init__(self, codes: Tensor, kind: str = "a") -> None:
        self.codes, self.format = codes, kind
        self.shape = (codes.shape[0], codes.shape[1])

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def to(self, device: torch.device) -> Halves:
        return self

    def rows(self, index: slice | Tensor) -> Halves:
        return Halves(self.codes[index], self.format)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.codes.to(dtype)

    def joined_with(self, others: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
        same = [o for o in others if isinstance(o, Halves) and o.format == self.format]
        if len(same) < len(others):
            return None
        return Halves(torch.cat([self.codes, *(o.codes for o in same)]), self.format)


def test_a_quantized_embedding_expands_the_rows_that_are_read() -> None:
    table = Halves(normal(11, 8, dtype=torch.float16))
    embedding = QuantizedEmbedding(table, table.num_bytes)
    out = torch.full((3, 8), torch.nan)
    embedding(torch.tensor([10, 0, 10]), out)
    assert torch.equal(out, table.codes[[10, 0, 10]].float())
    assert embedding.num_bytes == 11 * 8 * 2


def test_weights_of_one_format_are_joined_and_others_stand_side_by_side() -> None:
    x, bias = normal(4, 8), normal(9, seed=3)
    q, k, v = (normal(n, 8, seed=n) for n in (4, 2, 3))
    expected = x @ torch.cat((q, k, v)).t() + bias
    joined = make_joined((q, k, v), bias)
    assert not isinstance(joined, StackedLinear)
    whole = torch.full((4, 12), torch.nan)
    torch.testing.assert_close(joined(x, whole[:, :9]), expected)
    parts = [make_linear(w, b) for w, b in zip((q, k, v), bias.split([4, 2, 3]), strict=True)]
    stacked = StackedLinear(parts, [4, 2, 3])
    torch.testing.assert_close(stacked(x, whole[:, :9]), expected)
    assert whole[:, 9:].isnan().all()
    residual = normal(4, 9, seed=4)
    added = residual + expected
    stacked.add_to(x, residual)
    torch.testing.assert_close(residual, added)
    norm = RMSNorm(normal(8, seed=5), 1e-5)
    normed = reference.rms_norm(x, norm.weight, 1e-5) @ torch.cat((q, k, v)).t() + bias
    torch.testing.assert_close(stacked.normed(x, norm, torch.empty_like(x), residual), normed)
    assert stacked.num_bytes == sum(part.num_bytes for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_layers(name: str, dtype: torch.dtype) -> None:
    x, gate, up = (normal(n, 32, dtype=dtype, seed=n) for n in (3, 48, 49))
    up, bias = up[:48], normal(96, dtype=dtype)
    out = torch.empty((3, 48), dtype=dtype)
    make_gated(gate, up, bias, name)(x, out)
    both = x.double() @ torch.cat((gate, up)).double().t() + bias
    a, b = both.chunk(2, dim=1)
    exact = reference.activation(a, name) * b
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    error = (out.double() - exact).abs().max() / exact.abs().max()
    assert error < tolerance
