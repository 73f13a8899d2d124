"""Tiny models on disk, in the formats a user might have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant

sys.path.insert(0, str(Path(__file__).parent))  # the tests import `to_gguf` from here
from to_gguf import add

WriteGGUF = Callable[..., Path]

HF_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="session")
def tiny_configs() -> dict[str, Any]:
    """A transformers config of each family, 2 layers, 4 heads of 16 over 2 KV heads."""
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    size: dict[str, Any] = dict(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
    )
    return {
        "llama": LlamaConfig(**size, architectures=["LlamaForCausalLM"]),
        "llama-bias": LlamaConfig(
            **size, attention_bias=True, mlp_bias=True, architectures=["LlamaForCausalLM"]
        ),
        "llama-tied": LlamaConfig(
            **size, tie_word_embeddings=True, architectures=["LlamaForCausalLM"]
        ),
        "mistral": MistralConfig(**size, sliding_window=8, architectures=["MistralForCausalLM"]),
        "qwen2": Qwen2Config(**size, architectures=["Qwen2ForCausalLM"]),
        "qwen3": Qwen3Config(**size, architectures=["Qwen3ForCausalLM"]),
    }


@pytest.fixture
def tiny_model(tiny_configs: dict[str, Any]) -> Callable[[str], Any]:
    """Builds a random transformers model of one of `tiny_configs`."""
    from transformers import AutoModelForCausalLM

    def build(name: str) -> Any:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_configs[name])
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms too
                parameter.normal_(0.5, 0.5)
        return model

    return build


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """Writes a GGUF file of given metadata and tensors (HF names; vectors stay F32)."""

    def write(
        tensors: Mapping[str, np.ndarray],
        metadata: Mapping[str, Any],
        arch: str = "llama",
        quant: Quant = Quant.F32,
        raw: Mapping[str, tuple[np.ndarray, Quant]] | None = None,
        name: str = "tiny.gguf",
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        for key, value in metadata.items():
            add(writer, key, value)
        for hf_name, values in tensors.items():
            kind = quant if values.ndim > 1 else Quant.F32
            writer.add_tensor(
                to_gguf(hf_name), gguf.quantize(values.astype(np.float32), kind), raw_dtype=kind
            )
        for raw_name, (packed, kind) in (raw or {}).items():
            writer.add_tensor(raw_name, packed, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def to_gguf(hf_name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` -> `blk.0.ffn_up.weight`."""
    stem, _, kind = hf_name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{HF_TO_GGUF[part]}.{kind}"
    return f"{HF_TO_GGUF.get(stem, stem)}.{kind}"


@pytest.fixture(scope="session")
def llama_metadata() -> Callable[..., dict[str, Any]]:
    """The metadata llama.cpp's converter writes for `tiny_configs`, under a prefix."""

    def make(arch: str = "llama", **more: Any) -> dict[str, Any]:
        stated: dict[str, Any] = {
            "block_count": 2,
            "context_length": 128,
            "embedding_length": 64,
            "feed_forward_length": 96,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.dimension_count": 16,
            "rope.freq_base": 10000.0,
            "attention.layer_norm_rms_epsilon": 1e-6,
        }
        return {f"{arch}.{key}": value for key, value in (stated | more).items()}

    return make
