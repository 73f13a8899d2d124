"""Random weights for a model of which only the shape is known (`--load-format dummy`)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping

import torch

from octavo.layers.quantized import Weight
from octavo.weights.source import Keep

_STD = 0.02


class DummySource:
    """Normal(0, 0.02) matrices and biases, norms of ones; a `WeightSource`.

    spec: name -> shape, as the model wants them. A tensor depends on the seed, its own name and the
    kind of device only, so that the order of loading, or a slice of a larger model, changes
    nothing. device: where they are drawn; a GPU draws 16 GB in a second, a CPU in minutes.
    """

    def __init__(
        self,
        spec: Mapping[str, tuple[int, ...]],
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.name = f"dummy weights (seed {seed})"
        self._spec, self._seed = dict(spec), seed
        self._device = device or torch.device("cpu")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `WeightSource`."""
        return dict(self._spec)

    @property
    def num_bytes(self) -> int:
        """See `WeightSource`."""
        return sum(4 * math.prod(shape) for shape in self._spec.values())

    def tensors(
        self, dtype: torch.dtype | None = None, keep: Keep | None = None
    ) -> Iterator[tuple[str, Weight, int]]:
        """See `WeightSource`."""
        for name, shape in self._spec.items():
            yield name, self._make(name, shape, dtype), 4 * math.prod(shape)

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device)
        # crc32: the same on every machine and run, which hash() is not; torch's generator looks
        # at 32 bits of a seed only, so seed and name go through it together
        seed = zlib.crc32(f"{self._seed}:{name}".encode())
        generator = torch.Generator(self._device).manual_seed(seed)
        tensor = torch.empty(shape, device=self._device)
        tensor.normal_(0.0, _STD, generator=generator)
        return tensor if dtype is None or len(shape) < 2 else tensor.to(dtype)
