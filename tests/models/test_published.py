"""The shapes of published checkpoints, from what their `config.json` says: parameters and context
as their authors state them, and the KV of a token."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.inspect import inspect_model
from octavo.errors import UnsupportedModelError
from octavo.hf_config import read_hf_config

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published_configs.json").read_text("utf-8")
)
"""Model -> its configuration, but for what training and other programs read, and the numbers."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_shape_of_a_published_model(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published["config"]))
    report = inspect_model(str(tmp_path))
    assert report.num_params == published["num_params"]
    per_layer, rest = divmod(published["kv_bytes_per_token"], report.arch.num_layers)
    num_held = sum(group.num_layers + group.num_padding for group in report.groups)
    assert (report.kv_bytes_per_token, rest) == (num_held * per_layer, 0)
    assert report.arch.max_position_embeddings == published["context"]
    windows = {str(group.window): group.num_layers for group in report.groups}
    assert windows == published["windows"]


SHAPE = {
    "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 50304,
}  # fmt: skip
RENAMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 1": (
        {"architectures": ["LLaMAForCausalLM"], "max_sequence_length": 2048, **SHAPE},
        {"architectures": ["LlamaForCausalLM"], **SHAPE},
    ),
    "Yi": (
        {"architectures": ["YiForCausalLM"], "model_type": "Yi", "rope_theta": 5e6, **SHAPE},
        {"architectures": ["LlamaForCausalLM"], "rope_theta": 5e6, **SHAPE},
    ),
    "InternLM 1": (
        {"model_type": "internlm", "bias": True, "rotary": {"base": 3e5, "type": "dynamic"}}
        | {"architectures": ["InternLMForCausalLM"], **SHAPE},
        {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "rope_theta": 3e5, **SHAPE},
    ),
    "StableLM 3B": (
        {"architectures": ["StableLMEpochForCausalLM"], "rope_pct": 0.5, "norm_eps": 1e-3, **SHAPE},
        {"architectures": ["StableLmForCausalLM"], "partial_rotary_factor": 0.5, **SHAPE}
        | {"layer_norm_eps": 1e-3},
    ),
    "Mistral Small 3.1": (
        {
            "architectures": ["Mistral3ForConditionalGeneration"], "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 16}, "text_config": {"rope_theta": 1e9, **SHAPE},
        },
        {"architectures": ["MistralForCausalLM"], "torch_dtype": "bfloat16"}
        | {"rope_theta": 1e9, **SHAPE},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RENAMED)
def test_names_and_fields_of_first_releases(name: str) -> None:
    first, now = RENAMED[name]
    assert read_hf_config(first) == read_hf_config(now)


def test_rotary_of_internlm_that_would_change_answers() -> None:
    config = {"architectures": ["InternLMForCausalLM"], "rotary": {"type": "linear"}, **SHAPE}
    with pytest.raises(UnsupportedModelError, match=r"rotary\.type='linear' .* origin, dynamic"):
        read_hf_config(config)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Llama4ForCausalLM", "LlamaForCausalLM"),
        ("Qwen3NextForCausalLM", "Qwen3ForCausalLM"),
        ("BaichuanForCausalLM", "FalconForCausalLM"),
        ("Gemma3nForConditionalGeneration", "Gemma3ForCausalLM"),
        ("GPTJForCausalLM", "GPT2LMHeadModel"),
    ],
)
def test_nearest_name(name: str, nearest: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"nearest: {nearest}$"):
        read_hf_config({"architectures": [name]})


ODD = (None, -1, 0, 0.5, True, "x", [], [1], {}, {"a": 1}, 2**70, float("nan"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_odd_values_are_refused_in_words_or_mean_something(name: str) -> None:
    config = PUBLISHED[name]["config"]
    tables = [(config, lambda changed: changed)]
    for key in ("rope_scaling", "text_config"):
        if isinstance(config.get(key), dict):
            tables.append((config[key], lambda changed, key=key: config | {key: changed}))
    for table, whole in tables:
        for key in table:
            for value in ODD:
                with contextlib.suppress(UnsupportedModelError):
                    read_hf_config(whole(table | {key: value}))
