"""What a decoder's weights, its steps and the KV of a token take, counted from its shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from octavo.arch import MLAConfig, MoEConfig
from octavo.kv.shape import KVShape
from octavo.kv_groups import groups_of_windows
from octavo.util import cdiv, human_bytes

_LOGIT_BYTES = 4
"""Logits are float32."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder as costs and pools see it. Sizes in elements, unless the name says bytes."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    """Longest sequence, in tokens."""
    tied: bool = False
    """Whether the head is the embedding."""
    gated: bool = True
    """Whether the MLP has a gate: three matrices instead of two."""
    num_learned_positions: int = 0
    """Rows of a table of positions; 0 where positions are rotated in."""
    num_norms: int = 2
    """Norms of a layer over the residual stream; Gemma has four, OLMo 1 none with weights."""
    biased: bool = False
    """Whether every matrix has a bias and norms have two vectors (OPT)."""
    qkv_biased: bool = False
    """Whether q, k and v alone have one."""
    qk_norm: str = "none"
    """One of `octavo.arch.QK_NORMS`."""
    sliding_windows: tuple[int, ...] = ()
    """Of each layer the tokens that it looks back, 0 for all; empty: all look at all."""
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    element_bytes: int = 2
    """Bytes of a weight, and of a number in the KV cache."""
    source: str = ""
    """Where the facts are from."""

    # -- weights

    @cached_property
    def layer_windows(self) -> tuple[int, ...]:
        """Of each layer the tokens that it looks back, 0 for all; one 0 where all do."""
        return self.sliding_windows if any(self.sliding_windows) else (0,)

    @cached_property
    def attention_params(self) -> int:
        """Weights of the matrices of one layer's attention. Of a latent's each token meets each of
        them once as well: in front of queries and behind results, instead of keys and values."""
        hidden, mla = self.hidden_size, self.mla
        if mla is None:
            return 2 * hidden * (self._q_size + self._kv_size)
        q_size = self.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        rank = mla.q_lora_rank
        queries = hidden * q_size if rank is None else rank * (hidden + q_size)
        latent = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
        out_of_it = mla.kv_lora_rank * self.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        return queries + latent + out_of_it + self.num_heads * mla.v_head_dim * hidden

    @cached_property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return 0 if self.moe is None else self.num_layers - len(self.moe.dense_layers)

    @cached_property
    def expert_params(self) -> int:
        """Weights of one expert."""
        return 0 if self.moe is None else self._mlp_params(self.moe.expert_size)

    @cached_property
    def common_params(self) -> int:
        """Weights of the matrices of all layers that every token is multiplied with: all of them
        but the experts."""
        dense = (self.num_layers - self.num_moe_layers) * self._mlp_params(self.intermediate_size)
        total = self.num_layers * self.attention_params + dense
        if self.moe is not None:
            router = self.hidden_size * self.moe.num_experts
            shared = self._mlp_params(self.moe.shared_size)
            gate = self.hidden_size if self.moe.shared_gate else 0
            total += self.num_moe_layers * (router + shared + gate)
        return total

    @cached_property
    def token_params(self) -> int:
        """Weights of the layers' matrices that one token is multiplied with: of the experts those
        that it is sent to."""
        if self.moe is None:
            return self.common_params
        chosen = self.moe.experts_per_token * self.expert_params
        return self.common_params + self.num_moe_layers * chosen

    @cached_property
    def head_params(self) -> int:
        """Weights of the head: what each token that samples is multiplied with."""
        return self.vocab_size * self.hidden_size

    @cached_property
    def active_params(self) -> int:
        """Weights that a token takes part in, as model cards count them: without experts that it
        is not sent to, the embedding included."""
        return self.num_params - self._all_experts + self.token_params - self.common_params

    @cached_property
    def num_params(self) -> int:
        """All weights, tied ones once."""
        hidden, q, kv = self.hidden_size, self._q_size, self._kv_size
        vectors = self.num_norms * hidden * (2 if self.biased else 1)
        if self.biased:
            vectors += q + 2 * kv + hidden + self.intermediate_size + hidden
        elif self.qkv_biased:
            vectors += q + 2 * kv
        vectors += {"none": 0, "head": 2 * self.head_dim}.get(self.qk_norm, q + kv)
        if self.mla is not None:
            vectors += self.mla.kv_lora_rank + (self.mla.q_lora_rank or 0)
        final_norm = hidden * (2 if self.biased else 1) if self.num_norms else 0
        tables = self.head_params * (1 if self.tied else 2) + self.num_learned_positions * hidden
        layers = self.common_params + self._all_experts + self.num_layers * vectors
        return layers + final_norm + tables

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.num_params * self.element_bytes

    def read_bytes(self, num_tokens: int) -> float:
        """Bytes of the weights that a step of so many tokens reads: of an embedding that is not the
        head only the rows of its tokens; of E experts, k of which each token is sent to, the
        E (1 - (1 - k / E) ^ tokens) that are expected to get any, if all are sent to alike."""
        read = float(self.common_params + self.head_params)
        if self.moe is not None:
            missed = (1 - self.moe.experts_per_token / self.moe.num_experts) ** num_tokens
            read += self._all_experts * (1 - missed)
        return read * self.element_bytes

    def _mlp_params(self, size: int) -> int:
        return (3 if self.gated else 2) * self.hidden_size * size

    @property
    def _all_experts(self) -> int:
        return (
            0
            if self.moe is None
            else (self.num_moe_layers * self.moe.num_experts * self.expert_params)
        )

    @property
    def _q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def _kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    # -- attention

    @cached_property
    def pair_flops(self) -> int:
        """Of one token of a prompt and one before it, in one layer: scores and values, two a
        product. Latents are attended to as they lie: wider heads, values the latent alone."""
        if self.mla is None:
            return 4 * self.num_heads * self.head_dim
        rank = self.mla.kv_lora_rank
        return 2 * self.num_heads * (rank + self.mla.qk_rope_head_dim + rank)

    def kv_shape(self, num_gpus: int = 1, max_model_len: int | None = None) -> KVShape:
        """What one GPU of so many keeps of a token: its share of the KV heads, whole ones; all of a
        latent. Layers with a window are in groups as the engine's, for sequences of at most
        `max_model_len` tokens; None: as long as the model can have them."""
        if self.mla is None:
            num_heads, head_dim, planes = cdiv(self.num_kv_heads, num_gpus), self.head_dim, 2
        else:
            num_heads, planes = 1, 1
            head_dim = self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
        stated = self.sliding_windows or (0,) * self.num_layers
        groups = groups_of_windows(stated, max_model_len or self.max_position_embeddings)
        return KVShape(
            len(groups.groups) * groups.layers_per_block,
            num_heads,
            head_dim,
            self.element_bytes,
            planes=planes,
            windows=groups.windows,
            num_padding=groups.num_padding,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's K and V (or latent) over all layers, none of which has given it
        up."""
        shape = self.kv_shape()
        return shape.bytes_per_token // shape.num_layers * self.num_layers

    def activation_bytes(self, num_tokens: int, num_samples: int, num_gpus: int = 1) -> int:
        """An estimate of a GPU's working set in a step: the residual stream and its norm, q, k, v
        and the attended values, both halves of the MLP (of the experts of each token), and the
        logits in float32."""
        shared = 2 * self._mlp_width
        if self.mla is None:
            shared += 2 * (self._q_size + self._kv_size)
        else:  # queries, then what they are in front of the latent, and what comes back
            nope, rope = self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim
            rank = self.mla.kv_lora_rank
            shared += self.num_heads * (nope + rope + 2 * rank + rope) + rank + rope
        width = 2 * self.hidden_size + cdiv(shared, num_gpus)
        return num_tokens * width * self.element_bytes + (
            num_samples * self.vocab_size * _LOGIT_BYTES
        )

    @property
    def _mlp_width(self) -> int:
        """Largest intermediate size of a token in a layer."""
        dense = self.intermediate_size if self.num_moe_layers < self.num_layers else 0
        if self.moe is None:
            return dense
        return max(dense, self.moe.experts_per_token * self.moe.expert_size + self.moe.shared_size)

    def __str__(self) -> str:
        active = f" ({self.active_params / 1e9:,.2f} active)" if self.moe is not None else ""
        return (
            f"{self.name}: {self.num_params / 1e9:,.2f} billion parameters{active}, "
            f"{human_bytes(self.weight_bytes)}; KV {self.kv_shape()}"
        )
