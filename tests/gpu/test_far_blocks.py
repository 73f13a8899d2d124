"""Offsets beyond 32 bits: a pool of 40,001 blocks with a token in its last one."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import reference
from octavo.ops.gpu import decode_attention, prefill_attention, rope_cache

pytestmark = pytest.mark.gpu

LAYERS, KV_HEADS, BLOCK, DIM, HEADS = 32, 8, 16, 128, 32
"""Of Llama 3.1 8B: 2 MiB a block, 84 GB in all."""


@pytest.fixture(scope="module")
def pool() -> torch.Tensor:
    needed = 40_001 * LAYERS * 2 * KV_HEADS * BLOCK * DIM * 2
    if torch.cuda.mem_get_info()[0] < needed + (4 << 30):
        pytest.skip("the GPU has no room for such a pool")
    return torch.empty(
        (40_001, LAYERS, 2, KV_HEADS, BLOCK, DIM), dtype=torch.bfloat16, device="cuda"
    )


def test_a_token_at_block_40000(pool: torch.Tensor) -> None:
    num_tokens, layer, device = 37, LAYERS - 1, "cuda"
    table = torch.tensor([[40_000, 17, 39_999]], dtype=torch.int32, device=device)
    pool[table[0].long()] = float("nan")
    slots = (table[0].long()[:, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten()
    shape = (num_tokens, HEADS + 2 * KV_HEADS, DIM)
    qkv = torch.randn(shape, dtype=torch.bfloat16, device=device)
    query, key, value = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    cos_sin = torch.cat((torch.ones(64, 64), torch.zeros(64, 64)), dim=1).to(device)
    rows = torch.arange(num_tokens, device=device)
    rope_cache.rope_and_cache(
        query, key, value, rows, cos_sin, slots[:num_tokens], pool, None, layer, None, None, 0.0
    )
    keys, values = reference.gather_sequence(pool, layer, table[0], 0, num_tokens)
    assert torch.equal(keys, key) and torch.equal(values, value)
    lens = torch.tensor([num_tokens], dtype=torch.int32, device=device)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    expected = reference.paged_attention(query, pool, layer, table, lens, starts, DIM**-0.5)

    out = torch.full_like(query, float("nan"), memory_format=torch.contiguous_format)
    from octavo.attention.work import plan_decode, plan_prefill, prefill_tile_tokens

    tile = prefill_tile_tokens(HEADS // KV_HEADS, DIM)
    tiles = plan_prefill([num_tokens], [num_tokens], 0, tile)
    prefill_attention.paged_prefill(
        out, query, pool, None, layer, table, None, lens, starts,
        torch.from_numpy(tiles).to(device), DIM**-0.5,
    )  # fmt: skip
    assert _error(out, expected) < 1e-2

    one = torch.full((1, HEADS, DIM), float("nan"), dtype=torch.bfloat16, device=device)
    items, item_start = plan_decode([num_tokens], 8)
    partial = torch.empty((8, HEADS, DIM), device=device)
    decode_attention.paged_decode(
        one, query[-1:], pool, None, layer, table, None, lens,
        torch.from_numpy(items).to(device), torch.from_numpy(item_start).to(device),
        partial, torch.empty((8, HEADS), device=device), DIM**-0.5,
    )  # fmt: skip
    assert _error(one, expected[-1:]) < 1e-2


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())
