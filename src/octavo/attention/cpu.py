"""CPU backend on octavo's C kernels: reads and writes the pool in place through the block table."""

from __future__ import annotations

from torch import Tensor

from octavo.attention.base import ForwardContext, QKNorm
from octavo.ops.cpu import attention, elementwise


class CpuAttention:
    """One C call rotates and writes, one C call attends; decodes, chunks and mixtures alike."""

    name = "cpu"
    replayable = True
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
        elementwise.rope_and_cache(
            query, key, value, ctx.rope_rows, ctx.cos_sin, ctx.slot_mapping, ctx.kv_cache, layer,
            *QKNorm.parts(qk_norm),
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
        attention.paged_attention(
            out, query, ctx.kv_cache, layer, ctx.block_tables, ctx.seq_lens, ctx.query_start_loc,
            scale, window,
        )  # fmt: skip
