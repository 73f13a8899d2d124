"""CPU backend on octavo's C kernels: reads and writes the pool in place through the block table."""

from __future__ import annotations

from torch import Tensor

from octavo.attention.base import ForwardContext, QKNorm
from octavo.ops.cpu import attention, rope_cache


class CpuAttention:
    """One C call rotates and writes, one C call attends; decodes, chunks and mixtures alike."""

    name = "cpu"
    replayable = True
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
        rope_cache.rope_and_cache(
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
        attention.paged_attention(
            out, query, ctx.kv_cache, layer, ctx.block_tables, ctx.seq_lens, ctx.query_start_loc,
            scale, window, soft_cap=soft_cap, alibi=alibi, kv_scales=ctx.kv_scales,
        )  # fmt: skip
