"""Beam search decides as transformers does: fed with the same candidates, it finds the same beams.

The candidates are computed from a tiny random Llama in the very shapes in which transformers runs
it, so that scores are equal bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from transformers.generation import GenerationConfig, GenerationMode

from octavo.plan import BeamCandidate
from octavo.request import BeamSearchParams, FinishReason
from octavo.sched.beams import BeamState, FinishedBeam

pytestmark = pytest.mark.usefixtures("one_torch_thread")
VOCAB_SIZE = 97
PROMPTS = ([5], [11, 42, 3, 90], [64, 1, 1, 7, 23, 50, 2, 8, 96])


def make_model(scale: float) -> transformers.LlamaForCausalLM:
    """`scale` multiplies the logits."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(config).eval()
    model.lm_head.weight.data *= scale
    return model


@pytest.fixture(scope="module")
def models() -> dict[str, transformers.LlamaForCausalLM]:
    """Two kinds of distributions: nearly flat, where beams change places all the time, and peaked,
    where one beam may have all the children."""
    return {"flat": make_model(1.0), "peaked": make_model(6.0)}


def search(
    model: transformers.LlamaForCausalLM, prompt: list[int], state: BeamState, width: int
) -> list[FinishedBeam]:
    """Run `state` to its end over the model."""
    beams = [list(prompt)]
    while not state.is_done:
        rows = beams * width if len(beams) == 1 else beams
        with torch.inference_mode():
            logits = model(torch.tensor(rows), use_cache=False, logits_to_keep=1).logits[:, -1]
        scores = torch.log_softmax(logits, dim=-1)[: len(beams)]
        scores = (scores + torch.tensor(state.scores)[:, None]).flatten()
        top = torch.topk(scores, min(state.num_candidates, len(scores)))
        candidates = [
            BeamCandidate(i // VOCAB_SIZE, i % VOCAB_SIZE, score)
            for score, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        ]
        chosen = state.advance(candidates, [beam[len(prompt) :] for beam in beams])
        beams = [[*beams[beam.beam], beam.token_id] for beam in chosen]
    return state.finished


def transformers_beams(
    model: transformers.LlamaForCausalLM,
    prompt: list[int],
    params: BeamSearchParams,
    eos: tuple[int, ...],
) -> list[tuple[list[int], float]]:
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        do_sample=False,
        use_cache=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    lengths = (result.beam_indices >= 0).sum(dim=1).tolist()
    outputs = [
        row[len(prompt) : len(prompt) + length].tolist()
        for row, length in zip(result.sequences, lengths, strict=True)
    ]
    return list(zip(outputs, result.sequences_scores.tolist(), strict=True))


def tokens_on_the_way(
    model: transformers.LlamaForCausalLM, prompt: list[int], width: int, num: int
) -> tuple[int, ...]:
    """Tokens that beams come across early: as end-of-sequence they end some of them."""
    params = BeamSearchParams(beam_width=width, max_tokens=9)
    beams = search(model, prompt, BeamState(params, frozenset(), 9), width)
    found = [beam.token_ids[i] for i in (3, 1, 5) for beam in beams]
    return tuple(dict.fromkeys(found))[:num]


@pytest.fixture
def width_1_is_beam_search_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes num_beams=1 for greedy search; its beam search can do it all the same."""
    monkeypatch.setattr(
        GenerationConfig, "get_generation_mode", lambda *_: GenerationMode.BEAM_SEARCH
    )


@pytest.mark.parametrize("kind", ["flat", "peaked"])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.usefixtures("width_1_is_beam_search_too")
def test_finds_the_beams_of_transformers(
    models: dict[str, Any], kind: str, early_stopping: Any, length_penalty: float
) -> None:
    model = models[kind]
    num_stopped = 0
    for case, prompt in enumerate(PROMPTS):
        for width in range(1, 6):
            num_eos = (width + case) % 4
            eos = tokens_on_the_way(model, prompt, width, num_eos)
            params = BeamSearchParams(
                beam_width=width,
                max_tokens=(1, 2, 9, 14)[(width + 2 * case) % 4],
                length_penalty=length_penalty,
                early_stopping=early_stopping,
            )
            state = BeamState(params, frozenset(eos), params.max_tokens)
            found = search(model, prompt, state, width)
            expected = transformers_beams(model, prompt, params, eos)
            assert [(list(b.token_ids), b.score) for b in found] == expected, (width, eos, params)
            for beam in found:
                is_eos = beam.token_ids[-1] in eos
                num_stopped += is_eos
                assert beam.finish_reason is (FinishReason.STOP if is_eos else FinishReason.LENGTH)
    assert num_stopped >= 5, "hardly a beam ended before its length: the test proves little"


def make_state(width: int = 2, max_tokens: int = 3, **fields: Any) -> BeamState:
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, **fields)
    return BeamState(params, frozenset({9}), max_tokens)


def test_how_many_candidates() -> None:
    def num_candidates(num_eos: int, ignore_eos: bool) -> int:
        params = BeamSearchParams(beam_width=3, max_tokens=2, ignore_eos=ignore_eos)
        return BeamState(params, frozenset(range(num_eos)), 2).num_candidates

    assert [num_candidates(n, False) for n in range(4)] == [6, 6, 9, 12]
    assert num_candidates(3, True) == 6


def test_ignore_eos_goes_on() -> None:
    state = make_state(ignore_eos=True)
    assert [b.token_id for b in state.advance([BeamCandidate(0, 9, -1.0)], [[]])] == [9]
    assert state.finished == []


def test_only_the_best_candidates_may_finish() -> None:
    state = make_state()
    candidates = [BeamCandidate(0, token, -float(i)) for i, token in enumerate((4, 5, 9, 6), 1)]
    assert state.advance(candidates, [[]]) == candidates[:2]
    assert state.finished == []
    assert state.scores == (-1.0, -2.0)
    assert (state.num_tokens, state.is_done) == (1, False)


def test_one_parent_may_have_all_children() -> None:
    state = make_state()
    state.advance([BeamCandidate(0, 4, -1.0), BeamCandidate(0, 5, -2.0)], [[]])
    children = state.advance([BeamCandidate(1, 6, -3.0), BeamCandidate(1, 7, -4.0)], [[4], [5]])
    assert [(b.beam, b.token_id) for b in children] == [(1, 6), (1, 7)]


def test_among_equal_scores_the_earlier_is_better() -> None:
    state = make_state(width=2, max_tokens=1)
    state.advance([BeamCandidate(0, 4, -1.0), BeamCandidate(0, 3, -1.0)], [[]])
    assert [b.token_ids for b in state.finished] == [(4,), (3,)]


def test_fewer_candidates_than_wanted_make_fewer_beams() -> None:
    """A vocabulary smaller than the number of candidates."""
    state = make_state(width=4, max_tokens=2)
    assert len(state.advance([BeamCandidate(0, 4, -1.0), BeamCandidate(0, 9, -2.0)], [[]])) == 1
    assert len(state.finished) == 1
    assert state.advance([BeamCandidate(0, 9, -3.0)], [[4]]) == []
    assert state.is_done
    assert [b.token_ids for b in state.finished] == [(4, 9), (9,)]  # -3 / 2 is more than -2


def test_cut_short_hands_out_what_there_is() -> None:
    state = make_state(width=2, max_tokens=9)
    state.advance([BeamCandidate(0, 4, -1.0), BeamCandidate(0, 5, -2.0)], [[]])
    state.cut_short([[4], [5]])
    assert state.is_done
    assert [(b.token_ids, b.score, b.finish_reason) for b in state.finished] == [
        ((4,), -1.0, FinishReason.LENGTH),
        ((5,), -2.0, FinishReason.LENGTH),
    ]
    nothing_yet = make_state()
    nothing_yet.cut_short([[]])
    assert nothing_yet.finished == []


@pytest.mark.parametrize("length_penalty", [1e308, -1e308, 400.0, -400.0])
@pytest.mark.parametrize("score", [0.0, -1.0, -math.inf])
def test_no_penalty_brings_it_down(length_penalty: float, score: float) -> None:
    state = make_state(width=1, max_tokens=2, length_penalty=length_penalty)
    state.advance([BeamCandidate(0, 4, score)], [[]])
    state.advance([BeamCandidate(0, 4, score)], [[4]])
    (beam,) = state.finished
    assert not math.isnan(beam.score)
