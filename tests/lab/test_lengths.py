"""Synthetic lengths have the distributions that were published, and are the same everywhere."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from octavo.errors import TraceError
from octavo.lab.lengths import NAMES, built_in_trace, draw_lengths, length_set

MEANS = {"sharegpt": (161.2, 338.0), "alpaca": (19.3, 58.4)}
SHAREGPT_PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
SHAREGPT_INPUT = (2, 7, 9, 15, 35, 133, 506, 863, 1460, 1864)
SHAREGPT_OUTPUT = (4, 22, 45, 128, 271, 458, 754, 899, 1280, 1706)

FIRST_SHAREGPT = [(62, 680), (10, 60), (22, 346), (402, 202)]
FIRST_ALPACA = [(18, 116), (11, 8), (14, 66), (28, 23)]


def drawn(name: str, num: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return np.array(draw_lengths(name, num, seed))


def ranks(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.argsort(np.argsort(values, kind="stable"), kind="stable")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num", [200, 2_000, 20_000])
def test_means_are_within_one_percent(name: str, num: int) -> None:
    assert drawn(name, num).mean(axis=0) == pytest.approx(MEANS[name], rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_output_are_below_the_limit(name: str) -> None:
    for num in (1, 2, 7, 5_000):
        lengths = drawn(name, num, seed=3)
        assert len(lengths) == num
        assert lengths.min() >= 1 and lengths.sum(axis=1).max() < 2048


def test_sharegpt_has_the_published_quantiles() -> None:
    lengths = drawn("sharegpt", 50_000)
    for column, published in enumerate((SHAREGPT_INPUT, SHAREGPT_OUTPUT)):
        found = np.percentile(lengths[:, column], SHAREGPT_PERCENTS)
        assert found == pytest.approx(published, rel=0.02, abs=0.5)


def test_prompts_and_outputs_hang_together_as_published() -> None:
    sharegpt, alpaca = drawn("sharegpt", 50_000), drawn("alpaca", 50_000)
    assert np.corrcoef(sharegpt.T)[0, 1] == pytest.approx(0.04, abs=0.02)
    assert np.corrcoef(ranks(alpaca[:, 0]), ranks(alpaca[:, 1]))[0, 1] == pytest.approx(
        -0.26, abs=0.01
    )


def test_the_same_everywhere_and_another_by_another_seed() -> None:
    assert draw_lengths("sharegpt", 4) == FIRST_SHAREGPT
    assert draw_lengths("alpaca", 4) == FIRST_ALPACA
    assert draw_lengths("sharegpt", 50) != draw_lengths("sharegpt", 50, seed=1)
    for column in (0, 1):  # in another order only
        assert sorted(drawn("alpaca", 50)[:, column]) == sorted(drawn("alpaca", 50, 1)[:, column])


def test_as_a_trace() -> None:
    trace = built_in_trace("alpaca", 10)
    assert [(r.num_input, r.num_output) for r in trace.requests] == draw_lengths("alpaca", 10)
    assert not trace.has_arrivals and "synthetic" in trace.name
    assert length_set("sharegpt").num_requests == 79_725


def test_unknown_names_and_numbers_are_refused() -> None:
    with pytest.raises(TraceError, match=r"'sharegtp'; known: sharegpt, alpaca; did you mean"):
        draw_lengths("sharegtp", 4)
    with pytest.raises(TraceError, match="at least 1"):
        draw_lengths("alpaca", 0)
