"""Families with a mixture of experts: Mixtral, Qwen 2 and 3 MoE, DeepSeek-V2."""

from __future__ import annotations

import math

from octavo.arch import MLAConfig, ModelArch, MoEConfig
from octavo.hf_config.common import (
    Defaults,
    Sizes,
    attention_bias,
    build,
    every_layer,
    layer_windows,
    read_sizes,
    switched_window,
)
from octavo.hf_config.fields import Fields
from octavo.hf_config.ropes import RopeDefaults, read_rope, rope_parameters


def mixtral(f: Fields) -> ModelArch:
    """Mixtral: every MLP is a mixture."""
    d = Defaults(
        intermediate_size=14336, num_kv_heads=8, max_position_embeddings=131072, norm_eps=1e-5,
        rope=RopeDefaults(theta=1e6),
    )  # fmt: skip
    sizes = read_sizes(f, d)
    moe = MoEConfig(
        num_experts=f.size("num_local_experts", 8),
        experts_per_token=f.size("num_experts_per_tok", 2),
        expert_size=f.size("intermediate_size", 14336),
        normalize=True,
    )
    return build(
        f, d, sizes, moe=_checked(f, moe), sliding_windows=every_layer(f, None, sizes.num_layers)
    )


def qwen2_moe(f: Fields) -> ModelArch:
    """Qwen 1.5 and 2 MoE: a shared expert behind a gate of its own."""
    d = _qwen(num_heads=16, num_kv_heads=16, intermediate_size=5632)
    sizes = read_sizes(f, d)
    window = switched_window(f, 4096)
    types = f.layers("layer_types", sizes.num_layers)
    if types is None:
        below = f.size("max_window_layers", 28, least=0)
        types = [
            "full_attention" if i % 2 or i >= below else "sliding_attention"
            for i in range(sizes.num_layers)
        ]
    moe = MoEConfig(
        num_experts=f.size("num_experts", 60),
        experts_per_token=f.size("num_experts_per_tok", 4),
        expert_size=f.size("moe_intermediate_size", 1408),
        normalize=f.flag("norm_topk_prob"),
        shared_size=f.size("shared_expert_intermediate_size", 5632),
        shared_gate=True,
        dense_layers=_dense_layers(f, sizes),
    )
    return build(
        f,
        d,
        sizes,
        moe=_checked(f, moe),
        qkv_bias=f.flag("qkv_bias", True),
        sliding_windows=() if window is None else layer_windows(f, window, types),
    )


def qwen3_moe(f: Fields) -> ModelArch:
    """Qwen 3 MoE: no shared expert."""
    d = _qwen(num_heads=32, num_kv_heads=4, intermediate_size=6144)
    sizes = read_sizes(f, d)
    window = switched_window(f, 4096)
    moe = MoEConfig(
        num_experts=f.size("num_experts", f.size("num_local_experts", 128)),
        experts_per_token=f.size("num_experts_per_tok", 8),
        expert_size=f.size("moe_intermediate_size", 768),
        normalize=f.flag("norm_topk_prob"),
        dense_layers=_dense_layers(f, sizes),
    )
    return build(
        f,
        d,
        sizes,
        moe=_checked(f, moe),
        qk_norm="head",
        sliding_windows=() if window is None else (window,) * sizes.num_layers,
        **attention_bias(f),
    )


def deepseek_v2(f: Fields) -> ModelArch:
    """DeepSeek-V2 and V2-Lite: latent attention, shared experts, groups of experts."""
    nope, rotated = f.size("qk_nope_head_dim", 128), f.size("qk_rope_head_dim", 64)
    d = Defaults(vocab_size=102400, states_head_dim=False, states_kv_heads=False, rope=None)
    plain = read_sizes(f, d)
    # every head has keys and values of its own, read out of the one latent
    f.only("num_key_value_heads", plain.num_heads)
    sizes = Sizes(
        plain.hidden_size, plain.num_layers, plain.num_heads, plain.num_heads, nope + rotated
    )
    stated = f.size("max_position_embeddings", d.max_position_embeddings)
    f.only("rope_interleave", True)
    rope, reached = read_rope(f, rotated, stated, RopeDefaults(interleaved=True))
    has_rank = f.raw("q_lora_rank", 1536) is not None
    mla = MLAConfig(
        kv_lora_rank=f.size("kv_lora_rank", 512),
        q_lora_rank=f.size("q_lora_rank", 1536) if has_rank else None,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated,
        v_head_dim=f.size("v_head_dim", 128),
    )
    return build(
        f,
        d,
        sizes,
        rope=rope,
        max_position_embeddings=reached,
        attention_scale=(nope + rotated) ** -0.5 * _yarn_scale(f),
        mla=mla,
        moe=_deepseek_moe(f, sizes),
        mlp_bias=f.flag("mlp_bias"),
        **attention_bias(f),
    )


