"""llama3 rope scaling out of a GGUF file, which holds its result instead of its parameters.

`rope_freqs.weight` is, per pair of dimensions, by what the frequency is divided. Since the smooth
part is linear in the frequency, the parameters can be fitted back exactly; what the fit does not
reproduce is refused.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from octavo.arch import RopeConfig
from octavo.errors import UnsupportedModelError

Floats = npt.NDArray[np.float64]

_STANDARD = (1.0, 4.0, 8192)
"""low_freq_factor, high_freq_factor, original context of every Llama 3.1 to 3.3 checkpoint."""
_TOLERANCE = 1e-3


def llama3_factors(rope: RopeConfig) -> Floats:
    """By what each frequency is divided, [rotary_dim / 2]; the inverse of `fit_llama3`."""
    frequency = _frequencies(rope.theta, rope.rotary_dim)
    turns = rope.original_max_position * frequency / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / rope.factor + smooth))


def fit_llama3(factors: npt.ArrayLike, theta: float, rotary_dim: int, where: str) -> RopeConfig:
    """The scaling whose factors these are ([rotary_dim / 2]).

    Raises `UnsupportedModelError` when they are not llama3's.
    """
    given: Floats = np.asarray(factors, dtype=np.float64)
    if given.shape != (rotary_dim // 2,):
        raise UnsupportedModelError(
            f"{where}: rope_freqs.weight has shape {given.shape}, expected ({rotary_dim // 2},)"
        )
    factor = float(given.max())
    for low, high, original in (_STANDARD, *_fitted(given, factor, theta, rotary_dim)):
        rope = RopeConfig(
            theta=theta,
            rotary_dim=rotary_dim,
            scaling_type="llama3",
            factor=factor,
            original_max_position=int(original),
            low_freq_factor=low,
            high_freq_factor=high,
        )
        if np.allclose(llama3_factors(rope), given, rtol=_TOLERANCE, atol=0.0):
            return rope
    raise UnsupportedModelError(
        f"{where}: the frequency factors in rope_freqs.weight are not those of llama3 rope scaling"
    )


def _fitted(
    given: Floats, factor: float, theta: float, rotary_dim: int
) -> list[tuple[float, float, int]]:
    """Parameters by a straight line through the smooth part, with low_freq_factor set to 1.

    Only the ratios of low, high and original matter, so fixing one loses nothing.
    """
    between = (given > 1.0) & (given < factor)
    if between.sum() < 2:
        return []
    smooth = (1.0 / given[between] - 1.0 / factor) / (1.0 - 1.0 / factor)
    turns_per_token = _frequencies(theta, rotary_dim)[between] / (2 * math.pi)
    slope, intercept = np.polyfit(turns_per_token, smooth, 1)
    if not (slope > 0 and intercept < 0):
        return []
    span = -1.0 / float(intercept)
    return [(1.0, 1.0 + span, round(float(slope) * span))]


def _frequencies(theta: float, rotary_dim: int) -> Floats:
    return np.asarray(theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim))
