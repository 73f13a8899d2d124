"""Beam candidates against a reference that looks at one continuation after the other."""

from __future__ import annotations

import pytest
import torch

from octavo.plan import BeamCandidate
from octavo.request import SamplerParams
from octavo.sampling import BeamRows, SamplingState, beam_candidates, sample
from octavo.sampling import draw as draw_module
from octavo.sampling.beams import merge_bytes


def naive(logits: torch.Tensor, group: BeamRows) -> list[BeamCandidate]:
    every = []
    for beam, (row, before) in enumerate(zip(group.rows, group.scores, strict=True)):
        own = logits[row]
        if group.temperature:
            own = (own - own.max()) / group.temperature
        sums = torch.log_softmax(own, dim=-1) + torch.tensor(before, dtype=torch.float32)
        every += [BeamCandidate(beam, token, score) for token, score in enumerate(sums.tolist())]
    every.sort(key=lambda c: (-c.score, c.beam, c.token_id))
    return every[: group.num_candidates]


@pytest.mark.parametrize("step", [0.001, 1.0, 8.0])
@pytest.mark.parametrize("vocab", [3, 64, 449, 5000])
def test_mixed_widths_and_numbers(vocab: int, step: float) -> None:
    """Coarse logits and equal scores make ties within a beam and between beams."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(14, vocab, generator=generator) * 4 / step).round() * step
    logits[5] = logits[4]
    groups = [
        BeamRows((4, 5, 9, 0), (-1.0, -1.0, -1.0, -2.5), 8, 0.0),
        BeamRows((1,), (0.0,), 8, 0.0),
        BeamRows((2, 3), (-0.5, -0.5), 6, 0.7),
        BeamRows((13, 12, 11, 10), (-3.0, -3.25, -1e-3, -70.0), 8, 0.0),
        BeamRows((8, 7), (-1.0, -1.5), 400, 0.0),
        BeamRows((6,), (-9.0,), 1, 2.0),
    ]
    before = logits.clone()
    found = beam_candidates(logits, groups)
    assert found == [naive(logits, group) for group in groups]
    assert torch.equal(logits, before)
    assert len(found[4]) == min(400, 2 * vocab)


def test_ties_go_to_the_lower_beam_then_the_lower_token() -> None:
    logits = torch.zeros(2, 1000)
    logits[0, 900] = logits[0, 7] = 2.0
    logits[1, 3] = logits[1, 999] = 2.0
    (found,) = beam_candidates(logits, [BeamRows((0, 1), (-1.0, -1.0), 5, 0.0)])
    places = [(c.beam, c.token_id) for c in found]
    assert places == [(0, 7), (0, 900), (1, 3), (1, 999), (0, 0)]
    assert len({c.score for c in found[:4]}) == 1


def test_ties_that_only_the_sum_makes() -> None:
    """Logprobs that differ in the last bit are equal once a large score is added: ids decide."""
    logits = torch.zeros(1, 300)
    logits[0, 200] = 1e-6
    assert beam_candidates(logits, [BeamRows((0,), (0.0,), 1, 0.0)])[0][0].token_id == 200
    assert beam_candidates(logits, [BeamRows((0,), (-5e4,), 1, 0.0)])[0][0].token_id == 0


def test_scores_are_those_of_transformers() -> None:
    """Its arithmetic, as in `_beam_search`: log_softmax, plus scores, topk over beams x tokens."""
    logits = torch.randn(12, 4001, generator=torch.Generator().manual_seed(3)) * 3
    scores = -torch.rand(3, 4, generator=torch.Generator().manual_seed(4)) * 20
    sums = torch.log_softmax(logits, dim=-1).view(3, 4, -1) + scores[:, :, None]
    values, index = sums.view(3, -1).topk(8)
    groups = [
        BeamRows(tuple(range(4 * i, 4 * i + 4)), tuple(scores[i].tolist()), 8, 0.0)
        for i in range(3)
    ]
    found = beam_candidates(logits, groups)
    assert [[c.score for c in group] for group in found] == values.tolist()
    assert [[c.beam * 4001 + c.token_id for c in group] for group in found] == index.tolist()


def test_company_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in a crowd, in pieces of one row: the same bits."""
    logits = torch.randn(64, 2000, generator=torch.Generator().manual_seed(5))
    groups = [
        BeamRows(tuple(range(4 * i, 4 * i + 4)), (-1.0, -2.0, -3.0, -4.0), 8, float(i % 2))
        for i in range(16)
    ]
    crowd = beam_candidates(logits, groups)
    assert crowd == [beam_candidates(logits, [group])[0] for group in groups]
    monkeypatch.setattr(draw_module, "CHUNK_ELEMENTS", 1)
    assert crowd == beam_candidates(logits, groups)


def test_a_tiny_temperature_is_no_nan() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
    for temperature in (1e-300, 1e-38, 1e-20):
        (found,) = beam_candidates(logits, [BeamRows((0,), (-1.0,), 3, temperature)])
        assert [c.token_id for c in found[:2]] == [1, 3]
        assert found[0].score == pytest.approx(-1.6931472)


def test_no_groups() -> None:
    assert beam_candidates(torch.zeros(0, 5), []) == []


def test_the_bound_covers_the_widest_group() -> None:
    assert merge_bytes(256, 50_000, 64) >= 64 * 512 * (8 + 4 + 8 + 8 + 8 + 8)
    assert merge_bytes(2, 100, 64) == 2 * 100 * 96


def test_a_fork_takes_the_output_over() -> None:
    """Penalties, bad words, `min_tokens` and the stream see a fork as the sequence it came from."""
    cases = [
        SamplerParams(temperature=0.9, seed=3, repetition_penalty=1.4),
        SamplerParams(temperature=0.9, seed=3, frequency_penalty=0.5, bad_words=((5, 6), (7,))),
        SamplerParams(temperature=0.9, seed=3, min_tokens=4, min_tokens_masked_ids=(0, 1, 2)),
        SamplerParams(temperature=0.9, seed=3),
    ]
    state = SamplingState(40)
    output = [5, 5, 9]
    for i, params in enumerate(cases):
        state.add(i, params, [1, 2, 3], 2)
        for token in output:
            state.append(i, token)
        state.add(100 + i, params, [1, 2, 3], 2, output)
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 3
    crowd = logits.repeat(4, 1)
    assert (
        sample(crowd.clone(), [0, 1, 2, 3], state).token_ids
        == sample(crowd.clone(), [100, 101, 102, 103], state).token_ids
    )
    assert state.params(100) is cases[0]
