"""Grouped products of experts against a dense loop in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from octavo.ops.gpu import experts

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "relu": relu,
    "relu2": lambda x: relu(x).square(),
}
Error = Callable[[Tensor, Tensor], float]
# (tokens, experts, chosen by a token, hidden size, expert size); sizes that no tile divides
SHAPES = [(1, 8, 2, 72, 40), (5, 3, 3, 64, 64), (37, 8, 2, 80, 66), (70, 2, 1, 33, 17)]


def _random_ids(tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((tokens, num_experts), generator=generator).topk(top_k, dim=-1).indices


def _weights(
    num_experts: int, hidden: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    gate_up = torch.randn((num_experts, 2 * size, hidden), device=device) / hidden**0.5
    down = torch.randn((num_experts, hidden, size), device=device) / size**0.5
    return gate_up.to(dtype), down.to(dtype)


def _dense(
    x: Tensor, ids: Tensor, scales: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """[num_tokens, hidden_size] float64, one pair after the other."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, chosen in enumerate(ids.tolist()):
        for j, expert in enumerate(chosen):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            y = down[expert].double() @ (ACTIVATIONS[activation](gate) * up)
            out[token] += scales[token, j].double() * y
    return out


def _computed(
    x: Tensor, ids: Tensor, scales: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    num_experts, both, hidden = gate_up.shape
    order, starts = experts.sort_by_expert(ids, num_experts)
    inner = x.new_full((ids.numel(), both // 2), torch.nan)
    experts.gated(x, gate_up, order, starts, inner, ids.shape[1], activation)
    parts = x.new_full((*ids.shape, hidden), torch.nan)
    experts.down(inner, down, order, starts, scales, parts)
    return experts.combine(
        parts, torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
    )


@pytest.mark.parametrize("dtype_of_ids", [torch.int64, torch.int32])
@pytest.mark.parametrize("pairs", [(1, 1), (3, 4), (700, 3)])
def test_pairs_are_sorted_by_expert_and_keep_their_order(
    pairs: tuple[int, int], dtype_of_ids: torch.dtype, device: torch.device
) -> None:
    ids = _random_ids(*pairs[:1], 7, pairs[1]).to(device, dtype_of_ids)
    order, starts = experts.sort_by_expert(ids, 7)
    assert torch.equal(order.long(), ids.flatten().argsort(stable=True))
    counts = ids.flatten().bincount(minlength=7)
    assert starts.tolist() == [0, *counts.cumsum(0).tolist()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_against_a_dense_loop(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device,
    relative_error: Error,
) -> None:  # fmt: skip
    tokens, num_experts, top_k, hidden, size = shape
    gate_up, down = _weights(num_experts, hidden, size, dtype, device)
    x = torch.randn((tokens, hidden + 8), device=device).to(dtype)[:, :hidden]
    ids = _random_ids(tokens, num_experts, top_k).to(device)
    scales = torch.rand((tokens, top_k), device=device)
    out = _computed(x, ids, scales, gate_up, down, "silu")
    expected = _dense(x, ids, scales, gate_up, down, "silu")
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("tokens", "num_groups"), [(5, 2), (33, 1)])
def test_fp8_weights(
    tokens: int, num_groups: int, device: torch.device, relative_error: Error
) -> None:
    """With scales of rows, and of each 128 inputs of a row."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    gate_up, down = (w.half() for w in _weights(3, 256, 128, torch.float32, device))
    codes = [(64 * w).float().to(torch.float8_e4m3fn) for w in (gate_up, down)]
    groups = (num_groups, 1)
    scales = [
        (torch.rand((*w.shape[:2], n), device=device) + 0.5) / 64
        for w, n in zip(codes, groups, strict=True)
    ]
    wide = [
        w.double() * s.double().repeat_interleave(w.shape[2] // s.shape[2], 2)
        for w, s in zip(codes, scales, strict=True)
    ]
    x = torch.randn((tokens, 256), device=device).to(dtype)
    ids, weights = _random_ids(tokens, 3, 2).to(device), torch.rand((tokens, 2), device=device)
    order, starts = experts.sort_by_expert(ids, 3)
    inner = x.new_full((2 * tokens, 128), torch.nan)
    experts.gated(x, codes[0], order, starts, inner, 2, weight_scales=scales[0])
    parts = x.new_full((tokens, 2, 256), torch.nan)
    experts.down(inner, codes[1], order, starts, weights, parts, scales[1])
    out = experts.combine(parts, torch.empty_like(x))
    expected = _dense(x, ids, weights, *wide, "silu")
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activations(activation: str, device: torch.device, relative_error: Error) -> None:
    gate_up, down = _weights(4, 32, 24, torch.float32, device)
    x, ids = torch.randn((6, 32), device=device), _random_ids(6, 4, 2).to(device)
    scales = torch.rand((6, 2), device=device)
    out = _computed(x, ids, scales, gate_up, down, activation)
    expected = _dense(x, ids, scales, gate_up, down, activation)
    assert relative_error(out, expected) < 2e-6


@pytest.mark.parametrize("chosen", [0, 2, 4], ids=["first", "middle", "last"])
@pytest.mark.parametrize("tokens", [1, 16, 33, 200])
def test_all_tokens_at_one_expert(
    tokens: int, chosen: int, device: torch.device, relative_error: Error
) -> None:
    """The others have none: their tiles must not be somebody else's."""
    gate_up, down = _weights(5, 24, 16, torch.float32, device)
    gate_up[[e for e in range(5) if e != chosen]] = torch.nan
    x = torch.randn((tokens, 24), device=device)
    ids = torch.full((tokens, 1), chosen, device=device)
    scales = torch.rand((tokens, 1), device=device)
    out = _computed(x, ids, scales, gate_up, down, "silu")
    assert relative_error(out, _dense(x, ids, scales, gate_up, down, "silu")) < 2e-6


def test_the_grid_holds_every_routing() -> None:
    """As many tiles as the worst one needs, and no more than that."""
    for num_experts in (1, 3, 8):
        for num_pairs in (1, 2, 7, 31, 100, 1000):
            block_m, num_tiles = experts.tiles(num_pairs, num_experts)
            spread = [1] * min(num_experts, num_pairs)
            spread[0] += num_pairs - len(spread)
            assert sum(-(-count // block_m) for count in spread) <= num_tiles
            assert num_tiles <= num_pairs
            # as uneven as can be: every expert one row more than whole tiles
            worst = sum(-(-c // block_m) for c in _most_tiles(num_pairs, num_experts, block_m))
            assert num_tiles == worst


def _most_tiles(num_pairs: int, num_experts: int, block_m: int) -> list[int]:
    """Rows of each expert such that tiles are as many as they can be."""
    counts = [0] * num_experts
    busy = min(num_experts, num_pairs)
    for expert in range(busy):
        counts[expert] = 1
    left = num_pairs - busy
    counts[0] += left // block_m * block_m
    return counts


def test_no_tokens(device: torch.device) -> None:
    gate_up, down = _weights(4, 32, 24, torch.float32, device)
    x, ids = torch.empty((0, 32), device=device), torch.empty((0, 2), dtype=torch.int64)
    scales = torch.empty((0, 2), device=device)
    assert _computed(x, ids.to(device), scales, gate_up, down, "silu").shape == (0, 32)


def test_refusals(device: torch.device) -> None:
    gate_up, down = _weights(4, 32, 24, torch.float32, device)
    x, ids = torch.randn((6, 32), device=device), _random_ids(6, 4, 2).to(device)
    order, starts = experts.sort_by_expert(ids, 4)
    inner, scales = torch.empty((12, 24), device=device), torch.rand((6, 2), device=device)
    parts = torch.empty((6, 2, 32), device=device)
    with pytest.raises(ValueError, match="contiguous"):
        experts.sort_by_expert(ids.t(), 4)
    with pytest.raises(ValueError, match="activation must be one of silu"):
        experts.gated(x, gate_up, order, starts, inner, 2, "tanh")
    with pytest.raises(ValueError, match="3th of the 12 pairs"):
        experts.gated(x, gate_up, order, starts, inner, 3)
    with pytest.raises(ValueError, match="weight must be contiguous"):
        experts.gated(x, gate_up[:, :-2], order, starts, inner, 2)
    with pytest.raises(ValueError, match="of 12 rows"):
        experts.gated(x, gate_up, order, starts, inner[1:], 2)
    with pytest.raises(TypeError, match="x's type"):
        experts.gated(x, gate_up.half(), order, starts, inner, 2)
    codes, rows = gate_up.to(torch.float8_e4m3fn), torch.ones((4, 48, 1), device=device)
    with pytest.raises(TypeError, match="weight_scales must be contiguous float32"):
        experts.gated(x, codes, order, starts, inner, 2, weight_scales=rows.double())
    with pytest.raises(ValueError, match=r"weight_scales must be \(4, 48\) with 1 a row"):
        experts.gated(
            x, codes, order, starts, inner, 2, weight_scales=rows.expand(4, 48, 2).clone()
        )
    with pytest.raises(TypeError, match="scales must be float32"):
        experts.down(inner, down, order, starts, scales.double(), parts)
    with pytest.raises(ValueError, match="scales must be contiguous"):
        experts.down(inner, down, order, starts, scales[:3], parts)
    with pytest.raises(ValueError, match="out must be contiguous"):
        experts.combine(parts, torch.empty((5, 32), device=device))
