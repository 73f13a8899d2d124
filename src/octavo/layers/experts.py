"""The experts of a mixture (Shazeer et al. 2017): which ones serve a token, and their MLPs.

Two ways to hold them. `SeparateExperts` has two layers an expert, of whatever kind is fastest here,
and calls those that have tokens. `StackedExperts` (GPU) has them all in two tensors, which kernels
with fixed grids read, so that a step can be recorded.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from octavo.arch import MoEConfig
from octavo.layers.linear import Gated, Linear, make_gated, make_linear
from octavo.layers.quantized import QuantizedWeight, Weight

_MAX_ROWS = 1024
"""Tokens of one expert that are computed at a time: what that takes does not depend on how uneven
the routing is."""


def route(logits: Tensor, moe: MoEConfig) -> tuple[Tensor, Tensor]:
    """The experts of each token and how much each counts, from router logits.

    logits: [num_tokens, num_experts]. With groups, experts outside the best `groups_per_token`
    groups count 0 (group-limited greedy, DeepSeek-V2 2024, section 2.2.2).

    Returns: [num_tokens, experts_per_token] int64, and float32 of the same shape.
    """
    wide = logits.float()
    scores = wide.softmax(dim=-1) if moe.scoring == "softmax" else wide.sigmoid()
    if moe.num_groups > 1:
        grouped = scores.unflatten(1, (moe.num_groups, -1))
        best = grouped.amax(dim=-1).topk(moe.groups_per_token, dim=-1).indices
        kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device)
        kept.scatter_(1, best, True)
        scores = grouped.masked_fill(~kept[..., None], 0.0).flatten(1)
    weights, ids = scores.topk(moe.experts_per_token, dim=-1)
    if moe.normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights * moe.routed_scale


class Experts(Protocol):
    """The MLPs `down(act(gate(x)) * up(x))` of all experts of a layer."""

    capturable: bool
    """As `models.sublayer.Sublayer.capturable`."""

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        ...

    def set_gate_up(self, expert: int, gate: Weight, up: Weight) -> None:
        """Take [expert_size, hidden_size] each."""
        ...

    def set_down(self, expert: int, down: Weight) -> None:
        """Take [hidden_size, expert_size]."""
        ...

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[num_tokens, hidden_size]: each token's experts, weighted and summed; ids and weights as
        of `route`."""
        ...

    def transient_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """What a call allocates, at most at one time."""
        ...


class SeparateExperts:
    """One by one, each with the tokens that chose it; the host waits to know which they are.

    A token's experts are summed in the order of their numbers, in float32, so that its result does
    not depend on its neighbours as far as the layers' do not.
    """

    capturable = False

    def __init__(
        self, moe: MoEConfig, hidden_size: int, activation: str, quantize: str | None = None
    ) -> None:
        self._moe, self._hidden_size = moe, hidden_size
        self._activation, self._quantize = activation, quantize
        self._gate_up: dict[int, Gated] = {}
        self._down: dict[int, Linear] = {}

    @property
    def num_bytes(self) -> int:
        """See `Experts`."""
        layers: list[Gated | Linear] = [*self._gate_up.values(), *self._down.values()]
        return sum(layer.num_bytes for layer in layers)

    def set_gate_up(self, expert: int, gate: Weight, up: Weight) -> None:
        """See `Experts`."""
        self._gate_up[expert] = make_gated(gate, up, None, self._activation, self._quantize)

    def set_down(self, expert: int, down: Weight) -> None:
        """See `Experts`."""
        self._down[expert] = make_linear(down, None, self._quantize)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See `Experts`."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=self._moe.num_experts).tolist()
        tokens, weight = order // ids.shape[1], weights.flatten()[order][:, None]
        first = 0
        for expert, count in enumerate(counts):
            for begin in range(first, first + count, _MAX_ROWS):
                mine = slice(begin, min(begin + _MAX_ROWS, first + count))
                rows = x[tokens[mine]]
                inner = rows.new_empty((len(rows), self._moe.expert_size))
                self._gate_up[expert](rows, inner)
                self._down[expert](inner, rows)
                total.index_add_(0, tokens[mine], rows.float().mul_(weight[mine]))
            first += count
        return total.to(x.dtype)

    def transient_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """See `Experts`."""
        hidden, pairs = self._hidden_size, num_tokens * self._moe.experts_per_token
        a_row = 4 * hidden + (hidden + 3 * self._moe.expert_size) * element_bytes
        return (
            min(num_tokens, _MAX_ROWS) * a_row
            + num_tokens * hidden * (4 + element_bytes)
            + 32 * pairs
        )


class StackedExperts:
    """All experts in two tensors on a GPU, multiplied by one kernel each.

    The tensors are made whole at once, and filled as weights come: there is never a second copy.
    """

    capturable = True

    def __init__(
        self,
        moe: MoEConfig,
        hidden_size: int,
        activation: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._moe, self._hidden_size, self._activation = moe, hidden_size, activation
        count, size = moe.num_experts, moe.expert_size
        self.gate_up = torch.empty((count, 2 * size, hidden_size), dtype=dtype, device=device)
        self.down = torch.empty((count, hidden_size, size), dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """See `Experts`."""
        return self.gate_up.nbytes + self.down.nbytes

    def set_gate_up(self, expert: int, gate: Weight, up: Weight) -> None:
        """See `Experts`."""
        size, mine = self._moe.expert_size, self.gate_up[expert]
        mine[:size].copy_(_expanded(gate, mine.dtype))
        mine[size:].copy_(_expanded(up, mine.dtype))

    def set_down(self, expert: int, down: Weight) -> None:
        """See `Experts`."""
        self.down[expert].copy_(_expanded(down, self.down.dtype))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See `Experts`."""
        from octavo.ops.gpu import experts

        num_tokens, top_k = ids.shape
        order, starts = experts.sort_by_expert(ids, self._moe.num_experts)
        inner = x.new_empty((num_tokens * top_k, self._moe.expert_size))
        experts.gated(x, self.gate_up, order, starts, inner, top_k, self._activation)
        parts = x.new_empty((num_tokens, top_k, self._hidden_size))
        experts.down(inner, self.down, order, starts, weights, parts)
        return experts.combine(parts, torch.empty_like(x))

    def transient_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """See `Experts`."""
        rows = num_tokens * self._moe.experts_per_token
        width = self._hidden_size + self._moe.expert_size
        return (rows * width + num_tokens * self._hidden_size) * element_bytes + rows * 32


def make_experts(
    moe: MoEConfig, hidden_size: int, activation: str, first: Weight, quantize: str | None = None
) -> Experts:
    """The fastest way to hold the experts, judged by the first weight that has come.

    quantize: as for `make_linear`.
    """
    plain = not isinstance(first, QuantizedWeight) and quantize is None
    if plain and first.device.type == "cuda":
        assert isinstance(first, Tensor)
        return StackedExperts(moe, hidden_size, activation, first.dtype, first.device)
    return SeparateExperts(moe, hidden_size, activation, quantize)


def _expanded(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight.dequantize(dtype) if isinstance(weight, QuantizedWeight) else weight
