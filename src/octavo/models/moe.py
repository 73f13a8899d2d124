"""A mixture of experts in place of the MLP: Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from octavo.arch import ModelArch
from octavo.attention.base import ForwardContext
from octavo.layers.experts import Experts, make_experts, route
from octavo.layers.linear import Linear
from octavo.layers.norm import Norm
from octavo.layers.quantized import Weight
from octavo.models.mlp import DenseMLP
from octavo.models.sublayer import Arrived, Pending, linear_of, parts_of


class MoEMLP:
    """`sum_e w_e expert_e(x)` over the experts that the router picks, plus, where there is one,
    the shared MLP, perhaps times a sigmoid gate; a `Sublayer`.

    The router has its weight as it is; experts and the shared MLP may be quantized. prefix: of its
    weights' names, with the last dot; quantize: as for `make_linear`.
    """

    router: Linear
    shared: DenseMLP | None = None
    shared_gate: Linear | None = None

    def __init__(self, arch: ModelArch, prefix: str, quantize: str | None = None) -> None:
        assert arch.moe is not None and arch.gated_mlp
        self.arch, self.moe, self.quantize = arch, arch.moe, quantize
        self.prefix = prefix
        self._experts: Experts | None = None
        if self.moe.shared_size:
            name = f"{prefix}shared_experts."
            self.shared = DenseMLP(arch, name, self.moe.shared_size, quantize)

    @property
    def experts(self) -> Experts:
        """There once a weight has come."""
        assert self._experts is not None, "no expert is loaded"
        return self._experts

    # -- weights

    def pending(self) -> list[Pending]:
        """See `Sublayer`. An expert's gate and up belong together; no expert waits for another."""
        hidden, moe = self.arch.hidden_size, self.moe
        router = {f"{self.prefix}gate.weight": (moe.num_experts, hidden)}
        groups = [Pending(dict(router), self._set_router)]
        for expert in range(moe.num_experts):
            name, shape = f"{self.prefix}experts.{expert}.", (moe.expert_size, hidden)
            both = {f"{name}gate_proj.weight": shape, f"{name}up_proj.weight": shape}
            down = {f"{name}down_proj.weight": (hidden, moe.expert_size)}
            groups += [
                Pending(dict(both), partial(self._set_gate_up, expert), quantizable=True),
                Pending(dict(down), partial(self._set_down, expert), quantizable=True),
            ]
        if self.shared is not None:
            groups += self.shared.pending()
        if moe.shared_gate:
            gate = {f"{self.prefix}shared_expert_gate.weight": (1, hidden)}
            groups.append(Pending(dict(gate), self._set_shared_gate))
        return groups

    def _made(self, first: Weight) -> Experts:
        if self._experts is None:
            self._experts = make_experts(
                self.moe, self.arch.hidden_size, self.arch.activation, first, self.quantize
            )
        return self._experts

    def _set_router(self, arrived: Arrived) -> None:
        self.router = linear_of(arrived)

    def _set_gate_up(self, expert: int, arrived: Arrived) -> None:
        gate, up = parts_of(arrived, ("gate_proj", "up_proj"), "weight")
        self._made(gate).set_gate_up(expert, gate, up)

    def _set_down(self, expert: int, arrived: Arrived) -> None:
        (down,) = arrived.values()
        self._made(down).set_down(expert, down)

    def _set_shared_gate(self, arrived: Arrived) -> None:
        self.shared_gate = linear_of(arrived)

    # -- a step

    def add_to(self, x: Tensor, norm: Norm, ctx: ForwardContext) -> None:
        """See `Sublayer`."""
        x.add_(self._mixed(norm(x, ctx.workspace.normed[: len(x)]), ctx))

    def compute(self, x: Tensor, norm: Norm | None, ctx: ForwardContext, out: Tensor) -> Tensor:
        """See `Sublayer`."""
        if norm is not None:
            x = norm(x, ctx.workspace.normed[: len(x)])
        return out.copy_(self._mixed(x, ctx))

    def _mixed(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size], normalised -> the same, newly made."""
        dtype = torch.float32 if self.moe.router_float32 else x.dtype
        logits = self.router(x, x.new_empty((len(x), self.moe.num_experts), dtype=dtype))
        mixed = self.experts(x, *route(logits, self.moe))
        if self.shared is None:
            return mixed
        shared = self.shared.compute(x, None, ctx, torch.empty_like(x))
        if self.shared_gate is None:
            return mixed.add_(shared)
        return mixed.addcmul_(shared, self.shared_gate(x, x.new_empty((len(x), 1))).sigmoid_())

    # -- what it takes

    @property
    def num_bytes(self) -> int:
        """See `Sublayer`."""
        total = self.router.num_bytes + self.experts.num_bytes
        total += 0 if self.shared is None else self.shared.num_bytes
        return total + (0 if self.shared_gate is None else self.shared_gate.num_bytes)

    @property
    def replayable(self) -> bool:
        """See `Sublayer`. Which experts are called differs from step to step."""
        return False

    @property
    def capturable(self) -> bool:
        """See `Sublayer`."""
        return self.experts.capturable

    def transient_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """See `Sublayer`."""
        hidden, moe = self.arch.hidden_size, self.moe
        routing = num_tokens * (moe.num_experts * 16 + moe.experts_per_token * 24)
        shared = num_tokens * hidden * element_bytes
        if self.shared is not None:
            shared += self.shared.transient_bytes(num_tokens, element_bytes)
        experts = self.experts.transient_bytes(num_tokens, element_bytes)
        return routing + num_tokens * hidden * element_bytes + max(experts, shared)
