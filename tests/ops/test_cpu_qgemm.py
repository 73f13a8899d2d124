"""The quantized linear layer against its formula in float64, on every instruction set there is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.ops import reference
from octavo.ops.cpu import native, qcodes, qgemm, trace
from octavo.ops.cpu.qcodes import Codes, Codes4, Codes8

BF16 = torch.bfloat16
LEVELS = ("plain", "avx512_bf16", "amx")
pytestmark = pytest.mark.skipif(not qgemm.is_available(), reason="needs the C library")
fuzz = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, best_isa_afterwards: None) -> str:
    """Each level in turn; the library goes back to the one it had."""
    if native.set_isa(request.param) != request.param:
        pytest.skip(f"this CPU has no {request.param}")
    return str(request.param)


@pytest.fixture(autouse=True)
def threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codes8(generator: torch.Generator, n: int, k: int) -> Codes8:
    return qcodes.rounded(torch.randn(n, k, generator=generator))


def codes4(generator: torch.Generator, n: int, k: int) -> Codes4:
    q = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    d = torch.randn(n, k // 32, generator=generator)
    return qcodes.from_blocks(q, d, torch.randn(n, k // 32, generator=generator) - 7 * d)


def codes(generator: torch.Generator, bits: int, n: int, k: int) -> Codes:
    return codes4(generator, n, k) if bits == 4 else codes8(generator, n, k)


def wide(weight: Codes) -> Codes8:
    return weight.widened() if isinstance(weight, Codes4) else weight


def steps_in_one(x: Tensor) -> Tensor:
    """float32 [rows, 1]: 127 steps are six times a row's root mean square, or its largest
    magnitude if that is less; the mean square is of 32,512ths of the largest magnitude."""
    # a number over a tensor would be its reciprocal, rounded, times the number
    fine = torch.tensor(32512.0) / x.float().abs().amax(dim=1, keepdim=True)
    squares = (x.float() * fine).round().double().square().sum(dim=1, keepdim=True)
    end = (squares / x.shape[1]).sqrt().float() * 6
    return fine * (torch.tensor(127.0) / end.clamp(max=32512))


def rounded_x(x: Tensor) -> Tensor:
    """float64: rows in steps of their own."""
    levels = steps_in_one(x)
    steps = torch.where(levels.isfinite(), torch.tensor(1.0) / levels, 0)
    return (x.float() * levels.nan_to_num(0, 0, 0)).round().double() * steps.double()


def activations(generator: torch.Generator, m: int, k: int) -> Tensor:
    """float32 [m, k]: some values are far larger than the rest of their row, and need 16 bits."""
    large = torch.rand(m, k, generator=generator) < 0.02
    return torch.randn(m, k, generator=generator) * torch.where(large, 60.0, 1.0)


def product(x: Tensor, weight: Codes) -> Tensor:
    return rounded_x(x) @ wide(weight).values().double().T


def assert_close(actual: Tensor, exact: Tensor) -> None:
    """To float32 arithmetic on sums that are exact, and the rounding of the result's type."""
    tolerance = exact.abs() * 1e-6 + exact.abs().amax() * 1e-6 + 1e-9
    if actual.dtype is BF16:
        tolerance = tolerance + exact.abs() * 2**-8
    error = (actual.double() - exact).abs()
    assert (error <= tolerance).all(), f"off by {(error - tolerance).max():.3g}"


def strided(t: Tensor, gap: int) -> Tensor:
    """t with `gap` NaNs between its rows."""
    full = torch.full((t.shape[0], t.shape[1] + gap), float("nan"), dtype=t.dtype)
    full[:, : t.shape[1]] = t
    return full[:, : t.shape[1]]


