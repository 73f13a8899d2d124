"""The same matrix of all experts of a layer, of integers that share scales in groups.

Words are packed as `ops.gpu.grouped` has it. Scales and zeros lie in pairs, those of neighbouring
outputs side by side: a kernel asks for 4 bytes at a time, ahead of its need, and gets whole lines.

No Triton here: see `ops.gpu.grouped`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.ops.gpu.grouped import WORDS, Grouped, ZeroKind


@dataclass(frozen=True, slots=True, eq=False)
class GroupedStack:
    """Matrices that are each as `grouped.Grouped` tells."""

    codes: Tensor
    """[num_experts, out_features, words] int32."""
    pairs: Tensor
    """[num_experts, num_groups, out_features, 2], of 16 bits: scales and zeros; where there are no
    zeros nothing reads the second."""
    order: Tensor | None
    """[num_experts, in_features] int32, as `Grouped.order` of each."""
    bits: int
    group_size: int
    zero_kind: ZeroKind
    zero_point: int
    shape: tuple[int, int, int]
    """(num_experts, out_features, in_features)."""

    @classmethod
    def like(cls, weight: Grouped, num_experts: int, out_features: int) -> GroupedStack:
        """Of nothing yet, for weights of which `is_stackable(weight)`, where weight lies."""
        in_features, num_groups = weight.shape[1], weight.scales.shape[1]
        codes, scales, order = weight.codes, weight.scales, weight.order
        return cls(
            codes.new_zeros((num_experts, out_features, codes.shape[1])),
            scales.new_zeros((num_experts, num_groups, out_features, 2)),
            None if order is None else order.new_zeros((num_experts, in_features)),
            weight.bits, weight.group_size, weight.zero_kind, weight.zero_point,
            (num_experts, out_features, in_features),
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Memory of all parts."""
        order = 0 if self.order is None else self.order.nbytes
        return self.codes.nbytes + self.pairs.nbytes + order

    def takes(self, weight: Grouped) -> bool:
        """Whether weight is of this kind, of as many inputs."""
        return (
            weight.bits == self.bits
            and weight.group_size == self.group_size
            and weight.zero_kind == self.zero_kind
            and weight.zero_point == self.zero_point
            and weight.scales.dtype == self.pairs.dtype
            and weight.shape[1] == self.shape[2]
            and (weight.order is None) == (self.order is None)
        )

    def put(self, expert: int, first: int, weight: Grouped) -> None:
        """Take rows of an expert, from `first` on; all rows of one must be in the same order."""
        assert self.takes(weight)
        rows = slice(first, first + weight.shape[0])
        self.codes[expert, rows].copy_(weight.codes)
        pairs = self.pairs[expert, :, rows]
        pairs[..., 0].copy_(weight.scales.t())
        if weight.zeros is not None:
            pairs[..., 1].copy_(weight.zeros.t())
        if self.order is not None and weight.order is not None:
            self.order[expert].copy_(weight.order)


def is_stackable(weight: Grouped) -> bool:
    """Whether kernels take stacks of its kind: scales and zeros of the same 16-bit type, and groups
    that end where blocks end, or divide them."""
    scales, zeros = weight.scales, weight.zeros
    block, group = WORDS * 32 // weight.bits, weight.group_size
    return (
        scales.element_size() == 2
        and (zeros is None or zeros.dtype == scales.dtype)
        and (scales.shape[1] == 1 or group % block == 0 or block % group == 0)
    )


def scales_of(stack: GroupedStack, expert: int, rows: slice) -> tuple[Tensor, Tensor | None]:
    """Scales and zeros of rows of an expert, as `Grouped` has them; copies."""
    pairs = stack.pairs[expert, :, rows]
    zeros = None if stack.zero_kind == "point" else pairs[..., 1].t().contiguous()
    return pairs[..., 0].t().contiguous(), zeros
