"""The one pre-norm, rotary, gated-MLP decoder; families differ by the flags of `ModelArch`.

Llama 1/2/3, SmolLM, Mistral, Qwen 2 and Qwen 3. The layer reads top to bottom as data flows.
Weights arrive one tensor at a time under their Hugging Face names; a layer that needs several
(q, k and v; gate and up) packs them when the last has come and keeps nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.arch import ModelArch
from octavo.attention.base import AttentionBackend, ForwardContext, QKNorm
from octavo.layers.embedding import Embedding, make_embedding
from octavo.layers.linear import Gated, Linear, make_gated, make_linear
from octavo.layers.norm import RMSNorm, make_norm
from octavo.layers.rope import RotaryTable
from octavo.layers.workspace import Workspace

Finish = Callable[[dict[str, Tensor]], None]
Shapes = dict[str, tuple[int, ...]]


class _Pending:
    """Tensors that wait for each other; `finish` gets them once all are there."""

    def __init__(self, shapes: Shapes, finish: Finish) -> None:
        self.shapes, self.finish = shapes, finish
        self.arrived: dict[str, Tensor] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        self.arrived[name] = tensor
        if len(self.arrived) == len(self.shapes):
            self.finish(self.arrived)
            self.arrived = {}


class DecoderLayer:
    """Attention and MLP of one layer, each behind its norm and added to the residual stream."""

    attn_norm: RMSNorm
    qkv: Linear
    qk_norm: QKNorm | None = None
    out: Linear
    mlp_norm: RMSNorm
    gate_up: Gated
    down: Linear

    def __init__(self, arch: ModelArch, index: int, attention: AttentionBackend) -> None:
        self.arch, self.index, self.attention = arch, index, attention
        self.q_size = arch.num_heads * arch.head_dim
        self.kv_size = arch.num_kv_heads * arch.head_dim
        self.scale = arch.head_dim**-0.5
        self.window = arch.window(index)

    def forward(self, x: Tensor, ctx: ForwardContext) -> None:
        """x [num_tokens, hidden_size], the residual stream, is updated in place."""
        work, num_tokens = ctx.workspace, len(x)
        normed = work.normed[:num_tokens]
        qkv = self.qkv.normed(x, self.attn_norm, normed, work.qkv[:num_tokens])
        attended = work.attended[:num_tokens]
        self._attend(qkv, ctx, attended)
        self.out.add_to(attended, x)
        gated = self.gate_up.normed(x, self.mlp_norm, normed, work.gated[:num_tokens])
        self.down.add_to(gated, x)

    def _attend(self, qkv: Tensor, ctx: ForwardContext, out: Tensor) -> None:
        arch, num_tokens = self.arch, len(qkv)
        q, k, v = qkv.split((self.q_size, self.kv_size, self.kv_size), dim=-1)
        q = q.view(num_tokens, arch.num_heads, arch.head_dim)
        k = k.view(num_tokens, arch.num_kv_heads, arch.head_dim)
        v = v.view(num_tokens, arch.num_kv_heads, arch.head_dim)
        self.attention.rope_and_cache(q, k, v, self.index, ctx, self.qk_norm)
        self.attention.attend(q, self.index, self.scale, self.window, ctx, out.view(q.shape))

    def pending(self) -> list[_Pending]:
        """What this layer waits for, as groups of tensors that belong together."""
        arch, prefix = self.arch, f"model.layers.{self.index}."
        hidden, inter = arch.hidden_size, arch.intermediate_size
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        sizes = {"q": self.q_size, "k": self.kv_size, "v": self.kv_size}
        qkv: Shapes = {f"{attn}{p}_proj.weight": (size, hidden) for p, size in sizes.items()}
        if arch.qkv_bias:
            qkv |= {f"{attn}{p}_proj.bias": (size,) for p, size in sizes.items()}
        out = _linear_shapes(f"{attn}o_proj", hidden, self.q_size, arch.o_bias)
        gate_up = _linear_shapes(f"{mlp}gate_proj", inter, hidden, arch.mlp_bias)
        gate_up |= _linear_shapes(f"{mlp}up_proj", inter, hidden, arch.mlp_bias)
        down = _linear_shapes(f"{mlp}down_proj", hidden, inter, arch.mlp_bias)
        groups = [
            _Pending({prefix + "input_layernorm.weight": (hidden,)}, self._set_attn_norm),
            _Pending({prefix + "post_attention_layernorm.weight": (hidden,)}, self._set_mlp_norm),
            _Pending(qkv, self._set_qkv),
            _Pending(out, self._set_out),
            _Pending(gate_up, self._set_gate_up),
            _Pending(down, self._set_down),
        ]
        if arch.qk_norm:
            norms: Shapes = {f"{attn}{p}_norm.weight": (arch.head_dim,) for p in ("q", "k")}
            groups.append(_Pending(norms, self._set_qk_norm))
        return groups

    def _set_attn_norm(self, tensors: dict[str, Tensor]) -> None:
        self.attn_norm = _norm_from(tensors, self.arch)

    def _set_mlp_norm(self, tensors: dict[str, Tensor]) -> None:
        self.mlp_norm = _norm_from(tensors, self.arch)

    def _set_qk_norm(self, tensors: dict[str, Tensor]) -> None:
        by_part = {name.split(".")[-2]: t for name, t in tensors.items()}
        self.qk_norm = QKNorm(by_part["q_norm"], by_part["k_norm"], self.arch.rms_norm_eps)

    def _set_qkv(self, tensors: dict[str, Tensor]) -> None:
        parts = ("q_proj", "k_proj", "v_proj")
        weight, bias = _joined(tensors, parts, "weight"), _joined(tensors, parts, "bias")
        assert weight is not None
        self.qkv = make_linear(weight, bias)

    def _set_out(self, tensors: dict[str, Tensor]) -> None:
        self.out = _linear_from(tensors)

    def _set_gate_up(self, tensors: dict[str, Tensor]) -> None:
        gate = _joined(tensors, ("gate_proj",), "weight")
        up = _joined(tensors, ("up_proj",), "weight")
        assert gate is not None and up is not None
        self.gate_up = make_gated(gate, up, _joined(tensors, ("gate_proj", "up_proj"), "bias"))

    def _set_down(self, tensors: dict[str, Tensor]) -> None:
        self.down = _linear_from(tensors)


class Decoder:
    """Embedding, layers, final norm and head. Built empty; `load` fills it.

    arch: the shape; attention: the backend of every layer; dtype: computation type; max_model_len:
    positions to make rotary tables for.
    """

    embed: Embedding
    final_norm: RMSNorm
    head: Linear

    def __init__(
        self,
        arch: ModelArch,
        attention: AttentionBackend,
        dtype: torch.dtype,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.arch, self.dtype, self.device = arch, dtype, device
        self._attention = attention
        self.rotary = RotaryTable(arch.rope, max_model_len, device)
        self.layers = [DecoderLayer(arch, i, attention) for i in range(arch.num_layers)]
        groups = [group for layer in self.layers for group in layer.pending()]
        vocab = (arch.vocab_size, arch.hidden_size)
        groups.append(_Pending({"model.embed_tokens.weight": vocab}, self._set_embed))
        groups.append(_Pending({"model.norm.weight": (arch.hidden_size,)}, self._set_final_norm))
        if not arch.tie_word_embeddings:
            groups.append(_Pending({"lm_head.weight": vocab}, self._set_head))
        self._groups = {name: group for group in groups for name in group.shapes}

    def parameters_spec(self) -> Shapes:
        """Hugging Face name -> shape of every tensor the model needs."""
        return {name: group.shapes[name] for name, group in self._groups.items()}

    def load(self, name: str, tensor: Tensor) -> None:
        """Take one tensor of `parameters_spec()`; its shape has been checked."""
        converted = tensor.to(device=self.device, dtype=self.dtype).contiguous()
        self._groups[name].put(name, converted)

    def _set_embed(self, tensors: dict[str, Tensor]) -> None:
        (table,) = tensors.values()
        tied_head = None
        if self.arch.tie_word_embeddings:
            tied_head = self.head = make_linear(table)
        self.embed = make_embedding(table, tied_head)

    def _set_final_norm(self, tensors: dict[str, Tensor]) -> None:
        self.final_norm = _norm_from(tensors, self.arch)

    def _set_head(self, tensors: dict[str, Tensor]) -> None:
        self.head = _linear_from(tensors)

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """[num_tokens] int64 -> hidden states [num_tokens, hidden_size], before the final norm.

        The result lies in the workspace and lasts until the next forward pass.
        """
        x = self.embed(token_ids, ctx.workspace.hidden[: len(token_ids)])
        for layer in self.layers:
            layer.forward(x, ctx)
        return x

    def logits(self, hidden: Tensor, workspace: Workspace) -> Tensor:
        """[num_rows, hidden_size] of `forward` -> [num_rows, vocab_size] float32, in the workspace.

        num_rows is at most what the workspace was made for.
        """
        num_rows = len(hidden)
        normed, logits = workspace.normed[:num_rows], workspace.logits[:num_rows]
        return self.head.normed(hidden, self.final_norm, normed, logits)

    @property
    def attention(self) -> AttentionBackend:
        """The backend of every layer."""
        return self._attention

    @property
    def replayable(self) -> bool:
        """Whether a step makes nothing but recordable kernel calls, on fixed addresses."""
        parts: list[Linear | Gated | Embedding] = [self.embed, self.head]
        for layer in self.layers:
            parts += [layer.qkv, layer.out, layer.gate_up, layer.down]
        replayable = self._attention.replayable and not self.rotary.is_dynamic
        return replayable and all(part.replayable for part in parts)

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights as they are held, packed copies and rotary tables included."""
        parts: list[Linear | Gated | RMSNorm | Embedding] = [self.embed, self.final_norm, self.head]
        for layer in self.layers:
            parts += [layer.attn_norm, layer.qkv, layer.out]
            parts += [layer.mlp_norm, layer.gate_up, layer.down]
        norms = [layer.qk_norm.query_weight for layer in self.layers if layer.qk_norm is not None]
        return (
            sum(part.num_bytes for part in parts)
            + self.rotary.table.nbytes
            + 2 * sum(norm.nbytes for norm in norms)
        )

    def transient_bytes(self, num_tokens: int) -> int:
        """What a layer of a step allocates beside the workspace: nothing where it is replayable."""
        if self.replayable:
            return 0
        width = 2 * self.arch.intermediate_size + self.arch.hidden_size
        return num_tokens * width * self.dtype.itemsize


def _norm_from(tensors: dict[str, Tensor], arch: ModelArch) -> RMSNorm:
    (weight,) = tensors.values()
    return make_norm(weight, arch.rms_norm_eps)


def _linear_shapes(name: str, out_features: int, in_features: int, bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out_features, in_features)}
    if bias:
        shapes[f"{name}.bias"] = (out_features,)
    return shapes


def _joined(tensors: dict[str, Tensor], parts: tuple[str, ...], kind: str) -> Tensor | None:
    """The named parts' weights (or biases) one under the other; None when there are none."""
    found = [t for part in parts for n, t in tensors.items() if n.endswith(f".{part}.{kind}")]
    if not found:
        return None
    return found[0] if len(found) == 1 else torch.cat(found)


def _linear_from(tensors: dict[str, Tensor]) -> Linear:
    by_kind = {name.rsplit(".", 1)[-1]: tensor for name, tensor in tensors.items()}
    return make_linear(by_kind["weight"], by_kind.get("bias"))
