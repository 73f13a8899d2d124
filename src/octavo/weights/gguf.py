"""A GGUF file as a source of weights: a stream of tensors, dequantized or as they are packed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from octavo.arch import ModelArch
from octavo.errors import UnsupportedModelError
from octavo.layers.gguf_weight import GGUFWeight, expand
from octavo.layers.quantized import Weight
from octavo.weights.gguf_arch import FAMILIES, read_gguf_arch
from octavo.weights.gguf_file import GGUFFile, GGUFTensor
from octavo.weights.gguf_parts import LatentPart, Part, gguf_parts, unit_norms
from octavo.weights.source import Keep

_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""`gguf.GGMLQuantizationType`s that are not quantized."""


class GGUFSource:
    """The tensors of a GGUF file, dequantized by package `gguf` or left packed; a `WeightSource`.

    Raises `UnsupportedModelError` at once when a tensor's type cannot be dequantized.
    """

    def __init__(self, file: GGUFFile | str | Path, arch: ModelArch | None = None) -> None:
        self._file = file if isinstance(file, GGUFFile) else GGUFFile(file)
        arch = arch or read_gguf_arch(self._file)
        self.name = str(self._file.path)
        self._parts = gguf_parts(self._file, arch, FAMILIES[self._file.architecture].permuted)
        self._ones = unit_norms(arch, self._parts)
        self._check_types()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `WeightSource`."""
        return {name: part.shape for name, part in self._parts.items()} | self._ones

    @property
    def num_bytes(self) -> int:
        """See `WeightSource`."""
        return sum(part.num_bytes for part in self._parts.values())

    def tensors(
        self, dtype: torch.dtype | None = None, keep: Keep | None = None
    ) -> Iterator[tuple[str, Weight, int]]:
        """See `WeightSource`."""
        for name, part in self._parts.items():
            if isinstance(part, LatentPart):
                yield name, self._latent(part, dtype), part.num_bytes
            elif _is_packed(part) and keep is not None and keep(name):
                yield name, self._packed(part), part.num_bytes
            else:
                yield name, self._unpacked(part, dtype), part.num_bytes
        for name, shape in self._ones.items():
            yield name, torch.ones(shape), 0

    def quantizations(self) -> dict[str, int]:
        """Types of the file's matrices, by name, with the bytes in each (`Q4_K`: 123456)."""
        from gguf import GGMLQuantizationType

        sizes: dict[str, int] = {}
        for part in self._parts.values():
            for tensor in part.tensors if len(part.shape) > 1 else ():
                kind = GGMLQuantizationType(tensor.type_id).name
                sizes[kind] = sizes.get(kind, 0) + part.num_bytes // len(part.tensors)
        return sizes

    def _check_types(self) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        tensors = [t for part in self._parts.values() for t in part.tensors]
        for type_id in {t.type_id for t in tensors} - set(_PLAIN):
            kind = GGMLQuantizationType(type_id)
            try:
                dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError:
                example = next(t.name for t in tensors if t.type_id == type_id)
                raise UnsupportedModelError(
                    f"{self.name}: tensor {example!r} has type {kind.name}, which cannot be "
                    "dequantized; use a file with another quantization"
                ) from None

    def _raw(self, part: Part) -> npt.NDArray[np.uint8]:
        return self._file.data(part.tensor)[part.first_byte :][: part.num_bytes]

    def _packed(self, part: Part) -> GGUFWeight:
        num_rows, in_features = part.shape
        # copied: what the model holds must not keep the file mapped, and torch takes no read-only
        # memory
        raw = torch.from_numpy(self._raw(part).copy().reshape(num_rows, -1))
        if (order := part.row_order()) is not None:
            raw = raw[order]
        return GGUFWeight.of(raw, part.tensor.type_id, in_features)

    def _unpacked(self, part: Part, dtype: torch.dtype | None) -> torch.Tensor:
        wanted = dtype if len(part.shape) > 1 else None
        out = self._expanded(self._raw(part), part.tensor, part.shape, wanted)
        return out if (order := part.row_order()) is None else out[order]

    def _expanded(
        self,
        raw: npt.NDArray[np.uint8],
        tensor: GGUFTensor,
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
    ) -> torch.Tensor:
        """`shape` out of packed bytes, in `dtype` or what comes nearest to the file's type."""
        plain = _PLAIN.get(tensor.type_id)
        out = torch.empty(shape, dtype=dtype or plain or torch.float32)
        if plain is out.dtype:
            out.view(-1).view(torch.uint8).numpy()[:] = raw
        else:
            expand(raw, tensor.type_id, out)
        return out

    def _latent(self, part: LatentPart, dtype: torch.dtype | None) -> torch.Tensor:
        keys, values = (self._expanded(self._file.data(t), t, t.shape, dtype) for t in part.tensors)
        return torch.cat([keys.transpose(1, 2), values], dim=1).reshape(part.shape)


def _is_packed(part: Part) -> bool:
    return part.tensor.type_id not in _PLAIN and len(part.shape) == 2
