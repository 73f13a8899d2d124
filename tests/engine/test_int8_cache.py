"""An int8 KV cache through the whole engine: memory, answers, and copies of its blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="int8 caches are for CPUs")

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 8, "num_threads": 1,
    "kv_cache_dtype": "int8",
}  # fmt: skip
PROMPTS = ["a" * 40, "b" * 8, "c" * 32]


def answers(path: Path, **options: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(str(path), **OPTIONS | options) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        preempted = llm.memory_report().num_preemptions
    assert (preempted > 0) == ("preemption_mode" in options)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_a_pool_of_the_same_bytes_holds_more_tokens(tiny_weights_path: Path) -> None:
    """2 layers x 2 KV heads x 2 x (16 codes + a scale of 2 bytes), against float32's 64 bytes."""
    size = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 100 * 16 * 512}
    with LLM(str(tiny_weights_path), **OPTIONS | size) as llm:
        report = llm.memory_report()
    assert report.plan.shape.bytes_per_token == 144
    assert report.plan.num_blocks == 100 * 512 // 144


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_changes_no_answer(mode: str, tiny_weights_path: Path) -> None:
    """Swapped blocks take their scales along."""
    tight = {"num_gpu_blocks_override": 38, "block_size": 4, "max_model_len": 100}
    found = answers(tiny_weights_path, **tight, preemption_mode=mode)
    assert found == answers(tiny_weights_path, block_size=4)


@pytest.mark.parametrize("backend", ["cpu", "gather"])
def test_prompt_logprobs_are_near_those_of_float32(backend: str, tiny_weights_path: Path) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = []
    for kv_cache_dtype in ("auto", "int8"):
        options = OPTIONS | {"kv_cache_dtype": kv_cache_dtype, "attention_backend": backend}
        with LLM(str(tiny_weights_path), **options, max_num_batched_tokens=16) as llm:
            output = llm.generate(["some text of forty tokens, in chunks"], params, use_tqdm=False)
        rows = output[0].prompt_logprobs
        assert rows is not None
        found.append([next(iter(row.values())).logprob for row in rows[1:] if row is not None])
    exact, coded = (torch.tensor(x) for x in found)
    error = (exact - coded).abs().max()
    assert 0 < error < 0.02
