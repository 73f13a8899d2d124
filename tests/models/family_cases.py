"""The table of families: each row a tiny configuration that reaches what the family does its own
way, saved by transformers with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

COMMON: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PROMPT_LENS = (1, 7, 41)
NUM_NEW = 32
MAX_MODEL_LEN = 80


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table."""

    config_class: str
    fields: dict[str, Any] = field(default_factory=dict)
    std: float = 0.2
    """Of the random matrices."""
    num_blocks: int = 20
    """Of the pool: one sequence fits, and not all three."""
    attention: str = "eager"
    """transformers' implementation."""
    auto_class: str = "AutoModelForCausalLM"
    """transformers' class that finds the model's."""
    steps: bool = False
    """Compare with transformers token by token: what it computes depends on where a prompt ends."""
    saved: Callable[[Path], None] | None = None
    """Changes the saved folder, for what transformers itself does not write."""


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0],
    "long_factor": [1.0, 1.3, 1.9, 2.8, 4.0, 5.5, 7.0, 8.0],
}
TIED = {"tie_word_embeddings": True}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA = {"head_dim": 32, "num_key_value_heads": 1}
FALCON = {"ffn_hidden_size": 96}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
MLA = {
    "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip


def as_internlm2(folder: Path) -> None:
    """A Llama checkpoint as InternLM 2's own code writes it."""
    from safetensors.torch import load_file, save_file

    names = {
        "self_attn.o_proj": "attention.wo", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
        "embed_tokens": "tok_embeddings", "lm_head": "output",
    }  # fmt: skip
    tensors, renamed = load_file(folder / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            q, k, v = (tensors[name.replace("q_proj", f"{p}_proj")] for p in "qkv")
            rest = q.shape[1:]
            groups = [q.view(2, 2, 16, *rest), k.view(2, 1, 16, *rest), v.view(2, 1, 16, *rest)]
            name, tensor = name.replace("self_attn.q_proj", "attention.wqkv"), torch.cat(groups, 1)
            tensor = tensor.reshape(-1, *rest)
        for own, theirs in names.items():
            name = name.replace(own, theirs)
        renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors")
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {
        "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": True,
        "rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None,
    }  # fmt: skip
    path.write_text(json.dumps(config))


def as_first_phi3(folder: Path) -> None:
    """A Phi 3 configuration in the spelling of its first release."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    p = config.pop("rope_parameters")
    config["rope_scaling"] = {"type": "su"} | {k: p[k] for k in ("short_factor", "long_factor")}
    path.write_text(json.dumps(config | {"rope_theta": p["rope_theta"]}))


def as_refined_web(folder: Path) -> None:
    """A Falcon checkpoint with the configuration that it first came with."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    old = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    for new, name in old.items():
        config[name] = config.pop(new)
    config |= {"architectures": ["RWForCausalLM"], "model_type": "RefinedWebModel"}
    path.write_text(json.dumps(config))


CASES: dict[str, Case] = {
    # Llama and relatives
    "llama": Case("LlamaConfig"),
    "llama-tied": Case("LlamaConfig", TIED),
    "llama-mha-biased": Case(
        "LlamaConfig", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}
    ),
    "llama-wide-heads-gelu": Case("LlamaConfig", {"head_dim": 32, "hidden_act": "gelu"}),
    "llama-linear": Case("LlamaConfig", rope("linear", factor=2.0)),
    "llama-llama3": Case(
        "LlamaConfig", rope("llama3", original_max_position_embeddings=64, **LLAMA3)
    ),
    "llama-yarn": Case(
        "LlamaConfig", rope("yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "llama-dynamic": Case(
        "LlamaConfig", {"max_position_embeddings": 24, **rope("dynamic", factor=4.0)}, steps=True
    ),
    "smollm3": Case("SmolLM3Config", {"no_rope_layers": [1, 0, 1]}),
    "smollm3-untied-window": Case(
        "SmolLM3Config",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 11,
            "tie_word_embeddings": False,
        },
        num_blocks=46,
    ),
    "olmo": Case("OlmoConfig", {"clip_qkv": 0.8}),
    "olmo-tied": Case("OlmoConfig", {"attention_bias": True, **TIED}),
    "olmo2": Case("Olmo2Config"),
    "olmo2-tied-mha": Case("Olmo2Config", {"num_key_value_heads": 4, **TIED}),
    "granite": Case(
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.15,
            "attention_bias": True,
            **TIED,
        },
    ),
    "granite-untied": Case("GraniteConfig", {"attention_multiplier": 0.3, "mlp_bias": True}),
    "internlm2": Case("LlamaConfig", {"attention_bias": True}, saved=as_internlm2),
    "internlm2-tied": Case("LlamaConfig", {"attention_bias": True, **TIED}, saved=as_internlm2),
    "internlm3": Case("InternLM3Config", {"head_dim": 16}),
    # Mistral
    "mistral": Case("MistralConfig", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": Case("MistralConfig", {"sliding_window": 13, **TIED}, num_blocks=9),
    "mistral-with-images": Case(
        "Mistral3Config",
        {
            "text_config": {**COMMON, "model_type": "mistral", "head_dim": 16},
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "head_dim": 8,
                "image_size": 28,
                "patch_size": 14,
            },
            "image_token_index": 0,
            "tie_word_embeddings": False,
        },
        auto_class="AutoModelForImageTextToText",
    ),
    "ministral": Case(
        "MinistralConfig",
        {"sliding_window": 9, "head_dim": 16, "layer_types": LAYERS},
        num_blocks=30,
    ),
    "ministral-tied": Case(
        "MinistralConfig", {"sliding_window": 13, "head_dim": 16, **TIED}, num_blocks=9
    ),
    "mixtral": Case("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": Case(
        "MixtralConfig", {"num_local_experts": 4, "sliding_window": 12, **TIED}, num_blocks=9
    ),
    # Qwen
    "qwen2": Case("Qwen2Config"),
    "qwen2-tied": Case("Qwen2Config", TIED),
    "qwen2-window": Case(
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
        num_blocks=32,
    ),
    "qwen2-moe": Case(
        "Qwen2MoeConfig", {**MOE, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}
    ),
    "qwen2-moe-normalized": Case(
        "Qwen2MoeConfig",
        {
            **MOE,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
            **TIED,
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 11,
        },
        num_blocks=32,
    ),
    "qwen3": Case("Qwen3Config", {"head_dim": 32}),
    "qwen3-tied": Case("Qwen3Config", {"head_dim": 16, **TIED}),
    "qwen3-moe": Case("Qwen3MoeConfig", {**MOE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-tied-window": Case(
        "Qwen3MoeConfig",
        {
            **MOE,
            "head_dim": 16,
            "attention_bias": True,
            "mlp_only_layers": [0],
            "use_sliding_window": True,
            "sliding_window": 12,
            **TIED,
        },
        num_blocks=9,
    ),
    # Gemma
    "gemma": Case("GemmaConfig", GEMMA),
    "gemma-untied": Case("GemmaConfig", {**GEMMA, "tie_word_embeddings": False}),
    "gemma2": Case(
        "Gemma2Config",
        {
            **GEMMA,
            "sliding_window": 11,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        num_blocks=32,
    ),
    "gemma2-untied": Case(
        "Gemma2Config",
        {
            **GEMMA,
            "sliding_window": 9,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
        num_blocks=32,
    ),
    "gemma3": Case(
        "Gemma3TextConfig", {**GEMMA, "sliding_window": 11, "layer_types": LAYERS}, num_blocks=32
    ),
    "gemma3-linear": Case(
        "Gemma3TextConfig",
        {
            **GEMMA,
            "sliding_window": 9,
            "layer_types": LAYERS,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 40,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        num_blocks=30,
    ),
    "gemma3-with-images": Case(
        "Gemma3Config",
        {
            "text_config": {**COMMON, **GEMMA, "sliding_window": 11, "layer_types": LAYERS},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
            "boi_token_index": 0,
            "eoi_token_index": 1,
            "image_token_index": 2,
        },
        num_blocks=32,
    ),
    # Phi
    "phi": Case("PhiConfig"),
    "phi-tied": Case("PhiConfig", {"num_key_value_heads": 4, **TIED}),
    "phi3": Case("Phi3Config", {"sliding_window": 13}, num_blocks=9),
    "phi3-partial-tied": Case("Phi3Config", {"partial_rotary_factor": 0.75, **TIED}),
    "phi3-longrope-short": Case(
        "Phi3Config",
        {
            "original_max_position_embeddings": 80,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONG},
        },
    ),
    "phi3-longrope-beyond": Case(
        "Phi3Config",
        {
            "original_max_position_embeddings": 24,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONG},
        },
        steps=True,
        saved=as_first_phi3,
    ),
    # with LayerNorm
    "gpt2": Case(
        "GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 96, "n_inner": 96}
    ),
    "gpt2-untied": Case(
        "GPT2Config",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 96,
            "scale_attn_weights": False,
            "tie_word_embeddings": False,
        },
    ),
    "gpt-neox": Case("GPTNeoXConfig", {"hidden_act": "gelu_fast"}),
    "gpt-neox-sequential": Case(
        "GPTNeoXConfig",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            **TIED,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "opt": Case("OPTConfig", {"ffn_dim": 96}),
    "opt-untied-plain": Case(
        "OPTConfig",
        {
            "ffn_dim": 96,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
    ),
    "stablelm": Case("StableLmConfig", {"use_qkv_bias": True}),
    "stablelm-parallel": Case(
        "StableLmConfig", {"use_parallel_residual": True, "qk_layernorm": True, **TIED}
    ),
    "falcon-7b": Case("FalconConfig", {**FALCON, "num_kv_heads": 4}, saved=as_refined_web),
    "falcon-40b": Case(
        "FalconConfig",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "falcon-11b": Case(
        "FalconConfig",
        {
            **FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-rw": Case(
        "FalconConfig",
        {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        attention="sdpa",
    ),
    # latent attention
    "deepseek-v2": Case("DeepseekV2Config", {**MLA, "attention_bias": True}),
    "deepseek-v2-yarn-groups": Case(
        "DeepseekV2Config",
        {
            **MLA,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            **TIED,
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                beta_fast=32,
                beta_slow=1,
                mscale=0.707,
                mscale_all_dim=0.707,
            ),
        },
    ),
}


def make_model(case: Case) -> transformers.PreTrainedModel:
    """transformers' model with random weights, biases and norms among them."""
    config = getattr(transformers, case.config_class)(**{**COMMON, **case.fields})
    torch.manual_seed(7)
    model = getattr(transformers, case.auto_class).from_config(
        config, dtype=torch.float32, attn_implementation=case.attention
    )
    assert isinstance(model.eval(), transformers.PreTrainedModel)
    is_offset = case.config_class.startswith("Gemma")
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, case.std)
        elif name.endswith("bias") or is_offset:  # initialised to 0 and 1: would hide mistakes
            torch.nn.init.normal_(parameter, 0.0, 0.3)
        else:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 199, (n,), generator=generator).tolist() for n in PROMPT_LENS]
