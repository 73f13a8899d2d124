"""Gemma 1, 2 and 3: norms of 1 + weight, scaled embeddings, soft caps, local and global layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.arch import ModelArch, RopeConfig
from octavo.hf_config.common import (
    Defaults,
    Sizes,
    attention_bias,
    build,
    every_layer,
    layer_windows,
    read_sizes,
)
from octavo.hf_config.fields import Fields
from octavo.hf_config.ropes import RopeDefaults, read_rope, rope_parameters

_FULL, _LOCAL = "full_attention", "sliding_attention"
_PATTERN = 6
"""Gemma 3: one layer in so many sees everything."""


def gemma(f: Fields) -> ModelArch:
    """Gemma 1."""
    d = Defaults(
        vocab_size=256000, hidden_size=3072, intermediate_size=24576, num_layers=28, num_heads=16,
        num_kv_heads=16, head_dim=256, max_position_embeddings=8192, tie=True, bos=2, eos=1,
        activation="gelu_pytorch_tanh",
    )  # fmt: skip
    # the first files say gelu, and were trained with its tanh approximation
    special = _common(f, read_sizes(f, d))
    if f.raw("hidden_act") == "gelu":
        special["activation"] = "gelu_tanh"
    return build(f, d, **special)


def gemma2(f: Fields) -> ModelArch:
    """Gemma 2: every other layer has a window."""
    d = _later(vocab_size=256000, max_position_embeddings=8192)
    sizes = read_sizes(f, d)
    types = f.layers("layer_types", sizes.num_layers) or [
        _FULL if i % 2 else _LOCAL for i in range(sizes.num_layers)
    ]
    return build(
        f,
        d,
        sizes,
        sliding_windows=_windows(f, sizes, types),
        **_sandwich(f, sizes, attention_cap=50.0, logits_cap=30.0),
    )


def gemma3(f: Fields) -> ModelArch:
    """Gemma 3's text model: five layers with a window, and a rope of their own, to each without."""
    d = _later(vocab_size=262208, max_position_embeddings=131072)
    sizes = read_sizes(f, d)
    # transformers passes it over, and no published Gemma 3 has it
    f.only("attn_logit_softcapping")
    pattern = f.size("sliding_window_pattern", _PATTERN)
    types = f.layers("layer_types", sizes.num_layers) or [
        _LOCAL if (i + 1) % pattern else _FULL for i in range(sizes.num_layers)
    ]
    stated = f.size("max_position_embeddings", d.max_position_embeddings)
    rope, local_rope, reached = _ropes(f, sizes.head_dim, stated)
    windows = _windows(f, sizes, types)
    if not windows:
        types = [_FULL] * sizes.num_layers
    return build(
        f,
        d,
        sizes,
        qk_norm="head",
        rope=rope,
        local_rope=local_rope if _LOCAL in types else None,
        max_position_embeddings=reached,
        sliding_windows=windows,
        **_sandwich(f, sizes, attention_cap=None, logits_cap=None),
    )


def _later(vocab_size: int, max_position_embeddings: int) -> Defaults:
    return Defaults(
        vocab_size=vocab_size, hidden_size=2304, intermediate_size=9216, num_layers=26,
        num_heads=8, num_kv_heads=4, head_dim=256, tie=True, bos=2, eos=1,
        max_position_embeddings=max_position_embeddings, activation="gelu_pytorch_tanh",
        activation_field="hidden_activation",
    )  # fmt: skip


def _common(f: Fields, sizes: Sizes) -> dict[str, Any]:
    return {
        "norm_offset": 1.0,
        "embedding_scale": sizes.hidden_size**0.5,
        **attention_bias(f),
    }


def _sandwich(
    f: Fields, sizes: Sizes, attention_cap: float | None, logits_cap: float | None
) -> dict[str, Any]:
    return {
        "norm_placement": "sandwich",
        "attention_scale": f.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_soft_cap": f.cap("attn_logit_softcapping", attention_cap),
        "logits_soft_cap": f.cap("final_logit_softcapping", logits_cap),
        **_common(f, sizes),
    }


def _windows(f: Fields, sizes: Sizes, types: list[Any]) -> tuple[int, ...]:
    windows = every_layer(f, 4096, sizes.num_layers)
    if not windows and _LOCAL in types:
        raise f.refuse("sliding_window is null, but layer_types has sliding_attention")
    return layer_windows(f, windows[0] if windows else 0, types)


def _ropes(f: Fields, head_dim: int, stated: int) -> tuple[RopeConfig, RopeConfig, int]:
    """Of layers without and with a window, and the context the first is good for.

    Older files state `rope_theta` and `rope_scaling` for the first, `rope_local_base_freq` for the
    second; newer ones an object for each in `rope_parameters`.
    """
    parameters = f.table("rope_parameters")
    if not any(isinstance(v, Mapping) for v in parameters.values()):
        parameters = {_FULL: rope_parameters(f)}
    full, local = (
        RopeDefaults(theta=1e6),
        RopeDefaults(theta=1e4, theta_field="rope_local_base_freq"),
    )
    rope, reached = read_rope(f, head_dim, stated, full, _object(f, parameters, _FULL))
    local_rope, _ = read_rope(f, head_dim, stated, local, _object(f, parameters, _LOCAL))
    return rope, local_rope, reached


def _object(f: Fields, parameters: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = parameters.get(name) or {}
    if not isinstance(value, Mapping):
        raise f.refuse(f"rope_parameters.{name} must be an object, got {value!r:.80}")
    return value
