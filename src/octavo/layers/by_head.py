"""Products in which every head has a matrix of its own (latent attention's)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from octavo.layers.linear import Linear, PackedLinear, make_linear


class ByHead(Protocol):
    """`x_h W_h^T` for each head h."""

    num_bytes: int
    """Memory of the weights."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """[num_tokens, num_heads, in_features] -> out, [num_tokens, num_heads, out_features]; the
        last dimension of both is dense."""
        ...


class BatchedHeads:
    """All heads in one call of torch's."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.contiguous().transpose(1, 2)
        self.num_bytes = weight.nbytes

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1))


class SeparateHeads:
    """A call a head of the packed bf16 kernel, as quick as torch's one, whose results for a token
    do not depend on the others of the batch."""

    def __init__(self, heads: list[Linear]) -> None:
        self._heads = heads
        self.num_bytes = sum(head.num_bytes for head in heads)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        for head, (rows, into) in enumerate(zip(x.unbind(1), out.unbind(1), strict=True)):
            self._heads[head](rows, into)
        return out


def make_by_head(weight: Tensor) -> ByHead:
    """For weight [num_heads, out_features, in_features], of which nothing is kept where it is
    packed."""
    first = make_linear(weight[0].contiguous()) if weight.is_cpu else None
    if not isinstance(first, PackedLinear):
        return BatchedHeads(weight)
    return SeparateHeads([first, *(make_linear(head.contiguous()) for head in weight[1:])])
