"""Quantized linears of safetensors folders: the several tensors of each as one weight.

fp8 as transformers and vLLM name its parts (`weight_scale`, `weight_scale_inv`, `input_scale`),
AWQ's (`qweight` in columns of interleaved order), GPTQ's (`qweight` in rows, `g_idx`), and the
packed integers of compressed-tensors.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.errors import WeightsError
from octavo.layers.fp8 import Fp8Weight
from octavo.layers.grouped import GroupedWeight
from octavo.layers.quantized import QuantizedWeight, Weight
from octavo.quantization import BLOCK, Quantization
from octavo.weights.dummy import DummySource
from octavo.weights.packed import StoredWeight
from octavo.weights.safetensors_source import SafetensorsSource
from octavo.weights.source import Keep

_WEIGHT = ".weight"
_STD = 0.02
_FP8_PARTS = (".weight_scale", ".weight_scale_inv", ".input_scale")
_INT_PARTS = {
    "awq": (".qweight", ".qzeros", ".scales"),
    "gptq": (".qweight", ".qzeros", ".scales", ".g_idx"),
    "compressed-tensors": (
        ".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx"
    ),
}  # fmt: skip
"""The first is there where a linear is quantized."""
_WORDS = (".qweight", ".qzeros", ".weight_packed", ".weight_zero_point")
"""Parts that hold several codes a word."""
_KV_SCALES = re.compile(r".*\.(self_attn\.(q|k|v|kv|prob)_scale|[kv]_proj\.(output|kv|k|v)_scale)")
"""Of an 8 bit KV cache, as AutoFP8, compressed-tensors and ModelOpt call them: not needed, since
octavo scales each token's keys and values by their own largest."""


@dataclass(frozen=True, slots=True)
class _Linear:
    """A quantized linear in the file."""

    shape: tuple[int, int]
    """(out_features, in_features)."""
    parts: dict[str, str]
    """End of a tensor's name -> the name."""
    num_bytes: int


