"""Products of experts whose weights are integers in groups, against a dense loop in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from octavo.layers.grouped import GroupedWeight
from octavo.ops.gpu import experts, experts_grouped, pdl
from octavo.ops.gpu.grouped import pack
from octavo.ops.gpu.grouped_stack import GroupedStack, is_stackable

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
KINDS = {
    # bits, group size, what is done about zero, ordered by groups, hidden size, expert size
    "awq": (4, 128, "points", False, 256, 40),
    "gptq": (4, 64, "points", True, 160, 24),
    "groups of 32": (4, 32, "point", False, 96, 40),
    "whole rows": (4, 80, "point", False, 72, 80),
    "Q4_K": (4, 32, "offsets", False, 128, 32),
    "groups of 16": (4, 16, "offsets", False, 64, 32),
    "8 bits": (8, 128, "points", True, 192, 24),
    "Q6_K": (8, 16, "point", False, 64, 32),
}
NUM_EXPERTS = 5
Error = Callable[[Tensor, Tensor], float]


def made(
    kind: str, num_rows: int, width: int, seed: int, device: torch.device, half: torch.dtype
) -> GroupedWeight:
    bits, group, zero, ordered, _, _ = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (num_rows, width), generator=generator)
    size = (num_rows, -(-width // group))
    scales = (torch.rand(size, generator=generator) + 0.5) / (2**bits * width**0.5)
    zeros = {
        "point": None,
        "points": torch.randint(0, 2**bits, size, generator=generator),
        "offsets": torch.randn(size, generator=generator) / width**0.5,
    }[zero]
    return GroupedWeight(
        pack(codes, bits), scales.to(half), None if zeros is None else zeros.to(half), bits, group,
        (num_rows, width), kind, zero_point=2 ** (bits - 1) if zero == "point" else 0,
        offsets=zero == "offsets",
        order=torch.randperm(width, generator=generator).int() if ordered else None,
    ).to(device)  # fmt: skip


def stacked(
    kind: str, device: torch.device, half: torch.dtype = torch.float16
) -> tuple[GroupedStack, GroupedStack, Tensor, Tensor]:
    """Gate over up and down of all experts, and the matrices they stand for, in float64."""
    hidden, size = KINDS[kind][4:]
    stacks, wide = [], []
    for num_rows, width in ((2 * size, hidden), (hidden, size)):
        weights = [made(kind, num_rows, width, e, device, half) for e in range(NUM_EXPERTS)]
        stack = GroupedStack.like(weights[0], NUM_EXPERTS, num_rows)
        for expert, weight in enumerate(weights):
            assert is_stackable(weight) and stack.takes(weight)
            cut = num_rows // 2
            stack.put(expert, cut, weight.rows(slice(cut, None)))
            stack.put(expert, 0, weight.rows(slice(cut)))
        stacks.append(stack)
        wide.append(torch.stack([weight.dequantize(torch.float64) for weight in weights]))
    return *stacks, *wide


def _dense(
    x: Tensor, ids: Tensor, scales: Tensor, gate_up: Tensor, down: Tensor,
    activation: Callable[[Tensor], Tensor] = silu,
) -> Tensor:  # fmt: skip
    """[num_tokens, hidden_size] float64, one pair after the other."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, chosen in enumerate(ids.tolist()):
        for j, expert in enumerate(chosen):
            gate, up = (gate_up[expert] @ x[token].double()).chunk(2)
            out[token] += scales[token, j].double() * (down[expert] @ (activation(gate) * up))
    return out


def _computed(
    x: Tensor, ids: Tensor, scales: Tensor, gate_up: GroupedStack, down: GroupedStack,
    activation: str = "silu", parts: int = 1,
) -> Tensor:  # fmt: skip
    (num_tokens, top_k), hidden = ids.shape, x.shape[1]
    order, starts = experts.sort_by_expert(ids, NUM_EXPERTS)
    inner = x.new_full((ids.numel(), down.shape[2]), torch.nan)
    assert experts_grouped.gated(x, gate_up, order, starts, inner, top_k, activation) is inner
    dtype = torch.float32 if parts > 1 else x.dtype
    out = torch.full((num_tokens, top_k * parts, hidden), torch.nan, dtype=dtype, device=x.device)
    assert experts_grouped.down(inner, down, order, starts, scales, out) is out
    return experts.combine(out, x.new_full((num_tokens, hidden), torch.nan))


