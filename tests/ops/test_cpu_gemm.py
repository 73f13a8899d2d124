"""The packed bf16 linear layer against float64 products, on every instruction set there is here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.ops import reference
from octavo.ops.cpu import gemm, native

BF16 = torch.bfloat16
LEVELS = [level for level in ("avx512_bf16", "amx") if gemm.is_available()]
needs_kernel = pytest.mark.skipif(not LEVELS, reason="needs AVX512_BF16 and the C library")
fuzz = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each level in turn; the library goes back to the one it had."""
    before = native.isa()
    if native.set_isa(request.param) != request.param:
        native.set_isa(before)
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    native.set_isa(before)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(BF16)


def strided(t: Tensor, gap: int) -> Tensor:
    """t with `gap` NaNs between its rows, and rows at any alignment."""
    wide = torch.full((t.shape[0], t.shape[1] + gap), float("nan"), dtype=t.dtype)
    wide[:, : t.shape[1]] = t
    return wide[:, : t.shape[1]]


def assert_sums(actual: Tensor, x: Tensor, weight: Tensor, extra: Tensor | float = 0.0) -> None:
    """actual = x weight^T + extra, to float32 sums and one rounding to actual's dtype."""
    exact = x.double() @ weight.double().T + extra
    magnitude = x.double().abs() @ weight.double().abs().T
    tolerance = magnitude * 2e-6 + 1e-6
    if actual.dtype is BF16:
        tolerance = tolerance + exact.abs() * 2**-8
    error = (actual.double() - exact).abs()
    assert not torch.isnan(error).any()
    assert (error <= tolerance).all(), f"off by {(error - tolerance).max():.3g}"


shapes = st.tuples(
    st.one_of(st.integers(1, 70), st.sampled_from([96, 129, 700])),
    st.one_of(st.integers(1, 100), st.sampled_from([160, 192])),
    st.one_of(st.integers(1, 80), st.sampled_from([96, 144, 288])).map(lambda pairs: pairs * 2),
)


@needs_kernel
@fuzz
@given(
    shape=shapes,
    gap=st.integers(0, 9),
    out_dtype=st.sampled_from([BF16, torch.float32]),
    residual=st.sampled_from(["none", "bf16", "float32", "in place"]),
    bias=st.booleans(),
    threads=st.sampled_from([1, 1, 2, 3]),
    seed=st.integers(0, 2**30),
)
def test_linear_is_the_product(
    level: str,
    shape: tuple[int, int, int],
    gap: int,
    out_dtype: torch.dtype,
    residual: str,
    bias: bool,
    threads: int,
    seed: int,
) -> None:
    m, n, k = shape
    g = torch.Generator().manual_seed(seed)
    x, weight = normal(g, m, k), normal(g, n, k)
    b = torch.randn(n, generator=g) if bias else None
    out = strided(torch.full((m, n), float("nan"), dtype=out_dtype), gap)
    added, extra = None, torch.zeros(m, n, dtype=torch.float64)
    if residual != "none":
        dtype = {"bf16": BF16, "float32": torch.float32}.get(residual, out_dtype)
        added = torch.randn(m, n, generator=g).to(dtype)
        extra += added
        if residual == "in place":
            added = out.copy_(added)
    if b is not None:
        extra += b
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = gemm.linear(strided(x, gap), gemm.pack(weight, b), out, added)
    finally:
        torch.set_num_threads(before)
    assert result is out
    assert_sums(out, x, weight, extra)
    if gap and m > 1:
        beyond = out.as_strided((m - 1, gap), out.stride(), out.storage_offset() + n)
        assert torch.isnan(beyond).all(), "wrote between the rows"


@needs_kernel
@fuzz
@given(
    shape=shapes,
    bias=st.booleans(),
    activation=st.sampled_from(gemm.GATED),
    seed=st.integers(0, 2**30),
)
def test_gate_up_fuses_activation_and_product(
    level: str, shape: tuple[int, int, int], bias: bool, activation: str, seed: int
) -> None:
    m, n, k = shape
    g = torch.Generator().manual_seed(seed)
    x, gate, up = normal(g, m, k), normal(g, n, k), normal(g, n, k)
    b = torch.randn(2 * n, generator=g) if bias else None
    out = torch.full((m, n), float("nan"), dtype=BF16)
    gemm.linear_gated(x, gemm.pack_gate_up(gate, up, b, activation), out)
    both = x.double() @ torch.cat((gate, up)).double().T
    if b is not None:
        both += b
    a, c = both.split(n, dim=1)
    exact = reference.activation(a, activation) * c
    atol = 1e-4 * k**0.5 * (1 + k**0.5 / 4)
    torch.testing.assert_close(out.double(), exact, rtol=5e-3, atol=atol)


