"""Norms, activation, rotary embedding and cache writes against the float64 reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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
    gap=st.integers(0, 3), with_out=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_rms_norm(
    isa: str, tokens: int, width: int, dtype: torch.dtype, gap: int, with_out: bool, seed: int
) -> None:
    use_isa(isa)
    x = rows(tokens, width, dtype, seed, gap)
    weight = rows(1, width, dtype, seed + 1, 0)[0]
    out = torch.full((tokens, width + gap), math.nan, dtype=dtype)[:, :width]
    result = elementwise.rms_norm(x, weight, EPS, out if with_out else None)
    assert (result is out) == with_out
    assert_close(result, reference.rms_norm(x, weight, EPS))


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


def rope_arguments(
    tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, block_size: int,
    dtype: torch.dtype, seed: int, normed: bool,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of rope_and_cache: query, key and value are views of one projection's output."""
    rng = torch.Generator().manual_seed(seed)
    num_blocks = tokens + 2
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=rng).to(dtype)
    query, key, value = (
        part.view(tokens, -1, head_dim)
        for part in torch.split(qkv, [n * head_dim for n in (heads, kv_heads, kv_heads)], dim=1)
    )
    slots = torch.randperm(num_blocks * block_size - 1, generator=rng)[:tokens]
    slots[0] = num_blocks * block_size - 1  # the far end of the pool
    slots[1:2] = -1
    weights = torch.rand(2, head_dim, generator=rng).to(dtype) + 0.5
    return {
        "query": query, "key": key, "value": value,
        "positions": torch.randint(0, 50, (tokens,), generator=rng),
        "cos_sin": torch.randn(50, rotary_dim, generator=rng),
        "slot_mapping": slots,
        "kv_cache": torch.zeros(num_blocks, 2, 2, kv_heads, block_size, head_dim, dtype=dtype),
        "layer": 1,
        "q_norm_weight": weights[0] if normed else None,
        "k_norm_weight": weights[1] if normed else None,
        "eps": EPS,
    }  # fmt: skip


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


@each_isa
@examples
@given(
    tokens=st.integers(1, 6), heads=st.integers(1, 5), kv_heads=st.integers(1, 3),
    dims=st.sampled_from([(16, 16), (64, 64), (80, 32), (128, 128), (20, 10), (6, 2)]),
    block_size=st.sampled_from([1, 3, 16]), dtype=st.sampled_from(DTYPES),
    normed=st.booleans(), narrow=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_rope_and_cache(
    isa: str, tokens: int, heads: int, kv_heads: int, dims: tuple[int, int], block_size: int,
    dtype: torch.dtype, normed: bool, narrow: bool, seed: int,
) -> None:  # fmt: skip
    use_isa(isa)
    arguments = rope_arguments(tokens, heads, kv_heads, *dims, block_size, dtype, seed, normed)
    if narrow:
        arguments["positions"] = arguments["positions"].int()
    expected = copied(arguments)
    reference.rope_and_cache(**expected)
    elementwise.rope_and_cache(**arguments)
    for name in ("query", "key", "value", "kv_cache"):
        actual, wanted = arguments[name], expected[name]
        assert (actual.double() - wanted.double()).abs().max() <= (
            4e-6 if dtype == torch.float32 else 0.05
        )
        assert torch.equal(actual == 0, wanted == 0) or dtype == torch.bfloat16


def test_bf16_rope_differs_from_the_reference_by_rounding_only() -> None:
    arguments = rope_arguments(6, 4, 2, 64, 64, 16, torch.bfloat16, 0, normed=False)
    query, cos_sin = arguments["query"], arguments["cos_sin"]
    expected = reference.rope(query, arguments["positions"], cos_sin)
    elementwise.rope_and_cache(**arguments)
    assert (query == expected).float().mean() > 0.99


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
    "odd width": (lambda: elementwise.silu_and_mul(X[:, :7]), ValueError, "even"),
    "silu's out": (lambda: elementwise.silu_and_mul(X, X), ValueError, "out"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name: str) -> None:
    call, error, message = MISUSES[name]
    with pytest.raises(error, match=message):
        call()


ROPE_MISUSES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "query": (lambda x: x.double(), TypeError, "query must have"),
    "key": (lambda x: x[:, :1], ValueError, "key must be"),
    "value": (lambda x: x.mT.contiguous().mT, ValueError, "value must be"),
    "positions": (lambda x: x.float(), TypeError, "positions must be"),
    "cos_sin": (lambda x: x[:, :15].contiguous(), ValueError, "cos_sin must be"),
    "slot_mapping": (lambda x: x[:2], ValueError, "slot_mapping must be"),
    "kv_cache": (lambda x: x.half(), TypeError, "kv_cache must be"),
    "layer": (lambda _: 2, ValueError, "layer must be"),
    "q_norm_weight": (lambda x: x[:3], ValueError, "q_norm_weight must be"),
}


@pytest.mark.parametrize("name", ROPE_MISUSES)
def test_rope_misuse(name: str) -> None:
    change, error, message = ROPE_MISUSES[name]
    arguments = rope_arguments(3, 4, 2, 16, 16, 4, torch.float32, 0, normed=True)
    arguments[name] = change(arguments[name])
    with pytest.raises(error, match=message):
        elementwise.rope_and_cache(**arguments)


@pytest.mark.skipif(ISAS == ("none",), reason="checked by the library")
@pytest.mark.parametrize(
    "name, value", [("positions", 50), ("positions", -1), ("slot_mapping", 20)]
)
def test_out_of_range_positions_and_slots_write_nothing(name: str, value: int) -> None:
    arguments = rope_arguments(3, 4, 2, 16, 16, 4, torch.float32, 0, normed=True)
    arguments[name][2] = value
    before = copied(arguments)
    with pytest.raises(ValueError, match=rf"{name}\[2\]"):
        elementwise.rope_and_cache(**arguments)
    for key in ("query", "key", "kv_cache"):
        assert torch.equal(arguments[key], before[key])
