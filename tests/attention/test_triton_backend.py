"""The Triton backend's own part: which keys and values a fresh prompt attends to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.attention.base import AttentionWork, ForwardContext
from octavo.attention.triton import TritonAttention
from octavo.attention.work import plan_prefill, prefill_tile_tokens

TOKENS, HEADS, DIM, BLOCK = 5, 2, 32, 8
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def context(qkv: torch.Tensor, fresh: bool) -> ForwardContext:
    tiles = torch.from_numpy(
        plan_prefill([TOKENS], [TOKENS], 0, prefill_tile_tokens(1, DIM))
    ).to(DEVICE)  # fmt: skip
    nothing, positions = int32([])[:, None].expand(0, 2), torch.arange(TOKENS, device=DEVICE)
    ones, zeros = (f((TOKENS, DIM // 2), device=DEVICE) for f in (torch.ones, torch.zeros))
    return ForwardContext(
        kv_cache=torch.zeros((2, 1, 2, HEADS, BLOCK, DIM), device=DEVICE),
        block_tables=int32([[1]]),
        seq_lens=int32([TOKENS]),
        query_start_loc=int32([0, TOKENS]),
        slot_mapping=BLOCK + positions,
        rope_rows=positions,
        cos_sin=torch.cat((ones, zeros), dim=1),
        workspace=SimpleNamespace(qkv=qkv, partial=None, partial_lse=None),  # type: ignore[arg-type]
        work=AttentionWork(
            0, int32([]).view(0, 3), int32([0]), nothing if fresh else tiles,
            tiles if fresh else None,
        ),
    )  # fmt: skip


def attended(qkv: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
    query, key, value = (x.view(TOKENS, HEADS, DIM) for x in qkv.split(HEADS * DIM, dim=1))
    backend, out = TritonAttention(reads_fresh=True), torch.full_like(query.contiguous(), torch.nan)
    backend.rope_and_cache(query, key, value, 0, ctx, None, cos_sin=ctx.cos_sin)
    backend.attend(query, 0, DIM**-0.5, 0, ctx, out)
    return out


def test_a_fresh_prompt_attends_to_what_was_projected() -> None:
    torch.manual_seed(0)
    qkv = torch.randn((TOKENS + 2, 3 * HEADS * DIM), device=DEVICE)
    paged, fresh = (attended(qkv[:TOKENS], context(qkv, is_fresh)) for is_fresh in (False, True))
    assert paged.isfinite().all()
    torch.testing.assert_close(fresh, paged, atol=1e-5, rtol=0)


def test_a_query_from_elsewhere_is_a_bug_of_the_caller() -> None:
    qkv = torch.randn((TOKENS, 3 * HEADS * DIM), device=DEVICE)
    with pytest.raises(AssertionError, match="no part of the workspace"):
        attended(qkv, context(qkv.clone(), fresh=True))
