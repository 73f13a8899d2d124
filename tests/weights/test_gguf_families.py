"""Every family that llama.cpp writes: a GGUF file gives the shape and weights of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from to_gguf import add, random_checkpoint, to_gguf

from octavo.arch import ModelArch
from octavo.errors import UnsupportedModelError, WeightsError
from octavo.hf_config import KNOWN_ARCHITECTURES
from octavo.weights.gguf import GGUFSource
from octavo.weights.gguf_arch import FAMILIES, read_gguf_arch
from octavo.weights.gguf_file import GGUFFile
from octavo.weights.load import open_model
from octavo.weights.locate import locate

SIZE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FACTORS = {
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
DEEPSEEK = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 24, "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "norm_topk_prob": False,
    "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 2.0,
}  # fmt: skip


def rope(kind: str, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaConfig", {}),
    "llama-tied-biased": (
        "llama",
        "LlamaConfig",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-yarn": (
        "llama",
        "LlamaConfig",
        rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "llama-linear": ("llama", "LlamaConfig", rope("linear", theta=5e5, factor=2.0)),
    "mistral": ("llama", "MistralConfig", {"sliding_window": 8}),
    "mixtral": (
        "llama",
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2": ("qwen2", "Qwen2Config", {}),
    "qwen3": ("qwen3", "Qwen3Config", {"head_dim": 32}),
    "qwen2moe": (
        "qwen2moe",
        "Qwen2MoeConfig",
        {**MOE, "shared_expert_intermediate_size": 48, "norm_topk_prob": False},
    ),
    "qwen3moe": ("qwen3moe", "Qwen3MoeConfig", {**MOE, "head_dim": 16, "norm_topk_prob": True}),
    "gemma": ("gemma", "GemmaConfig", {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        "Gemma2Config",
        {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32},
    ),
    "gemma3": (
        "gemma3",
        "Gemma3TextConfig",
        {
            "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32,
            "num_hidden_layers": 7,
        },
    ),
    "phi2": (
        "phi2",
        "PhiConfig",
        {"intermediate_size": 256, **rope("default", partial_rotary_factor=0.5),
         "num_key_value_heads": 4},
    ),
    "phi3": ("phi3", "Phi3Config", {"sliding_window": 16}),
    "phi3-longrope": (
        "phi3",
        "Phi3Config",
        {
            "original_max_position_embeddings": 32,
            **rope("longrope", original_max_position_embeddings=32, **FACTORS),
        },
    ),
    "gpt2": ("gpt2", "GPT2Config", {}),
    "gptneox": (
        "gptneox",
        "GPTNeoXConfig",
        {**rope("default", partial_rotary_factor=0.25), "tie_word_embeddings": False},
    ),
    "gptneox-sequential": ("gptneox", "GPTNeoXConfig", {"use_parallel_residual": False}),
    "stablelm": (
        "stablelm",
        "StableLmConfig",
        {"use_qkv_bias": True, **rope("default", partial_rotary_factor=0.25)},
    ),
    "stablelm-parallel-qk": (
        "stablelm",
        "StableLmConfig",
        {"qk_layernorm": True, "use_parallel_residual": True,
         **rope("default", partial_rotary_factor=0.25)},
    ),
    "falcon-7b": ("falcon", "FalconConfig", {"max_position_embeddings": 2048}),
    "falcon-40b": (
        "falcon",
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "max_position_embeddings": 2048},
    ),
    "olmo": ("olmo", "OlmoConfig", {"clip_qkv": 3.5}),
    "olmo2": ("olmo2", "Olmo2Config", {}),
    "granite": (
        "granite",
        "GraniteConfig",
        {
            "attention_multiplier": 0.25, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
    ),
    "smollm3": ("smollm3", "SmolLM3Config", {"num_hidden_layers": 5}),
    "deepseek2": ("deepseek2", "DeepseekV2Config", {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek2-yarn": (
        "deepseek2",
        "DeepseekV2Config",
        {
            **DEEPSEEK, "q_lora_rank": 16, "max_position_embeddings": 128,
            **rope("yarn", factor=4.0, original_max_position_embeddings=32,
                   mscale=0.707, mscale_all_dim=0.707),
        },
    ),
}  # fmt: skip

ELSEWHERE = {"bos_token_id", "eos_token_ids", "dtype", "architecture"}
"""Fields that tokenizer metadata or the quantization tell."""


UNKNOWN = {
    "gpt2": ("intermediate_size", "num_key_value_heads"),
    "gptneox": ("num_key_value_heads",),
    "falcon": ("intermediate_size", "num_key_value_heads"),
}
"""Fields of `SIZE` that an architecture does not have."""


def config_of(name: str) -> tuple[str, Any]:
    arch, kind, more = CASES[name]
    size = {k: v for k, v in SIZE.items() if k not in UNKNOWN.get(arch, ())}
    return arch, getattr(transformers, kind)(**(size | more))


def as_run(arch: ModelArch) -> dict[str, Any]:
    """Fields in the form in which the decoder uses them."""
    values = {f.name: getattr(arch, f.name) for f in fields(arch) if f.name not in ELSEWHERE}
    values["attention_scale"] = pytest.approx(arch.attention_scale or arch.head_dim**-0.5)
    if arch.positions != "rope":
        values.pop("rope")
    return values


@pytest.mark.parametrize("name", CASES)
def test_shape_and_weights_are_the_checkpoint_s(name: str, tmp_path: Path) -> None:
    kind, config = config_of(name)
    folder = random_checkpoint(config, tmp_path / "hf")
    truth = open_model(locate(str(folder)))
    read = open_model(locate(str(to_gguf(folder, tmp_path / "tiny.gguf", kind, config))))

    expected, got = as_run(truth.arch), as_run(read.arch)
    assert {k: v for k, v in got.items() if v != expected.get(k)} == {}
    assert got.keys() == expected.keys()
    assert truth.source is not None and read.source is not None
    weights = {n: t for n, t, _ in truth.source.tensors() if not _is_tied_head(n, truth.arch)}
    ours = {n: t for n, t, _ in read.source.tensors()}
    assert ours.keys() == weights.keys()
    for weight, tensor in weights.items():
        assert isinstance(tensor, torch.Tensor)
        assert torch.equal(ours[weight], tensor.float()), weight
    assert {n: tuple(t.shape) for n, t in ours.items()} == read.source.shapes()


def _is_tied_head(name: str, arch: ModelArch) -> bool:
    return name == "lm_head.weight" and arch.tie_word_embeddings


def test_table_covers_every_architecture() -> None:
    known = {kind for kind, _, _ in CASES.values()}
    assert known | {"internlm2"} == set(FAMILIES)
    assert {f.architecture for f in FAMILIES.values()} <= set(KNOWN_ARCHITECTURES)
    assert set(FAMILIES) <= set(gguf.MODEL_ARCH_NAMES.values())


def test_olmo_3_is_not_taken_for_olmo_2(tmp_path: Path) -> None:
    kind, config = config_of("olmo2")
    folder = random_checkpoint(config, tmp_path / "hf")
    path = to_gguf(
        folder, tmp_path / "x.gguf", kind, config,
        **{"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False]},
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="sliding_window"):
        read_gguf_arch(GGUFFile(path))


def test_windows_of_some_layers_may_be_stated(tmp_path: Path) -> None:
    kind, config = config_of("gemma3")
    folder = random_checkpoint(config, tmp_path / "hf")
    pattern = [i % 2 == 0 for i in range(7)]
    stated = to_gguf(
        folder, tmp_path / "x.gguf", kind, config,
        **{"attention.sliding_window_pattern": pattern, "rope.freq_base_swa": 5000.0},
    )  # fmt: skip
    arch = read_gguf_arch(GGUFFile(stated))
    assert arch.sliding_windows == tuple(8 if p else 0 for p in pattern)
    assert arch.local_rope is not None and arch.local_rope.theta == 5000.0
    short = to_gguf(
        folder, tmp_path / "y.gguf", kind, config,
        **{"attention.sliding_window_pattern": pattern[:3]},
    )  # fmt: skip
    with pytest.raises(WeightsError, match="3 entries for 7 layers"):
        read_gguf_arch(GGUFFile(short))


def test_older_layouts_of_experts_and_latent_attention(tmp_path: Path) -> None:
    """Experts one by one (as files before stacking have them), and kv_b_proj in one piece."""
    kind, config = config_of("mixtral")
    folder = random_checkpoint(config, tmp_path / "mixtral")
    path = to_gguf(folder, tmp_path / "x.gguf", kind, config)
    old = rewritten(
        path, tmp_path / "old.gguf",
        lambda t: [(t.name.replace("_exps.", f".{i}."), m) for i, m in enumerate(t.data)]
        if "_exps" in t.name else [(t.name, t.data)],
    )  # fmt: skip
    assert same_weights(path, old)

    kind, config = config_of("deepseek2")
    folder = random_checkpoint(config, tmp_path / "deepseek")
    path = to_gguf(folder, tmp_path / "y.gguf", kind, config)
    values = {t.name: t.data for t in gguf.GGUFReader(path).tensors}

    def joined(t: Any) -> list[tuple[str, np.ndarray]]:
        if "attn_v_b" in t.name:
            return []
        if "attn_k_b" not in t.name:
            return [(t.name, t.data)]
        keys, rest = t.data.swapaxes(1, 2), values[t.name.replace("k_b", "v_b")]
        both = np.concatenate([keys, rest], axis=1)
        return [(t.name.replace("k_b", "kv_b"), both.reshape(-1, both.shape[-1]))]

    old = rewritten(path, tmp_path / "older.gguf", joined)
    assert same_weights(path, old)


def rewritten(path: Path, to: Path, change: Callable[[Any], list[tuple[str, np.ndarray]]]) -> Path:
    """The file with other tensors, all of them F32."""
    file, reader = GGUFFile(path), gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, file.architecture)
    for key, value in file.metadata.items():
        if key.startswith(file.architecture + "."):
            add(writer, key, value)
    for tensor in reader.tensors:
        for name, values in change(tensor):
            writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def same_weights(one: Path, other: Path) -> bool:
    a, b = ({n: t for n, t, _ in GGUFSource(p).tensors()} for p in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)  # type: ignore[arg-type]
