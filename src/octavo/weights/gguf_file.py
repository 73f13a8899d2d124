"""The header of a GGUF file: metadata and tensor index, read in one pass over the mapped bytes.

Package `gguf` reads the same through one numpy array per string, which takes seconds for a
vocabulary; this takes tens of milliseconds and can say where a damaged file breaks off. The
types' names and sizes, and dequantization, stay `gguf`'s.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import ModelNotFoundError, UnsupportedModelError, WeightsError
from octavo.weights.gguf_split import split_files

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""GGUF value type -> struct code; all little-endian."""
_CONTROL = 3
"""`tokenizer.ggml.token_type` of special tokens."""
_TURN_ENDS = {
    "llama-bpe": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    "qwen2": ("<|endoftext|>", "<|im_end|>"),
    "gemma": ("<end_of_turn>",),
    "gemma2": ("<end_of_turn>",),
    "gemma3": ("<end_of_turn>",),
    "phi3": ("<|endoftext|>", "<|end|>"),
}
"""Pre-tokenizer or architecture -> tokens that its family's generation_config.json lists as ends of
sequence; the metadata has room for one."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies in the file and how it is packed."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as torch has it (the file's own order is the reverse)."""
    type_id: int
    """A `gguf.GGMLQuantizationType`."""
    offset: int
    """Of the first byte, from the start of the file."""
    num_bytes: int
    file: int = 0
    """In which of the files of a split model."""

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return int(np.prod(self.shape, dtype=np.int64))


class GGUFFile:
    """A GGUF file's metadata and tensor index; tensor bytes are mapped, not read.

    metadata: key -> int, float, bool, str or list of them. tensors: name -> `GGUFTensor`. Of a
    split model (`name-00001-of-00003.gguf`) any file stands for all: metadata are the first's,
    tensors everyone's. Raises `ModelNotFoundError` when there is no such file, `WeightsError` when
    it is no GGUF, is truncated, damaged or lacks a part, `UnsupportedModelError` for a version or
    type that cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        paths = split_files(Path(path))
        parts = [_OneFile(p) for p in paths]
        self.path = paths[0]
        self.metadata: dict[str, Any] = parts[0].metadata
        self.tensors: dict[str, GGUFTensor] = dict(parts[0].tensors)
        self._maps = [part.map for part in parts]
        self._check_split(parts)
        for index, part in enumerate(parts[1:], 1):
            for name, tensor in part.tensors.items():
                if name in self.tensors:
                    raise WeightsError(
                        f"{part.path} is damaged: {name!r} is in another part as well"
                    )
                self.tensors[name] = replace(tensor, file=index)

    def data(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's packed bytes, one-dimensional; a view of the mapped file."""
        return np.frombuffer(self._maps[tensor.file], np.uint8, tensor.num_bytes, tensor.offset)

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        return sum(len(part) for part in self._maps)

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise WeightsError(f"{self.path} does not say its architecture (general.architecture)")
        return value

    def arch_key(self, name: str, default: Any = None) -> Any:
        """Metadata under the architecture's own prefix: `llama.block_count` for `block_count`."""
        return self.metadata.get(f"{self.architecture}.{name}", default)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence: the stated ones and those known of the model's family."""
        stated = (self.metadata.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot", "eom"))
        ids = [value for value in stated if isinstance(value, int)]
        kinds = ("tokenizer.ggml.pre", "general.architecture")
        ends = {end for kind in kinds for end in _TURN_ENDS.get(self.metadata.get(kind, ""), ())}
        if ids and ends:
            tokens = self.metadata.get("tokenizer.ggml.tokens", [])
            types = self.metadata.get("tokenizer.ggml.token_type", [])
            found = {t for t, kind in enumerate(types) if kind == _CONTROL and tokens[t] in ends}
            ids += sorted(found)
        return tuple(dict.fromkeys(ids))

    def _check_split(self, parts: list[_OneFile]) -> None:
        stated = self.metadata.get("split.count", 1) or 1
        if stated != len(parts):
            raise WeightsError(
                f"{self.path} is one of {stated} parts of a split model, but has not the name "
                f"llama-gguf-split gave it (NAME-00001-of-{stated:05}.gguf), by which the others "
                "are found: rename it"
            )
        total = sum(len(part.tensors) for part in parts)
        if (expected := self.metadata.get("split.tensors.count", total)) != total:
            raise WeightsError(
                f"the {len(parts)} parts of {self.path} hold {total} tensors instead of "
                f"{expected}; download them again"
            )


class _OneFile:
    """Metadata and tensor index of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.map: mmap.mmap | bytes
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise ModelNotFoundError(f"cannot read {self.path}: {error.strerror}") from error
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        cursor = _Cursor(self.map, self.path)
        num_tensors, num_keys = self._start(cursor)
        try:
            for _ in range(num_keys):
                key = cursor.string("a metadata key")
                self.metadata[key] = cursor.value(cursor.scalar(4, key), key)
            entries = [self._entry(cursor) for _ in range(num_tensors)]
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self.path} is damaged: {error}") from error
        self._place(entries, cursor.position)

    def _start(self, cursor: _Cursor) -> tuple[int, int]:
        magic = bytes(self.map[:4])
        if magic != MAGIC:
            found = f"it starts with {magic!r}, not {MAGIC!r}" if magic else "it is empty"
            raise WeightsError(f"{self.path} is not a GGUF file: {found}; download it again")
        cursor.position = 4
        version = cursor.scalar(4, "the version")
        if version not in _VERSIONS:
            swapped = version & 0xFFFF == 0
            detail = "it is big-endian" if swapped else f"it has version {version}"
            raise UnsupportedModelError(
                f"{self.path}: GGUF versions {_VERSIONS[0]} and {_VERSIONS[1]}, little-endian, can "
                f"be read, but {detail}; convert it again with a current llama.cpp"
            )
        return cursor.scalar(10, "the tensor count"), cursor.scalar(10, "the metadata count")

    def _entry(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string("a tensor name")
        num_dims = cursor.scalar(4, name)
        if num_dims > _MAX_DIMS:
            raise WeightsError(f"{self.path} is damaged: tensor {name!r} has {num_dims} dimensions")
        dims = tuple(cursor.scalar(10, name) for _ in range(num_dims))
        return name, dims[::-1], cursor.scalar(4, name), cursor.scalar(10, name)

    def _place(self, entries: list[tuple[str, tuple[int, ...], int, int]], end: int) -> None:
        """Turn relative offsets into places in the file and check that each is inside it."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise WeightsError(f"{self.path} is damaged: general.alignment is {alignment!r}")
        start = -(-end // alignment) * alignment
        for name, shape, type_id, offset in entries:
            try:
                block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
            except (ValueError, KeyError):
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name!r} has the unknown type {type_id}"
                ) from None
            if name in self.tensors:
                raise WeightsError(f"{self.path} is damaged: two tensors are called {name!r}")
            num_elements = int(np.prod(shape, dtype=np.object_)) if shape else 1
            if shape and shape[-1] % block:
                raise WeightsError(
                    f"{self.path} is damaged: rows of {name!r} have {shape[-1]} elements, not a "
                    f"multiple of the {block} in a {GGMLQuantizationType(type_id).name} block"
                )
            num_bytes = num_elements // block * block_bytes
            if start + offset + num_bytes > len(self.map):
                raise WeightsError(
                    f"{self.path} is truncated: tensor {name!r} ends at byte "
                    f"{start + offset + num_bytes:,} of a file of {len(self.map):,} bytes; "
                    "download it again"
                )
            self.tensors[name] = GGUFTensor(name, shape, type_id, start + offset, num_bytes)


