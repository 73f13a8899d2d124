"""Step times out of a record: a cost model fitted to what its own steps took."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from octavo.lab.costs import StepShape
from octavo.lab.fit import nonnegative
from octavo.lab.replay_workload import TimedStep

Floats = NDArray[np.float64]

_MOST_GAPS = 10
"""A pause between two steps longer than so many usual ones was not the engine's."""
_OUTLIER = 3.0
"""Steps that took so many times what was expected count as if they had taken that."""
_TERMS = (
    "a step", "a prompt token", "a pair of prompt tokens", "a decode", "a token read by decodes",
    "a draw", "a host block", "a copied block", "a prompt",
)  # fmt: skip


class FittedCosts:
    """Linear in what is in a step, with no term below 0: least squares of the relative error.

    What lies between two steps (text, news) is part of them. Terms that the record cannot tell
    apart share what they take together. Scaled so that all recorded steps together take what they
    took: warming up is in it, as it was in the run.
    """

    def __init__(self, steps: Sequence[TimedStep]) -> None:
        """steps: at least one."""
        self._num_steps = len(steps)
        gaps = [step.gap_s for step in steps if step.gap_s is not None]
        usual = median(gaps) if gaps else 0.0
        took = [s.seconds + min(s.gap_s or usual, _MOST_GAPS * usual) for s in steps]
        seconds = np.maximum(np.array(took), 1e-9)
        shapes = np.array([(1, *step.shape) for step in steps], dtype=np.float64)
        self._terms = _fit(shapes, seconds)
        self._terms *= seconds.sum() / max(1e-12, float((shapes @ self._terms).sum()))
        num_host = sum(step.shape.num_host_blocks for step in steps)
        self._block_s = sum(step.copy_s for step in steps) / max(1, num_host)
        expected = shapes @ self._terms
        self.error = float(np.median(np.abs(expected - seconds) / seconds))
        """Median over steps of the relative error."""

    @property
    def name(self) -> str:
        """See `StepCosts.name`."""
        return (
            f"step times fitted to the {self._num_steps:,} recorded steps, of which half are met "
            f"within {self.error:.0%}"
        )

    @property
    def terms(self) -> dict[str, float]:
        """Seconds of each thing that a step is made of."""
        return dict(zip(_TERMS, map(float, self._terms), strict=True))

    def step_s(self, shape: StepShape) -> float:
        """See `StepCosts.step_s`."""
        first, *terms = self._terms.tolist()
        return float(first + sum(term * num for term, num in zip(terms, shape, strict=True)))

    def copy_s(self, num_host_blocks: int) -> float:
        """See `StepCosts.copy_s`."""
        return self._block_s * num_host_blocks


def _fit(shapes: Floats, seconds: Floats) -> Floats:
    """Terms >= 0, [num_features], for shapes [num_steps, num_features]."""
    expected = shapes @ _least_squares(shapes, seconds)
    trusted = np.minimum(seconds, np.maximum(expected, seconds.min()) * _OUTLIER)
    return _least_squares(shapes, trusted)


def _least_squares(shapes: Floats, seconds: Floats) -> Floats:
    relative = shapes / seconds[:, None]
    scale = np.maximum(np.linalg.norm(relative, axis=0), 1e-300)
    return np.asarray(nonnegative(relative / scale, np.ones(len(seconds))) / scale)
