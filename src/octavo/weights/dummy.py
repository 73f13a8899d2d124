"""Random weights for a model of which only the shape is known (`--load-format dummy`)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping

import torch

_STD = 0.02


class DummySource:
    """Normal(0, 0.02) matrices and biases, norms of ones; a `WeightSource`.

    spec: name -> shape, as the model wants them. A tensor depends on the seed and its own name
    only, so that the order of loading, or a slice of a larger model, changes nothing.
    """

    def __init__(self, spec: Mapping[str, tuple[int, ...]], seed: int = 0) -> None:
        self.name = f"dummy weights (seed {seed})"
        self._spec, self._seed = dict(spec), seed

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `WeightSource`."""
        return dict(self._spec)

    @property
    def num_bytes(self) -> int:
        """See `WeightSource`."""
        return sum(4 * math.prod(shape) for shape in self._spec.values())

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor, int]]:
        """See `WeightSource`."""
        for name, shape in self._spec.items():
            tensor = self._make(name, shape)
            if dtype is not None and tensor.ndim > 1:
                tensor = tensor.to(dtype)
            yield name, tensor, 4 * math.prod(shape)

    def _make(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        # crc32: the same on every machine and run, which hash() is not; torch's generator looks
        # at 32 bits of a seed only, so seed and name go through it together
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed}:{name}".encode()))
        return torch.empty(shape).normal_(0.0, _STD, generator=generator)
