"""The dense MLP of a layer, gated (Shazeer 2020) or not."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.arch import ModelArch
from octavo.attention.base import ForwardContext
from octavo.layers.activation import activate, activation_replayable
from octavo.layers.linear import Gated, Linear, add_through, make_gated, normed
from octavo.layers.norm import Norm
from octavo.models.sublayer import Arrived, Pending, bias_of, linear_of, linear_shapes, parts_of


class DenseMLP:
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))`; a `Sublayer`.

    prefix: of its weights' names, with the last dot; size: its intermediate size, at most
    `ModelArch.intermediate_size`; quantize: as for `make_linear`.
    """

    up: Gated | Linear
    """With the gate, where there is one."""
    down: Linear

    def __init__(
        self, arch: ModelArch, prefix: str, size: int, quantize: str | None = None
    ) -> None:
        self.arch, self.prefix, self.size, self.quantize = arch, prefix, size, quantize

    def add_to(self, x: Tensor, norm: Norm, ctx: ForwardContext) -> None:
        """See `Sublayer`."""
        buffer = ctx.workspace.normed[: len(x)]
        if add_through(self.up, self.down, x, norm, buffer):
            return
        self.down.add_to(self._inner(x, norm, ctx), x)

    def compute(self, x: Tensor, norm: Norm | None, ctx: ForwardContext, out: Tensor) -> Tensor:
        """See `Sublayer`."""
        return self.down(self._inner(x, norm, ctx), out)

    def _inner(self, x: Tensor, norm: Norm | None, ctx: ForwardContext) -> Tensor:
        """[num_tokens, size], in the workspace."""
        num_tokens = len(x)
        inner = ctx.workspace.gated[:num_tokens, : self.size]
        normed(self.up, x, norm, ctx.workspace.normed[:num_tokens], inner)
        return inner if self.arch.gated_mlp else activate(inner, self.arch.activation)

    def pending(self) -> list[Pending]:
        """See `Sublayer`."""
        hidden, bias = self.arch.hidden_size, self.arch.mlp_bias
        up = linear_shapes(f"{self.prefix}up_proj", self.size, hidden, bias)
        if self.arch.gated_mlp:
            up |= linear_shapes(f"{self.prefix}gate_proj", self.size, hidden, bias)
        down = linear_shapes(f"{self.prefix}down_proj", hidden, self.size, bias)
        return [
            Pending(up, self._set_up, quantizable=True),
            Pending(down, self._set_down, quantizable=True),
        ]

    def _set_up(self, arrived: Arrived) -> None:
        if not self.arch.gated_mlp:
            self.up = linear_of(arrived, self.quantize)
            return
        gate, up = parts_of(arrived, ("gate_proj", "up_proj"), "weight")
        biases = bias_of(arrived, ("gate_proj", "up_proj"))
        bias = torch.cat(biases) if biases else None
        self.up = make_gated(gate, up, bias, self.arch.activation, self.quantize)

    def _set_down(self, arrived: Arrived) -> None:
        self.down = linear_of(arrived, self.quantize)

    @property
    def num_bytes(self) -> int:
        """See `Sublayer`."""
        return self.up.num_bytes + self.down.num_bytes

    @property
    def replayable(self) -> bool:
        """See `Sublayer`."""
        alone = self.arch.gated_mlp or activation_replayable(self.arch.activation)
        return alone and self.up.replayable and self.down.replayable

    @property
    def capturable(self) -> bool:
        """See `Sublayer`."""
        return True

    def transient_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """See `Sublayer`."""
        if self.replayable:
            return 0
        width = (2 if self.arch.gated_mlp else 1) * self.size + self.arch.hidden_size
        return num_tokens * width * element_bytes
