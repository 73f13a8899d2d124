"""Beam search equals transformers' `generate(num_beams=...)`, token for token (float32).

Of the default model, too: test_default_model.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from beam_support import assert_same, transformers_beams

from octavo import LLM, BeamSearchParams

EOS = 2
TINY: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0,
}  # fmt: skip
TINY_LENGTHS = (1, 3, 4, 5, 16, 17, 30)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**TINY), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():  # end-of-sequence must come now and then
        model.lm_head.weight[EOS] *= 2.5
    folder = tmp_path_factory.mktemp("beams")
    model.save_pretrained(folder)
    return folder, model


def tiny_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 199, (n,), generator=generator).tolist() for n in TINY_LENGTHS]


@pytest.fixture(scope="module")
def tiny_llm(tiny: tuple[Path, Any]) -> Iterator[LLM]:
    with LLM(
        str(tiny[0]), dtype="float32", max_model_len=64, block_size=4, skip_tokenizer_init=True
    ) as llm:
        yield llm


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("width", [1, 2, 4, 5])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"early_stopping": True},
        {"early_stopping": "never", "length_penalty": 2.0},
        {"length_penalty": 0.0},
        {"length_penalty": -1.0, "early_stopping": True},
        {"ignore_eos": True},
    ],
    ids=str,
)
def test_tiny_model(
    tiny: tuple[Path, Any], tiny_llm: LLM, width: int, fields: dict[str, Any]
) -> None:
    if width == 1 and fields:
        pytest.skip("transformers decodes one beam greedily and knows no scores then")
    params = BeamSearchParams(beam_width=width, max_tokens=12, **fields)
    eos = None if params.ignore_eos else EOS
    outputs = tiny_llm.beam_search(tiny_prompts(), params, use_tqdm=False)
    ended = 0
    for prompt, output in zip(tiny_prompts(), outputs, strict=True):
        if width == 1:
            (beam,) = output.sequences
            greedy = tiny[1].generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=0
            )
            assert beam.tokens == greedy[0].tolist()
            continue
        expected = transformers_beams(tiny[1], prompt, params, eos)
        assert_same(output, len(prompt), expected, width)
        ended += sum(beam.finish_reason == "stop" for beam in output.sequences)
    if width > 1 and not params.ignore_eos:
        assert ended, "no beam ended by end-of-sequence: the test does not reach that"
    report = tiny_llm.memory_report()
    assert report.ledger.num_physical_blocks == 0
