"""Norms and activation against the float64 reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops import reference
from octavo.ops.cpu import elementwise, native

ISAS = native.ISA_LEVELS if native.load() is not None else ("none",)
DTYPES = (torch.float32, torch.bfloat16)
WIDTHS = st.sampled_from([1, 2, 15, 16, 17, 33, 64, 100, 576])
EPS = 1e-5
each_isa = pytest.mark.parametrize("isa", ISAS)
examples = settings(max_examples=30, deadline=None, derandomize=True)


pytestmark = pytest.mark.usefixtures("best_isa_afterwards", "one_torch_thread")


def use_isa(name: str) -> None:
    if name != "none" and native.set_isa(name) != name:
        pytest.skip(f"this machine has no {name}")


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within float32 arithmetic's error, or in bf16 one step of rounding the other way."""
    relative = 2**-7 if actual.dtype == torch.bfloat16 else 4e-6
    error = (actual.double() - expected.double()).abs()
    assert (error <= relative * expected.double().abs() + 2e-6).all(), error.max()


def rows(tokens: int, width: int, dtype: torch.dtype, seed: int, gap: int) -> torch.Tensor:
    """[tokens, width] whose rows lie `gap` elements further apart than they need."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, width + gap, generator=rng).to(dtype)[:, :width]


@each_isa
@examples
@given(
    tokens=st.integers(0, 5), width=WIDTHS, dtype=st.sampled_from(DTYPES),
    gap=st.integers(0, 3), with_out=st.booleans(), wide=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_rms_norm(
    isa: str, tokens: int, width: int, dtype: torch.dtype, gap: int, with_out: bool, wide: bool,
    seed: int,
) -> None:  # fmt: skip
    use_isa(isa)
    x = rows(tokens, width, dtype, seed, gap)
    weight = rows(1, width, torch.float32 if wide else dtype, seed + 1, 0)[0]
    out = torch.full((tokens, width + gap), math.nan, dtype=dtype)[:, :width]
    result = elementwise.rms_norm(x, weight, EPS, out if with_out else None)
    assert (result is out) == with_out
    assert_close(result, reference.rms_norm(x, weight, EPS))


@each_isa
@examples
@given(
    tokens=st.integers(0, 5), width=WIDTHS, dtype=st.sampled_from(DTYPES),
    gap=st.integers(0, 3), scale=st.sampled_from([1.0, 0.22]), seed=st.integers(0, 99),
)  # fmt: skip
def test_add_scaled_and_scale_rows(
    isa: str, tokens: int, width: int, dtype: torch.dtype, gap: int, scale: float, seed: int
) -> None:
    use_isa(isa)
    x, y = rows(tokens, width, dtype, seed, gap), rows(tokens, width, dtype, seed + 1, gap)
    whole = torch.full((tokens, width + gap), math.nan, dtype=dtype)
    out = whole[:, :width]
    out.copy_(x)
    assert elementwise.add_scaled(out, y, scale) is out
    exact = x.double() + y.double() * scale
    assert_close(out, exact.to(dtype))
    out.copy_(x)
    assert elementwise.scale_rows(out, scale) is out
    assert_close(out, (x.double() * scale).to(dtype))
    assert whole[:, width:].isnan().all()


@each_isa
def test_a_float32_weight_is_multiplied_without_rounding_before(isa: str) -> None:
    use_isa(isa)
    x, weight = rows(1, 333, torch.bfloat16, 0, 0), rows(1, 333, torch.float32, 1, 0)[0]
    exact = x.double() / x.double().square().mean().sqrt() * weight.double()
    result = elementwise.rms_norm(x, weight, 0.0)
    # Rounded twice, a third of them would be another number.
    assert (result != exact.bfloat16()).sum() <= 1


@each_isa
@examples
@given(
    tokens=st.integers(1, 5), width=WIDTHS, dtype=st.sampled_from(DTYPES),
    gap=st.integers(0, 3), in_place=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_fused_add_rms_norm(
    isa: str, tokens: int, width: int, dtype: torch.dtype, gap: int, in_place: bool, seed: int
) -> None:
    use_isa(isa)
    x, residual = rows(tokens, width, dtype, seed, gap), rows(tokens, width, dtype, seed + 1, gap)
    weight = rows(1, width, dtype, seed + 2, 0)[0]
    expected_residual = residual.clone()
    expected = reference.fused_add_rms_norm(x, expected_residual, weight, EPS)
    result = elementwise.fused_add_rms_norm(x, residual, weight, EPS, x if in_place else None)
    assert torch.equal(residual, expected_residual)
    assert_close(result, expected)


@each_isa
@examples
@given(
    tokens=st.integers(0, 5), width=WIDTHS, dtype=st.sampled_from(DTYPES),
    gap=st.integers(0, 3), scale=st.sampled_from([1.0, 20.0, 1000.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_silu_and_mul(
    isa: str, tokens: int, width: int, dtype: torch.dtype, gap: int, scale: float, seed: int
) -> None:
    use_isa(isa)
    gate_up = rows(tokens, 2 * width, dtype, seed, gap)
    gate_up[:, :width] *= scale
    assert_close(elementwise.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_threads_give_the_same_bits(dtype: torch.dtype) -> None:
    x = rows(300, 1024, dtype, 0, 0)
    weight = rows(1, 1024, dtype, 1, 0)[0]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append((elementwise.rms_norm(x, weight, EPS), elementwise.silu_and_mul(x)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_silu_of_extremes() -> None:
    gate = torch.tensor([[-math.inf, -1e30, -200.0, 0.0, 200.0, 1e30]])
    result = elementwise.silu_and_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert torch.allclose(result[0], torch.tensor([0, 0, 0, 0, 200.0, 1e30]), atol=1e-35)
    assert elementwise.silu_and_mul(torch.full((1, 40), math.nan)).isnan().all()


def test_bf16_keeps_nan() -> None:
    x = torch.full((1, 40), math.nan, dtype=torch.bfloat16)
    assert elementwise.rms_norm(x, x[0], EPS).isnan().all()


ONES, X = torch.ones(8), torch.ones(2, 8)
MISUSES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "float16": (lambda: elementwise.rms_norm(X.half(), ONES, EPS), TypeError, "bfloat16"),
    "weight's type": (lambda: elementwise.rms_norm(X, ONES.double(), EPS), TypeError, "weight"),
    "weight's size": (lambda: elementwise.rms_norm(X, ONES[:7], EPS), ValueError, "weight"),
    "out's shape": (lambda: elementwise.rms_norm(X, ONES, EPS, X[:1]), ValueError, "out"),
    "strided x": (lambda: elementwise.rms_norm(X[:, ::2], ONES[:4], EPS), ValueError, "dense"),
    "residual": (
        lambda: elementwise.fused_add_rms_norm(X, X[:1], ONES, EPS), ValueError, "residual"
    ),
    "y": (lambda: elementwise.add_scaled(X, X[:1]), ValueError, "y must be"),
    "y's type": (lambda: elementwise.add_scaled(X, X.bfloat16()), TypeError, "y must have"),
    "odd width": (lambda: elementwise.silu_and_mul(X[:, :7]), ValueError, "even"),
    "silu's out": (lambda: elementwise.silu_and_mul(X, X), ValueError, "out"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name: str) -> None:
    call, error, message = MISUSES[name]
    with pytest.raises(error, match=message):
        call()
