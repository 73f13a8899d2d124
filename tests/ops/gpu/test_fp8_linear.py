"""fp8: rows rounded by kernels against arithmetic in float64, and products of codes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.layers.fp8 import E4M3_MAX, Fp8Weight
from octavo.layers.gpu import GpuRMSNorm
from octavo.layers.linear import add_through
from octavo.layers.norm import LayerNorm
from octavo.layers.quantized_gpu import Fp8Linear, make_quantized_gated, make_quantized_linear
from octavo.ops import reference
from octavo.ops.gpu import fp8_linear as module
from octavo.ops.gpu.fp8_linear import fp8_linear, scale_into
from octavo.ops.gpu.quantize import quantize_gated, quantize_rows

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
Error = Callable[[Tensor, Tensor], float]

# Sums of codes on Hopper keep 14 bits; under the interpreter they are exact.
SUMS = 1e-3 if torch.cuda.is_available() else 0.0


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _wide(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes times scales in float64, one a row or one for each 128."""
    width = codes.shape[1]
    return codes.double() * scales.double().repeat_interleave(width // scales.shape[1], 1)


def _nearest(values: Tensor, scales: Tensor) -> Tensor:
    """What torch rounds values / scales to."""
    scaled = (values.float() * (1.0 / scales)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("width", [48, 640])
def test_rows_are_rounded_to_nearest(
    width: int, normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    x = _random(5, width + 16, dtype=dtype, device=device)[:, :width]
    x[3] = 0.0
    x[4] *= 1e-3
    norm = (torch.rand(width, device=device) + 0.5).to(dtype) if normed else None
    codes, scales = quantize_rows(x, norm_weight=norm, eps=1e-5)
    values = x if norm is None else reference.rms_norm(x, norm, 1e-5)
    expected = values.float().abs().amax(1, keepdim=True) / E4M3_MAX
    torch.testing.assert_close(scales[:3], expected[:3], rtol=1e-2 if normed else 1e-6, atol=0)
    assert codes[3].float().abs().max() == 0
    wrong = codes.float() != _nearest(values, scales)
    assert wrong.float().mean() < (0.02 if normed else 0.002)  # ties, and norms summed otherwise


def test_static_scales_saturate(device: torch.device) -> None:
    x = torch.tensor([[1.0, -2.0, 500.0, -1000.0]], device=device)
    scale = torch.full((1,), 0.5, device=device)
    codes, scales = quantize_rows(x, static_scale=scale)
    assert codes.float().tolist() == [[2.0, -4.0, 448.0, -448.0]]
    assert scales.tolist() == [[0.5]]


def test_groups_have_scales_of_their_own(device: torch.device, relative_error: Error) -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 384, device=device)
    x[:, 128:256] *= 1e-4
    codes, scales = quantize_rows(x, groups=True)
    assert scales.shape == (3, 3)
    part = slice(128, 256)
    assert relative_error(_wide(codes, scales)[:, part], x[:, part]) < 0.04
    with pytest.raises(ValueError, match="groups are of 128"):
        quantize_rows(x[:, :200].contiguous(), groups=True)


@pytest.mark.parametrize("width", [100, 5000, 8192, 10000])
@pytest.mark.parametrize("scaled", [False, True])
def test_gated_rows_are_rounded(
    scaled: bool, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Rows of one block or several, the last one full or not."""
    torch.manual_seed(8)
    num_rows = 2
    both = _random(num_rows, 2 * width, dtype=dtype, device=device)
    bias = _random(2 * width, dtype=dtype, device=device)
    of_row = torch.rand(num_rows, 1, device=device) + 0.5
    of_column = torch.rand(2 * width, 1, device=device) + 0.5
    values = both.double()
    if scaled:
        values = values * (4 * of_row.double() * of_column.double().t())
        codes, scales = quantize_gated(
            both, "silu", row_scales=of_row, column_scales=of_column, factor=4.0, bias=bias
        )
    else:
        codes, scales = quantize_gated(both, "silu", bias=bias)
    gate, up = (values + bias.double()).chunk(2, 1)
    expected = reference.activation(gate, "silu") * up
    torch.testing.assert_close(
        scales.double(), expected.abs().amax(1, keepdim=True) / E4M3_MAX, rtol=1e-5, atol=0
    )
    assert (codes.float() != _nearest(expected, scales)).float().mean() < 1e-3  # ties
    with pytest.raises(ValueError, match="activation must be one of silu"):
        quantize_gated(both, "tanh")


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("num_rows", "out_features", "width"), [(1, 40, 128), (19, 72, 384)])
def test_product(
    num_rows: int, out_features: int, width: int, grouped: bool, dtype: torch.dtype,
    device: torch.device, relative_error: Error,
) -> None:  # fmt: skip
    torch.manual_seed(2)
    x = _random(num_rows, width, dtype=dtype, device=device)
    codes, x_scales = quantize_rows(x, groups=grouped)
    weight = _random(out_features, width, dtype=torch.float32, device=device)
    weight = weight.to(torch.float8_e4m3fn)
    scales = torch.rand(out_features, width // 128 if grouped else 1, device=device) + 0.1
    bias = _random(out_features, dtype=dtype, device=device)
    product = _wide(codes, x_scales) @ _wide(weight, scales).t()
    whole = torch.full((num_rows, out_features + 8), torch.nan, dtype=dtype, device=device)
    out = whole[:, :out_features]
    assert fp8_linear(codes, x_scales, weight, scales, out, bias=bias) is out
    assert relative_error(out, product + bias.double()) < TOLERANCE[dtype] + SUMS
    assert whole[:, out_features:].isnan().all()
    before = _random(num_rows, out_features, dtype=dtype, device=device)
    out = before.clone()
    fp8_linear(codes, x_scales, weight, scales, out, residual=True)
    assert relative_error(out, product + before.double()) < TOLERANCE[dtype] + SUMS


def _plain_product(x: Tensor, weight: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() @ weight.float().t() * unit**2).to(dtype)


@pytest.mark.parametrize("activation", ["", "silu", "gelu_tanh"])
def test_scaling_behind_a_product(
    activation: str, dtype: torch.dtype, device: torch.device, relative_error: Error
) -> None:
    torch.manual_seed(3)
    num_rows, width, out_features = 6, 64, 48
    x = torch.randn(num_rows, width, device=device).to(torch.float8_e4m3fn)
    weight = torch.randn(out_features, width, device=device).to(torch.float8_e4m3fn)
    x_scales = torch.rand(num_rows, 1, device=device) + 0.1
    scales = torch.rand(out_features, 1, device=device) + 0.1
    bias = _random(out_features, dtype=dtype, device=device)
    raw = _plain_product(x, weight, module.unit_scale(device), dtype)
    expected = _wide(x, x_scales) @ _wide(weight, scales).t() + bias.double()
    before = _random(num_rows, out_features, dtype=dtype, device=device)
    if activation:
        gate, up = expected.chunk(2, 1)
        expected, before = reference.activation(gate, activation) * up, before[:, :24]
    else:
        expected = expected + before.double()
    out = before.clone()
    scale_into(
        raw, x_scales, scales, out, bias=bias, residual=not activation, activation=activation
    )
    assert relative_error(out, expected) < 4 * TOLERANCE[dtype]


def _expected(layer: Fp8Linear, rows: Tensor) -> Tensor:
    """rows, rounded as the layer rounds them, times its weight and bias."""
    weight = layer.weight
    codes, scales = quantize_rows(
        rows, static_scale=weight.input_scale, groups=weight.scales.shape[1] > 1
    )
    product = _wide(codes, scales) @ weight.dequantize(torch.float64).t()
    return product if layer.bias is None else product + layer.bias.double()


@pytest.mark.parametrize(
    ("num_rows", "kind", "by_cublas"),
    [
        (1, "dynamic", False), (20, "dynamic", True), (1, "static", True), (20, "static", False),
        (20, "blocks", False),
    ],
)  # fmt: skip
def test_layers(
    num_rows: int, kind: str, by_cublas: bool, dtype: torch.dtype, device: torch.device,
    relative_error: Error, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where rows are few, many, static, in blocks; with the norm before and the residual behind."""
    torch.manual_seed(4)
    if by_cublas and device.type == "cpu":
        monkeypatch.setattr(module, "cublas_product", _plain_product)
    monkeypatch.setattr(
        module, "is_cublas_product", lambda *args: by_cublas and kind != "blocks"
    )  # fmt: skip
    width, size = 256, 64
    values = torch.randn(2 * size, width, device=device) / 16
    weight = Fp8Weight.quantized(values)
    if kind == "static":
        static = torch.full((1,), 0.02, device=device)
        weight = Fp8Weight(weight.codes, weight.scales, weight.shape, static)
    elif kind == "blocks":
        weight = Fp8Weight.of(weight.codes, torch.rand(1, 2, device=device) / 100)
    bias = _random(2 * size, dtype=dtype, device=device)
    x = _random(num_rows, width, dtype=dtype, device=device)
    norm = GpuRMSNorm((torch.rand(width, device=device) + 0.5).to(dtype), 1e-5)
    layer = make_quantized_linear(weight, bias)
    assert isinstance(layer, Fp8Linear)
    tolerance = 4 * TOLERANCE[dtype] + SUMS
    out = torch.full((num_rows, 2 * size), torch.nan, dtype=dtype, device=device)
    assert relative_error(layer(x, out), _expected(layer, x)) < tolerance
    # The norm is summed in another order than torch's: a code in a hundred is another.
    rows = reference.rms_norm(x, norm.weight, norm.eps)
    expected = _expected(layer, rows)
    assert relative_error(layer.normed(x, norm, x.clone(), out), expected) < max(tolerance, 1e-2)
    before = _random(num_rows, 2 * size, dtype=dtype, device=device)
    residual = before.clone()
    layer.add_to(x, residual)
    assert relative_error(residual, _expected(layer, x) + before.double()) < tolerance
    gated = make_quantized_gated(weight.rows(slice(size)), weight.rows(slice(size, None)), bias)
    gate, up = expected.chunk(2, 1)
    out = torch.full((num_rows, size), torch.nan, dtype=dtype, device=device)
    gated.normed(x, norm, x.clone(), out)
    assert relative_error(out, reference.activation(gate, "silu") * up) < max(3 * tolerance, 2e-2)


@pytest.mark.parametrize("num_rows", [3, 20])
def test_up_and_down_in_one(
    num_rows: int, device: torch.device, relative_error: Error, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is between is rounded to fp8 where it is made: as one layer after the other, but for
    numbers so near the middle of two codes that rounding them to float16 first moves them."""
    if device.type == "cpu":
        monkeypatch.setattr(module, "cublas_product", _plain_product)
        monkeypatch.setattr(module, "is_cublas_product", lambda num_rows, *args: num_rows > 16)
    torch.manual_seed(6)
    gate, up, down = (
        torch.randn(size, device=device) / 8 for size in ((96, 64), (96, 64), (64, 96))
    )
    biases = torch.randn(192, device=device).half(), torch.randn(64, device=device).half()
    first = make_quantized_gated(gate, up, biases[0], "gelu_tanh", "fp8")
    second = make_quantized_linear(down, biases[1], "fp8")
    norm = GpuRMSNorm((torch.rand(64, device=device) + 0.5).half(), 1e-5)
    x = torch.randn(num_rows, 64, device=device).half()
    expected, together = x.clone(), x.clone()
    inner = torch.empty(num_rows, 96, device=device, dtype=torch.float16)
    second.add_to(first.normed(expected, norm, x.clone(), inner), expected)
    done = add_through(first, second, together, norm, x.clone())
    assert done == (num_rows > 16)
    if done:
        assert relative_error(together, expected) < 1e-2
    else:
        assert torch.equal(together, x)
    plain = make_quantized_linear(down.half(), biases[1])
    assert not add_through(first, plain, together, norm, x.clone())


def test_layer_norms_run_before_rounding(device: torch.device, relative_error: Error) -> None:
    torch.manual_seed(5)
    weight = torch.randn(32, 64, device=device)
    layer = make_quantized_linear(weight, None, "fp8")
    norm = LayerNorm(torch.rand(64, device=device), torch.rand(64, device=device), 1e-5)
    x, out = torch.randn(3, 64, device=device), torch.empty(3, 32, device=device)
    layer.normed(x, norm, torch.empty_like(x), out)
    expected = norm(x, torch.empty_like(x)).double() @ weight.double().t()
    assert 1e-4 < relative_error(out, expected) < 0.08


def test_wrong_arguments_are_refused(device: torch.device) -> None:
    codes, scales = quantize_rows(torch.randn(2, 64, device=device))
    out = torch.empty(2, 2, device=device)
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        fp8_linear(codes, scales, torch.randn(2, 64, device=device), scales, out)
    with pytest.raises(ValueError, match="scales must be dense"):
        fp8_linear(codes, scales, codes, scales[:1], out)
    with pytest.raises(ValueError, match="out must be"):
        fp8_linear(codes, scales, codes, scales, out[:1])
    with pytest.raises(ValueError, match="as many features"):
        fp8_linear(codes, scales, codes[:, :32], scales, out)
    with pytest.raises(ValueError, match="norm_weight"):
        quantize_rows(torch.randn(2, 64, device=device), norm_weight=torch.ones(3, device=device))
