"""What the tests of `LLM` share: options of a tiny engine, greedy tokens, and the proof of I3."""

from __future__ import annotations

from typing import Any

from octavo import LLM, SamplingParams

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
