"""The experts of a mixture (Shazeer et al. 2017): which ones serve a token, and their MLPs.

Three ways to hold them. `SeparateExperts` has two layers an expert, of whatever kind is fastest
here, and calls those that have tokens. `StackedExperts` (GPU) has them all in two tensors, as they
are or in fp8, which kernels with fixed grids read, so that a step can be recorded; so has
`experts_grouped.GroupedExperts` integers that share scales in groups.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from octavo.arch import MoEConfig
from octavo.layers.fp8 import Fp8Weight
from octavo.layers.linear import Gated, Linear, make_gated, make_linear
from octavo.layers.quantized import QuantizedWeight, Weight
from octavo.quantization import BLOCK

_MAX_ROWS = 1024
"""Tokens of one expert that are computed at a time: what that takes does not depend on how uneven
the routing is."""


def route(logits: Tensor, moe: MoEConfig) -> tuple[Tensor, Tensor]:
    """The experts of each token and how much each counts, from router logits.

    logits: [num_tokens, num_experts]. With groups, experts outside the best `groups_per_token`
    groups count 0 (group-limited greedy, DeepSeek-V2 2024, section 2.2.2).

    Returns: [num_tokens, experts_per_token] int64 (on GPUs int32), and float32 of the same shape.
    """
    if logits.is_cuda:
        from octavo.ops.gpu import experts_route

        return experts_route.route(logits, moe)
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

    @property
    def capturable(self) -> bool:
        """As `models.sublayer.Sublayer.capturable`."""
        ...

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


class _Stack:
    """The same matrix of all experts; dtype float8_e4m3fn: with scales of rows, or, `in_groups`, of
    each 128 inputs of a row."""

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, in_groups: bool
    ) -> None:
        self.codes = torch.empty(shape, dtype=dtype, device=device)
        self.scales: Tensor | None = None
        if dtype == torch.float8_e4m3fn:
            num_groups = shape[2] // BLOCK if in_groups and shape[2] % BLOCK == 0 else 1
            self.scales = torch.empty((*shape[:2], num_groups), device=device)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def set(self, expert: int, first: int, weight: Weight) -> None:
        """Take rows of an expert, from `first` on."""
        rows = slice(first, first + weight.shape[0])
        if self.scales is None:
            self.codes[expert, rows].copy_(_expanded(weight, self.codes.dtype))
            return
        num_groups = self.scales.shape[2]
        if not isinstance(weight, Fp8Weight) or weight.scales.shape[1] not in (1, num_groups):
            weight = Fp8Weight.quantized(_expanded(weight, torch.float32))
        self.codes[expert, rows].copy_(weight.codes)
        self.scales[expert, rows].copy_(weight.scales.expand(-1, num_groups))


class StackedExperts:
    """All experts in two tensors on a GPU, multiplied by one kernel each.

    The tensors are made whole at once, and filled as weights come: there is never a second copy.
    dtype: of the weights; under float8_e4m3fn they keep scales of 128 inputs if they come
    `in_groups` and those fit, and are quantized where they come as anything else. Inputs are not
    rounded.
    """

    capturable = True

    def __init__(
        self,
        moe: MoEConfig,
        hidden_size: int,
        activation: str,
        dtype: torch.dtype,
        device: torch.device,
        in_groups: bool = False,
    ) -> None:
        self._moe, self._hidden_size, self._activation = moe, hidden_size, activation
        count, size = moe.num_experts, moe.expert_size
        self._gate_up = _Stack((count, 2 * size, hidden_size), dtype, device, in_groups)
        self._down = _Stack((count, hidden_size, size), dtype, device, in_groups)

    @property
    def num_bytes(self) -> int:
        """See `Experts`."""
        return self._gate_up.num_bytes + self._down.num_bytes

    def set_gate_up(self, expert: int, gate: Weight, up: Weight) -> None:
        """See `Experts`."""
        self._gate_up.set(expert, 0, gate)
        self._gate_up.set(expert, self._moe.expert_size, up)

    def set_down(self, expert: int, down: Weight) -> None:
        """See `Experts`."""
        self._down.set(expert, 0, down)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See `Experts`."""
        from octavo.ops.gpu import experts

        num_tokens, top_k = ids.shape
        order, starts = experts.sort_by_expert(ids, self._moe.num_experts)
        inner = x.new_empty((num_tokens * top_k, self._moe.expert_size))
        gate_up, down = self._gate_up, self._down
        experts.gated(
            x, gate_up.codes, order, starts, inner, top_k, self._activation, gate_up.scales
        )
        parts = x.new_empty((num_tokens, top_k, self._hidden_size))
        experts.down(inner, down.codes, order, starts, weights, parts, down.scales)
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
    if first.device.type == "cuda":
        kept = partial(StackedExperts, moe, hidden_size, activation, device=first.device)
        if isinstance(first, Fp8Weight):
            return kept(torch.float8_e4m3fn, in_groups=first.scales.shape[1] > 1)
        if isinstance(first, Tensor):
            assert quantize in (None, "fp8"), quantize
            return kept(first.dtype if quantize is None else torch.float8_e4m3fn)
        from octavo.layers.experts_grouped import GroupedExperts, grouped_of

        if grouped_of(first) is not None:
            return GroupedExperts(moe, hidden_size, activation)
    return SeparateExperts(moe, hidden_size, activation, quantize)


def _expanded(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight.dequantize(dtype) if isinstance(weight, QuantizedWeight) else weight
