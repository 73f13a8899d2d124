"""The default model against transformers, float32: greedy tokens and beams.

What transformers picks greedily is checked in one forward pass a prompt: by induction greedy
decoding gives our tokens if and only if, after each prefix of them, transformers' most probable
token is the next.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from beam_support import assert_same, transformers_beams
from llm_support import default_model_prompts

from octavo import LLM, BeamSearchParams, SamplingParams

pytestmark = pytest.mark.model

BEAM_TEXTS = (
    "The capital of France is",
    "1, 1, 2, 3, 5, 8, 13,",
    "<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def reference(default_model_path: Path) -> Iterator[Any]:
    # It reads the file's metadata twice, and lists the names of all tensors for each tensor, which
    # takes most of its time.
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            default_model_path.parent, gguf_file=default_model_path.name, dtype=torch.float32
        )
    yield model.eval()
    del model


@pytest.fixture(scope="module")
def llm(default_model_path: Path) -> Iterator[LLM]:
    with LLM(str(default_model_path), dtype="float32", max_model_len=256, max_num_seqs=32) as llm:
        yield llm


def test_greedy_tokens(default_model_path: Path, llm: LLM, reference: Any) -> None:
    prompts = default_model_prompts(default_model_path)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)
    for output in llm.generate([*prompts], params, use_tqdm=False):
        prompt, tokens = output.prompt_token_ids, list(output.outputs[0].token_ids)
        assert len(tokens) == 48
        with torch.inference_mode():
            found = reference(torch.tensor([prompt + tokens]), logits_to_keep=49, use_cache=False)
        assert found.logits[0, :-1].argmax(-1).tolist() == tokens


@pytest.mark.parametrize(
    ("width", "fields"),
    [(4, {}), (3, {"early_stopping": True, "length_penalty": 0.6})],
    ids=["width-4", "width-3-early"],
)
def test_beams(llm: LLM, reference: Any, width: int, fields: dict[str, Any]) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=16, **fields)
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    prompts = [tokenizer.encode(text) for text in BEAM_TEXTS]
    (eos,) = tokenizer.eos_token_ids
    outputs = llm.beam_search([*prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = transformers_beams(reference, prompt, params, eos)
        assert_same(output, len(prompt), expected, width)
        for beam in output.sequences:
            assert beam.text is not None
