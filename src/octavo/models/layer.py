"""One layer of the decoder: attention and MLP, their norms, and the residual stream."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from octavo.arch import ModelArch
from octavo.attention.base import ForwardContext
from octavo.layers.norm import Norm, make_norm
from octavo.layers.residual import add_branch
from octavo.models.sublayer import Arrived, Pending, Shapes, Sublayer, tensor_of


class DecoderLayer:
    """Attention and MLP, each behind its norm (or before one, or both), added to the residual
    stream one after the other or at once: as the flags of `ModelArch` have it."""

    attn_norm: Norm | None = None
    attn_post_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_post_norm: Norm | None = None

    def __init__(self, arch: ModelArch, index: int, attn: Sublayer, mlp: Sublayer) -> None:
        self.arch, self.index, self.attn, self.mlp = arch, index, attn, mlp
        self.window = arch.window(index)
        self._adds_directly = arch.norm_placement == "pre" and arch.residual_scale == 1.0

    def forward(self, x: Tensor, ctx: ForwardContext) -> None:
        """x [num_tokens, hidden_size], the residual stream, is updated in place."""
        if self.arch.parallel_residual:
            self._forward_parallel(x, ctx)
        elif self._adds_directly:
            assert self.attn_norm is not None and self.mlp_norm is not None
            self.attn.add_to(x, self.attn_norm, ctx)
            self.mlp.add_to(x, self.mlp_norm, ctx)
        else:
            self._add(x, self.attn, self.attn_norm, self.attn_post_norm, ctx)
            self._add(x, self.mlp, self.mlp_norm, self.mlp_post_norm, ctx)

    def _forward_parallel(self, x: Tensor, ctx: ForwardContext) -> None:
        """x + attn(norm1(x)) + mlp(norm2(x))."""
        mlp_norm = self.attn_norm if self.arch.shared_norm else self.mlp_norm
        assert self.attn_norm is not None and mlp_norm is not None
        attended = self.attn.compute(x, self.attn_norm, ctx, ctx.workspace.branch[: len(x)])
        self.mlp.add_to(x, mlp_norm, ctx)
        add_branch(x, attended)

    def _add(
        self,
        x: Tensor,
        sublayer: Sublayer,
        before: Norm | None,
        after: Norm | None,
        ctx: ForwardContext,
    ) -> None:
        """x += scale * after(sublayer(before(x)))."""
        branch = sublayer.compute(x, before, ctx, ctx.workspace.branch[: len(x)])
        if after is not None:
            after(branch, branch)
        add_branch(x, branch, self.arch.residual_scale)

    def pending(self) -> list[Pending]:
        """What this layer waits for, as groups of weights that belong together."""
        arch, prefix = self.arch, f"model.layers.{self.index}."
        groups = self.attn.pending() + self.mlp.pending()
        for attribute, name in _norm_names(arch).items():
            shapes: Shapes = {f"{prefix}{name}.weight": (arch.hidden_size,)}
            if arch.norm_bias:
                shapes[f"{prefix}{name}.bias"] = (arch.hidden_size,)
            groups.append(Pending(shapes, partial(self._set_norm, attribute), wide=arch.wide_norms))
        return groups

    def _set_norm(self, attribute: str, arrived: Arrived) -> None:
        setattr(self, attribute, norm_of(arrived, self.arch))

    @property
    def norms(self) -> list[Norm]:
        """Those that there are."""
        found = (self.attn_norm, self.attn_post_norm, self.mlp_norm, self.mlp_post_norm)
        return [norm for norm in found if norm is not None]

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that make the same kernel calls but for the weights' addresses."""
        arch, index = self.arch, self.index
        # files mix formats (Q4_K_M has some matrices in Q6_K), which differ in size
        formats = self.attn.num_bytes, self.mlp.num_bytes
        return self.window, arch.rotates(index), arch.is_moe_layer(index), formats

    @property
    def num_bytes(self) -> int:
        """Memory of its weights."""
        norms = sum(norm.num_bytes for norm in self.norms)
        return self.attn.num_bytes + self.mlp.num_bytes + norms

    @property
    def replayable(self) -> bool:
        """Whether it makes nothing but calls that `ops.cpu.trace` records."""
        norms = all(norm.replayable for norm in self.norms)
        return norms and self.attn.replayable and self.mlp.replayable

    @property
    def capturable(self) -> bool:
        """Whether it can be recorded in a CUDA graph; see `Sublayer`."""
        return self.attn.capturable and self.mlp.capturable

    def transient_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """What it allocates beside the workspace, at most at one time."""
        sublayers = (self.attn, self.mlp)
        most = max(s.transient_bytes(num_tokens, element_bytes) for s in sublayers)
        if all(norm.replayable for norm in self.norms):
            return most
        return most + num_tokens * self.arch.hidden_size * element_bytes


def norm_of(arrived: Arrived, arch: ModelArch) -> Norm:
    """A norm of one `weight` and perhaps a `bias`."""
    weight = tensor_of(arrived, "weight")
    assert weight is not None
    return make_norm(weight, arch.norm_eps, arch.norm, tensor_of(arrived, "bias"))


def _norm_names(arch: ModelArch) -> dict[str, str]:
    """Attribute of the layer -> canonical name, of the norms that a layer has."""
    if arch.norm_placement == "pre":
        names = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        if arch.shared_norm:
            del names["mlp_norm"]
        return names
    after = {
        "attn_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
    if arch.norm_placement == "post":
        return after
    return {"attn_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm", **after}
