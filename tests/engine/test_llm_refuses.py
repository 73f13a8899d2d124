"""What `LLM` refuses, by name, and goes on serving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llm_support import GREEDY, OPTIONS, assert_drained, tokens

from octavo import LLM, EngineConfig, SamplingParams
from octavo.errors import CapacityError, ConfigError, InvalidRequestError, RequestCapacityError


@pytest.mark.parametrize(
    ("prompt", "params", "error", "says"),
    [
        ("", {}, InvalidRequestError, "empty"),
        ([[]], {}, InvalidRequestError, "empty"),
        ("x" * 64, {}, RequestCapacityError, "--max-model-len"),
        ("x", {"max_tokens": 10**9}, RequestCapacityError, "max_tokens"),
        ([[1, 320]], {}, InvalidRequestError, "319"),
        ([[1, -1]], {}, InvalidRequestError, "-1"),
        ("x", {"stop_token_ids": [400]}, InvalidRequestError, "stop_token_ids"),
        ({"promt": "x"}, {}, InvalidRequestError, "promt"),
        (3.5, {}, InvalidRequestError, "prompt must be"),
    ],
)
def test_refused_requests(
    llm: LLM, prompt: Any, params: dict[str, Any], error: Any, says: str
) -> None:
    expected = tokens(llm, "good")
    with pytest.raises(error, match=says):
        llm.generate(prompt, SamplingParams(**{"temperature": 0, **params}), use_tqdm=False)
    assert tokens(llm, "good") == expected


def test_one_bad_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate(["fine", "also fine", ""], GREEDY, use_tqdm=False)
    assert_drained(llm)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.5},
        {"top_k": -2}, {"min_p": 2}, {"n": 0}, {"max_tokens": 0}, {"min_tokens": -1},
        {"presence_penalty": 3}, {"frequency_penalty": float("inf")}, {"repetition_penalty": 0},
        {"logprobs": -1}, {"logprobs": 1000}, {"logit_bias": {1: 200.0}}, {"stop": [""]},
        {"allowed_token_ids": []}, {"bad_words": [""]}, {"seed": 1.5}, {"max_tokens": True},
        {"min_tokens": 20}, {"best_of": 0}, {"best_of": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_params_are_refused_by_name(params: dict[str, Any]) -> None:
    (name,) = params
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**params)
    assert caught.value.parameter == name


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="temprature"):
        SamplingParams.from_dict({"temprature": 0})
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        EngineConfig.from_kwargs(blocksize=16)
    with pytest.raises(ConfigError, match="'tensor_parallel_size': one engine runs on one GPU"):
        EngineConfig.from_kwargs(tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"block_size": 0}, ConfigError, "block_size"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, ConfigError, "max_num_batched_tokens"),
        ({"max_model_len": 257}, ConfigError, "256"),
        ({"num_gpu_blocks_override": 2}, CapacityError, "--num-gpu-blocks-override"),
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 100},
            CapacityError,
            "--kv-cache-memory-bytes",
        ),
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 2**60},
            CapacityError,
            "--kv-cache-memory-bytes",
        ),
        ({"num_gpu_blocks_override": 10**9}, CapacityError, "--num-gpu-blocks-override"),
        ({"max_num_batched_tokens": 10**12}, CapacityError, "--max-num-batched-tokens"),
        ({"dtype": "int3"}, ConfigError, "dtype"),
        ({"kv_policy": "magic"}, ConfigError, "kv_policy"),
        ({"preemption_mode": "kill"}, ConfigError, "preemption_mode"),
        ({"preemption_mode": "swap", "swap_space": 0}, ConfigError, "--swap-space"),
        ({"preemption_victim": "me"}, ConfigError, "preemption_victim"),
        ({"swap_space": -1}, ConfigError, "swap_space"),
        ({"swap_space": float("nan")}, ConfigError, "swap_space"),
        ({"swap_space": 60_000}, CapacityError, "--swap-space 60000 GiB"),
        ({"enable_prefix_caching": 1}, ConfigError, "enable_prefix_caching"),
        ({"kv_disk_bytes": 0}, ConfigError, "kv_disk_bytes"),
        ({"kv_disk_bytes": 10**9}, ConfigError, "no effect without a kv_disk_dir"),
    ],
)
def test_refused_configs(
    tiny_model_path: Path, options: dict[str, Any], error: Any, says: str
) -> None:
    with pytest.raises(error, match=says):
        LLM(str(tiny_model_path), **{**OPTIONS, **options})


def test_text_without_tokenizer(tiny_model_path: Path) -> None:
    with LLM(str(tiny_model_path), **OPTIONS, skip_tokenizer_init=True) as llm:
        with pytest.raises(InvalidRequestError, match="skip-tokenizer-init"):
            llm.generate("text", GREEDY, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
        (output,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert output.prompt is None and output.outputs[0].text == ""
        assert len(output.outputs[0].token_ids) == 6


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda llm: llm.generate("a", 5), "sampling_params"),
        (lambda llm: llm.generate(["a", "b"], [GREEDY]), "sampling_params"),
        (lambda llm: llm.generate("a", []), "sampling_params"),
        (lambda llm: llm.generate("a", {}), "sampling_params"),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}], GREEDY, priority=3), "priority"),
        (lambda llm: llm.pin_prefix("a long prefix", chat_template="{{ x }}"), "chat_template"),
        (lambda llm: llm.generate("a", GREEDY, priority=["high"]), "priority"),
        (lambda llm: llm.generate("a", GREEDY, priority=[3]), "priority"),
        (lambda llm: llm.stream("a", GREEDY, priority=3), "priority"),
        (lambda llm: llm.chat(None), "messages"),
        (lambda llm: llm.chat([]), "messages"),
    ],
)
def test_refused_calls(llm: LLM, call: Any, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        call(llm)
    assert caught.value.parameter == name
