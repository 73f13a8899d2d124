"""Products with integers that share scales in groups, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.layers.gpu import GpuRMSNorm
from octavo.layers.grouped import GroupedWeight
from octavo.layers.quantized_gpu import (
    GroupedGated,
    GroupedLinear,
    SeparateGated,
    make_quantized_gated,
    make_quantized_linear,
)
from octavo.ops import reference
from octavo.ops.gpu import grouped_linear as tiles
from octavo.ops.gpu import grouped_row_linear as rows_module
from octavo.ops.gpu import pdl
from octavo.ops.gpu.grouped import pack, unpack
from octavo.ops.gpu.grouped_linear import expand, grouped_linear
from octavo.ops.gpu.grouped_row_linear import grouped_row_linear

ROW = {torch.float16: 1e-3, torch.bfloat16: 6e-3}
TILE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
Error = Callable[[Tensor, Tensor], float]

WEIGHTS = {
    # bits, group size, what is done about zero, ordered by groups, inputs
    "awq": (4, 128, "points", False, 256),
    "gptq": (4, 128, "points", True, 384),
    "groups of 32": (4, 32, "point", False, 160),
    "whole rows": (4, 80, "point", False, 72),
    "Q4_K": (4, 32, "offsets", False, 256),
    "groups of 16": (4, 16, "offsets", False, 128),
    "8 bits": (8, 128, "points", True, 384),
    "Q6_K": (8, 16, "point", False, 256),
}


NUM_OUTPUTS = 37
"""Two whole tiles of the kernel for one row, and a part."""


@pytest.fixture(params=WEIGHTS)
def weight(request: pytest.FixtureRequest, device: torch.device) -> GroupedWeight:
    """A weight of each kind."""
    return make_weight(request.param, NUM_OUTPUTS, device)


@pytest.fixture
def half(device: torch.device) -> torch.dtype:
    """Of 16 bits."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


@pytest.fixture
def dtype(weight: GroupedWeight, device: torch.device) -> torch.dtype:
    """One of each kind's: on a CPU float32 and float16 by turns, as their products are slow."""
    if device.type == "cuda":
        return torch.bfloat16
    turn = list(WEIGHTS).index(weight.format)
    return (torch.float32, torch.float16)[turn % 2]


def make_weight(kind: str, num_rows: int, device: torch.device, seed: int = 0) -> GroupedWeight:
    bits, group, zero, ordered, width = WEIGHTS[kind]
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (num_rows, width), generator=generator)
    size = (num_rows, -(-width // group))
    scales = torch.rand(size, generator=generator) / 2**bits + 0.01
    zeros = {
        "point": None,
        "points": torch.randint(0, 2**bits, size, generator=generator).float(),
        "offsets": torch.randn(size, generator=generator),
    }[zero]
    order = torch.randperm(width, generator=generator).int() if ordered else None
    point = 2 ** (bits - 1) if zero == "point" else 0
    return GroupedWeight(
        pack(codes, bits), scales, zeros, bits, group, (num_rows, width), kind,
        zero_point=point, offsets=zero == "offsets", order=order,
    ).to(device)  # fmt: skip


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [16, 100, 256])
def test_packing(width: int, bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, width), generator=torch.Generator().manual_seed(0))
    words = pack(codes, bits)
    assert words.shape[1] % 16 == 0
    transposed = pack(codes.t().contiguous().t(), bits)  # as AWQ's codes come
    assert transposed.is_contiguous()
    assert torch.equal(transposed, words)
    unpacked = unpack(words, bits)
    assert torch.equal(unpacked[:, :width].long(), codes)
    assert unpacked[:, width:].abs().sum() == 0


def test_places_in_a_word() -> None:
    """Code i of word j is of input 16 i + j."""
    codes = torch.zeros((1, 128), dtype=torch.int64)
    codes[0, 16 * 3 + 5] = 9
    words = pack(codes, 4)
    assert words[0, 5] == 9 << 12
    assert words.abs().sum() == 9 << 12


