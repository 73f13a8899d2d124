"""I4 on the real default model: a request's greedy tokens depend on nothing but it.

That they are those of transformers is in test_default_model.py. What runs here is two dozen runs of
a real model, so its crowd is small: lengths at the edges of blocks and chunks, and texts.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_support import default_model_prompts

from octavo import LLM, SamplingParams
from octavo.ops.cpu import gemm

pytestmark = pytest.mark.model

NUM_NEW = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
BASE: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 256, "max_num_seqs": 32, "skip_tokenizer_init": True,
}  # fmt: skip
TIGHT = {"block_size": 8, "num_gpu_blocks_override": 24, "max_model_len": 160}
"""The longest sequence needs 19 blocks: the others give way again and again."""


@pytest.fixture(scope="module")
def prompts(default_model_path: Path) -> list[list[int]]:
    return default_model_prompts(default_model_path)


def run(model: Path, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], int]:
    with LLM(str(model), **{**BASE, **options}) as llm:
        outputs = llm.generate([*prompts], GREEDY, use_tqdm=False)
        report = llm.memory_report()
        assert report.ledger.num_physical_blocks == 0
        return [o.outputs[0].token_ids for o in outputs], report.num_preemptions


@pytest.fixture(scope="module")
def expected(default_model_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    return run(default_model_path, prompts)[0]


@pytest.mark.parametrize(("block_size", "budget"), [(1, 64), (32, 16), (128, 512)])
def test_blocks_and_chunks(
    default_model_path: Path, prompts: list[list[int]], expected: list[list[int]],
    block_size: int, budget: int,
) -> None:  # fmt: skip
    """Blocks of 8 tokens are in the tests below, of 16 in what is expected."""
    tokens, _ = run(
        default_model_path, prompts, block_size=block_size, max_num_batched_tokens=budget,
        max_num_seqs=16,
    )  # fmt: skip
    assert tokens == expected


def test_alone(
    default_model_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    tokens, _ = run(default_model_path, prompts[::4], max_num_seqs=1)
    assert tokens == expected[::4]


def test_constant_preemption(
    default_model_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    tokens, num_preemptions = run(default_model_path, prompts, **TIGHT)
    assert num_preemptions >= 4
    assert tokens == expected


def test_swapping(
    default_model_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    tokens, num_preemptions = run(
        default_model_path, prompts, **TIGHT, preemption_mode="swap", enable_prefix_caching=False
    )
    assert num_preemptions >= 4
    assert tokens == expected


def test_prefix_hits(
    default_model_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Whole blocks, beginnings of blocks, the whole prompt, and what was generated."""
    with LLM(str(default_model_path), **BASE) as llm:
        llm.generate([*prompts], GREEDY, use_tqdm=False)
        again = llm.generate([*prompts], GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in again] == expected
        assert all(o.num_cached_tokens == len(o.prompt_token_ids) - 1 for o in again)
        longer = [p + t[:12] for p, t in zip(prompts, expected, strict=True)]
        rest = [tokens[12:] for tokens in expected]
        params = dataclasses.replace(GREEDY, max_tokens=NUM_NEW - 12)
        continued = llm.generate(longer, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in continued] == rest
        assert sum(o.num_cached_tokens for o in continued) >= sum(map(len, longer)) - len(longer)


@pytest.mark.skipif(
    torch.cuda.is_available() or not gemm.is_available(), reason="needs the packed bf16 kernel"
)
def test_bfloat16_is_exact_too(default_model_path: Path, prompts: list[list[int]]) -> None:
    """octavo's own kernels compute a row alike in any batch, chunk and block size: no near-ties."""
    bf16 = {"dtype": "bfloat16", "quantization": "none"}
    expected = run(default_model_path, prompts, **bf16)[0]
    small_steps = {"max_num_batched_tokens": 16, "max_num_seqs": 16}
    for options in ({"block_size": 1}, small_steps, TIGHT):
        assert run(default_model_path, prompts, **bf16, **options)[0] == expected, options
    alone = run(default_model_path, prompts[::4], **bf16, max_num_seqs=1)[0]
    assert alone == expected[::4]
