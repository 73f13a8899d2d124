"""GGUF metadata -> `ModelArch`, for every architecture that llama.cpp writes and octavo runs.

Keys are those of llama.cpp's converter; what its graphs take for granted (activations, which layers
have a window, scales) stands in the table here.
Source: https://github.com/ggml-org/llama.cpp, `conversion/` and `src/models/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.arch import MLAConfig, ModelArch, MoEConfig, RopeConfig
from octavo.errors import WeightsError
from octavo.hf_config import stretched_context, unknown_architecture
from octavo.weights.gguf_file import GGUFFile
from octavo.weights.gguf_metadata import Metadata
from octavo.weights.gguf_rope import read_rope

_SCALES = ("logit_scale", "embedding_scale", "residual_scale", "attention.scale")
_OPTIONS = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.temperature_scale",
    "nextn_predict_layers",
    "router_logit_softcapping",
)
"""Keys that change what is computed wherever they are not 0."""
_DTYPE_NAMES = {0: "float32", 1: "float16", 30: "bfloat16"}
_SIGMOID = 2
"""`expert_gating_func`; 1 is softmax."""

Finish = Callable[[Metadata, ModelArch], ModelArch]


def _as_is(metadata: Metadata, arch: ModelArch) -> ModelArch:
    return arch


def _mixtral(metadata: Metadata, arch: ModelArch) -> ModelArch:
    if not metadata.number("expert_count", 0):
        return arch
    moe = MoEConfig(
        num_experts=metadata.required("expert_count"),
        experts_per_token=metadata.required("expert_used_count"),
        expert_size=metadata.number("expert_feed_forward_length", arch.intermediate_size),
    )
    return replace(arch, architecture="MixtralForCausalLM", moe=moe)


def _qwen2_moe(metadata: Metadata, arch: ModelArch) -> ModelArch:
    moe = MoEConfig(
        num_experts=metadata.required("expert_count"),
        experts_per_token=metadata.required("expert_used_count"),
        expert_size=metadata.required("expert_feed_forward_length"),
        normalize=False,
        shared_size=metadata.required("expert_shared_feed_forward_length"),
        shared_gate=True,
    )
    return replace(arch, moe=moe)


def _qwen3_moe(metadata: Metadata, arch: ModelArch) -> ModelArch:
    moe = MoEConfig(
        num_experts=metadata.required("expert_count"),
        experts_per_token=metadata.required("expert_used_count"),
        expert_size=metadata.required("expert_feed_forward_length"),
    )
    return replace(arch, moe=moe)


def _gemma(metadata: Metadata, arch: ModelArch) -> ModelArch:
    return replace(arch, embedding_scale=arch.hidden_size**0.5)


def _gemma2(metadata: Metadata, arch: ModelArch) -> ModelArch:
    # llama.cpp knows the 27B model by its number of layers; it alone does not scale by a head's
    # own dimension
    large = arch.hidden_size // arch.num_heads if arch.num_layers == 46 else arch.head_dim
    return replace(
        _gemma(metadata, arch),
        attention_scale=metadata.real("attention.scale", 0.0) or large**-0.5,
        attention_soft_cap=metadata.real("attn_logit_softcapping", 50.0),
        logits_soft_cap=metadata.real("final_logit_softcapping", 30.0),
    )


def _gemma3(metadata: Metadata, arch: ModelArch) -> ModelArch:
    large = arch.hidden_size // arch.num_heads if arch.num_layers == 62 else arch.head_dim
    local = None
    if arch.sliding_windows:
        theta = metadata.real("rope.freq_base_swa", 10000.0)
        local = RopeConfig(theta=theta, rotary_dim=arch.rope.rotary_dim)
    return replace(
        _gemma(metadata, arch),
        attention_scale=metadata.real("attention.scale", 0.0) or large**-0.5,
        logits_soft_cap=metadata.real("final_logit_softcapping", 0.0),
        local_rope=local,
    )


def _gpt2(metadata: Metadata, arch: ModelArch) -> ModelArch:
    rows = metadata.tensor("position_embd.weight").shape[0]
    return replace(arch, max_position_embeddings=rows)


def _gptneox(metadata: Metadata, arch: ModelArch) -> ModelArch:
    return replace(arch, parallel_residual=bool(metadata.get("use_parallel_residual", True)))


def _stablelm(metadata: Metadata, arch: ModelArch) -> ModelArch:
    parallel = bool(metadata.get("use_parallel_residual", True))
    shared = parallel and not metadata.holds("blk.0.ffn_norm.weight")
    return replace(arch, parallel_residual=parallel, shared_norm=shared)


def _falcon(metadata: Metadata, arch: ModelArch) -> ModelArch:
    return replace(arch, shared_norm=not metadata.holds("blk.0.attn_norm_2.weight"))


def _granite(metadata: Metadata, arch: ModelArch) -> ModelArch:
    logits = metadata.real("logit_scale", 1.0) or 1.0
    return replace(
        arch,
        embedding_scale=metadata.real("embedding_scale", 1.0) or 1.0,
        residual_scale=metadata.real("residual_scale", 1.0) or 1.0,
        attention_scale=metadata.real("attention.scale", 0.0) or None,
        logits_scale=1.0 / logits,
    )


def _olmo(metadata: Metadata, arch: ModelArch) -> ModelArch:
    return replace(arch, qkv_clip=metadata.real("attention.clamp_kqv", 0.0))


def _olmo2(metadata: Metadata, arch: ModelArch) -> ModelArch:
    if arch.sliding_windows:  # OLMo 3
        raise metadata.refuse_key("attention.sliding_window")
    return arch


def _smollm3(metadata: Metadata, arch: ModelArch) -> ModelArch:
    return replace(arch, no_rope_layers=tuple(range(3, arch.num_layers, 4)))


def _deepseek2(metadata: Metadata, arch: ModelArch) -> ModelArch:
    if metadata.holds(*(f"blk.{i}.exp_probs_b.bias" for i in range(arch.num_layers))):
        raise metadata.refuse("routing with a bias for each expert (DeepSeek-V3) is not supported")
    rope_dim = metadata.required("rope.dimension_count")
    key_dim = metadata.number(
        "attention.key_length_mla", metadata.number("attention.key_length", 0)
    )
    value_dim = metadata.number(
        "attention.value_length_mla", metadata.number("attention.value_length", 0)
    )
    mla = MLAConfig(
        kv_lora_rank=metadata.required("attention.kv_lora_rank"),
        qk_rope_head_dim=rope_dim,
        qk_nope_head_dim=key_dim - rope_dim,
        v_head_dim=value_dim,
        q_lora_rank=metadata.number("attention.q_lora_rank", 0) or None,
    )
    if mla.qk_nope_head_dim < 1 or mla.v_head_dim < 1:
        raise WeightsError(
            f"{metadata.path} is damaged: heads of {key_dim} for keys, of which {rope_dim} are "
            f"rotated, and {value_dim} for values"
        )
    rope, scale = replace(arch.rope, rotary_dim=rope_dim, interleaved=True), key_dim**-0.5
    if rope.scaling_type == "yarn":
        # the converter writes 0.1 * mscale_all_dim; every checkpoint has mscale = mscale_all_dim
        log_mul = metadata.real("rope.scaling.yarn_log_multiplier", 0.0)
        mscale = round(log_mul / 0.1, 6) or None
        rope = replace(rope, mscale=mscale, mscale_all_dim=mscale)
        scale *= (log_mul * math.log(rope.factor) + 1.0) ** 2
    return replace(
        arch,
        rope=rope,
        head_dim=key_dim,
        num_kv_heads=arch.num_heads,
        attention_scale=scale,
        mla=mla,
        moe=_deepseek_moe(metadata, arch),
    )


def _deepseek_moe(metadata: Metadata, arch: ModelArch) -> MoEConfig | None:
    if not (num_experts := metadata.number("expert_count", 0)):
        return None
    size = metadata.required("expert_feed_forward_length")
    gating = metadata.number("expert_gating_func", 1)
    return MoEConfig(
        num_experts=num_experts,
        experts_per_token=metadata.required("expert_used_count"),
        expert_size=size,
        normalize=bool(metadata.get("expert_weights_norm", False)),
        scoring="sigmoid" if gating == _SIGMOID else "softmax",
        router_float32=True,
        routed_scale=metadata.real("expert_weights_scale", 1.0) or 1.0,
        num_groups=metadata.number("expert_group_count", 1) or 1,
        groups_per_token=metadata.number("expert_group_used_count", 1) or 1,
        shared_size=metadata.number("expert_shared_count", 0) * size,
        dense_layers=tuple(range(metadata.number("leading_dense_block_count", 0))),
    )


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture's name says, as far as the metadata does not."""

    architecture: str
    """Name in the registry."""
    finish: Finish = _as_is
    """Adds what the family alone has."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelArch`."""
    permuted: bool = False
    """llama.cpp reorders rows of q and k, pairing the halves that rope rotates."""
    qk_norm: str = "head"
    """What norms of q and k are where the file has them."""
    window_period: int = 0
    """Layers have a window but for each so many-th; 0: all, where there is a window at all."""
    patterned: bool = False
    """Whether the file may say itself which layers have a window."""
    experts: bool = False
    honoured: tuple[str, ...] = ()
    """Which of `_SCALES` and `_OPTIONS`."""


