"""Llama and the families that are Llama with a difference or two."""

from __future__ import annotations

from octavo.arch import ModelArch
from octavo.hf_config.common import (
    Defaults,
    attention_bias,
    build,
    every_layer,
    layer_windows,
    read_sizes,
    switched_window,
)
from octavo.hf_config.fields import Fields
from octavo.hf_config.ropes import RopeDefaults

_OLMO = Defaults(vocab_size=50304, bos=None, eos=50279, norm_eps=1e-5)
_MISTRAL = Defaults(intermediate_size=14336, num_kv_heads=8, max_position_embeddings=131072)
_QWEN = Defaults(
    vocab_size=151936, intermediate_size=22016, num_kv_heads=32, max_position_embeddings=32768,
    bos=None, eos=None,
)  # fmt: skip
_QWEN3 = Defaults(
    vocab_size=151936, intermediate_size=22016, num_kv_heads=32, head_dim=128,
    max_position_embeddings=32768, bos=None, eos=None,
)  # fmt: skip


def llama(f: Fields) -> ModelArch:
    """Llama 1, 2, 3; Yi, SmolLM 1 and 2 and many more that are Llama by another name."""
    return build(f, Defaults(), mlp_bias=f.flag("mlp_bias"), **attention_bias(f))


def internlm(f: Fields) -> ModelArch:
    """InternLM 1: Llama with biases in attention; its dynamic rope changes nothing within the
    context that its file states."""
    rotary = f.table("rotary")
    if (kind := rotary.get("type", "origin")) not in ("origin", "dynamic"):
        raise f.refuse(f"rotary.type={kind!r:.80} is not supported; known: origin, dynamic")
    theta = f.number(rotary, "base", 10000.0)
    d = Defaults(vocab_size=103168, states_head_dim=False, rope=RopeDefaults(theta=theta))
    bias = f.flag("bias", True)
    return build(f, d, qkv_bias=bias, o_bias=bias)


def internlm2(f: Fields) -> ModelArch:
    """InternLM 2 and 2.5, by the configuration that comes with them."""
    d = Defaults(vocab_size=103168, states_head_dim=False)
    bias = f.flag("bias", True)
    return build(f, d, qkv_bias=bias, o_bias=bias)


def internlm3(f: Fields) -> ModelArch:
    """InternLM 3; transformers calls `qkv_bias` attention_bias and `bias` mlp_bias."""
    d = Defaults(
        vocab_size=128512, intermediate_size=10240, num_layers=48, num_kv_heads=2, head_dim=128,
        max_position_embeddings=32768, norm_eps=1e-5,
    )  # fmt: skip
    others = f.flag("bias", f.flag("mlp_bias"))
    qkv = f.flag("qkv_bias", f.flag("attention_bias"))
    return build(f, d, qkv_bias=qkv, o_bias=others, mlp_bias=others)


def granite(f: Fields) -> ModelArch:
    """Granite 3: Llama with multipliers."""
    return build(
        f,
        Defaults(),
        embedding_scale=f.positive("embedding_multiplier", 1.0),
        residual_scale=f.positive("residual_multiplier", 1.0),
        attention_scale=f.positive("attention_multiplier", 1.0),
        logits_scale=1.0 / f.positive("logits_scaling", 1.0),
        mlp_bias=f.flag("mlp_bias"),
        **attention_bias(f),
    )


def smollm3(f: Fields) -> ModelArch:
    """SmolLM 3: every fourth layer does not rotate."""
    d = Defaults(
        vocab_size=128256, hidden_size=2048, num_layers=36, num_heads=16, num_kv_heads=4,
        max_position_embeddings=32768, tie=True, bos=128000, eos=128001,
        rope=RopeDefaults(theta=2e6),
    )  # fmt: skip
    sizes = read_sizes(f, d)
    interval = f.size("no_rope_layer_interval", 4)
    # the field's name says the opposite of its values: 1 is a layer that rotates
    rotates = f.layers("no_rope_layers", sizes.num_layers)
    if rotates is None:
        rotates = [(i + 1) % interval != 0 for i in range(sizes.num_layers)]
    window = switched_window(f, 1) if f.has("sliding_window") else None
    windows: tuple[int, ...] = ()
    if window is not None:
        types = f.layers("layer_types", sizes.num_layers)
        types = types or ["full_attention" if r else "sliding_attention" for r in rotates]
        windows = layer_windows(f, window, types)
    return build(
        f,
        d,
        sizes,
        no_rope_layers=tuple(i for i, rotated in enumerate(rotates) if not rotated),
        sliding_windows=windows,
        mlp_bias=f.flag("mlp_bias"),
        **attention_bias(f),
    )


def olmo(f: Fields) -> ModelArch:
    """OLMo 1: LayerNorm without weights, and q, k, v that may be clipped."""
    return build(f, _OLMO, norm="layer", norm_eps=1e-5, qkv_clip=f.cap("clip_qkv", None),
                 **attention_bias(f))  # fmt: skip


def olmo2(f: Fields) -> ModelArch:
    """OLMo 2: norms after attention and MLP, and over all of q and k."""
    return build(f, _OLMO, norm_placement="post", qk_norm="all", **attention_bias(f))


def mistral(f: Fields) -> ModelArch:
    """Mistral: a window on every layer, or none."""
    num_layers = read_sizes(f, _MISTRAL).num_layers
    return build(f, _MISTRAL, sliding_windows=every_layer(f, 4096, num_layers))


def ministral(f: Fields) -> ModelArch:
    """Ministral: a window on the layers that `layer_types` names."""
    num_layers = read_sizes(f, _MISTRAL).num_layers
    windows = every_layer(f, 4096, num_layers)
    types = f.layers("layer_types", num_layers)
    if types is not None:
        windows = layer_windows(f, windows[0] if windows else 0, types)
    return build(f, _MISTRAL, sliding_windows=windows)


def qwen2(f: Fields) -> ModelArch:
    """Qwen 2 and 2.5: biases on q, k and v."""
    return build(f, _QWEN, qkv_bias=True, sliding_windows=_upper_layers(f, _QWEN))


def qwen3(f: Fields) -> ModelArch:
    """Qwen 3: a norm on each head of q and k."""
    return build(
        f, _QWEN3, qk_norm="head", sliding_windows=_upper_layers(f, _QWEN3), **attention_bias(f)
    )


def _upper_layers(f: Fields, d: Defaults) -> tuple[int, ...]:
    """Windows by `layer_types`; without them, from `max_window_layers` upwards."""
    window, num_layers = switched_window(f, 4096), read_sizes(f, d).num_layers
    if window is None:
        return ()
    first = f.size("max_window_layers", 28, least=0)
    types = f.layers("layer_types", num_layers) or [
        "sliding_attention" if i >= first else "full_attention" for i in range(num_layers)
    ]
    return layer_windows(f, window, types)
