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


@pytest.mark.parametrize("fp8", [False, True])
def test_decodes_of_several_items_at_block_40000(pool: torch.Tensor, fp8: bool) -> None:
    """Partial results are merged, and codes and scales of fp8 lie beyond 32 bits, too."""
    from octavo.attention.work import plan_decode

    num_tokens, layer, device, num_blocks = 400, LAYERS - 1, pool.device, 25
    last = 40_000 if not fp8 else 77_999
    table = torch.arange(last, last - num_blocks, -1, dtype=torch.int32, device=device)[None]
    cache, scales = (pool, None) if not fp8 else _as_fp8(pool)
    at = table[0].long()
    slots = (at[:, None] * BLOCK + torch.arange(BLOCK, device=device)).flatten()[:num_tokens]
    qkv = torch.randn((num_tokens, HEADS + 2 * KV_HEADS, DIM), device=device).bfloat16()
    query, key, value = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    cos_sin = torch.cat((torch.ones(1, 64), torch.zeros(1, 64)), dim=1).to(device)
    rows = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    rope_cache.rope_and_cache(
        query, key, value, rows, cos_sin, slots, cache, scales, layer, None, None, 0.0
    )
    if scales is None:
        few = cache[at].float()
    else:
        codes = cache.view(torch.uint8)[at].view(torch.float8_e4m3fn)
        few = codes.float() * scales[at].float()[..., None]
    lens = torch.tensor([num_tokens], dtype=torch.int32, device=device)
    items, item_start = plan_decode([num_tokens], 8)
    assert len(items) > 3
    padded = torch.full((8, 3), -1, dtype=torch.int32)
    padded[: len(items)] = torch.from_numpy(items)
    out = torch.full((1, HEADS, DIM), float("nan"), dtype=torch.bfloat16, device=device)
    decode_attention.paged_decode(
        out, query[-1:], cache, scales, layer, table, None, lens, padded.to(device),
        torch.from_numpy(item_start).to(device),
        torch.full((8, HEADS, DIM), float("nan"), device=device),
        torch.full((8, HEADS), float("nan"), device=device), DIM**-0.5,
    )  # fmt: skip
    order = torch.arange(num_blocks, dtype=torch.int32, device=device)[None]
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    expected = reference.paged_attention(
        query[-1:].float(), few, layer, order, lens, starts, DIM**-0.5
    )
    assert _error(out, expected) < 1e-2
    assert _error(few[:, layer, 0].transpose(1, 2).flatten(0, 1)[:num_tokens], key) < 0.05


def _as_fp8(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of 78,000 blocks in the same memory, scales behind each block's codes."""
    shape = (LAYERS, 2, KV_HEADS, BLOCK)
    num_scales = torch.Size(shape).numel()
    block_bytes = num_scales * (DIM + 2)
    flat = pool.view(-1).view(torch.uint8)
    blocks = flat[: 78_000 * block_bytes].view(78_000, block_bytes)
    codes = blocks[:, : num_scales * DIM].view(torch.float8_e4m3fn).unflatten(1, (*shape, DIM))
    return codes, blocks[:, num_scales * DIM :].view(torch.float16).unflatten(1, shape)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())
