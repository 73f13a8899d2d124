"""What a forward pass knows besides the weights, and what an attention backend must do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.layers.workspace import Workspace


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step's batch, flat: `num_tokens` tokens of `num_seqs` sequences, without padding.

    Sequence `i` owns tokens `query_start_loc[i] .. query_start_loc[i + 1] - 1`; they are the last
    ones of its `seq_lens[i]` tokens of context.
    """

    kv_cache: Tensor
    """[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]: the pool; 2 is K, V."""
    block_tables: Tensor
    """[num_seqs, max_blocks] int32: logical to physical block."""
    seq_lens: Tensor
    """[num_seqs] int32: context length, this step's tokens included."""
    query_start_loc: Tensor
    """[num_seqs + 1] int32."""
    slot_mapping: Tensor
    """[num_tokens] int64: where each token's K and V go; block id * block_size + offset."""
    rope_rows: Tensor
    """[num_tokens] int64: each token's row in `cos_sin`; its position, but for dynamic rope."""
    cos_sin: Tensor
    """[rows, rotary_dim] float32: cosines, then sines."""
    workspace: Workspace
    """Where the activations go."""


class AttentionBackend(Protocol):
    """Rotates, writes and reads K and V of one layer. A backend holds no state of a step."""

    name: str
    replayable: bool
    """Whether it consists of kernel calls that `ops.cpu.trace` records, and of nothing else."""

    def rope_and_cache(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: int,
        ctx: ForwardContext,
        qk_norm: QKNorm | None,
    ) -> None:
        """Normalise (if asked) and rotate query and key in place; put key and value in the pool.

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim].
        """
        ...

    def attend(
        self,
        query: Tensor,
        layer: int,
        scale: float,
        window: int,
        ctx: ForwardContext,
        out: Tensor,
    ) -> None:
        """Causal attention over the pool: [num_tokens, num_heads, head_dim] -> out, the same.

        `window` > 0 limits a token to the last `window` positions, itself included.
        """
        ...


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMSNorm over each head of query and key before rope (Qwen3)."""

    query_weight: Tensor
    """[head_dim]"""
    key_weight: Tensor
    """[head_dim]"""
    eps: float
