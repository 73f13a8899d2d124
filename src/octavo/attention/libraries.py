"""Attention by other libraries, where they are installed: FlashAttention 3 and FlashInfer.

Both read octavo's pool in place, through strided views; rope and cache writes stay octavo's. Their
steps are launched from Python: neither is recorded in a CUDA graph here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from octavo.attention.base import AttentionBackend, ForwardContext
from octavo.attention.triton import TritonAttention

_FA3 = ("flash_attn_interface", "vllm.vllm_flash_attn")
"""FlashAttention 3 as built from its own repository, and the build that vLLM's wheel carries."""
_HOPPER = (9, 0)
_WORKSPACE_BYTES = 256 << 20


def what_is_missing(
    name: str,
    capability: tuple[int, int],
    *,
    head_dim: int | None,
    fp8: bool,
    alibi: bool = False,
) -> str | None:
    """What keeps `fa3` or `flashinfer` from running here, as the end of a sentence."""
    if fp8:
        return "does not read octavo's fp8 cache, which has a scale for each token"
    if alibi:
        return "adds no slopes to scores (ALiBi), which the model needs"
    if name == "fa3":
        if _fa3_module() is None:
            return "needs FlashAttention 3 (module flash_attn_interface), which is not installed"
        if capability[0] != _HOPPER[0]:
            shown = ".".join(map(str, capability))
            return f"needs a Hopper GPU (compute capability 9.0), and this one has {shown}"
        if head_dim is not None and (head_dim % 8 or head_dim > 256):
            return f"takes head sizes up to 256 in eights, and the model's is {head_dim}"
        return None
    if find_spec("flashinfer") is None:
        return "needs the package flashinfer: pip install octavo[flashinfer]"
    if head_dim is not None and head_dim not in (64, 128, 256):
        return f"takes head sizes 64, 128 and 256, and the model's is {head_dim}"
    return None


def make(name: str) -> AttentionBackend:
    """The backend, of which nothing is missing."""
    return Fa3Attention() if name == "fa3" else FlashInferAttention()


def _fa3_module() -> str | None:
    for name in _FA3:
        top = name.split(".")[0]
        if find_spec(top) is not None and (top == name or find_spec(name) is not None):
            return name
    return None


def _paged_views(ctx: ForwardContext, layer: int) -> tuple[Tensor, Tensor]:
    """K and V of a layer, each [num_blocks, num_kv_heads, block_size, head_dim], in place."""
    return ctx.kv_cache[:, layer, 0], ctx.kv_cache[:, layer, 1]


class Fa3Attention(TritonAttention):
    """FlashAttention 3 (Shah et al. 2024) over the pool, decodes and chunks in one call."""

    name = "fa3"
    capturable = False
    reads_behind_window = True  # whole tiles, whose probabilities are 0 there: 0 times NaN is NaN

    def __init__(self) -> None:
        super().__init__()
        module = _fa3_module()
        assert module is not None, "FlashAttention 3 is not installed"
        self._is_vllms = module != _FA3[0]
        function = "flash_attn_varlen_func" if self._is_vllms else "flash_attn_with_kvcache"
        self._call: Callable[..., Any] = getattr(import_module(module), function)

    def attend(
        self,
        query: Tensor,
        layer: int,
        scale: float,
        window: int,
        ctx: ForwardContext,
        out: Tensor,
        *,
        soft_cap: float = 0.0,
        alibi: Tensor | None = None,
    ) -> None:
        """See `AttentionBackend.attend`."""
        assert alibi is None, "refused by what_is_missing"
        keys, values = (part.transpose(1, 2) for part in _paged_views(ctx, layer))
        tables = ctx.tables_in_order()
        common: dict[str, Any] = {
            "cu_seqlens_q": ctx.query_start_loc,
            "max_seqlen_q": len(query),
            "softmax_scale": scale,
            "causal": True,
            "window_size": (window - 1, 0) if window else (-1, -1),
        }
        if soft_cap:
            common["softcap"] = soft_cap
        if self._is_vllms:
            found = self._call(
                q=query, k=keys, v=values, block_table=tables, seqused_k=ctx.seq_lens,
                max_seqlen_k=tables.shape[1] * keys.shape[1], fa_version=3, **common,
            )  # fmt: skip
        else:
            found = self._call(
                q=query, k_cache=keys, v_cache=values, page_table=tables,
                cache_seqlens=ctx.seq_lens, **common,
            )  # fmt: skip
        out.copy_(found[0] if isinstance(found, tuple) else found)


class FlashInferAttention(TritonAttention):
    """FlashInfer (Ye et al. 2025): plans each step on the host, once for each window in use."""

    name = "flashinfer"
    capturable = False
    reads_behind_window = True

    def __init__(self) -> None:
        super().__init__()
        self._make: Callable[..., Any] = import_module(
            "flashinfer"
        ).BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._planned_for: Callable[[], ForwardContext | None] = lambda: None
        # By a weak reference: a pool that moved meanwhile must not be kept by the last step.
        self._wrappers: dict[tuple[int, float, float], Any] = {}
        """By window, scale and soft cap, for the step that was planned last."""

    def attend(
        self,
        query: Tensor,
        layer: int,
        scale: float,
        window: int,
        ctx: ForwardContext,
        out: Tensor,
        *,
        soft_cap: float = 0.0,
        alibi: Tensor | None = None,
    ) -> None:
        """See `AttentionBackend.attend`."""
        assert alibi is None, "refused by what_is_missing"
        if self._planned_for() is not ctx:
            self._planned_for, self._wrappers = weakref.ref(ctx), {}
        kind = window, scale, soft_cap
        wrapper = self._wrappers.get(kind)
        if wrapper is None:
            wrapper = self._wrappers[kind] = self._plan(query, *kind, ctx)
        out.copy_(wrapper.run(query, _paged_views(ctx, layer)))

    def _plan(
        self, query: Tensor, window: int, scale: float, soft_cap: float, ctx: ForwardContext
    ) -> Any:
        _, _, _, num_kv_heads, block_size, head_dim = ctx.kv_cache.shape
        seq_lens = ctx.seq_lens
        num_blocks = (seq_lens + block_size - 1) // block_size
        tables = ctx.tables_in_order()
        column = torch.arange(tables.shape[1], device=tables.device)
        indptr = torch.zeros(len(seq_lens) + 1, dtype=torch.int32, device=tables.device)
        indptr[1:] = num_blocks.cumsum(0)
        wrapper = self._make(self._workspace, "HND")
        wrapper.plan(
            ctx.query_start_loc,
            indptr,
            tables[column < num_blocks[:, None]],
            (seq_lens - 1) % block_size + 1,
            query.shape[1],
            num_kv_heads,
            head_dim,
            block_size,
            causal=True,
            sm_scale=scale,
            window_left=window - 1,
            logits_soft_cap=soft_cap,
            q_data_type=query.dtype,
            kv_data_type=ctx.kv_cache.dtype,
        )
        return wrapper
