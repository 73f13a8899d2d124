"""Weights of a Hugging Face folder: `model.safetensors`, or shards named by an index."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from octavo.errors import UnsupportedModelError, WeightsError
from octavo.layers.quantized import Weight
from octavo.quantization import PLAIN_TYPES
from octavo.weights.hf_folder import safetensors_files
from octavo.weights.source import Keep

_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_BUFFERS = ("inv_freq", "attn.bias", "attention.bias", "masked_bias")
"""Constants that old checkpoints carry along, masks of bits among them; no weights."""
_QUANTIZED = ("F8_E4M3", "I32", "I64", "U8", "I8")
"""Of the parts of quantized weights."""
_Header = dict[str, dict[str, Any]]
Read = Callable[[str], torch.Tensor]


class SafetensorsSource:
    """The safetensors files of `folder`, streamed tensor by tensor; a `WeightSource`.

    Headers are read and checked at once: raises `WeightsError` for a missing shard, a truncated or
    damaged file, or an index that does not agree with its shards; `ModelNotFoundError` when there
    is no safetensors file; `UnsupportedModelError` for tensors that are not floating point, and,
    where `quantized`, no parts of quantized weights.
    """

    def __init__(self, folder: str | Path, quantized: bool = False) -> None:
        self.name = str(folder)
        self._types = (*PLAIN_TYPES, *_QUANTIZED) if quantized else PLAIN_TYPES
        self._headers = {path: _read_header(path) for path in safetensors_files(Path(folder))}
        self._check()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `WeightSource`."""
        return {
            name: tuple(entry["shape"])
            for header in self._headers.values()
            for name, entry in header.items()
        }

    @property
    def num_bytes(self) -> int:
        """See `WeightSource`."""
        return sum(_num_bytes(e) for header in self._headers.values() for e in header.values())

    def formats(self) -> dict[str, int]:
        """Type of tensors, in the format's own words -> their bytes."""
        sizes: Counter[str] = Counter()
        for header in self._headers.values():
            for entry in header.values():
                sizes[entry["dtype"]] += _num_bytes(entry)
        return dict(sizes)

    def tensors(
        self, dtype: torch.dtype | None = None, keep: Keep | None = None
    ) -> Iterator[tuple[str, Weight, int]]:
        """See `WeightSource`."""
        from safetensors import SafetensorError, safe_open

        for path, header in self._headers.items():
            try:
                with safe_open(path, framework="pt") as file:
                    # in the order of the bytes, so that a cold disk reads ahead
                    for name in sorted(header, key=lambda n: header[n]["data_offsets"]):
                        tensor = file.get_tensor(name)
                        if dtype is not None and tensor.ndim > 1:
                            tensor = tensor.to(dtype)
                        yield name, tensor, _num_bytes(header[name])
            except SafetensorError as error:
                raise WeightsError(f"{path} cannot be read: {error}") from error

    def type_of(self, name: str) -> str:
        """A tensor's type in the format's own words."""
        return str(self._entry(name)["dtype"])

    def bytes_of(self, name: str) -> int:
        """A tensor's size in the file."""
        return _num_bytes(self._entry(name))

    def in_order(self) -> Iterator[str]:
        """Names in the order of the bytes, so that a cold disk reads ahead."""
        for header in self._headers.values():
            yield from sorted(header, key=lambda name: header[name]["data_offsets"])

    @contextmanager
    def opened(self) -> Iterator[Read]:
        """Reads tensors by name, as they are in the file. Raises `WeightsError` as `tensors`."""
        from safetensors import SafetensorError, safe_open

        with ExitStack() as stack:
            files: dict[Path, Any] = {}

            def read(name: str) -> torch.Tensor:
                path = next(p for p, header in self._headers.items() if name in header)
                try:
                    if path not in files:
                        files[path] = stack.enter_context(safe_open(path, framework="pt"))
                    tensor: torch.Tensor = files[path].get_tensor(name)
                except SafetensorError as error:
                    raise WeightsError(f"{path} cannot be read: {error}") from error
                return tensor

            yield read

    def _entry(self, name: str) -> dict[str, Any]:
        return next(header[name] for header in self._headers.values() if name in header)

    def _check(self) -> None:
        seen: dict[str, Path] = {}
        for path, header in self._headers.items():
            for name, entry in header.items():
                if name in seen:
                    raise WeightsError(f"tensor {name!r} is both in {seen[name]} and in {path}")
                seen[name] = path
                if entry["dtype"] not in self._types and not name.endswith(_BUFFERS):
                    raise self._unsupported(path, name, entry["dtype"])

    def _unsupported(self, path: Path, name: str, kind: str) -> UnsupportedModelError:
        if kind in _QUANTIZED:  # and config.json does not say how
            return UnsupportedModelError(
                f"{path}: tensor {name!r} has type {kind}, as quantized weights have, but "
                "config.json has no quantization_config that tells how to read it: use a "
                "checkpoint that has one, or the unquantized one"
            )
        return UnsupportedModelError(
            f"{path}: tensor {name!r} has type {kind}; only {', '.join(self._types)} are "
            "supported: use the unquantized checkpoint"
        )


def _read_header(path: Path) -> _Header:
    """Name -> dtype, shape, data_offsets. Format: 8 bytes of length, JSON, tensor bytes."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
            text = file.read(length) if length <= _MAX_HEADER_BYTES else b""
            size = file.seek(0, 2)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    if len(text) < length:
        raise WeightsError(
            f"{path} is truncated or no safetensors file: its header does not fit into its "
            f"{size:,} bytes; download it again"
        )
    try:
        header: _Header = json.loads(text)
        header.pop("__metadata__", None)
        end = max((_end(entry) for entry in header.values()), default=0)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(
            f"{path} is damaged: its header cannot be read ({error!r}); download it again"
        ) from error
    if 8 + length + end > size:
        raise WeightsError(
            f"{path} is truncated: its tensors end at byte {8 + length + end:,} but it has "
            f"{size:,} bytes; download it again"
        )
    return header


def _end(entry: dict[str, Any]) -> int:
    """The byte behind a tensor; raises as a wrong type does for an entry that describes none."""
    sizes, (start, end) = entry["shape"], entry["data_offsets"]
    if not isinstance(entry["dtype"], str) or not all(type(n) is int for n in (*sizes, start, end)):
        raise TypeError(f"no tensor: {entry}")
    return int(end)


def _num_bytes(entry: dict[str, Any]) -> int:
    start, end = entry["data_offsets"]
    return int(end - start)
