"""FlashAttention 3 over octavo's pool, where it is installed: the tokens of the default backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.attention import libraries

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(libraries._fa3_module() is None, reason="FlashAttention 3 is not installed")
def test_tokens_are_the_same(tiny_wide_path: Path) -> None:
    prompts = [[(7 * i + j) % 200 for j in range(3 + 30 * i)] for i in range(5)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def answers(backend: str) -> list[list[int]]:
        with LLM(
            str(tiny_wide_path), dtype="bfloat16", skip_tokenizer_init=True, max_num_seqs=8,
            max_num_batched_tokens=64, num_gpu_blocks_override=200, attention_backend=backend,
            load_format="dummy",
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [output.outputs[0].token_ids for output in outputs]

    triton, fa3 = answers("triton"), answers("fa3")
    same = sum(a == b for x, y in zip(triton, fa3, strict=True) for a, b in zip(x, y, strict=True))
    assert same >= 70, f"{same} of 80 tokens"  # bfloat16: near-ties may go either way


@pytest.fixture
def tiny_wide_path(tiny_model_path: Path, tmp_path: Path) -> Path:
    """With heads of 64: FlashAttention takes no smaller ones than 32 well."""
    import json

    config = json.loads((tiny_model_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 64}))
    assert torch.cuda.is_available()
    return tmp_path
