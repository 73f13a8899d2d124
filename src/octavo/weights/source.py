"""What every kind of weight file looks like to the loader: names, shapes, a stream of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch


class WeightSource(Protocol):
    """Weights under their Hugging Face names. One tensor at a time is in memory."""

    name: str
    """For messages: the file or folder."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's name and shape, read from headers alone."""

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor, int]]:
        """Each tensor, with the bytes it takes in the file.

        Matrices come as `dtype` when it is given (quantized ones are expanded straight into it,
        a few rows at a time), otherwise in the file's own type, float32 when that is a quantized
        one. Vectors (norms, biases) keep the file's type, so that the model may hold them exactly.
        """

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in the file."""
