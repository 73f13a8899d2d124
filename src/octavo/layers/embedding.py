"""Token embeddings, held apart or read out of a tied head's packed weight."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from octavo.layers.linear import Linear, PackedLinear
from octavo.ops.cpu import gemm


class Embedding(Protocol):
    """Row `i` of the table is the vector of token `i`."""

    num_bytes: int
    """Memory of its own; 0 when it reads a tied head's."""
    replayable: bool
    """As in `Linear`."""

    def __call__(self, token_ids: Tensor, out: Tensor) -> Tensor:
        """[num_tokens] int64 -> out, [num_tokens, hidden_size]."""
        ...


class TableEmbedding:
    """The plain table, [vocab_size, hidden_size]."""

    replayable = False

    def __init__(self, table: Tensor, num_bytes: int) -> None:
        self.table, self.num_bytes = table, num_bytes

    def __call__(self, token_ids: Tensor, out: Tensor) -> Tensor:
        return torch.index_select(self.table, 0, token_ids, out=out)


class PackedEmbedding:
    """Rows gathered out of the head's packed weight, so that tied weights are held once."""

    num_bytes = 0
    replayable = True

    def __init__(self, head: PackedLinear) -> None:
        self._packed = head.packed

    def __call__(self, token_ids: Tensor, out: Tensor) -> Tensor:
        return gemm.embedding(self._packed, token_ids, out)


def make_embedding(table: Tensor, tied_head: Linear | None = None) -> Embedding:
    """An embedding of `table`; with a head made of the same weight it shares memory if it can."""
    if isinstance(tied_head, PackedLinear):
        return PackedEmbedding(tied_head)
    if table.is_cuda:
        from octavo.layers.gpu import GpuEmbedding

        shared = getattr(tied_head, "weight", None) is table
        return GpuEmbedding(table, 0 if shared else table.nbytes)
    shares = getattr(tied_head, "weight", None) is table
    return TableEmbedding(table, 0 if shares else table.numel() * table.element_size())
