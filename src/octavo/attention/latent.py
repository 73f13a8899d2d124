"""NVIDIA GPUs: attention over latents (MLA) through octavo's Triton kernels."""

from __future__ import annotations

from torch import Tensor

from octavo.attention.base import ForwardContext, QKNorm
from octavo.attention.work import prefill_tile_tokens
from octavo.ops.gpu import latent_attention, rope_cache


class LatentKernels:
    """For models whose pool has one plane; the kernels for K and V apart cannot read that.

    Prompts go over the pool's latents too, at some three times the arithmetic of attention to keys
    and values that are computed from them, and none of its memory.
    """

    name = "latent"
    replayable = False
    capturable = True
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
        assert value is None and qk_norm is None, "a latent has no value apart, and heads no norm"
        rope_cache.rope_and_cache(
            query, key, None, ctx.rope_rows, cos_sin, ctx.slot_mapping, ctx.kv_cache, None, layer,
            interleaved=interleaved,
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
        """See `AttentionBackend.attend`; without windows, soft caps and slopes, which no model
        with latents has."""
        assert not window and not soft_cap and alibi is None
        work = ctx.work
        assert work is not None, "the runner cuts the work up for this backend"
        num = work.num_decodes
        if num:
            latent_attention.latent_decode(
                out[:num], query[:num], ctx.kv_cache, layer, ctx.block_tables, ctx.table_rows,
                ctx.seq_lens if work.decode_lens is None else work.decode_lens,
                work.decode_items, work.item_start,
                ctx.workspace.partial, ctx.workspace.partial_lse, scale,
            )  # fmt: skip
        # The decodes first: in a padded step they write zeros where the prompts' rows are.
        if len(work.prefill_tiles):
            tokens = prefill_tile_tokens(query.shape[1], query.shape[2])
            latent_attention.latent_prefill(
                out, query, ctx.kv_cache, layer, ctx.block_tables, ctx.table_rows, ctx.seq_lens,
                ctx.query_start_loc, work.prefill_tiles, tokens, scale,
            )  # fmt: skip
