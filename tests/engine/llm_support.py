"""What the tests of `LLM` share: options of a tiny engine, greedy tokens, and the proof of I3."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.text.tokenizer import load_tokenizer

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "max_model_len": 64,
    "block_size": 4,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 8,
    "num_threads": 1,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def assert_drained(llm: LLM) -> None:
    """I3: nothing runs, so nobody references a block of the pool, and nothing is broken."""
    core = llm._engine.engine.core
    core.kv.check_integrity()
    assert not llm.block_tables()
    assert core.kv.num_free_blocks == core.kv.num_blocks


def tokens(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


TEXTS = (
    "The capital of France is",
    "<|im_start|>user\nName three primary colours.<|im_end|>\n<|im_start|>assistant\n",
    "The quick brown fox jumps over the lazy dog. The quick brown",
    "SELECT name, age FROM users WHERE",
)
LENGTHS = (1, 7, 8, 9, 16, 17, 32, 33, 128)
"""At the edges of blocks of 8, 16, 32 and 128 tokens, and one token alone."""


def default_model_prompts(model: Path) -> list[list[int]]:
    """The texts' tokens, and pieces of them of each length."""
    tokenizer = load_tokenizer(model)
    ids = [tokenizer.encode(text) for text in TEXTS]
    stream = [token for text in ids for token in text]
    chooser = random.Random(5)
    for length in LENGTHS:
        start = chooser.randrange(len(stream))
        ids.append([stream[(start + i) % len(stream)] for i in range(length)])
    return ids
