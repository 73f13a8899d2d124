"""The one decoder of all families, which differ by the flags of `ModelArch`.

Weights arrive one at a time under their canonical names: those of Hugging Face's Llama, extended
(`octavo.weights.names`). A layer that needs several (q, k and v; gate and up) packs them when the
last has come and keeps nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.arch import ModelArch
from octavo.attention.base import AttentionBackend, ForwardContext
from octavo.errors import UnsupportedModelError
from octavo.layers.alibi import alibi_slopes
from octavo.layers.embedding import Embedding, make_embedding
from octavo.layers.linear import Linear, make_linear
from octavo.layers.norm import Norm
from octavo.layers.quantized import Weight
from octavo.layers.residual import scale_embeddings
from octavo.layers.rope import RotaryTable
from octavo.layers.workspace import Workspace
from octavo.models.layer import DecoderLayer, norm_of
from octavo.models.mla import LatentAttention
from octavo.models.mlp import DenseMLP
from octavo.models.moe import MoEMLP
from octavo.models.self_attention import SelfAttention
from octavo.models.sublayer import Arrived, Pending, Shapes, Sublayer, linear_of

_EMBED, _POSITIONS = "model.embed_tokens.weight", "model.embed_positions.weight"
_HEAD = "lm_head.weight"


class Decoder:
    """Embedding, layers, final norm and head. Built empty; `load` fills it.

    arch: the shape; attention: the backend of every layer; dtype: computation type; max_model_len:
    positions to make rotary tables for; quantize: how plain weights of layers are quantized as they
    arrive (as for `make_linear`), quantize_head: the same for the head and the embedding.
    """

    embed: Embedding
    final_norm: Norm
    head: Linear
    embed_positions: Tensor | None = None
    """[max_position_embeddings, hidden_size] of models that learn positions."""

    def __init__(
        self,
        arch: ModelArch,
        attention: AttentionBackend,
        dtype: torch.dtype,
        max_model_len: int,
        device: torch.device,
        quantize: str | None = None,
        quantize_head: str | None = None,
    ) -> None:
        self.arch, self.attention = arch, attention
        self.dtype, self.device = dtype, device
        self.quantize, self.quantize_head = quantize, quantize_head
        self.rotary = RotaryTable(
            arch.rope if arch.positions == "rope" else None, max_model_len, device
        )
        self.local_rotary = None
        if arch.local_rope is not None:
            self.local_rotary = RotaryTable(arch.local_rope, max_model_len, device)
            if self.rotary.is_dynamic or self.local_rotary.is_dynamic:
                raise UnsupportedModelError(
                    "rope scaling that depends on the prompt's length together with another rope "
                    "of window layers is not supported; lower --max-model-len to the trained "
                    f"context of {arch.rope.original_max_position}"
                )
        self._alibi = None
        if arch.positions == "alibi":
            self._alibi = alibi_slopes(arch.num_heads, arch.alibi_scale, device)
        # As transformers does for Gemma, and exact for the scales of others.
        self._embedding_scale = float(torch.tensor(arch.embedding_scale, dtype=dtype))
        self.layers = [
            DecoderLayer(arch, i, self._attention(i), self._mlp(i)) for i in range(arch.num_layers)
        ]
        groups = [group for layer in self.layers for group in layer.pending()]
        self._groups = {name: g for g in groups + self._own_groups() for name in g.shapes}

    def _attention(self, index: int) -> Sublayer:
        if self.arch.mla is not None:
            prefix = f"model.layers.{index}.self_attn."
            return LatentAttention(self.arch, prefix, index, self.attention, self.quantize)
        return SelfAttention(self.arch, index, self.attention, self.quantize, self._alibi)

    def _mlp(self, index: int) -> Sublayer:
        arch, prefix = self.arch, f"model.layers.{index}.mlp."
        if arch.is_moe_layer(index):
            return MoEMLP(arch, prefix, self.quantize)
        return DenseMLP(arch, prefix, arch.intermediate_size, self.quantize)

    # -- weights

    def _own_groups(self) -> list[Pending]:
        """What is not of a layer."""
        arch = self.arch
        hidden, vocab = (arch.hidden_size,), (arch.vocab_size, arch.hidden_size)
        norm: Shapes = {"model.norm.weight": hidden}
        if arch.norm_bias:
            norm["model.norm.bias"] = hidden
        groups = [Pending(norm, self._set_final_norm, wide=arch.wide_norms)]
        embed: Shapes = {_EMBED: vocab}
        if arch.tie_word_embeddings:
            if arch.head_bias:
                embed["lm_head.bias"] = (arch.vocab_size,)
        else:
            head: Shapes = {_HEAD: vocab}
            if arch.head_bias:
                head["lm_head.bias"] = (arch.vocab_size,)
            groups.append(Pending(head, self._set_head, quantizable=True))
        groups.append(Pending(embed, self._set_embed, quantizable=True))
        if arch.positions == "learned":
            rows = arch.max_position_embeddings + arch.position_offset
            positions: Shapes = {_POSITIONS: (rows, arch.hidden_size)}
            groups.append(Pending(positions, self._set_positions))
        return groups

    def parameters_spec(self) -> Shapes:
        """Canonical name -> shape of every tensor the model needs."""
        return {name: group.shapes[name] for name, group in self._groups.items()}

    def quantizable(self, name: str) -> bool:
        """Whether `load` takes the weight of that canonical name as a `QuantizedWeight`: the
        matrices of layers, the head, and the embedding, of which single rows are expanded."""
        group = self._groups.get(name)
        return group is not None and group.quantizable and name.endswith(".weight")

    def load(self, name: str, weight: Weight) -> None:
        """Take one weight of `parameters_spec()`; its shape has been checked."""
        group = self._groups[name]
        if isinstance(weight, Tensor):
            dtype, given = torch.float32 if group.wide else self.dtype, weight.data_ptr()
            weight = weight.to(device=self.device, dtype=dtype).contiguous()
            if weight.data_ptr() == given and not weight.is_cuda:
                # what the model holds must not keep the file mapped, which others may cut short
                weight = weight.clone()
        else:
            weight = weight.to(self.device)
        group.put(name, weight)

    def _set_embed(self, arrived: Arrived) -> None:
        table, tied_head = arrived[_EMBED], None
        if self.arch.tie_word_embeddings:
            bias = arrived.get("lm_head.bias")
            assert bias is None or isinstance(bias, Tensor)
            tied_head = self.head = make_linear(table, bias, self.quantize_head)
        self.embed = make_embedding(table, tied_head, self.quantize_head)

    def _set_positions(self, arrived: Arrived) -> None:
        (table,) = arrived.values()
        assert isinstance(table, Tensor)
        self.embed_positions = table[self.arch.position_offset :].clone()

    def _set_final_norm(self, arrived: Arrived) -> None:
        self.final_norm = norm_of(arrived, self.arch)

    def _set_head(self, arrived: Arrived) -> None:
        self.head = linear_of(arrived, self.quantize_head)

    # -- computing

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[num_tokens] int64 -> hidden states [num_tokens, hidden_size], before the final norm.

        The result lies in the workspace and lasts until the next forward pass.
        """
        return self.layered(self.embedded(token_ids, ctx.rope_rows, ctx.workspace), ctx)

    def embedded(self, token_ids: Tensor, positions: Tensor, workspace: Workspace) -> Tensor:
        """[num_tokens] int64 each -> what the first layer gets, in the workspace. positions are
        looked at by models that learn them."""
        x = self.embed(token_ids, workspace.hidden[: len(token_ids)])
        if self._embedding_scale != 1.0:
            scale_embeddings(x, self._embedding_scale)
        if self.embed_positions is not None:
            x.add_(self.embed_positions.index_select(0, positions))
        return x

    def layered(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """`embedded` -> the result of `forward`, in place."""
        for layer in self.layers:
            layer.forward(x, ctx)
        return x

    def logits(self, hidden: Tensor, workspace: Workspace) -> Tensor:
        """[num_rows, hidden_size] of `forward` -> [num_rows, vocab_size] float32, in the workspace.

        num_rows is at most what the workspace was made for.
        """
        return self.scaled_logits(self.raw_logits(hidden, workspace))

    def raw_logits(self, hidden: Tensor, workspace: Workspace) -> Tensor:
        """`logits` before they are scaled and capped."""
        num_rows = len(hidden)
        normed, logits = workspace.normed[:num_rows], workspace.logits[:num_rows]
        return self.head.normed(hidden, self.final_norm, normed, logits)

    def scaled_logits(self, logits: Tensor) -> Tensor:
        """`raw_logits` -> `logits`, in place."""
        if self.arch.logits_scale != 1.0:
            logits.mul_(self.arch.logits_scale)
        cap = self.arch.logits_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def place_kv(self, groups: Sequence[Sequence[int]]) -> None:
        """Say where each layer's K and V lie: the layers of each group, in their order."""
        for group, layers in enumerate(groups):
            for place, index in enumerate(layers):
                attn = self.layers[index].attn
                assert isinstance(attn, SelfAttention | LatentAttention)
                attn.kv_group, attn.kv_index = group, place

    # -- what it is

    @property
    def local_cos_sin(self) -> Tensor | None:
        """`ForwardContext.local_cos_sin` of every step."""
        return None if self.local_rotary is None else self.local_rotary.table

    @property
    def replayable(self) -> bool:
        """Whether `layered` and `raw_logits` make nothing but recordable kernel calls, on fixed
        addresses."""
        parts = (self.final_norm, self.head, *self.layers)
        return not self.rotary.is_dynamic and all(part.replayable for part in parts)

    @property
    def embeds_replayably(self) -> bool:
        """Whether `embedded` is such a call as well."""
        return self.embed.replayable and self.embed_positions is None

    @property
    def capturable(self) -> bool:
        """Whether steps can be recorded as CUDA graphs."""
        # A dynamic table makes rows anew each step, somewhere else.
        return not self.rotary.is_dynamic and all(layer.capturable for layer in self.layers)

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights as they are held, packed copies and tables included."""
        parts = (self.embed, self.final_norm, self.head, *self.layers)
        tables = (self.rotary.table, self.local_cos_sin, self.embed_positions, self._alibi)
        return sum(part.num_bytes for part in parts) + sum(
            t.nbytes for t in tables if t is not None
        )

    def transient_bytes(self, num_tokens: int) -> int:
        """What a part of a step allocates beside the workspace, at most at one time."""
        element_bytes = self.dtype.itemsize
        most = max(layer.transient_bytes(num_tokens, element_bytes) for layer in self.layers)
        if self.embeds_replayably:
            return most
        return max(most, num_tokens * self.arch.hidden_size * 4)  # rows, perhaps in float32