class QuantizedSource:
    """A `WeightSource` over a folder's tensors in which a quantized linear is one of them.

    Raises `WeightsError` for a linear whose parts are missing or do not fit each other.
    """

    def __init__(self, source: SafetensorsSource, quantization: Quantization) -> None:
        self.name = source.name
        self.quantization = quantization
        self._source = source
        self._shapes = source.shapes()
        self._linears = dict(self._find())
        self._left_out = {name for name in self._shapes if _KV_SCALES.fullmatch(name)}
        parts = {name for x in self._linears.values() for name in x.parts.values()}
        self._hidden = parts | self._left_out

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `WeightSource`."""
        plain = {n: shape for n, shape in self._shapes.items() if n not in self._hidden}
        return plain | {stem + _WEIGHT: x.shape for stem, x in self._linears.items()}

    @property
    def num_bytes(self) -> int:
        """See `WeightSource`."""
        return self._source.num_bytes - sum(map(self._source.bytes_of, self._left_out))

    def tensors(
        self, dtype: torch.dtype | None = None, keep: Keep | None = None
    ) -> Iterator[tuple[str, Weight, int]]:
        """See `WeightSource`."""
        mains = {
            name: stem
            for stem, linear in self._linears.items()
            for end, name in linear.parts.items()
            if end in (_WEIGHT, ".qweight", ".weight_packed")
        }
        with self._source.opened() as read:
            for name in self._source.in_order():
                if name in mains:
                    stem = mains[name]
                    linear = self._linears[stem]
                    parts = {end: read(part) for end, part in linear.parts.items()}
                    weight = self._weight(stem, parts, linear.shape)
                    target = stem + _WEIGHT
                    if keep is not None and keep(target):
                        yield target, weight, linear.num_bytes
                    else:
                        expanded = weight.dequantize(dtype or torch.float32)
                        yield target, expanded, linear.num_bytes
                elif name not in self._hidden:
                    tensor = read(name)
                    if dtype is not None and tensor.ndim > 1:
                        tensor = tensor.to(dtype)
                    yield name, tensor, self._source.bytes_of(name)

    def _weight(
        self, stem: str, parts: dict[str, Tensor], shape: tuple[int, int]
    ) -> QuantizedWeight:
        if self.quantization.codes == "int":
            return StoredWeight(stem, parts, shape, self.quantization)
        scale = parts.get(".weight_scale")
        scale = parts[".weight_scale_inv"] if scale is None else scale
        static = parts.get(".input_scale") if self.quantization.static_input else None
        return Fp8Weight.of(parts[_WEIGHT], scale, static)

    # -- what the headers say

    def _find(self) -> Iterator[tuple[str, _Linear]]:
        if self.quantization.codes == "fp8":
            yield from self._find_fp8()
            return
        ends = _INT_PARTS[self.quantization.method]
        for name in self._shapes:
            if name.endswith(ends[0]):
                stem = name.removesuffix(ends[0])
                parts = {end: stem + end for end in ends if stem + end in self._shapes}
                self._check_words(stem, parts)
                yield stem, self._linear(stem, parts, self._int_shape(stem, parts))

    def _check_words(self, stem: str, parts: Mapping[str, str]) -> None:
        for end in (end for end in _WORDS if end in parts):
            if (kind := self._source.type_of(parts[end])) != "I32":
                raise self._damaged(stem, f"{end[1:]} of type {kind}, and not I32")

    def _find_fp8(self) -> Iterator[tuple[str, _Linear]]:
        for name, shape in self._shapes.items():
            if not name.endswith(_WEIGHT) or self._source.type_of(name) != "F8_E4M3":
                continue
            stem = name.removesuffix(_WEIGHT)
            parts = {end: stem + end for end in _FP8_PARTS if stem + end in self._shapes}
            scale = parts.get(".weight_scale") or parts.get(".weight_scale_inv")
            if scale is None or len(shape) != 2:
                raise self._damaged(stem, "no weight_scale beside its weight")
            self._check_fp8_scale(stem, shape, self._shapes[scale])
            if self.quantization.static_input and ".input_scale" not in parts:
                raise self._damaged(stem, "no input_scale, and its inputs' scales are static")
            yield stem, self._linear(stem, {_WEIGHT: name, **parts}, (shape[0], shape[1]))

    def _check_fp8_scale(self, stem: str, shape: tuple[int, ...], scale: tuple[int, ...]) -> None:
        blocks = tuple(-(-size // BLOCK) for size in shape)
        known = ((), (1,), (1, 1), (shape[0],), (shape[0], 1))
        if scale != blocks if self.quantization.blocks else scale not in known:
            raise self._damaged(stem, f"scales {list(scale)} for a weight of {list(shape)}")

    def _int_shape(self, stem: str, parts: Mapping[str, str]) -> tuple[int, int]:
        sizes = {end: self._shapes[name] for end, name in parts.items()}
        per_word = 32 // self.quantization.bits
        method = self.quantization.method
        scales = sizes.get(".scales" if method != "compressed-tensors" else ".weight_scale")
        if scales is None or len(scales) != 2:
            raise self._damaged(stem, "no scales beside its codes")
        if method == "compressed-tensors":
            rows, words = sizes[".weight_packed"]
            return rows, self._width_of(stem, words * per_word)
        rows, columns = sizes[".qweight"]
        shape = (columns * per_word, rows) if method == "awq" else (columns, rows * per_word)
        if ".qzeros" not in sizes or scales[1] != shape[0]:
            raise self._damaged(stem, f"scales {list(scales)} for a weight of {list(shape)}")
        return shape

    def _width_of(self, stem: str, padded: int) -> int:
        """Inputs of a packed weight, whose last word need not be full."""
        name = stem + ".weight_shape"
        if name not in self._shapes:
            raise self._damaged(stem, "no weight_shape beside its codes")
        with self._source.opened() as read:
            width = int(read(name)[1])
        if not padded - 32 < width <= padded:
            raise self._damaged(stem, f"{padded} codes a row for {width} inputs")
        return width

    def _linear(self, stem: str, parts: dict[str, str], shape: tuple[int, int]) -> _Linear:
        num_bytes = sum(self._source.bytes_of(name) for name in parts.values())
        return _Linear(shape, parts, num_bytes)

    def _damaged(self, stem: str, what: str) -> WeightsError:
        return WeightsError(
            f"{self.name}: {stem} has {what}: the file does not fit its quantization_config "
            f"({self.quantization.text}); download it again"
        )


class QuantizedDummySource(DummySource):
    """Random weights whose linears of layers are quantized as a checkpoint says.

    Of `_proj.weight`s codes are drawn, all equally likely, with scales by which weights have the
    size of those that `DummySource` draws.
    """

    def __init__(
        self,
        spec: Mapping[str, tuple[int, ...]],
        quantization: Quantization,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(spec, seed, device)
        self._quantization, self._draws = quantization, seed

    def tensors(
        self, dtype: torch.dtype | None = None, keep: Keep | None = None
    ) -> Iterator[tuple[str, Weight, int]]:
        """See `WeightSource`."""
        for name, shape in self._spec.items():
            if len(shape) != 2 or not self._is_quantized(name):
                yield name, self._make(name, shape, dtype), 4 * shape[0] * (shape[-1])
                continue
            weight = self._codes(name, (shape[0], shape[1]))
            kept = keep is not None and keep(name)
            yield (
                name,
                weight if kept else weight.dequantize(dtype or torch.float32),
                4 * (shape[0] * shape[1]),
            )

    def _is_quantized(self, name: str) -> bool:
        return name.endswith("_proj.weight") and not self._quantization.ignores(
            name.removesuffix(_WEIGHT)
        )

    def _codes(self, name: str, shape: tuple[int, int]) -> QuantizedWeight:
        quantization, device = self._quantization, self._device
        if quantization.codes == "fp8":
            weight = Fp8Weight.quantized(self._make(name, shape, torch.bfloat16))
            if not quantization.static_input:
                return weight
            one = torch.ones(1, device=device) / 32
            return Fp8Weight(weight.codes, weight.scales, weight.shape, one)
        seed = zlib.crc32(f"{self._draws}:{name}:codes".encode())
        generator = torch.Generator(device).manual_seed(seed)
        bits = max(quantization.bits, 4)
        group = quantization.group_size if quantization.group_size > 0 else -(-shape[1] // 16) * 16
        num_words = -(-shape[1] // (16 * 32 // bits)) * 16
        codes = torch.randint(
            -(2**31), 2**31, (shape[0], num_words), dtype=torch.int32, device=device,
            generator=generator,
        )  # fmt: skip
        size = (shape[0], -(-shape[1] // group))
        scales = torch.full(size, _STD * 12**0.5 / 2**bits, dtype=torch.float16, device=device)
        zeros = None
        if not quantization.symmetric:
            zeros = torch.full(size, 2 ** (bits - 1), dtype=torch.float16, device=device)
        return GroupedWeight(
            codes, scales, zeros, bits, group, shape, quantization.method, 2 ** (bits - 1)
        )
