"""Matrix products of one row against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.ops import reference
from octavo.ops.gpu import pdl
from octavo.ops.gpu import row_linear as module
from octavo.ops.gpu.row_linear import is_row_product, row_gated, row_linear

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
Error = Callable[[Tensor, Tensor], float]


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.randn(shape, device=device) / shape[-1] ** 0.5).to(dtype)


@pytest.fixture(params=["a program each", "few programs"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program for each pair of features, as of small weights, or 16 that own several pairs."""
    if request.param == "few programs":
        monkeypatch.setattr(module, "_MANY_WEIGHTS", 0)
        monkeypatch.setattr(pdl, "num_sms", lambda device: 1)


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 40), (80, 41), (4096, 13)])
def test_plain_product(
    in_features: int, out_features: int, dtype: torch.dtype, device: torch.device,
    relative_error: Error,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    x = _random(1, in_features + 16, dtype=dtype, device=device)[:, :in_features]
    weight = _random(out_features, in_features, dtype=dtype, device=device)
    for out_dtype in {dtype, torch.float32}:
        whole = torch.full((1, out_features + 7), torch.nan, dtype=out_dtype, device=device)
        out = whole[:, :out_features]
        assert row_linear(x, weight, out) is out
        assert relative_error(out, x.double() @ weight.double().t()) < TOLERANCE[dtype]
        assert whole[:, out_features:].isnan().all()


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize(("in_features", "out_features"), [(80, 41), (4096, 13)])
def test_norm_bias_and_residual(
    in_features: int, out_features: int, dtype: torch.dtype, device: torch.device,
    relative_error: Error,
) -> None:  # fmt: skip
    torch.manual_seed(1)
    x = _random(1, in_features, dtype=dtype, device=device) * 3
    weight = _random(out_features, in_features, dtype=dtype, device=device)
    bias = _random(out_features, dtype=dtype, device=device)
    norm = torch.rand(in_features, device=device).to(dtype) + 0.5
    before = _random(1, out_features, dtype=dtype, device=device)
    out = before.clone()
    row_linear(x, weight, out, bias=bias, residual=True, norm_weight=norm, eps=1e-5)
    normed = reference.rms_norm(x, norm, 1e-5).double()
    expected = before.double() + normed @ weight.double().t() + bias.double()
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 37), (80, 1)])
def test_gated(
    in_features: int, out_features: int, with_bias: bool, dtype: torch.dtype,
    device: torch.device, relative_error: Error,
) -> None:  # fmt: skip
    torch.manual_seed(2)
    x = _random(1, in_features, dtype=dtype, device=device) * 3
    weight = _random(2 * out_features, in_features, dtype=dtype, device=device) * 3
    bias = _random(2 * out_features, dtype=dtype, device=device) * 3 if with_bias else None
    norm = torch.rand(in_features, device=device).to(dtype) + 0.5
    out = torch.full((1, out_features), torch.nan, dtype=dtype, device=device)
    row_gated(x, weight, out, bias=bias, norm_weight=norm, eps=1e-5)
    both = reference.rms_norm(x, norm, 1e-5).double() @ weight.double().t()
    if bias is not None:
        both += bias.double()
    assert relative_error(out, reference.silu_and_mul(both)) < 2 * TOLERANCE[dtype]


def test_where_it_is_the_faster_one() -> None:
    assert is_row_product(1, 16384, torch.bfloat16)
    assert not is_row_product(0, 4096, torch.bfloat16)
    assert not is_row_product(2, 4096, torch.bfloat16)
    assert not is_row_product(1, 4096, torch.float32)
    assert not is_row_product(1, 16385, torch.bfloat16)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    x, weight = torch.zeros(1, 64, device=device), torch.zeros(8, 64, device=device)
    with pytest.raises(ValueError, match="out must be"):
        row_linear(x, weight, x.new_empty(1, 9))
    with pytest.raises(ValueError, match="out must be"):
        row_gated(x, weight, x.new_empty(1, 8))
    with pytest.raises(ValueError, match="weight must be contiguous"):
        row_linear(x, weight.t().contiguous().t(), x.new_empty(1, 8))
    with pytest.raises(ValueError, match="bias must be"):
        row_linear(x, weight, x.new_empty(1, 8), bias=x[0])
    with pytest.raises(ValueError, match="rows of x and out must be dense"):
        row_linear(x, weight, x.new_empty(1, 16)[:, ::2])
    with pytest.raises(TypeError, match="norm_weight must have"):
        row_linear(x, weight, x.new_empty(1, 8), norm_weight=x[0].half())
    with pytest.raises(TypeError, match="out that or float32"):
        row_linear(x, weight, x.new_empty(1, 8).half())
    with pytest.raises(ValueError, match="exactly 1 row"):
        row_linear(x.expand(2, 64), weight, x.new_empty(2, 8))
    with pytest.raises(ValueError, match="at most 16384 input features"):
        row_linear(x.new_empty(1, 16385), x.new_empty(8, 16385), x.new_empty(1, 8))
