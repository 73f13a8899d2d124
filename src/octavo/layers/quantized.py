"""Weights that stay quantized: what the loader hands on, and what layers are made of it.

A `QuantizedWeight` stands for a matrix [out_features, in_features]. Its rows are independent, so
q, k and v can be joined, a fused weight taken apart and rows reordered without expanding it. Which
kernel multiplies by it is decided in `layers.linear.make_linear`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor


class QuantizedWeight(ABC):
    """A matrix [out_features, in_features] in a quantized format."""

    format: str
    """What it is called in messages: `Q4_1`, `fp8`, `awq`."""
    shape: tuple[int, int]
    """(out_features, in_features) of the matrix it stands for."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory of all its parts."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its parts lie."""

    @abstractmethod
    def to(self, device: torch.device) -> QuantizedWeight:
        """The same on another device."""

    @abstractmethod
    def rows(self, index: slice | Tensor) -> QuantizedWeight:
        """Some of its rows: a range, or [count] int64 in any order."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The whole matrix, [out_features, in_features]."""

    @abstractmethod
    def joined_with(self, others: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
        """The rows of others below its own; None where they are of different formats."""


Weight: TypeAlias = Tensor | QuantizedWeight
"""What a layer is made of."""


def join_rows(weights: Sequence[Weight]) -> Weight | None:
    """The weights one below the other; None where they are of different formats."""
    first, *others = weights
    if not others:
        return first
    if isinstance(first, QuantizedWeight):
        quantized = [weight for weight in others if isinstance(weight, QuantizedWeight)]
        return first.joined_with(quantized) if len(quantized) == len(others) else None
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    return torch.cat(tensors) if len(tensors) == len(weights) else None
