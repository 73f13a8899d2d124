"""Synthetic beam searches: the real decisions, and sharing like that of real ones."""

from __future__ import annotations

import random

import pytest

from octavo.lab.config import SimConfig
from octavo.lab.costs import FixedCosts
from octavo.lab.null_model import BeamModel, shape_of
from octavo.lab.simulator import simulate
from octavo.lab.trace import TraceRequest
from octavo.lab.window import Window, pool_means
from octavo.plan import BeamDraw, SeqPlan, StepPlan

CONFIG = SimConfig(num_blocks=983, max_num_batched_tokens=2560)
COSTS = FixedCosts(0.02, 1e-4)


def test_candidates_are_sorted_and_new() -> None:
    model = BeamModel()
    seen: set[int] = set()
    for _ in range(20):
        found = model.draw(BeamDraw((4, 5, 6), (-1.0, -1.5, -2.0), 6))
        assert len(found) == 6
        scores = [one.score for one in found]
        assert scores == sorted(scores, reverse=True) and scores[0] <= -1.0
        seen.update(one.token_id for one in found)
    assert len(seen) == 120 and max(seen) < -(1 << 61)


def test_searches_end_at_their_length() -> None:
    requests = [
        TraceRequest(num_input=9, num_output=20, arrival_s=0.0, beam_width=3),
        TraceRequest(num_input=9, num_output=4, arrival_s=0.0),
        TraceRequest(num_input=9, num_output=7, arrival_s=0.0, n=2),
    ]
    result = simulate(requests, CONFIG, COSTS)
    assert sorted(result.times.num_output) == [4, 7, 20]
    assert result.num_output_tokens == 60 + 4 + 14
    assert result.num_steps == 20


def test_samples_share_their_prompt() -> None:
    requests = [TraceRequest(num_input=160, num_output=80, n=4) for _ in range(8)]
    result = simulate(requests, CONFIG, COSTS, sample_s=0.1)
    means = pool_means(result.samples, Window(start_s=0.0, end_s=result.end_s))
    assert 0.3 < means["saved"] / means["logical"] < 0.6


@pytest.mark.parametrize(("width", "paper"), [(2, 37.6), (4, 53.1), (6, 55.2)])
def test_beams_share_about_what_the_paper_measured(width: int, paper: float) -> None:
    """Fig. 15, at lengths that resemble Alpaca's."""
    rng = random.Random(1)
    requests = [
        TraceRequest(
            num_input=max(1, int(rng.lognormvariate(2.8, 0.55))),
            num_output=1 + int(rng.expovariate(1 / 58)),
            beam_width=width,
        )
        for _ in range(70)
    ]
    result = simulate(requests, CONFIG, COSTS, sample_s=0.4, concurrency=16)
    means = pool_means(result.samples, Window(start_s=1.0, end_s=0.9 * result.end_s))
    assert 100 * means["saved"] / means["logical"] == pytest.approx(paper, abs=5.0)


def test_shape_counts_what_is_drawn_from_one_row_as_often_as_it_is_drawn() -> None:
    plan = StepPlan(0)
    plan.seqs.append(SeqPlan(0, 0, 10, (), None, True))
    plan.seqs.append(SeqPlan(1, 20, 1, (), None, True))
    plan.extra_draws[0] = (2, 3)
    shape = shape_of(plan)
    assert (shape.num_prefill_tokens, shape.prefill_context, shape.num_prompts) == (10, 55, 1)
    assert (shape.num_decodes, shape.decode_context, shape.num_samples) == (1, 21, 4)
