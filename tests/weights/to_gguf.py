"""A small converter of checkpoints to GGUF, as llama.cpp's does it; names are package gguf's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import load_file

Arrays = dict[str, np.ndarray]
Quantize = Callable[[np.ndarray, Quant], np.ndarray]

LLAMA_LIKE = ("llama", "granite", "smollm3", "internlm2", "olmo")


def to_gguf(
    folder: Path,
    path: Path,
    arch: str,
    config: Any,
    quant: Quant = Quant.F32,
    quantize: Quantize = gguf.quantize,
    **more: Any,
) -> Path:
    """Write the safetensors of `folder` to `path`; `more` is further metadata of the arch."""
    state = {
        name: tensor.float().numpy()
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (metadata(arch, config) | more).items():
        add(writer, f"{arch}.{key}" if not key.startswith("tokenizer.") else key, value)
    for name, values in renamed(arch, config, state):
        matrix = values.ndim > 1 and "norm" not in name and "ffn_gate_inp" not in name
        kind = quant if matrix and values.shape[-1] % gguf.GGML_QUANT_SIZES[quant][0] == 0 else None
        kind = kind or Quant.F32
        values = np.ascontiguousarray(values)
        packed = values if kind is Quant.F32 else quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A metadata value of whatever type."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def metadata(arch: str, config: Any) -> dict[str, Any]:
    """What the converter writes of a config."""
    c = config
    rope = getattr(c, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    out: dict[str, Any] = {
        "block_count": c.num_hidden_layers,
        "context_length": getattr(c, "max_position_embeddings", 2048),
        "embedding_length": c.hidden_size,
        "feed_forward_length": getattr(c, "intermediate_size", None) or 4 * c.hidden_size,
        "attention.head_count": c.num_attention_heads,
    }
    if (kv := getattr(c, "num_key_value_heads", None)) is not None:
        out["attention.head_count_kv"] = kv
    if (head_dim := getattr(c, "head_dim", None)) is not None:
        out |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    for name, key in (
        ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
        ("layer_norm_eps", "attention.layer_norm_epsilon"),
        ("layer_norm_epsilon", "attention.layer_norm_epsilon"),
    ):
        if (value := getattr(c, name, None)) is not None:
            out[key] = value
    if "rope_theta" in rope and arch not in ("gpt2", "falcon"):
        out["rope.freq_base"] = float(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        out |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        if kind == "yarn":
            original = rope["original_max_position_embeddings"]
            out["rope.scaling.original_context_length"] = original
    if arch in LLAMA_LIKE:
        out["rope.dimension_count"] = head_dim or c.hidden_size // c.num_attention_heads
    return out | FAMILY_METADATA.get(arch, lambda c, rope: {})(c, rope)


def _partial(c: Any, rope: Any) -> int:
    return int(rope.get("partial_rotary_factor", 1.0) * c.hidden_size // c.num_attention_heads)


def _phi3(c: Any, rope: Any) -> dict[str, Any]:
    out = {"rope.dimension_count": _partial(c, rope)}
    out["attention.sliding_window"] = c.sliding_window or 0
    out["rope.scaling.original_context_length"] = c.original_max_position_embeddings
    if "long_factor" in rope:
        original = c.original_max_position_embeddings
        scale = c.max_position_embeddings / original
        attention = math.sqrt(1 + math.log(scale) / math.log(original))
        out["rope.scaling.attn_factor"] = attention
    return out


def _moe(c: Any, rope: Any) -> dict[str, Any]:
    count = getattr(c, "num_local_experts", None) or getattr(c, "num_experts", None)
    count = count or getattr(c, "n_routed_experts", 0)
    if not count:
        return {}
    out = {"expert_count": count, "expert_used_count": c.num_experts_per_tok}
    if (size := getattr(c, "moe_intermediate_size", None)) is not None:
        out["expert_feed_forward_length"] = size
    if (shared := getattr(c, "shared_expert_intermediate_size", None)) is not None:
        out["expert_shared_feed_forward_length"] = shared
    return out


def _deepseek(c: Any, rope: Any) -> dict[str, Any]:
    out = _moe(c, rope) | {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": c.kv_lora_rank,
        "attention.key_length": c.kv_lora_rank + c.qk_rope_head_dim,
        "attention.value_length": c.kv_lora_rank,
        "attention.key_length_mla": c.qk_nope_head_dim + c.qk_rope_head_dim,
        "attention.value_length_mla": c.v_head_dim,
        "rope.dimension_count": c.qk_rope_head_dim,
        "leading_dense_block_count": c.first_k_dense_replace,
        "expert_shared_count": c.n_shared_experts,
        "expert_weights_scale": float(c.routed_scaling_factor),
        "expert_group_count": c.n_group,
        "expert_group_used_count": c.topk_group,
    }
    if c.q_lora_rank is not None:
        out["attention.q_lora_rank"] = c.q_lora_rank
    if "mscale_all_dim" in rope:
        out["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return out


FAMILY_METADATA: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "llama": lambda c, rope: _moe(c, rope) | (
        {"attention.sliding_window": c.sliding_window} if getattr(c, "sliding_window", 0) else {}
    ),
    "olmo": lambda c, rope: {"attention.layer_norm_epsilon": 1e-5}
    | ({"attention.clamp_kqv": c.clip_qkv} if c.clip_qkv else {}),
    "qwen2moe": _moe,
    "qwen3moe": _moe,
    "gemma2": lambda c, rope: {
        "attention.sliding_window": c.sliding_window,
        "attn_logit_softcapping": c.attn_logit_softcapping,
        "final_logit_softcapping": c.final_logit_softcapping,
    },
    "gemma3": lambda c, rope: {"attention.sliding_window": c.sliding_window},
    "phi2": lambda c, rope: {"rope.dimension_count": _partial(c, rope)},
    "phi3": _phi3,
    "gptneox": lambda c, rope: {
        "rope.dimension_count": _partial(c, rope),
        "use_parallel_residual": c.use_parallel_residual,
    },
    "stablelm": lambda c, rope: {
        "rope.dimension_count": _partial(c, rope),
        "use_parallel_residual": c.use_parallel_residual,
    },
    "falcon": lambda c, rope: {
        "tensor_data_layout": "jploski",
        "context_length": 2048,
        "attention.head_count_kv": c.num_kv_heads if c.new_decoder_architecture else 1,
    },
    "granite": lambda c, rope: {
        "attention.scale": c.attention_multiplier,
        "embedding_scale": c.embedding_multiplier,
        "residual_scale": c.residual_multiplier,
        "logit_scale": c.logits_scaling,
    },
    "deepseek2": _deepseek,
}  # fmt: skip


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of arch llama."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def renamed(arch: str, config: Any, state: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a GGUF file."""
    kinds = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config.num_hidden_layers)
    for name, values in changed(arch, config, state):
        stem, kind = re.fullmatch(r"(.*)\.(weight|bias)", name).groups()  # type: ignore[union-attr]
        found = names.get_name(stem)
        assert found is not None, f"{arch}: package gguf knows no {name}"
        yield f"{found}.{kind}", values
    rope = getattr(config, "rope_parameters", None) or {}
    for length in ("long", "short") if "long_factor" in rope else ():
        factors = np.array(rope[f"{length}_factor"], np.float32)
        yield f"rope_factors_{length}.weight", factors