_GEMMA = {"activation": "gelu_tanh", "norm_offset": 1.0}
_SANDWICH = {**_GEMMA, "norm_placement": "sandwich"}
_PLAIN_MLP = {"norm": "layer", "gated_mlp": False}

FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", _mixtral, permuted=True, experts=True),
    "qwen2": _Family("Qwen2ForCausalLM"),
    "qwen3": _Family("Qwen3ForCausalLM"),
    "qwen2moe": _Family("Qwen2MoeForCausalLM", _qwen2_moe, experts=True),
    "qwen3moe": _Family("Qwen3MoeForCausalLM", _qwen3_moe, experts=True),
    "gemma": _Family("GemmaForCausalLM", _gemma, _GEMMA),
    "gemma2": _Family(
        "Gemma2ForCausalLM", _gemma2, _SANDWICH, window_period=2, patterned=True,
        honoured=("attention.scale",)
    ),
    "gemma3": _Family(
        "Gemma3ForCausalLM", _gemma3, _SANDWICH, window_period=6, patterned=True,
        honoured=("attention.scale",)
    ),
    "phi2": _Family(
        "PhiForCausalLM",
        flags={
            **_PLAIN_MLP, "activation": "gelu_tanh", "parallel_residual": True, "shared_norm": True
        },
    ),
    "phi3": _Family("Phi3ForCausalLM"),
    "gpt2": _Family(
        "GPT2LMHeadModel",
        _gpt2,
        {**_PLAIN_MLP, "activation": "gelu_tanh", "positions": "learned"},
    ),
    "gptneox": _Family("GPTNeoXForCausalLM", _gptneox, {**_PLAIN_MLP, "activation": "gelu"}),
    "stablelm": _Family(
        "StableLmForCausalLM", _stablelm, {"norm": "layer"}, qk_norm="layer_head"
    ),
    "falcon": _Family(
        "FalconForCausalLM",
        _falcon,
        {**_PLAIN_MLP, "activation": "gelu", "parallel_residual": True},
    ),
    "olmo": _Family(
        "OlmoForCausalLM", _olmo, {"norm": "layer"}, permuted=True,
        honoured=("attention.clamp_kqv",),
    ),
    "olmo2": _Family(
        "Olmo2ForCausalLM", _olmo2, {"norm_placement": "post"}, qk_norm="all"
    ),
    "granite": _Family("GraniteForCausalLM", _granite, permuted=True, honoured=_SCALES),
    "smollm3": _Family("SmolLM3ForCausalLM", _smollm3, permuted=True),
    "internlm2": _Family("InternLM2ForCausalLM", permuted=True),
    "deepseek2": _Family("DeepseekV2ForCausalLM", _deepseek2, experts=True),
}  # fmt: skip
"""By `general.architecture`. Mistral and Mixtral are written as llama."""


