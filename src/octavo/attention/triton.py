"""NVIDIA GPUs through octavo's Triton kernels: needs torch and triton, no CUDA toolkit."""

from __future__ import annotations

from torch import Tensor

from octavo.attention.base import ForwardContext, QKNorm
from octavo.ops.gpu import decode_attention, prefill_attention, rope_cache


class TritonAttention:
    """Decodes and chunks of prompts go to kernels of their own; a mixed step launches both."""

    name = "triton"
    replayable = False
    capturable = True

    def rope_and_cache(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: int,
        ctx: ForwardContext,
        qk_norm: QKNorm | None,
    ) -> None:
        """See `AttentionBackend.rope_and_cache`."""
        q_weight = k_weight = None
        eps = 0.0
        if qk_norm is not None:
            q_weight, k_weight, eps = qk_norm.query_weight, qk_norm.key_weight, qk_norm.eps
        rope_cache.rope_and_cache(
            query, key, value, ctx.rope_rows, ctx.cos_sin, ctx.slot_mapping, ctx.kv_cache,
            ctx.kv_scales, layer, q_weight, k_weight, eps,
        )  # fmt: skip

    def attend(
        self,
        query: Tensor,
        layer: int,
        scale: float,
        window: int,
        ctx: ForwardContext,
        out: Tensor,
    ) -> None:
        """See `AttentionBackend.attend`."""
        work = ctx.work
        assert work is not None, "the runner cuts the work up for this backend"
        num = work.num_decodes
        if num:
            decode_attention.paged_decode(
                out[:num], query[:num], ctx.kv_cache, ctx.kv_scales, layer, ctx.block_tables,
                ctx.table_rows, ctx.seq_lens, work.decode_items, work.item_start,
                ctx.workspace.partial, ctx.workspace.partial_lse, scale, window,
            )  # fmt: skip
        if len(work.prefill_tiles):
            prefill_attention.paged_prefill(
                out, query, ctx.kv_cache, ctx.kv_scales, layer, ctx.block_tables, ctx.table_rows,
                ctx.seq_lens, ctx.query_start_loc, work.prefill_tiles, scale, window,
            )  # fmt: skip
