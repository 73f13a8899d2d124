"""What a forward pass knows besides the weights, and what an attention backend must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.layers.workspace import Workspace


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ForwardContext:
    """One step's batch, flat: `num_tokens` tokens of `num_seqs` sequences.

    Sequence `i` owns tokens `query_start_loc[i] .. query_start_loc[i + 1] - 1`; they are the last
    ones of its `seq_lens[i]` tokens of context. Recorded steps are padded with sequences of length
    0, and with tokens that have slot -1: one each, or of no sequence where prompts are in the step.
    """

    kv_cache: Tensor
    """[max_blocks, num_layers, planes, num_kv_heads, block_size, head_dim]: the pool, and the
    addresses into which it can grow; planes are K and V, or one latent. Where layers are in several
    groups (`octavo.kv_groups`) `num_layers` is those of one."""
    block_tables: Tensor
    """[num_seqs, max_blocks] int32: logical to physical block. With `table_rows`, one row for each
    sequence that there can be. What is behind the window of a group's layers may be -1, or a block
    that others have by now: never to be read."""
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
    local_cos_sin: Tensor | None = None
    """Like `cos_sin`, for layers with a window, where those have a rope of their own."""
    kv_scales: Tensor | None = None
    """[num_blocks, num_layers, 2, num_kv_heads, block_size] float16: of a cache of codes (fp8,
    int8), what each token's codes of each head are multiplied by."""
    table_rows: Tensor | None = None
    """[num_seqs] int32: the row of `block_tables` of each sequence; None: its own number."""
    work: AttentionWork | None = None
    """How the step's attention is cut up; for kernels that want it."""
    other_groups: tuple[ForwardContext, ...] = ()
    """The same step for the further groups of layers, which have block tables and slots of their
    own; this one is the first group's."""

    def with_groups(
        self, block_tables: Sequence[Tensor], slot_mapping: Sequence[Tensor]
    ) -> ForwardContext:
        """The same with further groups, whose tables and slots these are."""
        if not block_tables:
            return self
        others = zip(block_tables, slot_mapping, strict=True)
        return replace(
            self,
            other_groups=tuple(
                replace(self, block_tables=tables, slot_mapping=slots) for tables, slots in others
            ),
        )

    def of_group(self, group: int) -> ForwardContext:
        """As the layers of a group see the step."""
        return self.other_groups[group - 1] if group else self

    def tables_in_order(self) -> Tensor:
        """[num_seqs, max_blocks] int32: the block tables in the order of the batch."""
        if self.table_rows is None:
            return self.block_tables
        return self.block_tables.index_select(0, self.table_rows)


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """A step's attention in pieces of about equal size; made by `attention.work`.

    The first `num_decodes` sequences compute one token each; the others are chunks of prompts.
    """

    num_decodes: int
    decode_items: Tensor
    """[max_items, 3] int32: (sequence, first token, end) of a piece of a decode's context; sequence
    -1 where there are fewer."""
    item_start: Tensor
    """[num_decodes + 1] int32: each decode's first item."""
    prefill_tiles: Tensor
    """[num_tiles, 2] int32: (sequence, first token of the tile within its chunk); sequence -1
    where there are fewer."""
    fresh_tiles: Tensor | None = None
    """[num_tiles, 2] int32, likewise: of chunks that begin at position 0 and are in no other tile,
    where the backend attends to those without the pool; None: there are none."""
    decode_lens: Tensor | None = None
    """[num_decodes] int32: in a recorded step with prompts `num_decodes` is the most that there can
    be, and this is the context length of those that there are, then 0. The rows behind theirs are
    tokens of prompts. None: `seq_lens` says it."""


class AttentionBackend(Protocol):
    """Rotates, writes and reads K and V of one layer. A backend holds no state of a step."""

    name: str
    replayable: bool
    """Whether it consists of kernel calls that `ops.cpu.trace` records, and of nothing else."""
    capturable: bool
    """Whether steps can be recorded as CUDA graphs: kernels only, whose grids and addresses
    do not depend on the lengths of the sequences."""
    reads_behind_window: bool
    """Whether it may read blocks that lie wholly behind a token's window, so that none may be given
    back while their sequence runs."""

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
        """Normalise (if asked) and rotate query and key in place; put key and value in the pool.

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim];
        value is None where the pool has one plane (a latent, which is key and value). cos_sin: the
        layer's table, of which `ctx.rope_rows` are taken: its rotary_dim first elements of a head
        are rotated, in halves, or in pairs (2 i, 2 i + 1) if `interleaved`. None: no rotation.
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
        *,
        soft_cap: float = 0.0,
        alibi: Tensor | None = None,
    ) -> None:
        """Causal attention over the pool: [num_tokens, num_heads, head_dim] -> out, the same; where
        the pool has one plane, out is [.., value_dim], the last value_dim elements of keys being
        the values.

        `window` > 0 limits a token to the last `window` positions, itself included. Blocks that lie
        wholly before it are not read, nor is their entry in the block table. `soft_cap` c > 0 turns
        scores s into c tanh(s / c) (Gemma 2); alibi: [num_heads] float32 slopes, with which a token
        at t adds slope (j - t) to its score for position j (Press et al. 2022).
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

    @staticmethod
    def parts(norm: QKNorm | None) -> tuple[Tensor | None, Tensor | None, float]:
        """(Query's weight, key's weight, eps), as kernels take them; without a norm no weights."""
        return (None, None, 0.0) if norm is None else (norm.query_weight, norm.key_weight, norm.eps)
