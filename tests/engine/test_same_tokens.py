"""I4 on the real default model, float32: a request's greedy tokens depend on nothing but it.

What transformers picks is checked in one forward pass a prompt: by induction greedy decoding gives
our tokens if and only if, after each prefix of them, transformers' most probable token is the next.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.ops.cpu import gemm

pytestmark = pytest.mark.model

NUM_NEW = 64
# Lengths around the edges of blocks of 8, 16, 32 and 128, and one token alone.
LENGTHS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at a lower temperature on a mountain because",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Once upon a time, in a village by the sea, there lived",
    "SELECT name, age FROM users WHERE",
    "The three laws of motion are",
    "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "Ingredients:\n- 2 eggs\n- 100 g flour\n",
    "In 1969, Apollo 11",
    "El perro y el gato",
    "The quick brown fox jumps over the lazy dog. The quick brown",
    "Q: What is photosynthesis?\nA:",
)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
BASE: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 32}


@pytest.fixture(scope="module")
def prompts(default_model_path: Path) -> list[list[int]]:
    with LLM(str(default_model_path), num_gpu_blocks_override=64, max_model_len=64) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        ids = [tokenizer.encode(text) for text in TEXTS]
        stream = [token for text in ids for token in text]
    chooser = random.Random(5)
    for length in LENGTHS:
        start = chooser.randrange(len(stream))
        ids.append([stream[(start + i) % len(stream)] for i in range(length)])
    assert len(ids) == 32
    return ids


def run(model: Path, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], int]:
    with LLM(str(model), **{**BASE, **options}) as llm:
        outputs = llm.generate([*prompts], GREEDY, use_tqdm=False)
        report = llm.memory_report()
        assert report.ledger.num_physical_blocks == 0
        return [o.outputs[0].token_ids for o in outputs], report.num_preemptions


@pytest.fixture(scope="module")
def expected(default_model_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    return run(default_model_path, prompts)[0]


@pytest.fixture(scope="module")
def reference(default_model_path: Path) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        default_model_path.parent, gguf_file=default_model_path.name, dtype=torch.float32
    )
    yield model.eval()
    del model


def test_tokens_are_those_of_transformers(
    expected: list[list[int]], prompts: list[list[int]], reference: Any
) -> None:
    for prompt, tokens in zip(prompts, expected, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens


@pytest.mark.parametrize("block_size", [1, 8, 32, 128])
def test_block_size(
    default_model_path: Path, prompts: list[list[int]], expected: list[list[int]], block_size: int
) -> None:
    assert run(default_model_path, prompts, block_size=block_size)[0] == expected


@pytest.mark.parametrize("budget", [16, 64])
def test_chunk_budget(
    default_model_path: Path, prompts: list[list[int]], expected: list[list[int]], budget: int
) -> None:
    tokens, _ = run(
        default_model_path, prompts, max_num_batched_tokens=budget, max_num_seqs=min(budget, 32)
    )
    assert tokens == expected


def test_alone(
    default_model_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    tokens, _ = run(default_model_path, prompts[::4], max_num_seqs=1)
    assert tokens == expected[::4]


def test_constant_preemption(
    default_model_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    # The longest sequence needs 25 blocks of 8; 40 make the others give way again and again.
    tokens, num_preemptions = run(
        default_model_path, prompts, block_size=8, num_gpu_blocks_override=40, max_model_len=320
    )
    assert num_preemptions >= 20
    assert tokens == expected


def test_swapping(
    default_model_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    tokens, num_preemptions = run(
        default_model_path, prompts, block_size=8, num_gpu_blocks_override=40, max_model_len=320,
        preemption_mode="swap", enable_prefix_caching=False,
    )  # fmt: skip
    assert num_preemptions >= 20
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
        longer = [p + t[:40] for p, t in zip(prompts, expected, strict=True)]
        continued = llm.generate(longer, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids[:24] for o in continued] == [t[40:] for t in expected]
        assert sum(o.num_cached_tokens for o in continued) >= sum(map(len, longer)) - len(longer)


@pytest.mark.skipif(
    torch.cuda.is_available() or not gemm.is_available(), reason="needs the packed bf16 kernel"
)
def test_bfloat16_is_exact_too(default_model_path: Path, prompts: list[list[int]]) -> None:
    """octavo's own kernels compute a row alike in any batch, chunk and block size: no near-ties."""
    bf16 = {"dtype": "bfloat16"}
    expected = run(default_model_path, prompts, **bf16)[0]
    for options in (
        {"block_size": 1},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"block_size": 8, "num_gpu_blocks_override": 40, "max_model_len": 320},
    ):
        assert run(default_model_path, prompts, **bf16, **options)[0] == expected, options
    alone = run(default_model_path, prompts[::4], **bf16, max_num_seqs=1)[0]
    assert alone == expected[::4]
