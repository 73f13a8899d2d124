"""Backends of other libraries: what they are asked for, against stand-ins that compute it.

On a GPU with FlashAttention 3 installed, the real one runs in tests/gpu.
"""

from __future__ import annotations

import sys
import types
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention import libraries
from octavo.attention.base import ForwardContext
from octavo.layers.workspace import Workspace
from octavo.ops import reference

HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 4, 2, 64, 8, 3
LENS, COUNTS = [21, 9, 1, 40], [1, 9, 1, 13]
"""A decode behind 20 tokens, a whole prompt, one token, a chunk behind 27."""


@pytest.fixture
def step() -> tuple[ForwardContext, Tensor]:
    """A step over a shuffled pool, and its query."""
    torch.manual_seed(0)
    num_blocks = 14
    pool = torch.randn(num_blocks, LAYERS, 2, KV_HEADS, BLOCK, DIM)
    order, tables = torch.randperm(num_blocks).int(), torch.zeros(6, 8, dtype=torch.int32)
    rows, first = torch.tensor([4, 0, 5, 2], dtype=torch.int32), 0
    for row, length in zip(rows.tolist(), LENS, strict=True):
        num = -(-length // BLOCK)
        tables[row, :num] = order[first : first + num]
        first += num
    starts = torch.tensor([0, *COUNTS]).cumsum(0).int()
    nothing: Any = torch.zeros(0)
    context = ForwardContext(
        kv_cache=pool,
        block_tables=tables,
        seq_lens=torch.tensor(LENS, dtype=torch.int32),
        query_start_loc=starts,
        slot_mapping=nothing,
        rope_rows=nothing,
        cos_sin=nothing,
        workspace=types.SimpleNamespace(spec=Workspace),  # type: ignore[arg-type]
        table_rows=rows,
    )
    return context, torch.randn(int(starts[-1]), HEADS, DIM)


def expected(
    context: ForwardContext, query: Tensor, layer: int, window: int, soft_cap: float = 0.0
) -> Tensor:
    assert context.table_rows is not None
    tables = context.block_tables[context.table_rows.long()]
    return reference.paged_attention(
        query, context.kv_cache, layer, tables, context.seq_lens, context.query_start_loc,
        DIM**-0.5, window, soft_cap=soft_cap,
    )  # fmt: skip


def dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lens: Tensor,
    starts: Tensor,
    scale: float,
    window: int,
    soft_cap: float = 0.0,
) -> Tensor:
    """What both libraries compute; keys and values [num_blocks, heads, block, dim]."""
    pool = torch.stack((keys, values), dim=1)[:, None]
    return reference.paged_attention(
        query, pool, 0, tables, lens, starts, scale, window, soft_cap=soft_cap
    ).to(query.dtype)


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (7, 0.0), (7, 1.5)])
def test_fa3(
    monkeypatch: pytest.MonkeyPatch,
    step: tuple[ForwardContext, Tensor],
    window: int,
    soft_cap: float,
) -> None:
    def flash_attn_with_kvcache(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, *, page_table: Tensor, cache_seqlens: Tensor,
        cu_seqlens_q: Tensor, max_seqlen_q: int, softmax_scale: float, causal: bool,
        window_size: tuple[int, int], softcap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        assert k_cache.stride(-1) == 1 and k_cache.shape[1:] == (BLOCK, KV_HEADS, DIM)
        assert causal and max_seqlen_q >= max(COUNTS) and page_table.dtype == torch.int32
        left, right = window_size
        assert right == (0 if left >= 0 else -1)
        keys, values = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        return dense(
            q, keys, values, page_table, cache_seqlens, cu_seqlens_q, softmax_scale, left + 1,
            softcap,
        )  # fmt: skip

    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(libraries, "_fa3_module", lambda: module.__name__)
    context, query = step
    out = torch.full_like(query, torch.nan)
    libraries.make("fa3").attend(query, 1, DIM**-0.5, window, context, out, soft_cap=soft_cap)
    found = expected(context, query, 1, window, soft_cap)
    torch.testing.assert_close(out.double(), found, atol=1e-5, rtol=0)


class StandInWrapper:
    """FlashInfer's paged prefill, by the reference."""

    num_plans = 0

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        assert kv_layout == "HND" and workspace.dtype == torch.uint8

    def plan(
        self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor,
        num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, *, causal: bool,
        sm_scale: float, window_left: int, logits_soft_cap: float, q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert (num_heads, num_kv_heads, head_dim, page_size) == (HEADS, KV_HEADS, DIM, BLOCK)
        assert causal and q_data_type == kv_data_type == torch.float32
        pages = indptr.diff()
        self._tables = torch.zeros(len(pages), int(pages.max()), dtype=torch.int32)
        for i, num in enumerate(pages.tolist()):
            self._tables[i, :num] = indices[int(indptr[i]) : int(indptr[i + 1])]
        self._lens = (pages - 1) * page_size + last_page_len
        self._starts, self._scale, self._window = qo_indptr, sm_scale, window_left + 1
        self._soft_cap = logits_soft_cap
        StandInWrapper.num_plans += 1

    def run(self, query: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        return dense(
            query, *cache, self._tables, self._lens, self._starts, self._scale, self._window,
            self._soft_cap,
        )  # fmt: skip


def test_flashinfer_plans_a_step_once(
    monkeypatch: pytest.MonkeyPatch, step: tuple[ForwardContext, Tensor]
) -> None:
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = StandInWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **(k | {"device": "cpu"})))
    backend = libraries.make("flashinfer")
    monkeypatch.undo()
    context, query = step
    StandInWrapper.num_plans = 0
    for layer, window, cap in ((0, 0, 0.0), (1, 7, 0.0), (2, 0, 0.0), (1, 7, 1.5)):
        out = torch.full_like(query, torch.nan)
        backend.attend(query, layer, DIM**-0.5, window, context, out, soft_cap=cap)
        found = expected(context, query, layer, window, cap)
        torch.testing.assert_close(out.double(), found, atol=1e-5, rtol=0)
    assert StandInWrapper.num_plans == 3, "once for each window and soft cap"
    again = replace(context)
    backend.attend(query, 0, DIM**-0.5, 0, again, out)
    assert StandInWrapper.num_plans == 4, "another step"
    gone = weakref.ref(again)
    del again
    assert gone() is None, "the backend holds the step, and with it the pool"


def test_what_is_missing_is_said() -> None:
    old = libraries.what_is_missing("fa3", (8, 0), head_dim=128, fp8=False)
    assert old is not None and ("not installed" in old or "Hopper" in old)
    assert "fp8" in str(libraries.what_is_missing("flashinfer", (9, 0), head_dim=128, fp8=True))
    for name in ("fa3", "flashinfer"):
        told = libraries.what_is_missing(name, (9, 0), head_dim=128, fp8=False, alibi=True)
        assert "slopes" in str(told)