def read_gguf_arch(file: GGUFFile) -> ModelArch:
    """The shape of the model in `file`.

    Raises `UnsupportedModelError` for an architecture or option octavo does not run, `WeightsError`
    when the metadata lacks what every model has or holds it in another type.
    """
    try:
        return _arch(file)
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise WeightsError(
            f"{file.path} is damaged: its metadata cannot be read ({error}); download it again"
        ) from error


def _arch(file: GGUFFile) -> ModelArch:
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise unknown_architecture(file.architecture, FAMILIES, str(file.path))
    metadata = Metadata(file)
    _check_options(metadata, family)
    num_heads = metadata.required("attention.head_count")
    hidden_size = metadata.required("embedding_length")
    head_dim = metadata.number("attention.key_length", hidden_size // num_heads)
    latent = metadata.number("attention.kv_lora_rank", 0) > 0
    value_dim = metadata.number("attention.value_length", head_dim)
    if value_dim != head_dim and not latent:
        raise metadata.refuse(f"heads of {head_dim} for keys and {value_dim} for values differ")
    num_layers, stated = metadata.required("block_count"), metadata.required("context_length")
    rope = read_rope(metadata, head_dim)
    layer_norm = family.flags.get("norm") == "layer"
    eps_key = "attention.layer_norm_epsilon" if layer_norm else "attention.layer_norm_rms_epsilon"
    arch = ModelArch(
        architecture=family.architecture,
        vocab_size=metadata.tensor("token_embd.weight").shape[0],
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(metadata),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=metadata.number("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=stretched_context(rope, stated),
        norm_eps=metadata.required_real(eps_key),
        rope=rope,
        sliding_windows=_windows(metadata, family, num_layers),
        qkv_bias=metadata.holds("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"),
        o_bias=metadata.holds("blk.0.attn_output.bias"),
        mlp_bias=metadata.holds("blk.0.ffn_up.bias"),
        head_bias=metadata.holds("output.bias"),
        qk_norm=family.qk_norm if metadata.holds("blk.0.attn_q_norm.weight") else "none",
        tie_word_embeddings=not metadata.holds("output.weight"),
        dtype=_dtype(metadata),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=file.eos_token_ids,
    )
    norm_bias = layer_norm and metadata.holds("output_norm.bias")
    return family.finish(metadata, replace(arch, **family.flags, norm_bias=norm_bias))


def _intermediate_size(metadata: Metadata) -> int:
    """Of the plain MLP; where every layer has experts, files may leave it out."""
    size = metadata.number("feed_forward_length", 0)
    return (
        size
        or metadata.number("expert_feed_forward_length", 0)
        or metadata.required("feed_forward_length")
    )


def _dtype(metadata: Metadata) -> str:
    names = ("blk.0.attn_q.weight", "blk.0.attn_qkv.weight", "blk.0.attn_q_a.weight")
    found = next((n for n in names if metadata.holds(n)), names[0])
    return _DTYPE_NAMES.get(metadata.tensor(found).type_id, "float32")


def _windows(metadata: Metadata, family: _Family, num_layers: int) -> tuple[int, ...]:
    window = metadata.number("attention.sliding_window", 0)
    pattern = metadata.get("attention.sliding_window_pattern")
    if not window:
        return ()
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise WeightsError(
                f"{metadata.path} is damaged: sliding_window_pattern has {len(pattern)} entries "
                f"for {num_layers} layers"
            )
        windows = tuple(window if has else 0 for has in pattern)
        return windows if any(windows) else ()
    period = int(pattern or family.window_period)
    if period == 0:
        return (window,) * num_layers
    return tuple(0 if i % period == period - 1 else window for i in range(num_layers))


def _check_options(metadata: Metadata, family: _Family) -> None:
    if metadata.number("expert_count", 0) and not family.experts:
        raise metadata.refuse_key("expert_count")
    if metadata.get("attention.sliding_window_pattern") and not family.patterned:
        raise metadata.refuse_key("attention.sliding_window_pattern")
    for key in _SCALES:
        if key not in family.honoured and metadata.get(key, 1.0) not in (0.0, 1.0):
            raise metadata.refuse_key(key)
    for key in _OPTIONS:
        if key not in family.honoured and metadata.get(key):
            raise metadata.refuse_key(key)
    if not metadata.get("attention.causal", True):
        raise metadata.refuse_key("attention.causal")
