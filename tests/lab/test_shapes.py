"""Shapes of models: published sizes, files, and names that are not known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.errors import ModelNotFoundError, UnsupportedModelError
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
    assert shape.read_bytes <= shape.weight_bytes
    assert shape.read_bytes > 0.7 * shape.weight_bytes


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


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "mixtures of experts"),
        (
            {
                "architectures": ["DeepseekV2ForCausalLM"],
                "first_k_dense_replace": 32,
                "num_experts_per_tok": 6,
            },
            "latent attention",
        ),
    ],
)
def test_models_whose_costs_are_not_modelled(
    tmp_path: Path, config: dict[str, object], what: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=f"costs of {what}.* not modelled.*inspect"):
        find_shape(tmp_path)


def test_an_opt_is_its_shape(tmp_path: Path) -> None:
    """The flags of a family that differs in many say what the shipped shape says."""
    config = {
        "architectures": ["OPTForCausalLM"], "num_hidden_layers": 24, "hidden_size": 2048,
        "ffn_dim": 8192, "num_attention_heads": 32, "word_embed_proj_dim": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_shape(tmp_path).num_params == PARAMS["opt-1.3b"]
