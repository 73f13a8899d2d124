"""Shapes of models: published sizes, files, and names that are not known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.errors import ModelNotFoundError, UnsupportedModelError
from octavo.hf_config import read_hf_config
from octavo.kv_groups import kv_groups
from octavo.lab.shapes import find_shape, shape_names

# Sums over the tensors of the published checkpoints.
PARAMS = {
    "opt-1.3b": 1_315_758_080,
    "opt-13b": 12_853_473_280,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v2-lite": 15_706_484_224,
}


@pytest.mark.parametrize("name", PARAMS)
def test_parameters_are_those_of_the_checkpoint(name: str) -> None:
    assert find_shape(name).num_params == PARAMS[name]


def test_the_papers_models() -> None:
    """PagedAttention paper, Table 1 and section 3: 26 / 132 / 346 GB, 800 KB a token of OPT-13B."""
    sizes = [find_shape(f"opt-{size}").weight_bytes / 1e9 for size in ("13b", "66b", "175b")]
    assert sizes == pytest.approx([26, 132, 346], rel=0.015)
    tokens = [find_shape(f"opt-{size}").kv_bytes_per_token for size in ("13b", "66b", "175b")]
    assert tokens == [819_200, 2_359_296, 4_718_592]


@pytest.mark.parametrize("name", shape_names())
def test_every_shape_is_whole_and_says_where_it_is_from(name: str) -> None:
    shape = find_shape(name.upper())
    assert shape.name == name
    assert shape.source
    assert shape.num_heads % shape.num_kv_heads == 0
    assert 0.9 * shape.weight_bytes < shape.num_params * 2 <= shape.weight_bytes
    # an embedding that is not the head is not read
    assert shape.read_bytes(8192) <= shape.weight_bytes
    assert shape.read_bytes(8192) > 0.7 * shape.weight_bytes


def test_kv_heads_are_shared_out_whole() -> None:
    shape = find_shape("llama-3.1-8b")
    assert shape.kv_shape(4).bytes_per_token * 4 == shape.kv_bytes_per_token == 131_072
    # 8 heads on 16 GPUs: each keeps one
    assert shape.kv_shape(16).bytes_per_token == 131_072 // 8


def test_activations_grow_with_the_step_and_shrink_with_gpus() -> None:
    shape = find_shape("opt-13b")
    one = shape.activation_bytes(2560, 256)
    assert one == 2560 * (2 * 5120 + 4 * 5120 + 2 * 20480) * 2 + 256 * 50272 * 4
    assert shape.activation_bytes(2560, 256, num_gpus=4) < one < shape.activation_bytes(2561, 256)


def test_from_a_folder_or_its_config(tiny_model_path: Path, tmp_path: Path) -> None:
    shape = find_shape(tiny_model_path)
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (2, 2, 16)
    # 320 x 64 tied; a layer: 64 x (2 x 64 + 2 x 32) + 3 x 64 x 96 + two norms; a last norm
    assert shape.num_params == 320 * 64 + 2 * (64 * 192 + 3 * 64 * 96 + 2 * 64) + 64
    assert shape.name == tiny_model_path.name
    other = tmp_path / "some-model.json"
    other.write_text((tiny_model_path / "config.json").read_text())
    assert find_shape(str(other)).num_params == shape.num_params
    assert find_shape(other).name == "some-model"


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ModelNotFoundError, match=r"no shape 'meta-llama/Llama-3\.1-8b-x'.*") as e:
        find_shape("meta-llama/Llama-3.1-8b-x")
    assert "did you mean llama-3.1-8b?" in str(e.value)
    assert "opt-175b" in str(e.value)
    with pytest.raises(ModelNotFoundError) as e:
        find_shape("zzz")
    assert "did you mean" not in str(e.value)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        find_shape(tmp_path)  # a folder without a config.json
    file = tmp_path / "config.json"
    for text, why in (("{", "not JSON"), ("[1]", "holds no object"), ("{}", "names no model")):
        file.write_text(text)
        with pytest.raises(UnsupportedModelError, match=why):
            find_shape(tmp_path)
    file.write_text(json.dumps({"architectures": ["T5ForConditionalGeneration"]}))
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration"):
        find_shape(tmp_path)


def test_an_opt_is_its_shape(tmp_path: Path) -> None:
    """The flags of a family that differs in many say what the shipped shape says."""
    config = {
        "architectures": ["OPTForCausalLM"], "num_hidden_layers": 24, "hidden_size": 2048,
        "ffn_dim": 8192, "num_attention_heads": 32, "word_embed_proj_dim": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_shape(tmp_path).num_params == PARAMS["opt-1.3b"]


# -- windows, experts, latents: by hand out of the published configurations

CONFIGS: dict[str, dict[str, object]] = {
    "gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 42, "hidden_size": 3584,
        "intermediate_size": 14336, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096, "query_pre_attn_scalar": 256,
        "max_position_embeddings": 8192,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "num_hidden_layers": 26, "hidden_size": 1152, "intermediate_size": 6912,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
        "sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
        "max_position_embeddings": 32768,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 32768,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 48, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8, "max_position_embeddings": 40960,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "num_hidden_layers": 27, "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 102400, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "topk_method": "greedy", "scoring_func": "softmax", "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False,
        "max_position_embeddings": 163840, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_says_what_the_shipped_shape_says(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    found, shipped = find_shape(tmp_path), find_shape(name)
    assert found.num_params == PARAMS[name]
    assert found.active_params == shipped.active_params
    assert found.layer_windows == shipped.layer_windows
    assert found.kv_shape() == shipped.kv_shape()
    assert found.pair_flops == shipped.pair_flops


def test_groups_are_those_of_the_engine(tmp_path: Path) -> None:
    shape = find_shape("gemma-3-1b")
    arch = read_hf_config(CONFIGS["gemma-3-1b"])
    for max_model_len, windows in (
        (32768, (0,) + 6 * (512,)),
        (512, (0,)),
        (513, (0,) + 6 * (512,)),
    ):
        assert kv_groups(arch, max_model_len).windows == windows
        assert shape.kv_shape(1, max_model_len).windows == windows
    # 4 layers look at all and 22 at 512: 7 groups of 4, 2 of them of no layer
    kv = shape.kv_shape()
    assert (kv.num_layers, kv.num_padding, kv.layers_per_block) == (28, 2, 4)
    assert kv.bytes_per_block(16) == 16 * 4 * 1 * 256 * 2 * 2
    assert shape.kv_bytes_per_token == 26 * 1 * 256 * 2 * 2 == 26_624


def test_experts_are_counted_as_they_are_used() -> None:
    """Mixtral 8x7B: 46.7 B weights, 12.9 B active (its announcement)."""
    shape = find_shape("mixtral-8x7b")
    expert = 3 * 4096 * 14336
    attention = 4096 * (2 * 4096 + 2 * 1024)
    assert shape.token_params == 32 * (attention + 4096 * 8 + 2 * expert)
    assert shape.active_params == 12_879_925_248
    # one token meets 2 of 8 experts, two 2 (2 - 2 / 8) = 3.5 of them, and many all
    rest = 32 * (attention + 4096 * 8) + 32000 * 4096
    for num_tokens, num_experts in ((1, 2.0), (2, 3.5), (4096, 8.0)):
        read = 2 * (rest + 32 * num_experts * expert)
        assert shape.read_bytes(num_tokens) == pytest.approx(read, rel=1e-12)
    # Qwen3-30B-A3B: 3.3 B active
    assert find_shape("qwen3-30b-a3b").active_params == pytest.approx(3.3e9, rel=0.02)


def test_latents_are_counted_as_they_are_attended_to() -> None:
    """DeepSeek-V2-Lite: 15.7 B weights, 2.4 B active without the embedding; a token keeps 512 + 64
    numbers a layer (its paper)."""
    shape = find_shape("deepseek-v2-lite")
    assert shape.active_params - shape.head_params == pytest.approx(2.4e9, rel=0.03)
    assert shape.kv_bytes_per_token == 27 * (512 + 64) * 2 == 31_104
    assert shape.kv_shape(4).bytes_per_token == 31_104  # every GPU keeps all of it
    # a query over 576 numbers, then 512 of values, for each of 16 heads
    assert shape.pair_flops == 16 * 2 * (576 + 512)
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    assert shape.attention_params == attention
    expert = 3 * 2048 * 1408
    layers = 27 * attention + 3 * 2048 * 10944 + 26 * (2048 * 64 + 2 * expert + 6 * expert)
    assert shape.token_params == layers


def test_working_sets_are_those_of_what_a_token_meets() -> None:
    mixtral, lite = find_shape("mixtral-8x7b"), find_shape("deepseek-v2-lite")
    assert mixtral.activation_bytes(1, 0) == 2 * (2 * 4096 + 2 * (4096 + 1024) + 2 * 2 * 14336)
    latent = 16 * (128 + 64 + 512 + 64 + 512) + 512 + 64
    # its first layer is dense, and wider than 6 experts and the shared ones
    assert lite.activation_bytes(1, 0) == 2 * (2 * 2048 + 2 * max(10944, 6 * 1408 + 2816) + latent)
