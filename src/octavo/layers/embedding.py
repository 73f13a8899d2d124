"""Token embeddings, held apart, quantized, or read out of a tied head's packed weight."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from octavo.layers.linear import Linear, PackedLinear
from octavo.layers.quantized import QuantizedWeight, Weight
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


class QuantizedEmbedding:
    """Rows of a quantized table, expanded as they are read."""

    replayable = False

    def __init__(self, table: QuantizedWeight, num_bytes: int) -> None:
        self._table, self.num_bytes = table, num_bytes

    def __call__(self, token_ids: Tensor, out: Tensor) -> Tensor:
        return out.copy_(self._table.rows(token_ids).dequantize(out.dtype))


def make_embedding(
    table: Weight, tied_head: Linear | None = None, quantize: str | None = None
) -> Embedding:
    """An embedding of `table`; with a head made of the same weight it shares memory if it can.

    quantize: as for `make_linear`; int8 is what a table can be rounded to.
    """
    shares = getattr(tied_head, "weight", None) is table
    if isinstance(table, QuantizedWeight) or quantize == "int8":
        if table.device.type == "cpu":
            from octavo.layers.quantized_cpu import make_quantized_embedding

            return make_quantized_embedding(table, tied_head)
        assert isinstance(table, QuantizedWeight)
        return QuantizedEmbedding(table, 0 if shares else table.num_bytes)
    if isinstance(tied_head, PackedLinear):
        return PackedEmbedding(tied_head)
    if table.is_cuda:
        from octavo.layers.gpu import GpuEmbedding

        return GpuEmbedding(table, 0 if shares else table.nbytes)
    return TableEmbedding(table, 0 if shares else table.nbytes)