@needs_kernel
@pytest.mark.parametrize("k", [576, 1536, 62])
def test_rows_do_not_depend_on_the_batch(level: str, k: int) -> None:
    g = torch.Generator().manual_seed(k)
    x, weight, residual = normal(g, 1100, k), normal(g, 200, k), normal(g, 1100, 200)
    packed = gemm.pack(weight)
    full = gemm.linear(x, packed, residual=residual)
    gated = gemm.pack_gate_up(weight[:100], weight[100:])
    full_gated = gemm.linear_gated(x, gated)
    for m in (1, 2, 4, 7, 8, 12, 13, 16, 17, 32, 33, 49, 64, 65, 97, 200, 513):
        first = (37 * m) % (1100 - m)
        rows = slice(first, first + m)
        out = residual[rows].clone()
        assert torch.equal(gemm.linear(x[rows], packed, out, out), full[rows])
        assert torch.equal(gemm.linear_gated(x[rows], gated), full_gated[rows])


@needs_kernel
def test_bits_do_not_depend_on_the_threads(level: str) -> None:
    g = torch.Generator().manual_seed(0)
    x, packed = normal(g, 130, 90), gemm.pack(normal(g, 70, 90))
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3, 4, 12):
        torch.set_num_threads(threads)
        results.append(gemm.linear(x, packed))
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], r) for r in results)


@needs_kernel
def test_nan_and_infinity_stay_in_their_row(level: str) -> None:
    g = torch.Generator().manual_seed(0)
    x, weight = normal(g, 40, 50), normal(g, 33, 50)
    clean = gemm.linear(x, gemm.pack(weight))
    x[7, 3], x[20, 49] = float("nan"), float("inf")
    dirty = gemm.linear(x, gemm.pack(weight))
    assert torch.isnan(dirty[7]).all()
    assert not torch.isfinite(dirty[20]).any()
    others = [i for i in range(40) if i not in (7, 20)]
    assert torch.equal(dirty[others], clean[others])


@needs_kernel
def test_silu_of_extreme_gates(level: str) -> None:
    gates = torch.tensor([-3e38, -1000.0, -90.0, -1.0, 0.0, 1.0, 90.0, 1000.0, 3e38, float("nan")])
    gate = gates.to(BF16).unsqueeze(1) * torch.tensor([[1.0, 0.0]], dtype=BF16)
    up = torch.ones_like(gate)
    result = gemm.linear_gated(torch.ones(1, 2, dtype=BF16), gemm.pack_gate_up(gate, up))[0]
    exact = torch.nn.functional.silu(gate[:, 0].double()) * 2
    torch.testing.assert_close(result[:8].double(), exact[:8], rtol=1e-2, atol=1e-30)
    assert result[8] == float("inf") or result[8] > 3e38
    assert torch.isnan(result[9])


@needs_kernel
def test_no_rows_is_no_work(level: str) -> None:
    packed = gemm.pack(torch.ones(40, 64, dtype=BF16))
    assert gemm.linear(torch.empty(0, 64, dtype=BF16), packed).shape == (0, 40)


@needs_kernel
def test_levels_agree_to_float32_rounding() -> None:
    g = torch.Generator().manual_seed(0)
    x, weight = normal(g, 50, 576), normal(g, 96, 576)
    packed, results, before = gemm.pack(weight), [], native.isa()
    for level in LEVELS:
        native.set_isa(level)
        results.append(gemm.linear(x, packed, out_dtype=torch.float32))
    native.set_isa(before)
    assert (results[0] - results[-1]).abs().max() < 1e-4


@pytest.mark.skipif(native.load() is None, reason="needs the C library")
def test_below_avx512_bf16_it_says_so() -> None:
    packed, before = gemm.pack(torch.ones(8, 8, dtype=BF16)), native.isa()
    native.set_isa("avx2")
    try:
        assert not gemm.is_available()
        with pytest.raises(RuntimeError, match="avx512_bf16"):
            gemm.linear(torch.ones(1, 8, dtype=BF16), packed)
        ids = torch.tensor([1])
        assert torch.equal(gemm.embedding(packed, ids), torch.ones(1, 8, dtype=BF16))
    finally:
        native.set_isa(before)


