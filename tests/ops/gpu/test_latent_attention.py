"""Attention over a pool of latents against the dense float64 computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention.work import plan_decode, plan_prefill
from octavo.ops import reference
from octavo.ops.gpu.latent_attention import LatentConfig, latent_decode, latent_prefill

LENS = [1, 37, 70, 16]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
ROTATED = 8
Error = Callable[[Tensor, Tensor], float]


class Latents:
    """A pool of NaN but for the sequences' own slots; tables whose other entries are far away."""

    def __init__(
        self, lens: list[int], latent: int, block_size: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        counts = [-(-length // block_size) for length in lens]
        width = ROTATED + latent
        num_blocks, size = sum(counts) + 3, 2 * block_size * width
        whole = torch.full((num_blocks, size + 32), torch.nan, dtype=dtype, device=device)
        self.data = whole[:, :size].view(num_blocks, 2, 1, 1, block_size, width)
        self.rows = torch.randperm(len(lens) + 2, device=device)[: len(lens)].int()
        order = torch.randperm(num_blocks, device=device).int()
        shape = (len(lens) + 2, max(counts) + 2)
        self.tables = torch.full(shape, 2**31 - 1, dtype=torch.int32, device=device)
        self.lens = torch.tensor(lens, dtype=torch.int32, device=device)
        first = 0
        for row, length, count in zip(self.rows.tolist(), lens, counts, strict=True):
            blocks = order[first : first + count]
            self.tables[row, :count] = blocks
            first += count
            where = torch.arange(length, device=device)
            x = torch.randn((length, width), device=device).to(dtype)
            self.data[blocks.long()[where // block_size], 1, 0, 0, where % block_size] = x

    def expected(self, query: Tensor, starts: Tensor, scale: float, latent: int) -> Tensor:
        tables = self.tables[self.rows.long()]
        tables = torch.where(tables < len(self.data), tables, 0)
        pool = self.data.double().nan_to_num(0.0)
        return reference.paged_attention(
            query.double(), pool, 1, tables, self.lens, starts, scale, value_dim=latent
        )


def decode(
    pool: Latents, query: Tensor, latent: int, *, max_items: int = 10, padding: int = 0,
    config: LatentConfig | None = None,
) -> Tensor:  # fmt: skip
    device, num_seqs = query.device, len(pool.lens)
    items, starts = plan_decode(pool.lens.cpu().numpy(), max_items - padding, min_tokens=32)
    padded = torch.full((max_items, 3), -1, dtype=torch.int32)
    padded[: len(items)] = torch.from_numpy(items)
    start = torch.full((num_seqs + padding + 1,), len(items), dtype=torch.int32)
    start[: len(starts)] = torch.from_numpy(starts)
    nothing = torch.zeros(padding, dtype=torch.int32, device=device)
    total, heads = num_seqs + padding, query.shape[1]
    wide = torch.full((total, heads + 2, query.shape[2]), torch.nan, dtype=query.dtype)
    wide = wide.to(device)
    wide[:num_seqs, :heads] = query
    out = torch.full((total, heads, latent), torch.nan, dtype=query.dtype, device=device)
    latent_decode(
        out, wide[:, :heads], pool.data, 1, pool.tables, torch.cat((pool.rows, nothing)),
        torch.cat((pool.lens, nothing)), padded.to(device), start.to(device),
        torch.full((max_items, heads, latent), torch.nan, device=device),
        torch.full((max_items, heads), torch.nan, device=device), 0.3, config,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("heads", "latent", "block_size"), [(4, 32, 16), (3, 24, 5)])
def test_decode(
    heads: int, latent: int, block_size: int, dtype: torch.dtype, device: torch.device,
    relative_error: Error,
) -> None:  # fmt: skip
    pool = Latents(LENS, latent, block_size, dtype, device)
    query = torch.randn((len(LENS), heads, ROTATED + latent), device=device).to(dtype) / 2
    want = pool.expected(query, torch.arange(len(LENS) + 1), 0.3, latent)
    assert relative_error(decode(pool, query, latent), want) < TOLERANCE[dtype]
    # whole contexts, and one cut into many
    whole = decode(pool, query, latent, max_items=len(LENS))
    assert relative_error(whole, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("tile", [16, 64])
def test_tiles_and_padding(tile: int, device: torch.device, relative_error: Error) -> None:
    """Sequences of length 0 at the end get zeros."""
    pool = Latents(LENS, 32, 16, torch.float32, device)
    query = torch.randn((len(LENS), 4, ROTATED + 32), device=device)
    want = pool.expected(query, torch.arange(len(LENS) + 1), 0.3, 32)
    out = decode(pool, query, 32, padding=3, config=LatentConfig(tile=tile))
    assert relative_error(out[: len(LENS)], want) < 2e-6
    assert torch.equal(out[len(LENS) :], torch.zeros_like(out[len(LENS) :]))


@pytest.mark.parametrize(("heads", "tile_tokens"), [(4, 4), (3, 8)])
def test_prefill(
    heads: int, tile_tokens: int, dtype: torch.dtype, device: torch.device, relative_error: Error
) -> None:
    """Fresh prompts and chunks behind a cached prefix; tiles that are too many do nothing."""
    counts = [1, 20, 37, 16]
    pool = Latents(LENS, 32, 16, dtype, device)
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    query = torch.randn((sum(counts), heads, ROTATED + 32), device=device).to(dtype) / 2
    tiles = torch.full((25 * len(counts), 2), -1, dtype=torch.int32)
    found = plan_prefill(counts, LENS, 0, tile_tokens)
    tiles[: len(found)] = torch.from_numpy(found)
    out = torch.full((sum(counts) + 1, heads, 32), torch.nan, dtype=dtype, device=device)
    padded = torch.cat((query, torch.full_like(query[:1], torch.nan)))
    latent_prefill(
        out, padded, pool.data, 1, pool.tables, pool.rows, pool.lens, starts, tiles.to(device),
        tile_tokens, 0.3,
    )  # fmt: skip
    want = pool.expected(query, starts, 0.3, 32)
    assert relative_error(out[:-1], want) < TOLERANCE[dtype]
    assert out[-1].isnan().all()


def test_more_heads_than_rows_of_a_product(device: torch.device, relative_error: Error) -> None:
    pool = Latents([3, 20], 16, 8, torch.float32, device)
    query = torch.randn((2, 80, ROTATED + 16), device=device)
    want = pool.expected(query, torch.arange(3), 0.3, 16)
    assert relative_error(decode(pool, query, 16, max_items=4), want) < 2e-6
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    tiles, out = torch.tensor([[1, 0], [0, 0]]).int().to(device), torch.empty_like(want).float()
    latent_prefill(
        out, query, pool.data, 1, pool.tables, pool.rows, pool.lens, starts, tiles, 1, 0.3
    )
    assert relative_error(out, want) < 2e-6


def test_without_table_rows(device: torch.device) -> None:
    pool = Latents([20], 16, 4, torch.float32, device)
    query = torch.randn((20, 2, ROTATED + 16), device=device)
    tables = pool.tables[pool.rows.long()]
    starts = torch.tensor([0, 20], dtype=torch.int32, device=device)
    tiles = torch.from_numpy(plan_prefill([20], [20], 0, 32)).to(device)
    outs = []
    for args in ((tables, None), (pool.tables, pool.rows)):
        out = torch.empty((20, 2, 16), device=device)
        latent_prefill(out, query, pool.data, 1, *args, pool.lens, starts, tiles, 32, 0.3)
        outs.append(out)
    assert torch.equal(*outs)


def test_refusals(device: torch.device) -> None:
    pool = Latents([20], 16, 4, torch.float32, device)
    query, out = torch.randn((1, 2, 24), device=device), torch.empty((1, 2, 16), device=device)
    ints = torch.zeros((1, 3), dtype=torch.int32, device=device)
    starts = torch.zeros(2, dtype=torch.int32, device=device)
    scratch = torch.empty((1, 2, 16), device=device), torch.empty((1, 2), device=device)

    def call(**changed: Any) -> None:
        given: dict[str, Any] = {
            "out": out, "query": query, "kv_cache": pool.data, "layer": 1,
            "block_tables": pool.tables, "table_rows": pool.rows, "seq_lens": pool.lens,
            "items": ints, "item_start": starts, "partial": scratch[0],
            "partial_lse": scratch[1], "scale": 1.0,
        }  # fmt: skip
        latent_decode(**{**given, **changed})

    call()
    with pytest.raises(TypeError, match="query's type"):
        call(query=query.half())
    with pytest.raises(TypeError, match="int32"):
        call(seq_lens=pool.lens.long())
    with pytest.raises(ValueError, match="kv_cache must be"):
        call(kv_cache=pool.data.expand(-1, -1, 2, -1, -1, -1))
    with pytest.raises(ValueError, match="does not fit"):
        call(out=torch.empty((1, 2, 24), device=device))
    with pytest.raises(ValueError, match="layer must be in"):
        call(layer=2)
    with pytest.raises(ValueError, match="partial must be"):
        call(partial=scratch[0][:0])
    with pytest.raises(ValueError, match="heads must be dense"):
        call(query=torch.randn((1, 2, 48), device=device)[..., ::2])
