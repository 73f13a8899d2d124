"""Step times that are found in recorded steps."""

from __future__ import annotations

import random

import pytest

from octavo.lab.costs import StepShape
from octavo.lab.replay_costs import FittedCosts
from octavo.lab.replay_workload import TimedStep


def test_costs_are_found_again() -> None:
    """Steps whose times are made of known terms."""
    rng = random.Random(0)
    steps = []
    for _ in range(400):
        prefill = rng.choice([0, 0, rng.randrange(1, 500)])
        decodes = rng.randrange(1, 200)
        context = decodes * rng.randrange(1, 1000)
        shape = StepShape(prefill, 0, decodes, context, decodes, rng.randrange(3) * 4, 0, 0)
        copy_s = 1e-4 * shape.num_host_blocks
        seconds = 0.01 + 2e-5 * prefill + 1e-6 * context + copy_s
        steps.append(TimedStep(shape, seconds, copy_s, 0.002))
    costs = FittedCosts(steps)
    for step in steps:
        assert costs.step_s(step.shape) == pytest.approx(step.seconds + 0.002, rel=0.02)
    assert costs.copy_s(10) == pytest.approx(1e-3, rel=1e-6)
    assert costs.terms["a step"] == pytest.approx(0.012, rel=0.05)
    assert costs.error < 0.01 and "400 recorded steps" in costs.name
    assert min(costs.terms.values()) >= 0


def test_pauses_are_not_the_engines() -> None:
    shape = StepShape(0, 0, 1, 10, 1)
    steps = [TimedStep(shape, 0.01, 0.0, 0.001) for _ in range(20)]
    steps += [TimedStep(shape, 0.01, 0.0, 100.0), TimedStep(shape, 0.01, 0.0, None)]
    costs = FittedCosts(steps)
    assert 0.01 < costs.step_s(shape) < 0.013
