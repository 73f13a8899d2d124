"""How a checkpoint's linear layers are quantized, from `quantization_config`; no torch.

Read here: `fp8` (native, and ModelOpt's), `compressed-tensors` (fp8 weights, and packed 4 or 8 bit
integers with activations left as they are), `awq` and `gptq`. What cannot be honoured is refused.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from octavo.errors import UnsupportedModelError

Method = Literal["awq", "compressed-tensors", "fp8", "gptq"]
METHODS: tuple[Method, ...] = get_args(Method)
"""Values of `quant_method` that are read."""

PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
"""Types of tensors, as files name them, whose numbers are what they are: nothing is quantized."""

_PER_LINEAR = ("bits", "group_size", "sym", "desc_act")
"""Of GPTQ's fields those that tell how codes are to be read."""

BLOCK = 128
"""Rows and columns that share a scale in fp8 checkpoints with blocks."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a checkpoint's quantized linears hold. Which ones are, the tensors' names tell."""

    method: Method
    """One of `METHODS`."""
    codes: Literal["fp8", "int"]
    bits: int = 8
    """Of a weight: 8 for fp8; 2, 4 or 8."""
    group_size: int = -1
    """int: inputs that share a scale; -1: a whole row."""
    symmetric: bool = True
    """int: no zero points are stored, or they say nothing (gptq)."""
    zero_offset: int = 0
    """gptq: what is added to stored zero points (1 in the older of its formats)."""
    act_order: bool = False
    """gptq, compressed-tensors: groups are of inputs that `g_idx` names."""
    per_channel: bool = False
    """fp8: a scale for each row of a weight, not one for the whole."""
    blocks: bool = False
    """fp8: a scale for each 128 x 128 weights, and for each 128 inputs of a token."""
    static_input: bool = False
    """fp8: inputs are scaled by a stored number instead of each token's largest."""
    ignored: tuple[str, ...] = ()
    """Linears that are left as they were: names, ends of names, or `re:` and a pattern."""
    kv_scales: bool = False
    """Whether it has scales for an 8 bit KV cache, which octavo does not need."""

    @property
    def text(self) -> str:
        """For people: `awq, 4 bits, groups of 128`."""
        if self.codes == "fp8":
            scales = "blocks of 128 x 128" if self.blocks else "tensors"
            scales = "channels" if self.per_channel else scales
            inputs = "static" if self.static_input else "dynamic"
            text = f"{self.method}, 8 bits (e4m3), scales of {scales}, {inputs} inputs"
            return text + ", KV scales that are not used" * self.kv_scales
        groups = "whole rows" if self.group_size < 0 else f"groups of {self.group_size}"
        order = " by activation" * self.act_order
        return f"{self.method}, {self.bits} bits, {groups}{order}"

    def ignores(self, name: str) -> bool:
        """Whether the linear of that name (without `.weight`) is not quantized."""
        for pattern in self.ignored:
            if pattern.startswith("re:"):
                if re.match(pattern[3:], name):
                    return True
            elif name == pattern or name.endswith(f".{pattern}") or f".{pattern}." in name:
                return True
        return False


def read_quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """From a parsed `config.json`; None where the weights are not quantized.

    where: the file, for errors. Raises `UnsupportedModelError` for what octavo does not read.
    """
    table = config.get("quantization_config") or config.get("compression_config")
    if not table:
        return None
    if not isinstance(table, Mapping):
        raise UnsupportedModelError(
            f"{where}: quantization_config must be an object: {table!r:.80}"
        )
    try:
        return _Reader(table, where).read()
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise UnsupportedModelError(
            f"{where} is damaged: a field of quantization_config is not of the type it should be "
            f"({error}); download it again"
        ) from error


