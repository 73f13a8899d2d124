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
    reads_behind_window = False

    def rope_and_cache(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        layer: int,
        ctx: ForwardContext,
        qk_norm: QKNorm | None,
        *,
        cos_sin: Tensor | None,
        interleaved: bool = False,
    ) -> None:
        """See `AttentionBackend.rope_and_cache`."""
        reference.rope_and_cache(
            query, key, value, ctx.rope_rows, cos_sin, ctx.slot_mapping, ctx.kv_cache, layer,
            *QKNorm.parts(qk_norm), interleaved=interleaved, kv_scales=ctx.kv_scales,
        )  # fmt: skip

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
        attended = reference.gather_attention(
            query, ctx.kv_cache, layer, ctx.tables_in_order(), ctx.seq_lens, ctx.query_start_loc,
            scale, window, soft_cap=soft_cap, alibi=alibi, kv_scales=ctx.kv_scales,
            value_dim=out.shape[-1],
        )  # fmt: skip
        out.copy_(attended)
