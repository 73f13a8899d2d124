"""What configurations of all families have in common, and how the rest is added to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.arch import ModelArch
from octavo.hf_config.fields import MAX_LAYERS, Fields
from octavo.hf_config.ropes import RopeDefaults, read_rope

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "relu": "relu",
    "relu2": "relu2", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
"""What files call them: octavo's name."""
_EFFECT = ("add_cross_attention", "is_encoder_decoder", "use_bidirectional_attention")
"""Flags of transformers' base classes that make another model of it."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a config class of transformers has where a file leaves a field out."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int | None = 11008
    """None: 4 x hidden_size."""
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int | None = None
    """None: as many as there are heads."""
    head_dim: int | None = None
    """None: hidden_size / num_heads."""
    states_head_dim: bool = True
    """Whether the family reads `head_dim` at all."""
    states_kv_heads: bool = True
    """Whether the family reads `num_key_value_heads` at all."""
    max_position_embeddings: int = 2048
    norm_eps: float = 1e-6
    eps_field: str = "rms_norm_eps"
    activation: str = "silu"
    activation_field: str = "hidden_act"
    tie: bool = False
    bos: int | None = 1
    eos: int | None = 2
    rope: RopeDefaults | None = field(default_factory=RopeDefaults)
    """None: the family does not rotate."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers that other fields are derived from."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def read_sizes(f: Fields, d: Defaults) -> Sizes:
    """Width, depth and heads, checked against each other."""
    hidden_size = f.size("hidden_size", d.hidden_size)
    num_heads = f.size("num_attention_heads", d.num_heads)
    num_kv_heads = num_heads
    if d.states_kv_heads:
        missing = num_heads if d.num_kv_heads is None else d.num_kv_heads
        num_kv_heads = f.size("num_key_value_heads", missing, null=num_heads)
    if num_heads % num_kv_heads:
        raise f.refuse(
            f"{f.name('num_attention_heads')}={num_heads} is not a multiple of "
            f"{f.name('num_key_value_heads')}={num_kv_heads}"
        )
    derived = max(hidden_size // num_heads, 1)
    if not d.states_head_dim and hidden_size % num_heads:
        raise f.refuse(
            f"{f.name('hidden_size')}={hidden_size} is not a multiple of "
            f"{f.name('num_attention_heads')}={num_heads}"
        )
    head_dim = derived
    if d.states_head_dim:
        head_dim = f.size("head_dim", d.head_dim or derived, null=derived)
    num_layers = f.size("num_hidden_layers", d.num_layers, most=MAX_LAYERS)
    return Sizes(hidden_size, num_layers, num_heads, num_kv_heads, head_dim)


def build(f: Fields, d: Defaults, sizes: Sizes | None = None, **special: Any) -> ModelArch:
    """The shape that file and defaults give; `special` are a family's own fields of `ModelArch`."""
    _refuse_other_models(f)
    sizes = sizes or read_sizes(f, d)
    stated = f.size("max_position_embeddings", d.max_position_embeddings)
    fields: dict[str, Any] = {"max_position_embeddings": stated}
    if d.rope is not None and "rope" not in special:
        rope, reached = read_rope(f, sizes.head_dim, stated, d.rope)
        fields |= {"rope": rope, "max_position_embeddings": _unchunked(f, reached)}
    inter = d.intermediate_size or 4 * sizes.hidden_size
    fields |= {
        "architecture": f.architecture,
        "vocab_size": f.size("vocab_size", d.vocab_size),
        "hidden_size": sizes.hidden_size,
        "intermediate_size": f.size("intermediate_size", inter),
        "num_layers": sizes.num_layers,
        "num_heads": sizes.num_heads,
        "num_kv_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "norm_eps": f.positive(d.eps_field, d.norm_eps),
        "activation": activation(f, d.activation_field, d.activation),
        "tie_word_embeddings": f.flag("tie_word_embeddings", d.tie),
        "dtype": f.dtype(),
        "bos_token_id": f.bos(d.bos),
        "eos_token_ids": f.eos(d.eos),
    }
    return ModelArch(**(fields | special))


def _unchunked(f: Fields, reached: int) -> int:
    """What of a context is computed as trained without dual chunk attention (An et al. 2024; the
    Qwen 2.5 for a million tokens), which only changes what lies beyond."""
    table = f.table("dual_chunk_attention_config")
    return min(reached, int(f.number(table, "original_max_position_embeddings", reached)))


def _refuse_other_models(f: Fields) -> None:
    for name in _EFFECT:
        f.only(name, False)
    f.only("per_layer_config", {})


def activation(f: Fields, field: str, default: str) -> str:
    """The MLP's activation by octavo's name."""
    value = f.raw(field, default) or default
    if value not in _ACTIVATIONS:
        raise f.refuse(
            f"{f.name(field)}={value!r:.80} is not supported; known: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[value]


def layer_windows(f: Fields, window: int, types: Sequence[Any]) -> tuple[int, ...]:
    """Windows of layers by their `layer_types`; empty where no layer has one."""
    for t in types:
        if t not in ("sliding_attention", "full_attention"):
            raise f.refuse(
                f"layer type {t!r:.80} is not supported; known: full_attention, sliding_attention"
            )
    windows = tuple(window if t == "sliding_attention" else 0 for t in types)
    return windows if any(windows) else ()


def every_layer(f: Fields, default: int | None, num_layers: int) -> tuple[int, ...]:
    """`sliding_window` on every layer; null, or a default of None: no window."""
    if f.raw("sliding_window", default) is None:
        return ()
    return (f.size("sliding_window", default or 1),) * num_layers


def switched_window(f: Fields, default: int) -> int | None:
    """`sliding_window` of families that have `use_sliding_window`; None where it is off."""
    if not f.flag("use_sliding_window") or f.raw("sliding_window", default) is None:
        return None
    return f.size("sliding_window", default)


def attention_bias(f: Fields) -> dict[str, Any]:
    """`attention_bias`: of q, k, v and o."""
    bias = f.flag("attention_bias")
    return {"qkv_bias": bias, "o_bias": bias}