def changed(arch: str, c: Any, state: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """The checkpoint's tensors as the converter rearranges them, under their own names."""
    heads = c.num_attention_heads
    kv_heads = getattr(c, "num_key_value_heads", None) or heads
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in state.items():
        if re.search(r"\.attn\.(masked_)?bias$|rotary_emb", name):
            continue
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        stacked = re.fullmatch(r"(.*(?:experts|layernorm\.norms))\.(\d+)\.(.*)", name)
        if stacked is not None:
            prefix = stacked[1].removesuffix(".norms")
            prefix = (
                prefix.replace("block_sparse_moe", "feed_forward").replace("model.", "", 1)
                if "block_sparse_moe" in prefix
                else prefix
            )
            key = f"{prefix}.{stacked[3]}"
            stacks.setdefault(key, {})[int(stacked[2])] = values
            continue
        if arch in LLAMA_LIKE and re.search(r"\.q_proj\.", name):
            values = permute(values, heads)
        if arch in LLAMA_LIKE and re.search(r"\.k_proj\.", name):
            values = permute(values, kv_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if arch == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name):
            values = values.T
        if "query_key_value" in name:
            values = _three(values, arch, c)
        if name.endswith("shared_expert_gate.weight"):
            values = values.squeeze()
        if arch == "deepseek2" and "kv_b_proj" in name:
            yield from _latent(name, values, c)
            continue
        yield name, values
    for name, experts in stacks.items():
        yield name, np.stack([experts[i] for i in range(len(experts))])


def _three(values: np.ndarray, arch: str, c: Any) -> np.ndarray:
    """q, k and v of all heads below each other, which checkpoints have head by head."""
    heads, dim = c.num_attention_heads, c.hidden_size // c.num_attention_heads
    if arch == "gptneox":
        split = values.reshape(heads, 3, dim, *values.shape[1:])
        return np.concatenate([split[:, i].reshape(-1, *values.shape[1:]) for i in range(3)])
    groups = c.num_kv_heads if c.new_decoder_architecture else 1
    split = values.reshape(groups, heads // groups + 2, dim, -1)
    parts = (split[:, :-2], split[:, [-2]], split[:, [-1]])
    return np.concatenate([part.reshape(-1, values.shape[-1]) for part in parts])


def _latent(name: str, values: np.ndarray, c: Any) -> Iterator[tuple[str, np.ndarray]]:
    nope = c.qk_nope_head_dim
    split = values.reshape(c.num_attention_heads, nope + c.v_head_dim, -1)
    yield name.replace("kv_b_proj", "k_b_proj"), split[:, :nope].swapaxes(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), split[:, nope:]


def random_checkpoint(config: Any, folder: Path, seed: int = 0) -> Path:
    """A model of that config with random weights, biases and norms, as transformers saves it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return folder