class _Reader:
    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self.table, self.where = table, where
        self.method = str(table.get("quant_method", "unnamed"))

    def read(self) -> Quantization:
        readers = {
            "fp8": self._fp8,
            "awq": self._awq,
            "gptq": self._gptq,
            "compressed-tensors": self._compressed,
            "modelopt": self._modelopt,
        }
        if self.method not in readers:
            raise UnsupportedModelError(
                f"{self.where}: weights quantized with {self.method!r} are not supported; known: "
                f"{', '.join(METHODS)}, modelopt; use one of those, the unquantized checkpoint, or "
                "a GGUF file of it"
            )
        return readers[self.method]()

    def _fp8(self) -> Quantization:
        self._expect("fmt", self.table.get("fmt", "e4m3"), ("e4m3",))
        scheme = self.table.get("activation_scheme", "dynamic")
        self._expect("activation_scheme", scheme, ("dynamic", "static"))
        block = self.table.get("weight_block_size")
        if block is not None:
            self._expect("weight_block_size", tuple(block), ((BLOCK, BLOCK),))
            self._expect("activation_scheme", scheme, ("dynamic",))
        return Quantization(
            "fp8",
            "fp8",
            blocks=block is not None,
            static_input=scheme == "static",
            ignored=self._names("ignored_layers", "modules_to_not_convert"),
            kv_scales=bool(self.table.get("kv_cache_scheme")),
        )

    def _modelopt(self) -> Quantization:
        """NVIDIA's tool, whose fp8 differs from the native one in its configuration alone."""
        self._expect("quant_algo", self.table.get("quant_algo"), ("FP8",))
        kv = self.table.get("kv_cache_scheme") or self.table.get("kv_cache_quant_algo")
        names = self._names("ignore", "exclude_modules")
        left_out = (f"re:{fnmatch.translate(n)}" if "*" in n else n for n in names)
        return Quantization(
            "fp8", "fp8", static_input=True, ignored=tuple(left_out), kv_scales=bool(kv)
        )

    def _awq(self) -> Quantization:
        table = self.table
        self._expect("version", str(table.get("version", "gemm")).lower(), ("gemm",))
        bits = table.get("bits", table.get("w_bit", 4))
        self._expect("bits", bits, (4,))
        self._expect("zero_point", table.get("zero_point", True), (True,))
        group_size = table.get("group_size", table.get("q_group_size", BLOCK))
        return Quantization(
            "awq",
            "int",
            bits=4,
            group_size=self._group(group_size),
            symmetric=False,
            ignored=self._names("modules_to_not_convert"),
        )

    def _gptq(self) -> Quantization:
        table = self.table
        bits = table.get("bits", 4)
        self._expect("bits", bits, (2, 4, 8))
        form = str(table.get("checkpoint_format", "gptq"))
        self._expect("checkpoint_format", form, ("gptq", "gptq_v2"))
        return Quantization(
            "gptq",
            "int",
            bits=bits,
            group_size=self._group(table.get("group_size", BLOCK)),
            symmetric=bool(table.get("sym", True)),
            zero_offset=1 if form == "gptq" else 0,
            act_order=bool(table.get("desc_act", False)),
            ignored=self._names("modules_in_block_to_not_quantize", "modules_to_not_convert")
            + self._left_out_by_rules(),
        )

    def _left_out_by_rules(self) -> tuple[str, ...]:
        """Patterns of GPTQModel's `dynamic`, whose `-:` leave linears as they were. Others give
        some linears bits or groups of their own, which is refused."""
        rules = self.table.get("dynamic") or {}
        if not isinstance(rules, Mapping):
            raise self._refusal("dynamic", rules, ("an object",))
        for pattern, changes in rules.items():
            same = not changes or all(
                self.table.get(field) == value
                for field, value in changes.items()
                if field in _PER_LINEAR
            )
            if not pattern.startswith("-:") and not same:
                raise self._refusal("dynamic", {pattern: changes}, ("-: and a pattern",))
        left_out = tuple(f"re:{p[2:]}" for p in rules if p.startswith("-:"))
        return self._compiled("dynamic", left_out)

    def _compressed(self) -> Quantization:
        table = self.table
        self._expect("transform_config", table.get("transform_config") or None, (None,))
        sparsity = (table.get("sparsity_config") or {}).get("format", "dense")
        self._expect("sparsity_config.format", sparsity, ("dense",))
        groups = list((table.get("config_groups") or {}).values())
        if not groups:
            raise self._refusal("config_groups", groups, ("one group",))
        first = groups[0]
        schemes = ("weights", "input_activations", "output_activations")
        if any(group.get(key) != first.get(key) for group in groups for key in schemes):
            raise self._refusal("config_groups", "several that differ", ("one scheme for all",))
        self._expect("output_activations", first.get("output_activations"), (None,))
        weights, inputs = first.get("weights") or {}, first.get("input_activations")
        kind = weights.get("type", "int")
        self._expect("weights.type", kind, ("float", "int"))
        self._expect("weights.dynamic", weights.get("dynamic", False), (False,))
        ignored = self._names("ignore")
        if kind == "float":
            return self._compressed_fp8(weights, inputs, ignored)
        self._expect("format", first.get("format") or table.get("format"), ("pack-quantized",))
        self._expect("weights.num_bits", weights.get("num_bits"), (4, 8))
        self._expect("weights.strategy", weights.get("strategy"), ("group", "channel"))
        self._expect("input_activations", inputs, (None,))
        grouped = weights["strategy"] == "group"
        return Quantization(
            "compressed-tensors",
            "int",
            bits=weights["num_bits"],
            group_size=self._group(weights.get("group_size")) if grouped else -1,
            symmetric=bool(weights.get("symmetric", True)),
            act_order=bool(weights.get("actorder")) and weights["actorder"] != "weight",
            ignored=ignored,
            kv_scales=bool(table.get("kv_cache_scheme")),
        )

    def _compressed_fp8(
        self, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, ignored: tuple[str, ...]
    ) -> Quantization:
        self._expect("format", self.table.get("format"), ("float-quantized", "naive-quantized"))
        self._expect("weights.num_bits", weights.get("num_bits"), (8,))
        self._expect("weights.symmetric", weights.get("symmetric", True), (True,))
        strategy = weights.get("strategy", "tensor")
        self._expect("weights.strategy", strategy, ("tensor", "channel", "block"))
        if inputs is None:
            raise self._refusal("input_activations", None, ("8 bit floats",))
        self._expect("input_activations.type", inputs.get("type"), ("float",))
        self._expect("input_activations.num_bits", inputs.get("num_bits"), (8,))
        dynamic = bool(inputs.get("dynamic", False))
        scales = inputs.get("strategy", "tensor")
        # dynamic scales of a whole batch would make a token depend on who else is in it
        known = ("token", "tensor") if dynamic else ("tensor",)
        if strategy == "block":
            structure = tuple(weights.get("block_structure") or ())
            self._expect("weights.block_structure", structure, ((BLOCK, BLOCK),))
            self._expect("input_activations.dynamic", dynamic, (True,))
            self._expect("input_activations.group_size", inputs.get("group_size"), (BLOCK,))
            known = ("group",)
        self._expect("input_activations.strategy", scales, known)
        return Quantization(
            "compressed-tensors",
            "fp8",
            blocks=strategy == "block",
            per_channel=strategy == "channel",
            static_input=not dynamic,
            ignored=ignored,
            kv_scales=bool(self.table.get("kv_cache_scheme")),
        )

    # -- fields

    def _group(self, value: Any) -> int:
        self._expect("group_size", value, (-1, 16, 32, 64, 128, 256, 512, 1024))
        return int(value)

    def _names(self, *fields: str) -> tuple[str, ...]:
        found = next((self.table[f] for f in fields if self.table.get(f)), ())
        if any(isinstance(x, list) for x in found):
            found = [name for part in found for name in part]
        if isinstance(found, str) or not all(isinstance(name, str) for name in found):
            raise self._refusal(fields[0], found, ("a list of names",))
        return self._compiled(fields[0], tuple(found))

    def _compiled(self, field: str, names: tuple[str, ...]) -> tuple[str, ...]:
        """`names`, the patterns of which can be compiled."""
        for name in names:
            if not name.startswith("re:"):
                continue
            try:
                re.compile(name[3:])
            except re.error as error:
                raise self._refusal(field, f"{name} ({error})", ("regular expressions",)) from error
        return names

    def _expect(self, field: str, value: Any, known: tuple[Any, ...]) -> None:
        if not any(type(value) is type(k) and value == k for k in known):
            raise self._refusal(field, value, known)

    def _refusal(self, field: str, value: Any, known: tuple[Any, ...]) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.where}: quantization_config of {self.method!r} with {field}={value!r:.80} is "
            f"not supported; known: {', '.join(map(str, known))}; use the unquantized checkpoint "
            "or a GGUF file of it"
        )