@pytest.fixture
def one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all rows of a weight, of which it takes 16 at a time."""
    monkeypatch.setattr(rows_module, "_per_sm", lambda parts: 1)
    monkeypatch.setattr(pdl, "num_sms", lambda device: 1)


@pytest.mark.usefixtures("one_program")
def test_one_row(
    weight: GroupedWeight, half: torch.dtype, device: torch.device, relative_error: Error
) -> None:
    torch.manual_seed(1)
    width = weight.shape[1]
    x = _random(1, width, dtype=half, device=device)
    bias = _random(NUM_OUTPUTS, dtype=half, device=device)
    norm = torch.rand(width, device=device).to(half) + 0.5
    wide = weight.dequantize(torch.float64)
    before = _random(1, NUM_OUTPUTS, dtype=half, device=device)
    out = before.clone()
    assert (
        grouped_row_linear(x, weight, out, bias=bias, residual=True, norm_weight=norm, eps=1e-5)
        is out
    )
    normed = reference.rms_norm(x, norm, 1e-5).double()
    expected = before.double() + normed @ wide.t() + bias.double()
    assert relative_error(out, expected) < ROW[half]


@pytest.mark.parametrize("cut", [(2, 2, 1), (2, 2, 2), (4, 1, 1)], ids=str)
def test_one_row_of_several_programs(
    cut: tuple[int, int, int], half: torch.dtype, device: torch.device, relative_error: Error,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """However parts, rounds and loads ahead cut 3 blocks of inputs, the last of them not whole."""
    monkeypatch.setattr(rows_module, "_cut", lambda num_blocks: cut)
    monkeypatch.setattr(pdl, "num_sms", lambda device: 1)
    monkeypatch.setattr(rows_module, "_per_sm", lambda parts: 2)
    torch.manual_seed(6)
    weight = make_weight("gptq", NUM_OUTPUTS, device)
    x = _random(1, 384, dtype=half, device=device)
    whole = torch.full((1, NUM_OUTPUTS + 8), torch.nan, device=device)
    out = whole[:, :NUM_OUTPUTS]
    grouped_row_linear(x, weight, out)
    assert relative_error(out, x.double() @ weight.dequantize(torch.float64).t()) < 1e-4
    assert whole[:, NUM_OUTPUTS:].isnan().all()


@pytest.mark.usefixtures("one_program")
def test_one_row_gated(half: torch.dtype, device: torch.device, relative_error: Error) -> None:
    num_outputs = 11
    torch.manual_seed(2)
    weight = make_weight("awq", 2 * num_outputs, device)
    x = _random(1, 256, dtype=half, device=device) / 16
    bias = _random(2 * num_outputs, dtype=half, device=device)
    out = torch.full((1, num_outputs), torch.nan, dtype=half, device=device)
    grouped_row_linear(x, weight, out, bias=bias, gated=True)
    both = x.double() @ weight.dequantize(torch.float64).t() + bias.double()
    gate, up = both.chunk(2, 1)
    assert relative_error(out, reference.activation(gate, "silu") * up) < ROW[half]


def test_one_row_of_inputs_that_are_alike(
    half: torch.dtype, device: torch.device, relative_error: Error
) -> None:
    """What is taken off sums of lifted codes is then much larger than what is left."""
    torch.manual_seed(7)
    weight = make_weight("awq", 16, device)
    x = torch.full((1, 256), 3.0, dtype=half, device=device)
    out = torch.empty((1, 16), device=device)
    grouped_row_linear(x, weight, out)
    assert relative_error(out, x.double() @ weight.dequantize(torch.float64).t()) < 1e-4


def _several_rows(weight: GroupedWeight, dtype: torch.dtype, error: Error) -> None:
    torch.manual_seed(3)
    device = weight.device
    num_rows, (num_outputs, width) = 19, weight.shape
    x = _random(num_rows, width + 8, dtype=dtype, device=device)[:, :width]
    bias = _random(num_outputs, dtype=dtype, device=device)
    before = _random(num_rows, num_outputs + 8, dtype=dtype, device=device)
    whole = before.clone()
    out = whole[:, :num_outputs]
    assert grouped_linear(x, weight, out, bias=bias, residual=True) is out
    product = x.double() @ weight.dequantize(torch.float64).t() + bias.double()
    assert error(out, product + before[:, :num_outputs].double()) < TILE[dtype]
    assert torch.equal(whole[:, num_outputs:], before[:, num_outputs:])


def test_several_rows(weight: GroupedWeight, dtype: torch.dtype, relative_error: Error) -> None:
    _several_rows(weight, dtype, relative_error)


@pytest.mark.parametrize("kind", ["gptq", "Q6_K", "whole rows"])
def test_several_rows_of_several_parts(
    kind: str, half: torch.dtype, device: torch.device, relative_error: Error,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As many parts as there are blocks, or more or fewer."""
    monkeypatch.setattr(tiles, "_num_parts", lambda *args: 3)
    _several_rows(make_weight(kind, NUM_OUTPUTS, device), half, relative_error)


def test_several_rows_into_float32(
    half: torch.dtype, device: torch.device, relative_error: Error
) -> None:
    torch.manual_seed(3)
    weight = make_weight("awq", NUM_OUTPUTS, device)
    x = _random(19, 256, dtype=half, device=device)
    out = torch.full((19, NUM_OUTPUTS), torch.nan, dtype=torch.float32, device=device)
    grouped_linear(x, weight, out)
    product = x.double() @ weight.dequantize(torch.float64).t()
    assert relative_error(out, product) < TILE[half]


