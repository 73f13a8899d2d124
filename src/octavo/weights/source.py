"""What every kind of weight file looks like to the loader: names, shapes, a stream of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from octavo.layers.quantized import Weight

Keep = Callable[[str], bool]
"""Which weights, by name, are to stay quantized."""


class WeightSource(Protocol):
    """Weights under their Hugging Face names. One tensor at a time is in memory."""

    name: str
    """For messages: the file or folder."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's name and shape, read from headers alone."""

    def tensors(
        self, dtype: torch.dtype | None = None, keep: Keep | None = None
    ) -> Iterator[tuple[str, Weight, int]]:
        """Each tensor, with the bytes it takes in the file.

        Those for which `keep(name)` is true and which are quantized in the file come as
        `QuantizedWeight`, in the file's own format. All other matrices come as `dtype` when it is
        given (quantized ones are expanded straight into it, a few rows at a time), otherwise in
        the file's own type, float32 when that is a quantized one. Vectors (norms, biases) keep the
        file's type, so that the model may hold them exactly.
        """

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in the file."""
