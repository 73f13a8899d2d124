"""`read_hf_config` against transformers' own config classes, old spellings and new."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.arch import ModelArch, RopeConfig
from octavo.errors import UnsupportedModelError
from octavo.hf_config import KNOWN_ARCHITECTURES, read_hf_config

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


def config_class(family: str) -> Any:
    import transformers

    return getattr(transformers, f"{family}Config")


def as_json(config: Any, family: str) -> dict[str, Any]:
    text = json.dumps(config.to_dict() | {"architectures": [f"{family}ForCausalLM"]})
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def tiny(family: str = "Llama", **more: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{family}ForCausalLM"], "vocab_size": 32, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128,
    } | more  # fmt: skip


def test_known_architectures_are_the_four() -> None:
    assert [f"{f}ForCausalLM" for f in FAMILIES] == list(KNOWN_ARCHITECTURES)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    config = config_class(family)()
    full = read_hf_config(as_json(config, family))
    assert read_hf_config({"architectures": [f"{family}ForCausalLM"]}) == full
    assert read_hf_config({"model_type": family.lower()}) == full
    assert full.vocab_size == config.vocab_size
    assert full.hidden_size == config.hidden_size
    assert full.intermediate_size == config.intermediate_size
    assert full.num_layers == config.num_hidden_layers
    assert full.num_heads == config.num_attention_heads
    assert full.num_kv_heads == config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None)
    assert full.head_dim == (head_dim or config.hidden_size // config.num_attention_heads)
    assert full.max_position_embeddings == config.max_position_embeddings
    assert full.rms_norm_eps == config.rms_norm_eps
    assert full.rope.theta == config.rope_parameters["rope_theta"]
    assert full.tie_word_embeddings == config.tie_word_embeddings
    assert full.bos_token_id == config.bos_token_id
    assert full.eos_token_ids == (() if config.eos_token_id is None else (config.eos_token_id,))


@pytest.mark.parametrize("family", FAMILIES)
def test_flags_match_the_parameters_transformers_builds(family: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    for bias in (False, True):
        config = config_class(family)(**tiny(family, attention_bias=bias, mlp_bias=bias))
        with torch.device("meta"):
            names = {n for n, _ in AutoModelForCausalLM.from_config(config).named_parameters()}
        arch = read_hf_config(as_json(config, family))
        layer = "model.layers.0."
        assert arch.qkv_bias == (layer + "self_attn.k_proj.bias" in names)
        assert arch.o_bias == (layer + "self_attn.o_proj.bias" in names)
        assert arch.mlp_bias == (layer + "mlp.up_proj.bias" in names)
        assert arch.qk_norm == (layer + "self_attn.q_norm.weight" in names)


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0,
        "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False, "attention_factor": 1.1,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
def test_old_and_new_spelling_of_rope_scaling_mean_the_same(kind: str) -> None:
    fields = SCALINGS[kind]
    oldest = read_hf_config(tiny(rope_theta=5000.0, rope_scaling={"type": kind, **fields}))
    old = read_hf_config(tiny(rope_theta=5000.0, rope_scaling={"rope_type": kind, **fields}))
    new = read_hf_config(tiny(rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **fields}))
    assert oldest == old == new
    assert (new.rope.scaling_type, new.rope.theta, new.rope.rotary_dim) == (kind, 5000.0, 16)
    for name, value in fields.items():
        field = "original_max_position" if name.startswith("original") else name
        assert getattr(new.rope, field) == value


def test_context_reached_by_each_scaling() -> None:
    reached = {
        kind: read_hf_config(tiny(rope_scaling={"rope_type": kind, **fields}))
        for kind, fields in SCALINGS.items()
    }
    assert {k: a.max_position_embeddings for k, a in reached.items()} == {
        "linear": 128, "dynamic": 256, "llama3": 128, "yarn": 256
    }  # fmt: skip
    assert reached["dynamic"].rope.original_max_position == 128


def test_rope_without_scaling() -> None:
    expected = RopeConfig(theta=1e6, rotary_dim=16)
    for spelling in (
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_theta": 1000000}},
    ):
        assert read_hf_config(tiny(**spelling)).rope == expected


def test_yarn_defaults() -> None:
    rope = read_hf_config(
        tiny(rope_scaling={"type": "yarn", "original_max_position_embeddings": 32})
    ).rope
    assert (rope.factor, rope.beta_fast, rope.beta_slow) == (4.0, 32.0, 1.0)
    assert rope.attention_factor is None and rope.truncate


def test_windows() -> None:
    def windows(family: str, **more: Any) -> tuple[int, ...]:
        return read_hf_config(tiny(family, **more)).sliding_windows

    assert windows("Llama", sliding_window=8) == ()
    assert windows("Mistral") == (4096,) * 4
    assert windows("Mistral", sliding_window=None) == ()
    assert windows("Mistral", sliding_window=8) == (8,) * 4
    assert windows("Qwen2", sliding_window=8) == ()
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert windows("Qwen2", **on) == ()  # the default of max_window_layers is 28
    assert windows("Qwen3", **on, max_window_layers=2) == (0, 0, 8, 8)
    mixed = ["sliding_attention", "full_attention"] * 2
    assert windows("Qwen3", **on, layer_types=mixed) == (8, 0, 8, 0)
    assert windows("Qwen3", layer_types=mixed) == ()


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_layer_types_transformers_derives_are_read_back(family: str) -> None:
    config = config_class(family)(
        **tiny(family, use_sliding_window=True, sliding_window=8, max_window_layers=3)
    )
    assert read_hf_config(as_json(config, family)).sliding_windows == (0, 0, 0, 8)


def test_dtype_and_end_of_sequence() -> None:
    assert read_hf_config(tiny(torch_dtype="bfloat16")).dtype == "bfloat16"
    assert read_hf_config(tiny(dtype="torch.float16")).dtype == "float16"
    assert read_hf_config(tiny(torch_dtype=None)).dtype == "float32"
    assert read_hf_config(tiny(eos_token_id=[5, 6, 5])).eos_token_ids == (5, 6)
    assert read_hf_config(tiny(eos_token_id=5), {"eos_token_id": [7]}).eos_token_ids == (7,)
    assert read_hf_config(tiny(eos_token_id=None)).eos_token_ids == ()
    assert read_hf_config(tiny(num_key_value_heads=None)).num_kv_heads == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "'Qwen2Moe.*known: Llama.*nearest: Qwen2"),
        ({"architectures": [], "model_type": "gpt2"}, "'gpt2'.*known"),
        ({"architectures": None}, "names no model"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'.*known: default"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor must be a number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "x": {"rope_theta": 2.0}}},
         "differ between layer types"),
        ({"partial_rotary_factor": 0.2}, "cannot rotate 3 of 16"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"vocab_size": "many"}, "vocab_size must be.*'many'"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        read_hf_config(tiny(**change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": ["full_attention"]}, "1 entries for 4 layers"),
        ({"layer_types": ["linear_attention"] * 4}, "'linear_attention'"),
    ],
)
def test_layer_types_are_checked(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        read_hf_config(tiny("Qwen3", use_sliding_window=True, sliding_window=8, **change))


def test_partial_rotation_is_carried() -> None:
    arch: ModelArch = read_hf_config(tiny(partial_rotary_factor=0.5))
    assert arch.rope.rotary_dim == 8