def _random_ids(tokens: int, top_k: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand((tokens, NUM_EXPERTS), generator=generator).topk(top_k, dim=-1).indices


@pytest.fixture
def half(device: torch.device) -> torch.dtype:
    """Of 16 bits."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


@pytest.mark.parametrize("kind", KINDS)
def test_products_against_a_dense_loop(
    kind: str, half: torch.dtype, device: torch.device, relative_error: Error
) -> None:
    """Ragged: experts with no rows, with one, and with more than a tile. In float32, too, of each
    way to pack."""
    gate_up, down, *wide = stacked(kind, device)
    torch.manual_seed(1)
    ids = torch.full((18, 2), 3)
    ids[:, 1] = 0
    ids[4:, 1] = 4
    ids[9, 0] = 1
    for dtype in (half, torch.float32)[: 2 if kind in ("whole rows", "8 bits") else 1]:
        x = torch.randn((18, KINDS[kind][4] + 8), device=device).to(dtype)[:, :-8]
        scales = torch.rand((18, 2), device=device)
        out = _computed(x, ids.to(device), scales, gate_up, down)
        assert relative_error(out, _dense(x, ids, scales, *wide)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("kind", "tokens"), [("gptq", 1), ("8 bits", 1), ("awq", 90)])
def test_all_tokens_at_one_expert(
    kind: str, tokens: int, half: torch.dtype, device: torch.device, relative_error: Error
) -> None:
    """The others have none: their tiles must not be somebody else's."""
    gate_up, down, *wide = stacked(kind, device)
    for stack in (gate_up, down):
        stack.pairs[[0, 1, 3, 4]] = torch.nan
    x = torch.randn((tokens, KINDS[kind][4]), device=device).to(half)
    ids = torch.full((tokens, 1), 2, device=device)
    scales = torch.rand((tokens, 1), device=device)
    out = _computed(x, ids, scales, gate_up, down)
    assert relative_error(out, _dense(x, ids, scales, *wide)) < TOLERANCE[half]


@pytest.mark.parametrize("block_m", [32, 64, 128])
def test_tiles_of_each_size(
    block_m: int, half: torch.dtype, device: torch.device, relative_error: Error,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Beside those of 16. Gate and up lie in halves of a tile, the last of which are not whole."""
    monkeypatch.setattr(
        experts_grouped, "tiles", lambda pairs, count, _: experts.tiles(pairs, count, block_m)
    )
    gate_up, down, *wide = stacked("whole rows", device)
    x = torch.randn((20, 72), device=device).to(half)
    ids, scales = _random_ids(20, 2).to(device), torch.rand((20, 2), device=device)
    out = _computed(x, ids, scales, gate_up, down, "gelu")
    assert relative_error(out, _dense(x, ids, scales, *wide, gelu)) < TOLERANCE[half]


def test_inputs_in_parts(
    half: torch.dtype, device: torch.device, relative_error: Error,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """More than there are blocks; added up with the experts of a token."""
    monkeypatch.setitem(KINDS, "long", (4, 128, "points", False, 32, 256))
    gate_up, down, *wide = stacked("long", device, torch.bfloat16)
    x = torch.randn((3, 32), device=device).to(half)
    ids, scales = _random_ids(3, 2).to(device), torch.rand((3, 2), device=device)
    out = _computed(x, ids, scales, gate_up, down, parts=3)
    assert relative_error(out, _dense(x, ids, scales, *wide)) < TOLERANCE[half]


def test_how_many_parts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdl, "num_sms", lambda device: 100)
    monkeypatch.setitem(KINDS, "long", (4, 128, "points", False, 64, 4096))
    first = made("long", 64, 4096, 0, device, torch.float16)
    long = GroupedStack.like(first, NUM_EXPERTS, 64)
    assert experts_grouped.num_parts(2, long) == 8
    assert experts_grouped.num_parts(64, long) == 8
    assert experts_grouped.num_parts(65, long) == 1 == experts_grouped.num_parts(0, long)
    # of 8 blocks two parts are long enough; and 300 programs are enough
    short = GroupedStack.like(made("long", 64, 1024, 0, device, torch.float16), NUM_EXPERTS, 64)
    assert experts_grouped.num_parts(2, short) == 2
    wide = GroupedStack.like(first, NUM_EXPERTS, 64 * 100)
    assert experts_grouped.num_parts(1, wide) == 3
    assert experts_grouped.num_parts(2, wide) == 1


def test_no_tokens(device: torch.device) -> None:
    gate_up, down, *_ = stacked("awq", device)
    x, ids = torch.empty((0, 256), device=device), torch.empty((0, 2), dtype=torch.int64)
    scales = torch.empty((0, 2), device=device)
    assert _computed(x, ids.to(device), scales, gate_up, down).shape == (0, 256)


def test_what_can_be_stacked(device: torch.device) -> None:
    half, single = torch.float16, torch.float32
    weight = made("awq", 32, 256, 0, device, half)
    assert is_stackable(weight)
    assert not is_stackable(made("awq", 32, 256, 0, device, single))
    assert not is_stackable(replace(weight, group_size=96))  # ends within a block
    assert weight.zeros is not None
    assert not is_stackable(replace(weight, zeros=weight.zeros.float()))
    stack = GroupedStack.like(weight, NUM_EXPERTS, 32)
    assert stack.takes(made("awq", 8, 256, 1, device, half))
    assert not stack.takes(made("awq", 32, 384, 0, device, half))
    assert not stack.takes(made("awq", 32, 256, 0, device, torch.bfloat16))
    for other in ("gptq", "Q4_K", "8 bits"):
        assert not stack.takes(made(other, 32, 256, 0, device, half))
    for other_zeros in (replace(weight, zeros=None), replace(weight, offsets=True)):
        assert not stack.takes(other_zeros)
    other = replace(weight, zeros=None, zero_point=8)
    assert not stack.takes(other)
    stack = GroupedStack.like(other, NUM_EXPERTS, 32)
    assert stack.takes(other) and not stack.takes(replace(other, zero_point=4))
    per_expert = 32 * (256 // 2 + 2 * 2 * 2)
    assert stack.num_bytes == NUM_EXPERTS * per_expert


def test_refusals(device: torch.device) -> None:
    gate_up, down, *_ = stacked("awq", device)
    x, ids = torch.randn((6, 256), device=device), _random_ids(6, 2).to(device)
    order, starts = experts.sort_by_expert(ids, NUM_EXPERTS)
    inner, scales = torch.empty((12, 40), device=device), torch.rand((6, 2), device=device)
    out = torch.empty((6, 2, 256), device=device)
    with pytest.raises(ValueError, match="activation must be one of silu"):
        experts_grouped.gated(x, gate_up, order, starts, inner, 2, "tanh")
    with pytest.raises(ValueError, match="3th of the 12 pairs"):
        experts_grouped.gated(x, gate_up, order, starts, inner, 3)
    with pytest.raises(ValueError, match=r"weight must be \(5, 40, 256\)"):
        experts_grouped.gated(x, down, order, starts, inner[:, :20].contiguous(), 2)
    with pytest.raises(ValueError, match="of 12 rows"):
        experts_grouped.gated(x, gate_up, order, starts, inner[1:], 2)
    with pytest.raises(TypeError, match="x's type"):
        experts_grouped.gated(x, gate_up, order, starts, inner.half(), 2)
    with pytest.raises(TypeError, match="scales must be float32"):
        experts_grouped.down(inner, down, order, starts, scales.double(), out)
    with pytest.raises(ValueError, match="scales must be contiguous"):
        experts_grouped.down(inner, down, order, starts, scales[:3], out)
    with pytest.raises(ValueError, match="out must have parts"):
        experts_grouped.down(inner, down, order, starts, scales, out[:, :1])
    with pytest.raises(TypeError, match="x's type"):
        experts_grouped.down(inner, down, order, starts, scales, out.half())
