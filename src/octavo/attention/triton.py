"""NVIDIA GPUs through octavo's Triton kernels: needs torch and triton, no CUDA toolkit."""

from __future__ import annotations

from torch import Tensor

from octavo.attention.base import ForwardContext, QKNorm
from octavo.ops.gpu import decode_attention, fresh_attention, prefill_attention, rope_cache

_FRESH_TOKENS = 256
"""From so many tokens on, a prompt's first chunk is quicker without block tables (H200)."""


class TritonAttention:
    """Decodes and chunks of prompts go to kernels of their own; a mixed step launches both.

    reads_fresh: whether chunks that begin at position 0 may attend to the step's own K and V
    instead of the pool's; not where the pool rounds them (fp8), as tokens would then depend on how
    a prompt is cut.
    """

    name = "triton"
    replayable = False
    capturable = True
    reads_behind_window = False

    def __init__(self, *, reads_fresh: bool = False) -> None:
        self.fresh_tokens = _FRESH_TOKENS if reads_fresh else 0
        """Length from which the runner names a first chunk in `AttentionWork.fresh_tiles`."""

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
            query, key, value, ctx.rope_rows, cos_sin, ctx.slot_mapping, ctx.kv_cache,
            ctx.kv_scales, layer, *QKNorm.parts(qk_norm), interleaved=interleaved,
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
        work = ctx.work
        assert work is not None, "the runner cuts the work up for this backend"
        num = work.num_decodes
        if num:
            decode_attention.paged_decode(
                out[:num], query[:num], ctx.kv_cache, ctx.kv_scales, layer, ctx.block_tables,
                ctx.table_rows, ctx.seq_lens if work.decode_lens is None else work.decode_lens,
                work.decode_items, work.item_start,
                ctx.workspace.partial, ctx.workspace.partial_lse, scale, window, soft_cap,
                alibi=alibi,
            )  # fmt: skip
        # The decodes first: in a padded step they write zeros where the prompts' rows are.
        if len(work.prefill_tiles):
            prefill_attention.paged_prefill(
                out, query, ctx.kv_cache, ctx.kv_scales, layer, ctx.block_tables, ctx.table_rows,
                ctx.seq_lens, ctx.query_start_loc, work.prefill_tiles, scale, window, soft_cap,
                alibi=alibi,
            )  # fmt: skip
        if work.fresh_tiles is not None and len(work.fresh_tiles):
            key, value = _own_keys_and_values(query, ctx)
            fresh_attention.fresh_prefill(
                out, query, key, value, ctx.query_start_loc, work.fresh_tiles, scale, window,
                soft_cap, alibi=alibi,
            )  # fmt: skip


def _own_keys_and_values(query: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
    """[num_tokens, num_kv_heads, head_dim] each: the step's own, rotated, as projected."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = ctx.kv_cache.shape[3]
    whole = ctx.workspace.qkv
    assert query.data_ptr() == whole.data_ptr() and query.stride(0) == whole.stride(0), (
        "the query is no part of the workspace's qkv: where its keys and values lie is not known"
    )
    qkv = whole[:num_tokens].view(num_tokens, -1, head_dim)
    key, value = qkv[:, num_heads:].split(num_kv_heads, dim=1)
    return key, value
