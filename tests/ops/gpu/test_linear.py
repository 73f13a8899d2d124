"""Matrix products of few rows against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.ops import reference
from octavo.ops.gpu.linear import SkinnyPlan, is_skinny, skinny_gated, skinny_linear

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
ROW = SkinnyPlan(4, 128, 2)
ROW_EARLY = SkinnyPlan(2, 128, 1, early=1, prefetch_bytes=4096, after_bytes=2048)
TILES = SkinnyPlan(16, 32, 1, num_stages=3, dot=True)
TILES_AHEAD = SkinnyPlan(16, 32, 2, dot=True, early=2, prefetch_bytes=2048)
WIDE = SkinnyPlan(64, 32, 1, num_stages=3, dot=True)
PLANS = [(1, ROW), (1, ROW_EARLY), (1, TILES), (3, TILES_AHEAD), (16, TILES), (3, WIDE)]
Error = Callable[[Tensor, Tensor], float]


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.randn(shape, device=device) / shape[-1] ** 0.5).to(dtype)


@pytest.mark.parametrize(("num_tokens", "plan"), PLANS, ids=str)
@pytest.mark.parametrize("in_features", [96, 80])  # a multiple of the tiles, and not
def test_plain_product(
    num_tokens: int, plan: SkinnyPlan, in_features: int, dtype: torch.dtype, device: torch.device,
    relative_error: Error,
) -> None:  # fmt: skip
    torch.manual_seed(num_tokens)
    x = _random(num_tokens, in_features + 16, dtype=dtype, device=device)[:, :in_features]
    weight = _random(41, in_features, dtype=dtype, device=device)
    for out_dtype in {dtype, torch.float32}:
        whole = torch.full((num_tokens, 48), torch.nan, dtype=out_dtype, device=device)
        out = whole[:, :41]
        skinny_linear(x, weight, out, plan=plan)
        assert relative_error(out, x.double() @ weight.double().t()) < TOLERANCE[dtype]
        assert whole[:, 41:].isnan().all()


@pytest.mark.parametrize(("num_tokens", "plan"), PLANS[:4], ids=str)
def test_norm_bias_and_residual(
    num_tokens: int, plan: SkinnyPlan, dtype: torch.dtype, device: torch.device,
    relative_error: Error,
) -> None:  # fmt: skip
    torch.manual_seed(num_tokens)
    x = _random(num_tokens, 80, dtype=dtype, device=device) * 3
    weight = _random(29, 80, dtype=dtype, device=device)
    bias = _random(29, dtype=dtype, device=device)
    norm = torch.rand(80, device=device).to(dtype) + 0.5
    before = _random(num_tokens, 29, dtype=dtype, device=device)
    out = before.clone()
    skinny_linear(
        x, weight, out, bias=bias, residual=True, norm_weight=norm, eps=1e-5, plan=plan
    )  # fmt: skip
    normed = reference.rms_norm(x, norm, 1e-5).double()
    expected = before.double() + normed @ weight.double().t() + bias.double()
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("num_tokens", "plan"), PLANS[:1] + PLANS[3:], ids=str)
def test_gated(
    num_tokens: int, plan: SkinnyPlan, with_bias: bool, dtype: torch.dtype, device: torch.device,
    relative_error: Error,
) -> None:  # fmt: skip
    torch.manual_seed(num_tokens)
    x = _random(num_tokens, 64, dtype=dtype, device=device) * 3
    weight = _random(2 * 19, 64, dtype=dtype, device=device) * 8
    bias = _random(2 * 19, dtype=dtype, device=device) if with_bias else None
    norm = torch.rand(64, device=device).to(dtype) + 0.5
    out = torch.full((num_tokens, 19), torch.nan, dtype=dtype, device=device)
    skinny_gated(x, weight, out, bias=bias, norm_weight=norm, eps=1e-5, plan=plan)
    both = reference.rms_norm(x, norm, 1e-5).double() @ weight.double().t()
    if bias is not None:
        both += bias.double()
    assert relative_error(out, reference.silu_and_mul(both)) < 2 * TOLERANCE[dtype]


def test_a_row_does_not_depend_on_its_company(device: torch.device) -> None:
    torch.manual_seed(0)
    x = _random(5, 64, dtype=torch.float16, device=device)
    weight = _random(40, 64, dtype=torch.float16, device=device)
    together = skinny_linear(x, weight, x.new_empty(5, 40), plan=TILES)
    alone = skinny_linear(x[3:4], weight, x.new_empty(1, 40), plan=TILES)
    assert torch.equal(together[3:4], alone)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_default_plans(
    num_tokens: int, dtype: torch.dtype, device: torch.device, relative_error: Error
) -> None:
    torch.manual_seed(0)
    x = _random(num_tokens, 576, dtype=dtype, device=device)
    weight = _random(40, 576, dtype=dtype, device=device)
    out = skinny_linear(x, weight, torch.full_like(x[:, :40], torch.nan))
    assert relative_error(out, x.double() @ weight.double().t()) < TOLERANCE[dtype]
    assert is_skinny(1, 4096, 4096, torch.bfloat16)
    assert not is_skinny(64, 4096, 4096, torch.bfloat16)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    x, weight = torch.zeros(1, 64, device=device), torch.zeros(8, 64, device=device)
    with pytest.raises(ValueError, match="out must be"):
        skinny_linear(x, weight, x.new_empty(1, 9))
    with pytest.raises(ValueError, match="weight must be contiguous"):
        skinny_linear(x, weight.t().contiguous().t(), x.new_empty(1, 8))
    with pytest.raises(ValueError, match="bias must be"):
        skinny_linear(x, weight, x.new_empty(1, 8), bias=x[0])
    with pytest.raises(TypeError, match="out that or float32"):
        skinny_linear(x, weight, x.new_empty(1, 8).half())
    with pytest.raises(ValueError, match="at most 64 rows"):
        skinny_linear(x.expand(65, 64), weight, x.new_empty(65, 8))
