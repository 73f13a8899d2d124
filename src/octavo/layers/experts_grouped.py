"""The experts of a mixture whose weights are integers in groups (AWQ, GPTQ, GGUF), on a GPU."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from octavo.arch import MoEConfig
from octavo.layers.experts import SeparateExperts
from octavo.layers.gguf_grouped import GROUPED_FORMATS, grouped_from_gguf
from octavo.layers.gguf_weight import GGUFWeight
from octavo.layers.grouped import GroupedWeight
from octavo.layers.quantized import Weight
from octavo.ops.gpu.grouped_stack import GroupedStack, is_stackable, scales_of

_MAX_SPLIT_BYTES = 64 * 8 * 4
"""Of each hidden feature, where the last product is cut into parts: so many pairs, parts, bytes."""


class GroupedExperts:
    """All experts in two stacks of packed integers, multiplied by one kernel each.

    As of `StackedExperts` there is never a second copy. What does not fit into the stacks (one
    expert in another format than the first, gate and up in different orders of inputs) makes them
    `SeparateExperts`, which take what has come as it lies.
    """

    def __init__(self, moe: MoEConfig, hidden_size: int, activation: str) -> None:
        self._moe, self._hidden_size, self._activation = moe, hidden_size, activation
        self._gate_up: GroupedStack | None = None
        self._down: GroupedStack | None = None
        self._has_gate_up: set[int] = set()
        self._has_down: set[int] = set()
        self._separate: SeparateExperts | None = None

    @property
    def capturable(self) -> bool:
        """See `Experts`."""
        return self._separate is None

    @property
    def num_bytes(self) -> int:
        """See `Experts`."""
        if self._separate is not None:
            return self._separate.num_bytes
        return sum(stack.num_bytes for stack in (self._gate_up, self._down) if stack is not None)

    def set_gate_up(self, expert: int, gate: Weight, up: Weight) -> None:
        """See `Experts`."""
        if self._separate is None:
            grouped = grouped_of(gate), grouped_of(up)
            stack = self._gate_up
            if stack is None and grouped[0] is not None:
                rows = 2 * self._moe.expert_size
                stack = GroupedStack.like(grouped[0], self._moe.num_experts, rows)
            if stack is not None and _fit(stack, *grouped):
                for first, part in zip((0, self._moe.expert_size), grouped, strict=True):
                    assert part is not None
                    stack.put(expert, first, part)
                self._gate_up = stack
                self._has_gate_up.add(expert)
                return
        self._apart().set_gate_up(expert, gate, up)

    def set_down(self, expert: int, down: Weight) -> None:
        """See `Experts`."""
        if self._separate is None:
            grouped = grouped_of(down)
            stack = self._down
            if stack is None and grouped is not None:
                stack = GroupedStack.like(grouped, self._moe.num_experts, self._hidden_size)
            if stack is not None and _fit(stack, grouped):
                assert grouped is not None
                stack.put(expert, 0, grouped)
                self._down = stack
                self._has_down.add(expert)
                return
        self._apart().set_down(expert, down)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See `Experts`."""
        if self._separate is not None:
            return self._separate(x, ids, weights)
        from octavo.ops.gpu import experts, experts_grouped

        assert self._gate_up is not None and self._down is not None
        num_tokens, top_k = ids.shape
        order, starts = experts.sort_by_expert(ids, self._moe.num_experts)
        inner = x.new_empty((num_tokens * top_k, self._moe.expert_size))
        experts_grouped.gated(x, self._gate_up, order, starts, inner, top_k, self._activation)
        num_parts = experts_grouped.num_parts(num_tokens * top_k, self._down)
        dtype = x.dtype if num_parts == 1 else torch.float32
        parts = x.new_empty((num_tokens, top_k * num_parts, self._hidden_size), dtype=dtype)
        experts_grouped.down(inner, self._down, order, starts, weights, parts)
        return experts.combine(parts, torch.empty_like(x))

    def transient_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """See `Experts`."""
        if self._separate is not None:
            return self._separate.transient_bytes(num_tokens, element_bytes)
        rows, hidden = num_tokens * self._moe.experts_per_token, self._hidden_size
        width = hidden + self._moe.expert_size
        ordered = 0  # copies of rows, each in the order of its expert
        if self._gate_up is not None and self._gate_up.order is not None:
            ordered = rows * width
        split = min(rows * 8 * 4, _MAX_SPLIT_BYTES) * hidden
        return (rows * width + ordered + num_tokens * hidden) * element_bytes + rows * 32 + split

    def _apart(self) -> SeparateExperts:
        """Experts one by one, from now on."""
        if self._separate is not None:
            return self._separate
        separate = SeparateExperts(self._moe, self._hidden_size, self._activation)
        size = self._moe.expert_size
        for expert in sorted(self._has_gate_up):
            assert self._gate_up is not None
            gate = _taken(self._gate_up, expert, slice(size))
            separate.set_gate_up(expert, gate, _taken(self._gate_up, expert, slice(size, None)))
        for expert in sorted(self._has_down):
            assert self._down is not None
            separate.set_down(expert, _taken(self._down, expert, slice(None)))
        self._separate, self._gate_up, self._down = separate, None, None
        return separate


def grouped_of(weight: Weight) -> GroupedWeight | None:
    """weight as integers in groups that can be stacked; None if it cannot be that."""
    if isinstance(weight, GGUFWeight) and weight.format in GROUPED_FORMATS:
        weight = grouped_from_gguf(weight)
    return weight if isinstance(weight, GroupedWeight) and is_stackable(weight) else None


def _fit(stack: GroupedStack, *weights: GroupedWeight | None) -> bool:
    """Whether rows of the same expert go there, all in the same order of inputs."""
    first = weights[0]
    if first is None or not all(w is not None and stack.takes(w) for w in weights):
        return False
    orders = [weight.order for weight in weights if weight is not None]
    return all(a is None or b is None or torch.equal(a, b) for a, b in pairwise(orders))


def _taken(stack: GroupedStack, expert: int, rows: slice) -> GroupedWeight:
    """Rows of an expert; words as they lie in the stack."""
    codes = stack.codes[expert, rows]
    scales, zeros = scales_of(stack, expert, rows)
    return GroupedWeight(
        codes, scales, zeros, stack.bits, stack.group_size, (len(codes), stack.shape[2]), "packed",
        zero_point=stack.zero_point, offsets=stack.zero_kind == "offsets",
        order=None if stack.order is None else stack.order[expert],
    )  # fmt: skip
