"""Fallback backend in plain torch: gathers each sequence's K and V. Any machine, several times
slower than a kernel."""

from __future__ import annotations

from torch import Tensor

from octavo.attention.base import ForwardContext, QKNorm
from octavo.ops import reference


class GatherAttention:
    """Correct everywhere; for machines without a C compiler and as a second opinion in tests."""

    name = "gather"
    replayable = False
    capturable = False

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
        if qk_norm is not None:
            query.copy_(reference.rms_norm(query, qk_norm.query_weight, qk_norm.eps))
            key.copy_(reference.rms_norm(key, qk_norm.key_weight, qk_norm.eps))
        reference.rope_and_cache(
            query, key, value, ctx.rope_rows, ctx.cos_sin, ctx.slot_mapping, ctx.kv_cache, layer
        )

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
        attended = reference.gather_attention(
            query, ctx.kv_cache, layer, ctx.tables_in_order(), ctx.seq_lens, ctx.query_start_loc,
            scale, window,
        )  # fmt: skip
        out.copy_(attended)
