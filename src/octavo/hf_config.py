"""`config.json` of a Hugging Face model -> `ModelArch`. Plain data in and out, no torch.

Defaults are those of transformers' config classes, so a file that leaves a field out means here
what it means there. What octavo cannot honour is refused rather than ignored.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.arch import ROPE_SCALING_TYPES, ModelArch, RopeConfig
from octavo.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class _Family:
    """What a config class of transformers has as defaults and fixes in its code."""

    model_type: str
    intermediate_size: int
    max_position_embeddings: int
    vocab_size: int = 32000
    num_kv_heads: int | None = None
    """When the field is missing; None: as many as there are heads."""
    head_dim: int | None = None
    """When the field is missing; None: hidden_size / num_heads."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    qkv_bias: bool | None = False
    """None: q, k, v and o follow `attention_bias`."""
    mlp_bias: bool = False
    """Whether `mlp_bias` is honoured."""
    qk_norm: bool = False
    windows: str = "none"
    """none; all: `sliding_window` on every layer; layered: `use_sliding_window` and layer types."""


_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(
        "llama", 11008, 2048, bos_token_id=1, eos_token_id=2, qkv_bias=None, mlp_bias=True
    ),
    "MistralForCausalLM": _Family(
        "mistral", 14336, 131072, num_kv_heads=8, bos_token_id=1, eos_token_id=2, windows="all"
    ),
    "Qwen2ForCausalLM": _Family(
        "qwen2", 22016, 32768, vocab_size=151936, num_kv_heads=32, qkv_bias=True, windows="layered"
    ),
    "Qwen3ForCausalLM": _Family(
        "qwen3", 22016, 32768, vocab_size=151936, num_kv_heads=32, head_dim=128,
        qkv_bias=None, qk_norm=True, windows="layered",
    ),
}  # fmt: skip

KNOWN_ARCHITECTURES: tuple[str, ...] = tuple(_FAMILIES)
"""Names of `config.json` that octavo runs."""

_DTYPES = ("float32", "float16", "bfloat16")
_MAX_SIZE, _MAX_LAYERS = 2**31 - 1, 10_000
"""A number above these is a mistake in the file, and would be one in what follows from it."""


def unknown_architecture(name: str, known: Iterable[str], where: str) -> UnsupportedModelError:
    """The error for an architecture octavo does not have: what is known and what is nearest."""
    known = tuple(known)
    by_lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.0)
    hint = f"; nearest: {by_lower[near[0]]}" if near else ""
    return UnsupportedModelError(
        f"{where}: architecture {name!r} is not supported; known: {', '.join(known)}{hint}"
    )


def read_hf_config(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    where: str = "config.json",
) -> ModelArch:
    """The shape of a model from its parsed `config.json`.

    `generation_config` (the parsed `generation_config.json`) wins for the end-of-sequence tokens,
    as it does in transformers; `where` names the file in errors. Raises `UnsupportedModelError`
    for an architecture, option or value that octavo cannot run.
    """
    try:
        return _Reader(config, generation_config or {}, where).arch()
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise UnsupportedModelError(
            f"{where} is damaged: a field is not of the type it should be ({error}); download it "
            "again"
        ) from error


