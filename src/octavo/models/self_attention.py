"""Multi-head, multi-query and grouped-query attention of a layer (Ainslie et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.arch import ModelArch
from octavo.attention.base import AttentionBackend, ForwardContext, QKNorm
from octavo.layers.linear import Linear, make_joined, normed
from octavo.layers.norm import HeadLayerNorm, Norm, RMSNorm, make_norm
from octavo.models.sublayer import (
    Arrived,
    Pending,
    Shapes,
    bias_of,
    linear_of,
    linear_shapes,
    parts_of,
)


class SelfAttention:
    """Projection to q, k and v, attention over the pool, projection back; a `Sublayer`.

    attention: the backend; quantize: as for `make_linear`; alibi: [num_heads] slopes, on the
    device, of models that have them.
    """

    qkv: Linear
    out: Linear
    fused_norm: QKNorm | None = None
    """A norm of q and k that the backend takes along with rope."""
    norms: tuple[RMSNorm, RMSNorm] | tuple[HeadLayerNorm, HeadLayerNorm] | None = None
    """Another one, of q and of k."""

    def __init__(
        self,
        arch: ModelArch,
        index: int,
        attention: AttentionBackend,
        quantize: str | None = None,
        alibi: Tensor | None = None,
    ) -> None:
        self.arch, self.index, self.attention = arch, index, attention
        self.quantize, self.alibi = quantize, alibi
        self.q_size = arch.num_heads * arch.head_dim
        self.kv_size = arch.num_kv_heads * arch.head_dim
        scale = arch.attention_scale
        self.scale = arch.head_dim**-0.5 if scale is None else scale
        self.window = arch.window(index)
        self.kv_group, self.kv_index = 0, index
        """Where its K and V lie: the layer group, and the layer's place in it."""
        self._rotates = arch.rotates(index)
        self._is_local = arch.local_rope is not None and self.window > 0
        rope = arch.local_rope if self._is_local and arch.local_rope is not None else arch.rope
        self._interleaved = rope.interleaved

    def add_to(self, x: Tensor, norm: Norm, ctx: ForwardContext) -> None:
        """See `Sublayer`."""
        self.out.add_to(self._attended(x, norm, ctx), x)

    def compute(self, x: Tensor, norm: Norm | None, ctx: ForwardContext, out: Tensor) -> Tensor:
        """See `Sublayer`."""
        return self.out(self._attended(x, norm, ctx), out)

    def _attended(self, x: Tensor, norm: Norm | None, ctx: ForwardContext) -> Tensor:
        """[num_tokens, num_heads * head_dim], in the workspace."""
        work, num_tokens = ctx.workspace, len(x)
        qkv = normed(self.qkv, x, norm, work.normed[:num_tokens], work.qkv[:num_tokens])
        if self.arch.qkv_clip:
            qkv.clamp_(-self.arch.qkv_clip, self.arch.qkv_clip)
        attended = work.attended[:num_tokens]
        self._attend(qkv, ctx, attended)
        return attended

    def _attend(self, qkv: Tensor, ctx: ForwardContext, out: Tensor) -> None:
        arch, num_tokens = self.arch, len(qkv)
        q, k, v = qkv.split((self.q_size, self.kv_size, self.kv_size), dim=-1)
        if self.norms is not None and arch.qk_norm == "all":
            for x, norm in zip((q, k), self.norms, strict=True):
                assert isinstance(norm, RMSNorm)
                norm(x, x)
        q = q.view(num_tokens, arch.num_heads, arch.head_dim)
        k = k.view(num_tokens, arch.num_kv_heads, arch.head_dim)
        v = v.view(num_tokens, arch.num_kv_heads, arch.head_dim)
        if self.norms is not None and arch.qk_norm == "layer_head":
            for x, norm in zip((q, k), self.norms, strict=True):
                assert isinstance(norm, HeadLayerNorm)
                norm(x)
        cos_sin = None
        if self._rotates:
            cos_sin = ctx.local_cos_sin if self._is_local else ctx.cos_sin
        if self.kv_group:
            ctx = ctx.of_group(self.kv_group)
        self.attention.rope_and_cache(
            q, k, v, self.kv_index, ctx, self.fused_norm,
            cos_sin=cos_sin, interleaved=self._interleaved,
        )  # fmt: skip
        self.attention.attend(
            q, self.kv_index, self.scale, self.window, ctx, out.view(q.shape),
            soft_cap=arch.attention_soft_cap, alibi=self.alibi,
        )  # fmt: skip

    def pending(self) -> list[Pending]:
        """See `Sublayer`."""
        arch, prefix = self.arch, f"model.layers.{self.index}.self_attn."
        sizes = {"q": self.q_size, "k": self.kv_size, "v": self.kv_size}
        qkv: Shapes = {}
        for part, size in sizes.items():
            qkv |= linear_shapes(f"{prefix}{part}_proj", size, arch.hidden_size, arch.qkv_bias)
        out = linear_shapes(f"{prefix}o_proj", arch.hidden_size, self.q_size, arch.o_bias)
        groups = [
            Pending(qkv, self._set_qkv, quantizable=True),
            Pending(out, self._set_out, quantizable=True),
        ]
        if arch.qk_norm != "none":
            shapes = self._norm_shapes(prefix)
            groups.append(Pending(shapes, self._set_norms, wide=arch.wide_norms))
        return groups

    def _norm_shapes(self, prefix: str) -> Shapes:
        arch = self.arch
        query, key = {
            "head": ((arch.head_dim,), (arch.head_dim,)),
            "all": ((self.q_size,), (self.kv_size,)),
            "layer_head": ((arch.num_heads, arch.head_dim), (arch.num_kv_heads, arch.head_dim)),
        }[arch.qk_norm]
        return {f"{prefix}q_norm.weight": query, f"{prefix}k_norm.weight": key}

    def _set_norms(self, arrived: Arrived) -> None:
        query, key = parts_of(arrived, ("q_norm", "k_norm"), "weight")
        assert isinstance(query, Tensor) and isinstance(key, Tensor)
        eps = self.arch.norm_eps
        if self.arch.qk_norm == "head":
            self.fused_norm = QKNorm(query, key, eps)
        elif self.arch.qk_norm == "all":
            both = make_norm(query, eps), make_norm(key, eps)
            assert isinstance(both[0], RMSNorm) and isinstance(both[1], RMSNorm)
            self.norms = (both[0], both[1])
        else:
            self.norms = (HeadLayerNorm(query, eps), HeadLayerNorm(key, eps))

    def _set_qkv(self, arrived: Arrived) -> None:
        parts = ("q_proj", "k_proj", "v_proj")
        biases = bias_of(arrived, parts)
        bias = torch.cat(biases) if biases else None
        self.qkv = make_joined(parts_of(arrived, parts, "weight"), bias, self.quantize)

    def _set_out(self, arrived: Arrived) -> None:
        self.out = linear_of(arrived, self.quantize)

    @property
    def num_bytes(self) -> int:
        """See `Sublayer`."""
        norms = 0 if self.norms is None else sum(norm.num_bytes for norm in self.norms)
        if self.fused_norm is not None:
            norms += self.fused_norm.query_weight.nbytes + self.fused_norm.key_weight.nbytes
        return self.qkv.num_bytes + self.out.num_bytes + norms

    @property
    def replayable(self) -> bool:
        """See `Sublayer`."""
        plain = not self.arch.qkv_clip and self.arch.qk_norm != "layer_head"
        linears = self.qkv.replayable and self.out.replayable
        return plain and linears and self.attention.replayable

    @property
    def capturable(self) -> bool:
        """See `Sublayer`."""
        return self.attention.capturable

    def transient_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """See `Sublayer`."""
        if self.replayable:
            return 0
        width = self.arch.hidden_size
        if self.arch.qk_norm == "layer_head":  # of queries, in float32, twice
            width += 8 * self.q_size // element_bytes
        return num_tokens * width * element_bytes
