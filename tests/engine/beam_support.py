"""What transformers' beam search finds, and the comparison with what octavo's found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo import BeamSearchOutput, BeamSearchParams

Beams = list[tuple[list[int], float]]


@torch.inference_mode()
def transformers_beams(
    model: Any, prompt: list[int], params: BeamSearchParams, eos: int | None
) -> Beams:
    """(output tokens, score) of the returned beams, best first."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = []
    for row, score in zip(found.sequences, found.sequences_scores, strict=True):
        tokens = row[len(prompt) :].tolist()
        if eos in tokens:
            tokens = tokens[: tokens.index(eos) + 1]  # behind it is padding
        beams.append((tokens, float(score)))
    return beams


def assert_same(output: BeamSearchOutput, num_prompt: int, expected: Beams, width: int) -> None:
    assert len(output.sequences) == width
    got = [beam.tokens[num_prompt:] for beam in output.sequences]
    assert got == [tokens for tokens, _ in expected]
    for beam, (_, score) in zip(output.sequences, expected, strict=True):
        assert beam.score == pytest.approx(score, abs=2e-4)