class _Cursor:
    """Reads little-endian values one after the other; running off the end is a `WeightsError`."""

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self._data, self._path, self.position = data, path, 0
        self._size = len(data)

    def _take(self, num_bytes: int, what: str) -> int:
        start, end = self.position, self.position + num_bytes
        if end > self._size:
            raise WeightsError(
                f"{self._path} is truncated or damaged: {what} needs bytes {start:,} to {end:,} of "
                f"a file of {self._size:,} bytes"
            )
        self.position = end
        return start

    def scalar(self, kind: int, what: str) -> Any:
        code = _SCALARS.get(kind)
        if code is None:
            raise WeightsError(f"{self._path} is damaged: {what} has the unknown type {kind}")
        return struct.unpack_from("<" + code, self._data, self._take(struct.calcsize(code), what))[
            0
        ]

    def string(self, what: str) -> str:
        length = self.scalar(10, what)
        start = self._take(length, what)
        return self._data[start : start + length].decode("utf-8")

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        return self.scalar(kind, what)

    def _array(self, what: str) -> list[Any]:
        kind, length = self.scalar(4, what), self.scalar(10, what)
        if kind == _STRING:
            return self._strings(length, what)
        if kind == _ARRAY:
            return [self._array(what) for _ in range(self._plausible(length, 12, what))]
        code = _SCALARS.get(kind)
        if code is None:
            raise WeightsError(f"{self._path} is damaged: {what} has the unknown type {kind}")
        start = self._take(length * struct.calcsize(code), what)
        values: list[Any] = np.frombuffer(self._data, np.dtype("<" + code), length, start).tolist()
        return values

    def _plausible(self, length: int, item_bytes: int, what: str) -> int:
        """A damaged length must not start a loop (or an allocation) of 2**60 items."""
        position = self.position
        self._take(length * item_bytes, what)
        self.position = position
        return length

    def _strings(self, length: int, what: str) -> list[str]:
        """The hot loop: a vocabulary and its merges are hundreds of thousands of strings."""
        self._plausible(length, 8, what)
        data, position, size = self._data, self.position, self._size
        read_length = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(length):
            if position + 8 > size:
                self._take(8 + size, what)
            start = position + 8
            position = start + read_length(data, position)[0]
            if position > size:
                self.position = start
                self._take(position - start, what)
            strings.append(data[start:position].decode("utf-8"))
        self.position = position
        return strings