@fuzz
@given(
    m=st.one_of(st.integers(1, 40), st.sampled_from([65, 130])),
    n=st.integers(1, 100),
    blocks=st.integers(1, 9),
    bits=st.sampled_from([4, 8]),
    dtypes=st.tuples(*[st.sampled_from([BF16, torch.float32])] * 2),
    residual=st.sampled_from(["none", "bf16", "float32", "in place"]),
    bias=st.booleans(),
    gap=st.integers(0, 5),
    threads=st.sampled_from([1, 1, 2, 3]),
    seed=st.integers(0, 2**30),
)
def test_linear_is_the_product(
    level: str, m: int, n: int, blocks: int, bits: int, dtypes: tuple[torch.dtype, torch.dtype],
    residual: str, bias: bool, gap: int, threads: int, seed: int,
) -> None:  # fmt: skip
    torch.set_num_threads(threads)
    generator, k = seeded(seed), blocks * 32
    weight = codes(generator, bits, n, k)
    offsets = torch.randn(n, generator=generator) if bias else None
    packed = qgemm.pack(weight, offsets)
    x = strided(activations(generator, m, k).to(dtypes[0]), gap)
    out = strided(torch.zeros(m, n, dtype=dtypes[1]), gap)
    exact = product(x, weight) + (0 if offsets is None else offsets)
    added = None
    if residual != "none":
        kind = {"bf16": BF16, "float32": torch.float32, "in place": out.dtype}[residual]
        added = strided(torch.randn(m, n, generator=generator).to(kind), gap)
        exact = exact + added
        out = added if residual == "in place" else out
    assert qgemm.linear(x, packed, out, added) is out
    assert_close(out, exact)


@fuzz
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    bits=st.tuples(*[st.sampled_from([4, 8])] * 2),
    bias=st.booleans(),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    seed=st.integers(0, 2**30),
)
def test_gated_is_the_activation_of_the_one_times_the_other(
    level: str, m: int, n: int, bits: tuple[int, int], bias: bool, activation: str, seed: int
) -> None:
    generator = seeded(seed)
    gate, up = (codes(generator, b, n, 96) for b in bits)
    offsets = torch.randn(2 * n, generator=generator) if bias else None
    packed = qgemm.pack_gate_up(gate, up, offsets, activation)
    assert packed.bits == max(bits)
    x = activations(generator, m, 96) / 40
    biases = torch.zeros(2 * n) if offsets is None else offsets
    left, right = product(x, gate) + biases[:n], product(x, up) + biases[n:]
    exact = reference.activation(left, activation) * right
    assert_close(qgemm.linear_gated(x, packed, torch.empty(m, n)), exact)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("m", [5, 37, 200])
def test_a_row_has_the_same_bits_in_every_batch(level: str, bits: int, m: int) -> None:
    """Alone it is multiplied as its weights stream by, beside others in tiles."""
    generator = seeded(m)
    packed = qgemm.pack(codes(generator, bits, 75, 160))
    x = activations(generator, m, 160).to(BF16)
    torch.set_num_threads(1)
    alone = torch.cat([qgemm.linear(row[None], packed, torch.empty(1, 75)) for row in x])
    torch.set_num_threads(3)
    assert torch.equal(qgemm.linear(x, packed, torch.empty(m, 75)), alone)
    pair = qgemm.linear(x[1:3], packed, torch.empty(2, 75))
    assert torch.equal(pair, alone[1:3])


@pytest.mark.parametrize("bits", [4, 8])
def test_kernels_agree_bit_for_bit(bits: int, best_isa_afterwards: None) -> None:
    generator = seeded(1)
    packed = qgemm.pack(codes(generator, bits, 75, 160))
    x = activations(generator, 70, 160).to(BF16)
    x[:32] = x[:32].clamp(-1, 1)  # a block of rows without high bytes
    results = [
        qgemm.linear(x, packed, torch.empty(70, 75))
        for name in ("amx", "avx512_bf16", "plain")
        if native.set_isa(name) == name
    ]
    if not results:
        pytest.skip("this CPU has none")
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["avx512_bf16", "amx"])
def test_rows_for_several_parts_and_passes(bits: int, name: str, best_isa_afterwards: None) -> None:
    """Rounded x of 4.3 MiB: two passes, the first of four parts; 33 rows are left over."""
    if native.set_isa(name) != name:
        pytest.skip(f"this CPU has no {name}")
    generator, m, k = seeded(12), 1057, 4096
    packed = qgemm.pack(codes(generator, bits, 70, k))
    x = activations(generator, m, k).to(BF16)
    torch.set_num_threads(1)
    few = [qgemm.linear(rows, packed, torch.empty(len(rows), 70)) for rows in x.split(50)]
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(qgemm.linear(x, packed, torch.empty(m, 70)), torch.cat(few))