def _qwen(num_heads: int, num_kv_heads: int, intermediate_size: int) -> Defaults:
    return Defaults(
        vocab_size=151936, hidden_size=2048, intermediate_size=intermediate_size, num_layers=24,
        num_heads=num_heads, num_kv_heads=num_kv_heads, max_position_embeddings=32768, bos=None,
        eos=None,
    )  # fmt: skip


def _dense_layers(f: Fields, sizes: Sizes) -> tuple[int, ...]:
    """Layers with a plain MLP, by `mlp_only_layers` and `decoder_sparse_step`."""
    only, step = f.raw("mlp_only_layers") or [], f.size("decoder_sparse_step", 1)
    if not isinstance(only, list):
        raise f.refuse(f"mlp_only_layers must be a list of layers, got {only!r:.80}")
    return tuple(i for i in range(sizes.num_layers) if i in only or (i + 1) % step)


def _checked(f: Fields, moe: MoEConfig) -> MoEConfig:
    if moe.experts_per_token > moe.num_experts:
        raise f.refuse(
            f"num_experts_per_tok={moe.experts_per_token} is more than the {moe.num_experts} "
            "experts there are"
        )
    if moe.num_experts % moe.num_groups or moe.groups_per_token > moe.num_groups:
        raise f.refuse(
            f"n_group={moe.num_groups} and topk_group={moe.groups_per_token} do not fit "
            f"{moe.num_experts} experts"
        )
    return moe


def _deepseek_moe(f: Fields, sizes: Sizes) -> MoEConfig | None:
    dense = f.size("first_k_dense_replace", 0, least=0)
    f.only("topk_method", "greedy", "group_limited_greedy")
    f.only("scoring_func", "softmax")
    f.only("moe_layer_freq", 1)
    # DeepSeek's own code normalises with it, transformers does not: no published V2 has it
    f.only("norm_topk_prob", False)
    grouped = f.raw("topk_method") == "group_limited_greedy"
    size = f.size("moe_intermediate_size", 1407)
    if not f.has("num_experts_per_tok"):
        raise f.refuse("num_experts_per_tok is missing: how many experts serve a token?")
    moe = MoEConfig(
        num_experts=f.size("n_routed_experts", f.size("num_experts", 64)),
        experts_per_token=f.size("num_experts_per_tok", 1),
        expert_size=size,
        normalize=False,
        router_float32=True,
        routed_scale=f.positive("routed_scaling_factor", 1.0),
        num_groups=f.size("n_group", 1) if grouped else 1,
        groups_per_token=f.size("topk_group", 1) if grouped else 1,
        shared_size=f.size("n_shared_experts", 2) * size,
        dense_layers=tuple(range(min(dense, sizes.num_layers))),
    )
    return _checked(f, moe) if dense < sizes.num_layers else None


def _yarn_scale(f: Fields) -> float:
    """What attention scores are multiplied by besides, squared as in DeepSeek's code."""
    p = rope_parameters(f)
    all_dim = p.get("mscale_all_dim")
    kind = p.get("rope_type") or p.get("type") or "default"
    factor = f.number(p, "factor", 1.0)
    if kind == "default" or not all_dim or factor <= 1:
        return 1.0
    mscale = 0.1 * f.number(p, "mscale_all_dim", 1.0) * math.log(factor) + 1.0
    return mscale * mscale
