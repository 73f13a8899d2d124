"""Metadata of a GGUF file under its architecture's prefix, read with a check on each value."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.errors import UnsupportedModelError, WeightsError
from octavo.weights.gguf_file import GGUFFile, GGUFTensor


class Metadata:
    """Typed reads of `<architecture>.*`; errors name the file and the key."""

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.prefix = file, file.architecture
        self.path = file.path

    def get(self, key: str, default: Any = None) -> Any:
        """A value as it is."""
        return self.file.arch_key(key, default)

    def has(self, key: str) -> bool:
        """Whether the file states it."""
        return f"{self.prefix}.{key}" in self.file.metadata

    def number(self, key: str, default: int) -> int:
        """A whole number, stated once or the same for every layer."""
        value = self.get(key, default)
        if isinstance(value, list):  # per layer
            if len(set(value)) != 1:
                raise self.refuse(f"{self.prefix}.{key} differs between layers ({value})")
            value = value[0]
        return int(value)

    def required(self, key: str) -> int:
        """A whole number above 0; raises `WeightsError` when it is missing."""
        value = self.number(key, 0)
        if value < 1:
            raise self._missing(key)
        return value

    def real(self, key: str, default: float) -> float:
        """A real number, in the fewest digits: float32 1e-5 reads 9.999999747378752e-06."""
        value = self.get(key)
        return default if value is None else shortest(float(value))

    def required_real(self, key: str) -> float:
        """A real number; raises `WeightsError` when it is missing."""
        if not isinstance(self.get(key), float):
            raise self._missing(key)
        return self.real(key, 0.0)

    def tensor(self, name: str) -> GGUFTensor:
        """A tensor that every model has."""
        if name not in self.file.tensors:
            raise WeightsError(f"{self.path} has no tensor {name!r}; convert the model again")
        return self.file.tensors[name]

    def holds(self, *names: str) -> bool:
        """Whether the file has any of these tensors."""
        return any(name in self.file.tensors for name in names)

    def refuse(self, what: str) -> UnsupportedModelError:
        """An error about something that octavo does not do."""
        return UnsupportedModelError(f"{self.path}: {what}")

    def refuse_key(self, key: str) -> UnsupportedModelError:
        """The same about one key."""
        return self.refuse(f"{self.prefix}.{key} = {self.get(key)!r:.80} is not supported")

    def _missing(self, key: str) -> WeightsError:
        return WeightsError(
            f"{self.path} does not state {self.prefix}.{key}; convert the model again with a "
            "current llama.cpp"
        )


def shortest(value: float) -> float:
    """The shortest decimal that is `value` in float32, which is what the file holds."""
    return float(np.format_float_positional(np.float32(value), unique=True))