def test_expansion_is_what_torch_expands(
    weight: GroupedWeight, dtype: torch.dtype, device: torch.device
) -> None:
    out = torch.full(weight.shape, torch.nan, dtype=dtype, device=device)
    assert expand(weight, out) is out
    expected = weight.dequantize(torch.float32)
    if weight.order is not None:
        expected = expected[:, weight.order.long()]
    torch.testing.assert_close(out, expected.to(dtype), rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize(("kind", "num_rows"), [("awq", 1), ("gptq", 5), ("gptq", 70)])
def test_layers(num_rows: int, kind: str, device: torch.device, relative_error: Error) -> None:
    """One row, few, and many that are multiplied by the expanded weight."""
    torch.manual_seed(4)
    dtype = torch.float16
    weight = make_weight(kind, 16, device)
    width = weight.shape[1]
    wide = weight.dequantize(torch.float64)
    bias = _random(16, dtype=dtype, device=device)
    x = _random(num_rows, width, dtype=dtype, device=device)
    norm = GpuRMSNorm((torch.rand(width, device=device) + 0.5).to(dtype), 1e-5)
    layer = make_quantized_linear(weight, bias)
    assert isinstance(layer, GroupedLinear)
    assert layer.num_bytes == weight.num_bytes + bias.nbytes
    before = _random(num_rows, 16, dtype=dtype, device=device)
    residual = before.clone()
    layer.add_to(x, residual)
    product = x.double() @ wide.t() + bias.double()
    tolerance = max(ROW[dtype], TILE[dtype])
    assert relative_error(residual, before.double() + product) < tolerance
    normed = reference.rms_norm(x, norm.weight, norm.eps).double() @ wide.t() + bias.double()
    out = torch.full((num_rows, 16), torch.nan, dtype=dtype, device=device)
    assert relative_error(layer.normed(x, norm, x.clone(), out), normed) < tolerance
    gated = make_quantized_gated(weight.rows(slice(8)), weight.rows(slice(8, None)), bias)
    assert isinstance(gated, GroupedGated)
    out = torch.full((num_rows, 8), torch.nan, dtype=dtype, device=device)
    gated.normed(x, norm, x.clone(), out)
    gate, up = normed.chunk(2, 1)
    assert relative_error(out, reference.activation(gate, "silu") * up) < 3 * tolerance


def test_gate_and_up_of_different_formats(device: torch.device, relative_error: Error) -> None:
    torch.manual_seed(5)
    gate, up = make_weight("Q4_K", 24, device), make_weight("Q6_K", 24, device)
    bias = torch.randn(48, device=device)
    layer = make_quantized_gated(gate, up, bias, "gelu_tanh")
    assert isinstance(layer, SeparateGated)
    x, out = torch.randn(3, 256, device=device), torch.empty(3, 24, device=device)
    layer(x, out)
    parts = [x.double() @ w.dequantize(torch.float64).t() for w in (gate, up)]
    activated = reference.activation(parts[0] + bias[:24].double(), "gelu_tanh")
    assert relative_error(out, activated * (parts[1] + bias[24:].double())) < 1e-5


def test_rows_joined_and_taken(device: torch.device) -> None:
    first, second = make_weight("gptq", 24, device), make_weight("gptq", 24, device, seed=0)
    both = first.joined_with([second])
    assert both is not None and both.shape == (48, 384)
    wide = first.dequantize(torch.float32)
    assert torch.equal(both.dequantize(torch.float32), torch.cat((wide, wide)))
    index = torch.tensor([5, 0, 30], device=device)
    expected = torch.stack([wide[5], wide[0], wide[6]])
    assert torch.equal(both.rows(index).dequantize(torch.float32), expected)
    # other groups, other formats
    assert first.joined_with([make_weight("gptq", 24, device, seed=1)]) is None
    assert first.joined_with([make_weight("8 bits", 24, device)]) is None


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    weight = make_weight("awq", 24, device)
    x, out = torch.randn(2, 256, device=device), torch.empty(2, 24, device=device)
    for wrong in (x, x[:1], x.half()):
        with pytest.raises(ValueError, match="takes 1 row of 16-bit numbers"):
            grouped_row_linear(wrong, weight, out[: len(wrong)])
    with pytest.raises(ValueError, match="x must be dense"):
        grouped_linear(x[:, :128], weight, out)
    with pytest.raises(ValueError, match="out must be"):
        grouped_linear(x, weight, out[:1])
    with pytest.raises(TypeError, match="bias must have"):
        grouped_linear(x, weight, out, bias=torch.zeros(24, device=device, dtype=torch.float16))
    with pytest.raises(ValueError, match="out must be contiguous"):
        expand(weight, out)