@fuzz
@given(n=st.integers(1, 100), pairs=st.integers(1, 80), seed=st.integers(0, 2**30))
def test_unpack_gives_back_the_weight(n: int, pairs: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    a, b = normal(g, n, pairs * 2), normal(g, n, pairs * 2)
    assert torch.equal(gemm.unpack(gemm.pack(a)), a)
    assert torch.equal(gemm.unpack(gemm.pack_gate_up(a, b)), torch.cat((a, b)))


@pytest.mark.skipif(native.load() is None, reason="needs the C library")
@fuzz
@given(
    n=st.integers(1, 100),
    pairs=st.integers(1, 80),
    count=st.integers(0, 40),
    gap=st.integers(0, 5),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**30),
)
def test_embedding_gathers_rows(
    n: int, pairs: int, count: int, gap: int, dtype: torch.dtype, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    weight = normal(g, n, pairs * 2)
    ids = torch.randint(n, (count,), generator=g, dtype=dtype)
    out = strided(torch.full((count, pairs * 2), float("nan"), dtype=BF16), gap)
    assert gemm.embedding(gemm.pack(weight), ids, out) is out
    assert torch.equal(out, weight[ids.long()])
    assert torch.equal(gemm.embedding(gemm.pack(weight), ids), weight[ids.long()])


@pytest.mark.skipif(native.load() is None, reason="needs the C library")
@pytest.mark.parametrize("bad", [-1, 10])
def test_embedding_refuses_ids_out_of_range(bad: int) -> None:
    packed = gemm.pack(torch.ones(10, 8, dtype=BF16))
    out = torch.zeros(3, 8, dtype=BF16)
    with pytest.raises(ValueError, match=rf"ids\[1\] is {bad}; ids must be in \[0, 10\)"):
        gemm.embedding(packed, torch.tensor([0, bad, 2]), out)
    assert (out == 0).all()


def test_refusals_name_the_argument() -> None:
    weight = torch.ones(10, 8, dtype=BF16)
    packed, gate_up = gemm.pack(weight), gemm.pack_gate_up(weight, weight)
    x = torch.ones(3, 8, dtype=BF16)
    assert gemm.supports(8) and not gemm.supports(7) and not gemm.supports(0)
    for error, name, call in (
        (TypeError, "weight", lambda: gemm.pack(weight.float())),
        (ValueError, "even", lambda: gemm.pack(weight[:, :7])),
        (ValueError, "bias", lambda: gemm.pack(weight, torch.ones(9))),
        (TypeError, "bias", lambda: gemm.pack(weight, torch.ones(10, dtype=torch.float64))),
        (ValueError, "up", lambda: gemm.pack_gate_up(weight, weight[:9])),
        (TypeError, "x must", lambda: gemm.linear(x.float(), packed)),
        (ValueError, "x must", lambda: gemm.linear(x[:, :6], packed)),
        (ValueError, "x must", lambda: gemm.linear(x[0], packed)),
        (ValueError, "dense rows", lambda: gemm.linear(torch.ones(8, 3, dtype=BF16).T, packed)),
        (ValueError, "out must", lambda: gemm.linear(x, packed, torch.ones(3, 9, dtype=BF16))),
        (TypeError, "out must", lambda: gemm.linear(x, packed, torch.ones(3, 10).double())),
        (TypeError, "out_dtype", lambda: gemm.linear(x, packed, out_dtype=torch.float16)),
        (ValueError, "residual", lambda: gemm.linear(x, packed, residual=torch.ones(2, 10))),
        (ValueError, "pack_gate_up", lambda: gemm.linear(x, gate_up)),
        (ValueError, "pack_gate_up", lambda: gemm.linear_gated(x, packed)),
        (ValueError, "activation", lambda: gemm.pack_gate_up(weight, weight, None, "relu")),
        (ValueError, "pack_gate_up", lambda: gemm.embedding(gate_up, torch.tensor([0]))),
        (TypeError, "ids", lambda: gemm.embedding(packed, torch.tensor([0.0]))),
    ):
        with pytest.raises(error, match=name):
            call()
