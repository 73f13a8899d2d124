"""Multi-head latent attention (DeepSeek-V2 2024, section 2.1): keys and values of all heads are
linear functions of one latent vector a token, and the latent is what is cached.

With head h's key U_h c and value V_h c of a latent c, scores are q.(U_h c) = (U_h^T q).c, so U_h
goes into the query and V_h into the result (the paper's absorption): attention itself runs over
latents, as with a single KV head that is key and value at once. Beside the latent lies a key of a
few dimensions that all heads share, and it alone is rotated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.arch import ModelArch
from octavo.attention.base import AttentionBackend, ForwardContext
from octavo.layers.by_head import ByHead, make_by_head
from octavo.layers.linear import Linear, make_linear
from octavo.layers.norm import Norm, make_norm
from octavo.layers.quantized import QuantizedWeight
from octavo.models.sublayer import Arrived, Pending, linear_of, linear_shapes, tensor_of

_NORM_EPS = 1e-6
"""Of the latents' norms, in all such models, whatever the other norms have."""
_Shape = dict[str, tuple[int, ...]]


class LatentAttention:
    """The attention of a layer with `ModelArch.mla`; a `Sublayer`.

    The pool's rows, and queries, are [rotated key | latent]: kernels rotate the front of a head and
    read values from its back. prefix: of the weights' names, with the last dot; index: of the
    layer; attention: the backend; quantize: as for `make_linear`.
    """

    query: Linear
    """Queries, from the input or from their latent."""
    query_latent: Linear | None = None
    query_norm: Norm
    latent: Linear
    """The rotated key, then the latent, [rotated + rank, hidden_size]."""
    latent_norm: Norm
    key_up: ByHead
    """U_h^T, from qk_nope_head_dim to kv_lora_rank."""
    value_up: ByHead
    """V_h, from kv_lora_rank to v_head_dim."""
    out: Linear

    def __init__(
        self,
        arch: ModelArch,
        prefix: str,
        index: int,
        attention: AttentionBackend,
        quantize: str | None = None,
    ) -> None:
        assert arch.mla is not None
        self.arch, self.mla, self.prefix = arch, arch.mla, prefix
        self.attention, self.quantize = attention, quantize
        self.kv_group, self.kv_index = 0, index
        """As in `SelfAttention`; models with latents have no windows, and so one group."""
        self.head_dim = self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        self.width = self.mla.qk_rope_head_dim + self.mla.kv_lora_rank
        """Of what a token has in the pool."""
        scale = arch.attention_scale
        self.scale = self.head_dim**-0.5 if scale is None else scale

    # -- weights

    def pending(self) -> list[Pending]:
        """See `Sublayer`."""
        arch, mla, hidden = self.arch, self.mla, self.arch.hidden_size
        heads, name = arch.num_heads, self.prefix
        up = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        groups = self._query_groups()
        latent = linear_shapes(f"{name}kv_a_proj_with_mqa", self.width, hidden, arch.qkv_bias)
        norm: _Shape = {f"{name}kv_a_layernorm.weight": (mla.kv_lora_rank,)}
        kv_up = linear_shapes(f"{name}kv_b_proj", up, mla.kv_lora_rank, False)
        out = linear_shapes(f"{name}o_proj", hidden, heads * mla.v_head_dim, arch.o_bias)
        return [
            *groups,
            Pending(latent, self._set_latent, quantizable=True),
            Pending(norm, self._set_latent_norm),
            Pending(kv_up, self._set_up),
            Pending(out, self._set_out, quantizable=True),
        ]

    def _query_groups(self) -> list[Pending]:
        rank, hidden, name = self.mla.q_lora_rank, self.arch.hidden_size, self.prefix
        size = self.arch.num_heads * self.head_dim
        if rank is None:
            whole = linear_shapes(f"{name}q_proj", size, hidden, False)
            return [Pending(whole, self._set_query, quantizable=True)]
        down = linear_shapes(f"{name}q_a_proj", rank, hidden, self.arch.qkv_bias)
        norm: _Shape = {f"{name}q_a_layernorm.weight": (rank,)}
        up = linear_shapes(f"{name}q_b_proj", size, rank, False)
        return [
            Pending(down, self._set_query_latent, quantizable=True),
            Pending(norm, self._set_query_norm),
            Pending(up, self._set_query, quantizable=True),
        ]

    def _set_query(self, arrived: Arrived) -> None:
        self.query = linear_of(arrived, self.quantize)

    def _set_query_latent(self, arrived: Arrived) -> None:
        self.query_latent = linear_of(arrived, self.quantize)

    def _set_query_norm(self, arrived: Arrived) -> None:
        self.query_norm = self._norm(arrived)

    def _set_latent_norm(self, arrived: Arrived) -> None:
        self.latent_norm = self._norm(arrived)

    def _norm(self, arrived: Arrived) -> Norm:
        weight = tensor_of(arrived, "weight")
        assert weight is not None
        return make_norm(weight, _NORM_EPS)

    def _set_latent(self, arrived: Arrived) -> None:
        """Files have the latent's rows first."""
        (weight,) = [w for name, w in arrived.items() if name.endswith(".weight")]
        bias, rank = tensor_of(arrived, "bias"), self.mla.kv_lora_rank
        order = torch.arange(self.width, device=weight.device).roll(self.width - rank)
        rows = weight.rows(order) if isinstance(weight, QuantizedWeight) else weight[order]
        self.latent = make_linear(rows, None if bias is None else bias[order], self.quantize)

    def _set_up(self, arrived: Arrived) -> None:
        weight = tensor_of(arrived, "weight")
        assert weight is not None
        by_head = weight.unflatten(0, (self.arch.num_heads, -1))
        keys, values = by_head.split((self.mla.qk_nope_head_dim, self.mla.v_head_dim), dim=1)
        self.key_up = make_by_head(keys.transpose(1, 2))
        self.value_up = make_by_head(values)

    def _set_out(self, arrived: Arrived) -> None:
        self.out = linear_of(arrived, self.quantize)

    # -- a step

    def add_to(self, x: Tensor, norm: Norm, ctx: ForwardContext) -> None:
        """See `Sublayer`."""
        self.out.add_to(self._attended(norm(x, ctx.workspace.normed[: len(x)]), ctx), x)

    def compute(self, x: Tensor, norm: Norm | None, ctx: ForwardContext, out: Tensor) -> Tensor:
        """See `Sublayer`."""
        if norm is not None:
            x = norm(x, ctx.workspace.normed[: len(x)])
        return self.out(self._attended(x, ctx), out)

    def _attended(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size], normalised -> [num_tokens, num_heads * v_head_dim], in the
        workspace."""
        rotated = self.mla.qk_rope_head_dim
        query = self._queries(x)
        key = self.latent(x, x.new_empty((len(x), self.width)))
        latent = key[:, rotated:]
        self.latent_norm(latent, latent)
        self.attention.rope_and_cache(
            query, key[:, None], None, self.kv_index, ctx, None,
            cos_sin=ctx.cos_sin, interleaved=self.arch.rope.interleaved,
        )  # fmt: skip
        heads = query.new_empty((len(x), self.arch.num_heads, self.mla.kv_lora_rank))
        self.attention.attend(query, self.kv_index, self.scale, 0, ctx, heads)
        out = ctx.workspace.attended[: len(x)]
        self.value_up(heads, out.view(len(x), self.arch.num_heads, -1))
        return out

    def _queries(self, x: Tensor) -> Tensor:
        """[num_tokens, num_heads, rotated + rank]: what meets the pool's rows, not yet rotated."""
        num_tokens, num_heads = len(x), self.arch.num_heads
        if self.query_latent is not None:
            assert self.mla.q_lora_rank is not None
            x = self.query_latent(x, x.new_empty((num_tokens, self.mla.q_lora_rank)))
            self.query_norm(x, x)
        raw = self.query(x, x.new_empty((num_tokens, num_heads * self.head_dim)))
        sizes = (self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim)
        plain, turned = raw.view(num_tokens, num_heads, -1).split(sizes, dim=-1)
        query = x.new_empty((num_tokens, num_heads, self.width))
        query[..., : sizes[1]] = turned
        self.key_up(plain, query[..., sizes[1] :])
        return query

    # -- what it takes

    @property
    def num_bytes(self) -> int:
        """See `Sublayer`."""
        layers: list[Linear | Norm | ByHead] = [self.query, self.latent, self.latent_norm, self.out]
        layers += [self.key_up, self.value_up]
        if self.query_latent is not None:
            layers += [self.query_latent, self.query_norm]
        return sum(layer.num_bytes for layer in layers)

    @property
    def replayable(self) -> bool:
        """See `Sublayer`. Queries are put together by torch."""
        return False

    @property
    def capturable(self) -> bool:
        """See `Sublayer`."""
        return self.attention.capturable

    def transient_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """See `Sublayer`."""
        mla, heads = self.mla, self.arch.num_heads
        by_head = self.head_dim + self.width + 2 * mla.kv_lora_rank + mla.v_head_dim
        alone = self.width + (mla.q_lora_rank or 0) + self.arch.hidden_size
        return num_tokens * (heads * by_head + alone) * element_bytes