@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_codes_and_activations_do_not_overflow(level: str, bits: int) -> None:
    """The largest sums: all codes 127 (or -128) and all activations at the end of their range."""
    k = 1 << 16
    weight = Codes8(torch.full((1, k), 127, dtype=torch.int8), torch.ones(1))
    if bits == 4:
        q, a = torch.full((1, k), 15, dtype=torch.uint8), torch.full((1, k // 32), 240)
        c = torch.full((1, k // 32), -98, dtype=torch.int8)
        weight = Codes4(q, a.to(torch.uint8), c, torch.ones(1))  # type: ignore[assignment]
    assert (wide(weight).codes == 127).all()
    packed, signs = qgemm.pack(weight), torch.tensor([[1.0], [-1.0]])
    x = signs.expand(2, k).contiguous()
    out = qgemm.linear(x, packed, torch.empty(2, 1))
    assert torch.allclose(out, signs * 127 * k, rtol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_large_values_leave_the_others_their_steps(level: str, dtype: torch.dtype) -> None:
    """All are within a 42nd of the row's root mean square; with 8 bits for all, within a tenth."""
    k = 1024
    x = torch.linspace(-1, 1, k).repeat(7, 1)
    x[:, 5], x[2:, 700] = 100.0, -77.0
    x[0, 5], x[1] = 0.3, -x[3]
    x = x.to(dtype)
    packed = qgemm.pack(Codes8(torch.eye(k).to(torch.int8), torch.ones(k)))
    out = qgemm.linear(x, packed, torch.empty(7, k))
    rms = x.float().square().mean(1, keepdim=True).sqrt()
    assert ((out - x.float()).abs() <= rms / 42).all()
    assert torch.equal(out[1], -out[3]) and torch.equal(out, rounded_x(x).float())


def test_a_row_that_is_not_finite_spoils_no_other(level: str) -> None:
    generator = seeded(3)
    weight = codes8(generator, 40, 64)
    packed = qgemm.pack(weight)
    x = torch.randn(9, 64, generator=generator)
    x[2, 5], x[4, 0], x[6] = float("nan"), float("-inf"), 0.0
    out = qgemm.linear(x, packed, torch.empty(9, 40))
    assert out[[2, 4]].isnan().all() and (out[6] == 0).all()
    fine = [0, 1, 3, 5, 7, 8]
    assert_close(out[fine], product(x[fine], weight))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
def test_embedding_reads_rows(bits: int, dtype: torch.dtype) -> None:
    weight = codes(seeded(4), bits, 50, 96)
    packed = qgemm.pack(weight)
    ids = torch.tensor([49, 0, 31, 32, 0, *range(20)])
    out = strided(torch.zeros(len(ids), 96, dtype=dtype), 3)
    assert torch.equal(qgemm.embedding(packed, ids, out), wide(weight).values()[ids].to(dtype))
    for bad in (50, -1):
        out.fill_(7)
        with pytest.raises(ValueError, match=rf"ids\[1\] is {bad}; ids must be in \[0, 50\)"):
            qgemm.embedding(packed, torch.tensor([3, bad]), out[:2])
        assert (out == 7).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_calls_are_recorded_and_made_again(bits: int) -> None:
    generator = seeded(5)
    packed = qgemm.pack(codes(generator, bits, 48, 96))
    ids, rows, out = torch.tensor([1, 2, 3]), torch.empty(3, 96), torch.empty(3, 48)

    def step() -> Tensor:
        return qgemm.linear(qgemm.embedding(packed, ids, rows), packed, out).clone()

    with trace.record() as found:
        first = step()
    ids.copy_(torch.tensor([47, 46, 45]))
    (recorded,) = found
    recorded.replay()
    again = out.clone()
    assert torch.equal(again, step()) and not torch.equal(again, first)


# -- codes


def test_int8_codes_are_the_nearest_of_their_row() -> None:
    weight = torch.randn(20, 64, generator=seeded(6)) * torch.logspace(-6, 3, 20)[:, None]
    weight[3] = 0
    made = qcodes.rounded(weight)
    assert ((made.values() - weight).abs() <= made.scales[:, None] * 0.5001).all()
    largest = weight.abs().amax(1)
    assert torch.allclose(made.values().abs().amax(1), largest) and not made.codes[3].any()


def test_codes_of_four_bits_are_near_their_blocks() -> None:
    """Rounded twice on a grid of 1 / 125 of the row's largest weight; slopes may be negative."""
    generator = seeded(7)
    q = torch.randint(0, 16, (64, 256), generator=generator, dtype=torch.uint8)
    d = torch.randn(64, 8, generator=generator) * torch.logspace(-6, 3, 64)[:, None]
    m = -8 * d + torch.randn(64, 8, generator=generator) * d.abs()
    m[1], d[1], d[2, :3] = 0, 0, 0
    exact = d[..., None] * q.unflatten(1, (-1, 32)) + m[..., None]
    made = qcodes.from_blocks(q, d, m)
    steps = (made.widened().values() - exact.flatten(1)) / made.scales[:, None]
    assert steps.abs().max() < 1.6 and steps.square().mean().sqrt() < 0.5
    assert not made.widened().codes[1].any()
    largest = exact.flatten(1).abs().amax(1)
    # an offset far from zero leaves the slope as much room as a slope alone needs
    needed = torch.maximum(largest / 125, d.abs().amax(1) * 16 / 255)
    assert torch.allclose(made.scales[needed > 0], needed[needed > 0])


def test_joining_kinds_widens() -> None:
    four, eight = codes4(seeded(8), 3, 64), codes8(seeded(9), 2, 64)
    same = qcodes.concat([four, four])
    assert isinstance(same, Codes4) and torch.equal(same.q, torch.cat((four.q, four.q)))
    mixed = qcodes.concat([four, eight])
    assert isinstance(mixed, Codes8)
    assert torch.equal(mixed.values(), torch.cat((wide(four).values(), eight.values())))


# -- refusals


def test_refusals() -> None:
    packed = qgemm.pack(codes8(seeded(10), 32, 64))
    gated = qgemm.pack_gate_up(codes8(seeded(10), 32, 64), codes8(seeded(11), 32, 64))
    x, out = torch.zeros(2, 64), torch.zeros(2, 32)
    with pytest.raises(ValueError, match=r"x must be \[2, 64\]"):
        qgemm.linear(torch.zeros(2, 65), packed, out)
    with pytest.raises(TypeError, match=r"x must be torch\.bfloat16 or torch.float32"):
        qgemm.linear(x.half(), packed, out)
    with pytest.raises(ValueError, match=r"out must be \[2, 32\]"):
        qgemm.linear(x, packed, torch.zeros(2, 31))
    with pytest.raises(ValueError, match="dense rows"):
        qgemm.linear(torch.zeros(64, 2).t(), packed, out)
    with pytest.raises(ValueError, match="from pack, this one is from pack_gate_up"):
        qgemm.linear(x, gated, out)
    with pytest.raises(ValueError, match="from pack_gate_up, this one is from pack"):
        qgemm.linear_gated(x, packed, out)
    with pytest.raises(ValueError, match="from pack, this one is from pack_gate_up"):
        qgemm.embedding(gated, torch.tensor([0]), x[:1])
    with pytest.raises(TypeError, match="ids must be int64 or int32"):
        qgemm.embedding(packed, torch.tensor([0.0]), x[:1])
    with pytest.raises(ValueError, match=r"ids must be \[count\]"):
        qgemm.embedding(packed, torch.tensor([[0]]), x[:1])
    with pytest.raises(ValueError, match=r"bias must be \[32\]"):
        qgemm.pack(codes8(seeded(10), 32, 64), torch.zeros(31))
    with pytest.raises(ValueError, match=r"activation must be one of .*: 'relu'"):
        qgemm.pack_gate_up(codes8(seeded(10), 32, 64), codes8(seeded(11), 32, 64), None, "relu")
    with pytest.raises(ValueError, match="must be alike"):
        qgemm.pack_gate_up(codes8(seeded(10), 32, 64), codes8(seeded(11), 31, 64))
    long = Codes8(torch.zeros(1, (1 << 16) + 1, dtype=torch.int8), torch.ones(1))
    with pytest.raises(ValueError, match="k must be from 1 to 65536"):
        qgemm.pack(long)


def test_an_empty_batch_is_fine() -> None:
    packed = qgemm.pack(codes8(seeded(12), 32, 64))
    assert qgemm.linear(torch.zeros(0, 64), packed, torch.zeros(0, 32)).shape == (0, 32)
