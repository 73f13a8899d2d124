"""Norms and the embedding against the dense reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.ops import reference
from octavo.ops.gpu.embedding import embed
from octavo.ops.gpu.norm import fused_add_rms_norm, layer_norm, rms_norm

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}
Error = Callable[[Tensor, Tensor], float]


def _rows(
    num_rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """x (its rows apart), weight, and an out full of NaN."""
    torch.manual_seed(width)
    x = torch.randn(num_rows, width + 16, device=device).to(dtype)[:, :width]
    weight = torch.rand(width, device=device).to(dtype) + 0.5
    return x, weight, torch.full((num_rows, width), torch.nan, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 576), (3, 96), (2, 1000)])
def test_rms_norm(
    num_rows: int, width: int, dtype: torch.dtype, device: torch.device, relative_error: Error
) -> None:
    x, weight, out = _rows(num_rows, width, dtype, device)
    assert rms_norm(x, weight, 1e-5, out) is out
    expected = reference.rms_norm(x, weight, 1e-5)
    assert relative_error(out, expected) < TOLERANCE[dtype]
    rms_norm(x, weight, 1e-5, x)
    assert torch.equal(x, out)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 576), (3, 96)])
def test_fused_add_rms_norm(
    num_rows: int, width: int, dtype: torch.dtype, device: torch.device, relative_error: Error
) -> None:
    x, weight, out = _rows(num_rows, width, dtype, device)
    residual = torch.randn(num_rows, width, device=device).to(dtype)
    expected_residual = residual.clone()
    expected = reference.fused_add_rms_norm(x, expected_residual, weight, 1e-5)
    fused_add_rms_norm(x, residual, weight, 1e-5, out)
    assert torch.equal(residual, expected_residual)
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("num_rows", "width"), [(1, 576), (3, 96)])
def test_a_float32_weight_is_multiplied_without_rounding_before(
    num_rows: int, width: int, device: torch.device
) -> None:
    x, _, out = _rows(num_rows, width, torch.float16, device)
    weight = torch.randn(width, device=device)
    rms_norm(x, weight, 1e-5, out)
    wide = x.double()
    exact = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + 1e-5) * weight
    # Rounded twice, a third of them would be another number.
    assert (out != exact.half()).sum() <= 0.01 * out.numel()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 768), (3, 100)])
def test_layer_norm(
    num_rows: int,
    width: int,
    biased: bool,
    dtype: torch.dtype,
    device: torch.device,
    relative_error: Error,
) -> None:
    x, weight, out = _rows(num_rows, width, dtype, device)
    x += 3.0  # a mean to take off
    bias = torch.randn(width, device=device).to(dtype) if biased else None
    assert layer_norm(x, weight, bias, 1e-5, out) is out
    assert relative_error(out, reference.layer_norm(x, weight, bias, 1e-5)) < 3 * TOLERANCE[dtype]
    layer_norm(x, weight, bias, 1e-5, x)
    assert torch.equal(x, out)


def test_norm_refuses_what_does_not_fit(device: torch.device) -> None:
    x, weight, out = _rows(2, 32, torch.float32, device)
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm(x, weight[:16], 1e-5, out)
    with pytest.raises(TypeError, match="out must have x's type"):
        rms_norm(x, weight, 1e-5, out.half())
    with pytest.raises(ValueError, match="residual must be"):
        fused_add_rms_norm(x, out[:1], weight, 1e-5, out)
    with pytest.raises(ValueError, match="bias must be"):
        layer_norm(x, weight, weight[:16], 1e-5, out)
    with pytest.raises(TypeError, match="bias must have x's type"):
        layer_norm(x, weight, weight.half(), 1e-5, out)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_embedding_copies_rows_and_survives_ids_outside(
    ids_dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    table = torch.randn(11, 1040, device=device).half()
    ids = torch.tensor([3, 10, 0, -5, 2_000_000_000], dtype=ids_dtype, device=device)
    out = torch.full((5, 1050), torch.nan, dtype=torch.float16, device=device)
    embed(table, ids, out[:, :1040])
    assert torch.equal(out[:, :1040], table[ids.long().clamp(0, 10)])
    assert out[:, 1040:].isnan().all()
    with pytest.raises(TypeError, match="table's type"):
        embed(table, ids, out[:, :1040].float())
    with pytest.raises(ValueError, match="out must be"):
        embed(table, ids[:4], out[:, :1040])
