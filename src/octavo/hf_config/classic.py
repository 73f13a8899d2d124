"""Families with LayerNorm, plain MLPs or fused projections: GPT-2 to Falcon, and Phi."""

from __future__ import annotations

from typing import Any

from octavo.arch import ModelArch
from octavo.hf_config.common import Defaults, Sizes, build, every_layer, read_sizes
from octavo.hf_config.fields import Fields
from octavo.hf_config.ropes import RopeDefaults

_LAYER_NORM: dict[str, Any] = {"norm": "layer", "norm_bias": True}


def gpt2(f: Fields) -> ModelArch:
    """GPT-2."""
    d = Defaults(
        vocab_size=50257, hidden_size=768, intermediate_size=None, num_layers=12, num_heads=12,
        states_head_dim=False, states_kv_heads=False, max_position_embeddings=1024, norm_eps=1e-5,
        eps_field="layer_norm_epsilon", activation="gelu_new",
        activation_field="activation_function", tie=True, bos=50256, eos=50256, rope=None,
    )  # fmt: skip
    f.only("scale_attn_by_inverse_layer_idx", False)
    return build(
        f,
        d,
        positions="learned",
        gated_mlp=False,
        attention_scale=None if f.flag("scale_attn_weights", True) else 1.0,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        **_LAYER_NORM,
    )


def gpt_neox(f: Fields) -> ModelArch:
    """GPT-NeoX and Pythia."""
    d = Defaults(
        vocab_size=50432, hidden_size=6144, intermediate_size=24576, num_layers=44, num_heads=64,
        states_head_dim=False, states_kv_heads=False, norm_eps=1e-5, eps_field="layer_norm_eps",
        activation="gelu", bos=0, eos=2,
        rope=RopeDefaults(
            partial=0.25, theta_field="rotary_emb_base", partial_field="rotary_pct"
        ),
    )  # fmt: skip
    bias = f.flag("attention_bias", True)
    return build(
        f,
        d,
        gated_mlp=False,
        parallel_residual=f.flag("use_parallel_residual", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        **_LAYER_NORM,
    )


def opt(f: Fields) -> ModelArch:
    """OPT, but for the 350M one, whose norms come after the residual is added."""
    d = Defaults(
        vocab_size=50272, hidden_size=768, intermediate_size=3072, num_layers=12, num_heads=12,
        states_head_dim=False, states_kv_heads=False, activation="relu",
        activation_field="activation_function", tie=True, bos=2, eos=2, rope=None,
    )  # fmt: skip
    sizes = read_sizes(f, d)
    f.only("do_layer_norm_before", True)
    f.only("_remove_final_layer_norm", False)
    f.only("word_embed_proj_dim", sizes.hidden_size)
    bias = f.flag("enable_bias", True)
    affine = f.flag("layer_norm_elementwise_affine", True)
    return build(
        f,
        d,
        sizes,
        norm="layer",
        norm_bias=affine,
        norm_eps=1e-5,
        positions="learned",
        position_offset=2,
        gated_mlp=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def stablelm(f: Fields) -> ModelArch:
    """StableLM 1.6B, 3B, Zephyr and 12B."""
    d = Defaults(
        vocab_size=50304, hidden_size=2560, intermediate_size=6912, num_kv_heads=32,
        states_head_dim=False, max_position_embeddings=4096, norm_eps=1e-5,
        eps_field="layer_norm_eps", bos=0, eos=0, rope=RopeDefaults(partial=0.25),
    )  # fmt: skip
    parallel = f.flag("use_parallel_residual")
    return build(
        f,
        d,
        parallel_residual=parallel,
        shared_norm=parallel,
        qkv_bias=f.flag("use_qkv_bias"),
        qk_norm="layer_head" if f.flag("qk_layernorm") else "none",
        **_LAYER_NORM,
    )


def falcon(f: Fields) -> ModelArch:
    """Falcon 7B, 40B, 180B, 11B and RW; the older RefinedWeb configurations, too."""
    d = Defaults(
        vocab_size=65024, hidden_size=4544, intermediate_size=None, num_heads=71,
        states_head_dim=False, states_kv_heads=False, norm_eps=1e-5,
        eps_field="layer_norm_epsilon", activation="gelu", activation_field="activation",
        tie=True, bos=11, eos=11,
    )  # fmt: skip
    plain = read_sizes(f, d)
    f.only("apply_residual_connection_post_layernorm", False)
    # RefinedWeb's configurations of 40B state the heads of K and V, and no architecture
    is_new = f.flag("new_decoder_architecture", "n_head_kv" in f.config)
    num_kv_heads = _falcon_kv_heads(f, plain, is_new)
    sizes = Sizes(
        plain.hidden_size, plain.num_layers, plain.num_heads, num_kv_heads, plain.head_dim
    )
    parallel = f.flag("parallel_attn", True)
    if is_new and not parallel:
        raise f.refuse("new_decoder_architecture with parallel_attn=false is not supported")
    num_norms = f.size("num_ln_in_parallel_attn", 2 if is_new else 1, most=2)
    if num_norms == 2 and not is_new:
        raise f.refuse(
            "num_ln_in_parallel_attn=2 without new_decoder_architecture is not supported"
        )
    bias, alibi = f.flag("bias"), f.flag("alibi")
    return build(
        f,
        d,
        sizes,
        positions="alibi" if alibi else "rope",
        # ALiBi is added to the scores before they are scaled
        alibi_scale=plain.head_dim**-0.5 if alibi else 1.0,
        gated_mlp=False,
        parallel_residual=parallel,
        shared_norm=parallel and num_norms == 1,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        **_LAYER_NORM,
    )


def _falcon_kv_heads(f: Fields, sizes: Sizes, is_new: bool) -> int:
    num_heads = sizes.num_heads
    if is_new:
        num_kv_heads = f.size("num_kv_heads", num_heads, null=num_heads)
        if num_heads % num_kv_heads:
            raise f.refuse(
                f"{f.name('num_attention_heads')}={num_heads} is not a multiple of "
                f"{f.name('num_kv_heads')}={num_kv_heads}"
            )
        return num_kv_heads
    return 1 if f.flag("multi_query", True) else num_heads


def phi(f: Fields) -> ModelArch:
    """Phi 1, 1.5 and 2."""
    d = Defaults(
        vocab_size=51200, hidden_size=2048, intermediate_size=8192, num_layers=24, norm_eps=1e-5,
        eps_field="layer_norm_eps", activation="gelu_new", rope=RopeDefaults(partial=0.5),
    )  # fmt: skip
    f.only("qk_layernorm", False)
    return build(
        f,
        d,
        gated_mlp=False,
        parallel_residual=True,
        shared_norm=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        **_LAYER_NORM,
    )


def phi3(f: Fields) -> ModelArch:
    """Phi 3, 3.5 and 4, mini to medium: Llama with fused projections and longrope."""
    d = Defaults(
        vocab_size=32064, hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096,
        norm_eps=1e-5, bos=1, eos=32000,
        rope=RopeDefaults(
            original=4096, types=("default", "longrope"),
            renamed=(("su", "longrope"), ("yarn", "longrope")),
        ),
    )  # fmt: skip
    num_layers = read_sizes(f, d).num_layers
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        f.only(name, False)
    return build(f, d, sliding_windows=every_layer(f, None, num_layers))
