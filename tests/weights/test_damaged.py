"""Files with a field changed into anything: read, or refused with a typed error; never a crash."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.errors import OctavoError
from octavo.hf_config import KNOWN_ARCHITECTURES, read_hf_config
from octavo.text.chat import chat_template
from octavo.text.tokenizer import load_tokenizer
from octavo.weights.gguf import GGUFSource
from octavo.weights.gguf_arch import read_gguf_arch
from octavo.weights.gguf_file import GGUFFile
from octavo.weights.safetensors_source import SafetensorsSource

ODD: list[Any] = [
    None, True, 0, -1, 1, 2.5, float("inf"), float("nan"), 10**30, "x", "", [], [1], [None], [{}],
    {}, {"a": 1}, {"a": {"b": None}},
]  # fmt: skip
ODD_ROPES: list[Any] = [
    {"rope_type": ["x"]},
    {"rope_type": "linear", "factor": "x"},
    {"rope_type": "llama3", "factor": 8},
    {"rope_type": "yarn", "factor": 2, "beta_fast": "x"},
    {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": "x"},
    {"rope_type": "dynamic", "factor": 1e308},
    {"rope_type": "default", "partial_rotary_factor": "x"},
]
FIELDS = (
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "torch_dtype", "quantization_config", "layer_types", "sliding_window",
    "use_sliding_window", "max_window_layers", "partial_rotary_factor", "attention_bias",
    "mlp_bias", "hidden_act", "rope_scaling", "rope_parameters",
    "original_max_position_embeddings",
    # of families
    "n_embd", "n_head", "n_layer", "n_positions", "n_inner", "ffn_dim", "ffn_hidden_size",
    "num_kv_heads", "n_head_kv", "layer_norm_eps", "layer_norm_epsilon", "rotary_pct",
    "rotary_emb_base", "rope_local_base_freq", "qkv_bias", "use_qkv_bias", "bias", "enable_bias",
    "layer_norm_elementwise_affine", "qk_layernorm", "use_parallel_residual", "parallel_attn",
    "new_decoder_architecture", "num_ln_in_parallel_attn", "multi_query", "alibi", "clip_qkv",
    "no_rope_layers", "no_rope_layer_interval", "embedding_multiplier", "residual_multiplier",
    "attention_multiplier", "logits_scaling", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping", "hidden_activation", "activation", "activation_function",
    "sliding_window_pattern", "text_config", "num_experts", "num_local_experts",
    "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step", "n_routed_experts",
    "n_shared_experts", "first_k_dense_replace", "topk_method", "n_group", "topk_group",
    "routed_scaling_factor", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "word_embed_proj_dim", "scale_attn_weights",
)  # fmt: skip

refused_or_read = contextlib.suppress(OctavoError)


@pytest.fixture
def folder(tiny_weights_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_weights_path, tmp_path / "model"))


@pytest.mark.parametrize("family", KNOWN_ARCHITECTURES)
def test_any_field_of_a_config(family: str, tiny_model_path: Path) -> None:
    good = json.loads((tiny_model_path / "config.json").read_text())
    good |= {"architectures": [family], "use_sliding_window": True, "num_experts_per_tok": 2}
    if family == "DeepseekV2ForCausalLM":
        good |= {"num_key_value_heads": 4, "topk_method": "group_limited_greedy"}
    read_hf_config(good)
    for field in FIELDS:
        for value in ODD + (ODD_ROPES if field.startswith("rope_") else []):
            with refused_or_read:
                read_hf_config({**good, field: value})
    for value in ODD:
        with refused_or_read:
            read_hf_config(good, {"eos_token_id": value})


def test_any_entry_of_a_safetensors_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    name = "model.norm.weight"

    def read(changed: Any) -> None:
        text = json.dumps(changed).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + body)
        with refused_or_read:
            source = SafetensorsSource(folder)
            source.shapes()
            assert source.num_bytes >= 0
            for _ in source.tensors():
                pass

    for value in [*ODD, "F32", [-1, 2], ["a", "b"], [5, 1], [0, 10**15], [1, 2, 3], [64.0], [[64]]]:
        for field in ("dtype", "shape", "data_offsets"):
            read({**header, name: {**header[name], field: value}})
        read({**header, name: value})
    for field in ("dtype", "shape", "data_offsets"):
        read({**header, name: {k: v for k, v in header[name].items() if k != field}})
    for value in ([], {}, 3):
        read(value)


def test_any_field_of_a_tokenizer_config(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    odd = [*ODD, {"5": {}}, {"5": None}, {"x": {"content": "a"}}, {"5": {"content": 3}},
           [{"name": "default"}], [{"name": "default", "template": 3}]]  # fmt: skip
    for field in (
        "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens",
        "chat_template", "bos_token", "eos_token",
    ):  # fmt: skip
        for value in odd:
            path.write_text(json.dumps({field: value}))
            with refused_or_read:
                tokenizer = load_tokenizer(folder)
                tokenizer.encode("hi")
                chat_template(tokenizer).render([{"role": "user", "content": "hi"}])
    path.write_text("{}")
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(OctavoError, match="chat template"):
        load_tokenizer(folder)


def test_any_byte_of_a_gguf_header(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 32)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "gpt-2")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ab", "<eos>"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1, 1, 3])
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 3)
    for name in ("token_embd", "blk.0.attn_q"):
        writer.add_tensor(f"{name}.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = path.read_bytes()
    end = data.index(b"blk.0.attn_q") + 50

    def read(changed: bytes) -> None:
        path.write_bytes(changed)
        with refused_or_read:
            file = GGUFFile(path)
            GGUFSource(file, read_gguf_arch(file)).shapes()
        with refused_or_read:
            load_tokenizer(path).encode("ab")

    read(data)
    rng = random.Random(0)
    for num_bytes in range(0, len(data), 7):
        read(data[:num_bytes])
    for place in range(end):
        read(data[:place] + bytes([rng.choice([0, 1, 255, data[place] ^ 128])]) + data[place + 1 :])


def test_any_type_of_gguf_metadata(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    stated = {
        "block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32,
        "attention.head_count": 2, "attention.head_count_kv": 2, "attention.key_length": 16,
        "rope.dimension_count": 16, "attention.sliding_window": 0, "rope.freq_base": 1e4,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 1.0,
        "rope.scaling.original_context_length": 32, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    adders = {int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
    for key in stated:
        for value in (0, 3, -1.0, float("inf"), "x", "", [1, 2], ["x"]):
            writer = gguf.GGUFWriter(path, "llama")
            for name, stated_value in (stated | {key: value}).items():
                getattr(writer, adders[type(stated_value)])(f"llama.{name}", stated_value)
            for tensor in ("token_embd", "blk.0.attn_q"):
                writer.add_tensor(f"{tensor}.weight", np.zeros((4, 32), np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            with refused_or_read:
                read_gguf_arch(GGUFFile(path))