class _Reader:
    def __init__(
        self, config: Mapping[str, Any], generation_config: Mapping[str, Any], where: str
    ) -> None:
        self.config, self.generation, self.where = config, generation_config, where
        self.architecture = self._architecture()
        self.family = _FAMILIES[self.architecture]

    def refuse(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.where}: {what}")

    def arch(self) -> ModelArch:
        self._check_options()
        family = self.family
        hidden_size = self._int("hidden_size", 4096)
        num_heads = self._int("num_attention_heads", 32)
        missing_kv = num_heads if family.num_kv_heads is None else family.num_kv_heads
        num_kv_heads = self._int("num_key_value_heads", missing_kv, null=num_heads)
        if num_heads % num_kv_heads:
            raise self.refuse(
                f"num_attention_heads={num_heads} is not a multiple of "
                f"num_key_value_heads={num_kv_heads}"
            )
        derived = max(hidden_size // num_heads, 1)
        head_dim = self._int("head_dim", family.head_dim or derived, null=derived)
        num_layers = self._int("num_hidden_layers", 32, most=_MAX_LAYERS)
        stated = self._int("max_position_embeddings", family.max_position_embeddings)
        rope, max_position = self._rope(head_dim, stated)
        attention_bias = family.qkv_bias is None and bool(self.config.get("attention_bias", False))
        return ModelArch(
            architecture=self.architecture,
            vocab_size=self._int("vocab_size", family.vocab_size),
            hidden_size=hidden_size,
            intermediate_size=self._int("intermediate_size", family.intermediate_size),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position,
            rms_norm_eps=self._float(self.config, "rms_norm_eps", 1e-6),
            rope=rope,
            sliding_windows=self._windows(num_layers),
            qkv_bias=bool(family.qkv_bias) or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family.mlp_bias and bool(self.config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            tie_word_embeddings=bool(self.config.get("tie_word_embeddings", False)),
            dtype=self._dtype(),
            bos_token_id=self._bos(),
            eos_token_ids=self._eos(),
        )

    def _architecture(self) -> str:
        names = self.config.get("architectures") or []
        if isinstance(names, str):
            names = [names]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.refuse(f"architectures must be a list of names, got {names!r:.80}")
        for name in names:
            if name in _FAMILIES:
                return str(name)
        model_type = self.config.get("model_type")
        if names:
            raise unknown_architecture(str(names[0]), _FAMILIES, self.where)
        for name, family in _FAMILIES.items():
            if family.model_type == model_type:
                return name
        if model_type is None:
            raise self.refuse(
                "names no model (neither architectures nor model_type); known: "
                + ", ".join(_FAMILIES)
            )
        raise unknown_architecture(str(model_type), _FAMILIES, self.where)

    def _check_options(self) -> None:
        activation = self.config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise self.refuse(f"hidden_act={activation!r} is not supported; known: silu")
        quantization = self._table("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "unnamed")
            raise self.refuse(
                f"weights quantized with {method!r} are not supported; use the unquantized "
                "checkpoint or a GGUF file of it"
            )

    def _int(self, name: str, default: int, null: int | None = None, most: int = _MAX_SIZE) -> int:
        value = self.config.get(name, default)
        if value is None:
            value = default if null is None else null
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.refuse(f"{name} must be a whole number in 1..{most:,}, got {value!r:.80}")
        return value

    def _table(self, name: str) -> Mapping[str, Any]:
        """An object inside the file; empty where it is missing or null."""
        value = self.config.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.refuse(f"{name} must be an object, got {value!r:.80}")
        return value

    def _float(self, table: Mapping[str, Any], name: str, default: float) -> float:
        value = table.get(name)
        if value is None:
            return default
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise self.refuse(f"{name} must be a number above 0, got {value!r:.80}")
        return float(value)

    def _dtype(self) -> str:
        value = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        name = str(value).removeprefix("torch.")
        name = "float32" if name == "auto" else name
        if name not in _DTYPES:
            raise self.refuse(f"dtype {name!r} is not supported; known: {', '.join(_DTYPES)}")
        return name

    def _bos(self) -> int | None:
        value = self.config.get("bos_token_id", self.family.bos_token_id)
        return value if isinstance(value, int) else None

    def _eos(self) -> tuple[int, ...]:
        value = self.generation.get("eos_token_id")
        if value is None:
            value = self.config.get("eos_token_id", self.family.eos_token_id)
        return token_ids(value, self.where)

    # -- attention windows

    def _windows(self, num_layers: int) -> tuple[int, ...]:
        kind = self.family.windows
        if kind == "none":
            return ()
        # transformers' config classes have 4096 where the field is missing, null where it is null
        window = self.config.get("sliding_window", 4096)
        if kind == "layered" and not self.config.get("use_sliding_window", False):
            window = None
        if window is None:
            return ()
        window = self._int("sliding_window", 4096)
        if kind == "all":
            return (window,) * num_layers
        windows = tuple(
            window if t == "sliding_attention" else 0 for t in self._layer_types(num_layers)
        )
        return windows if any(windows) else ()

    def _layer_types(self, num_layers: int) -> list[str]:
        types = self.config.get("layer_types")
        if types is None:
            first = self.config.get("max_window_layers", 28)
            return [
                "sliding_attention" if i >= first else "full_attention" for i in range(num_layers)
            ]
        if len(types) != num_layers:
            raise self.refuse(f"layer_types has {len(types)} entries for {num_layers} layers")
        for t in types:
            if t not in ("sliding_attention", "full_attention"):
                raise self.refuse(
                    f"layer type {t!r} is not supported; known: full_attention, sliding_attention"
                )
        return list(types)

    # -- rope

    def _rope_parameters(self) -> Mapping[str, Any]:
        """`rope_scaling` (with `rope_theta` beside it) or transformers 5's `rope_parameters`."""
        parameters = self._table("rope_scaling") or self._table("rope_parameters")
        nested = [v for v in parameters.values() if isinstance(v, Mapping)]
        if not nested:
            return parameters
        if any(v != nested[0] for v in nested):
            raise self.refuse("rope_parameters that differ between layer types are not supported")
        return nested[0]

    def _rope(self, head_dim: int, stated: int) -> tuple[RopeConfig, int]:
        """Rope, and the context it is good for."""
        p = self._rope_parameters()
        kind = p.get("rope_type") or p.get("type") or "default"
        if kind not in ROPE_SCALING_TYPES:
            raise self.refuse(
                f"rope scaling {kind!r} is not supported; known: {', '.join(ROPE_SCALING_TYPES)}"
            )
        default_theta = self._float(self.config, "rope_theta", 10000.0)
        partial = p.get("partial_rotary_factor", self.config.get("partial_rotary_factor")) or 1.0
        theta, rotary_dim = self._float(p, "rope_theta", default_theta), int(head_dim * partial)
        if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
            raise self.refuse(f"cannot rotate {rotary_dim} of {head_dim} head dimensions")
        if kind == "default":
            return RopeConfig(theta=theta, rotary_dim=rotary_dim), stated
        original = p.get("original_max_position_embeddings") or self.config.get(
            "original_max_position_embeddings"
        )
        # dynamic stretches what the file calls max_position_embeddings, whatever else it says
        original = stated if kind == "dynamic" or original is None else int(original)
        if kind == "yarn" and p.get("factor") is None:
            factor = stated / original
        else:
            factor = self._required(p, "factor", kind)
        attention_factor = p.get("attention_factor")
        rope = RopeConfig(
            theta=theta,
            rotary_dim=rotary_dim,
            scaling_type=kind,
            factor=factor,
            original_max_position=original,
            low_freq_factor=self._required(p, "low_freq_factor", kind) if kind == "llama3" else 1.0,
            high_freq_factor=(
                self._required(p, "high_freq_factor", kind) if kind == "llama3" else 4.0
            ),
            beta_fast=float(p.get("beta_fast") or 32),
            beta_slow=float(p.get("beta_slow") or 1),
            attention_factor=None if attention_factor is None else float(attention_factor),
            mscale=p.get("mscale"),
            mscale_all_dim=p.get("mscale_all_dim"),
            truncate=bool(p.get("truncate", True)),
        )
        return rope, stretched_context(rope, stated)

    def _required(self, parameters: Mapping[str, Any], name: str, kind: str) -> float:
        if parameters.get(name) is None:
            raise self.refuse(f"rope scaling {kind!r} needs {name}")
        return self._float(parameters, name, 1.0)


def stretched_context(rope: RopeConfig, stated: int) -> int:
    """Longest context in tokens under a rope scaling, given what the checkpoint states.

    yarn and dynamic reach `factor` times the trained context, and configs are often left at the
    trained figure; linear and llama3 checkpoints state the stretched one.
    """
    if rope.scaling_type in ("yarn", "dynamic"):
        return max(stated, int(rope.original_max_position * rope.factor))
    return stated


def token_ids(value: Any, where: str = "config.json") -> tuple[int, ...]:
    """An `eos_token_id` field, which is null, one id or a list of ids.

    Raises `UnsupportedModelError`, naming the file `where` it stands, for anything else.
    """
    if value is None or isinstance(value, bool):
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise UnsupportedModelError(
            f"{where}: eos_token_id must be a token id or a list of them, got {value!r:.80}"
        )
    return tuple(dict.fromkeys(ids))
