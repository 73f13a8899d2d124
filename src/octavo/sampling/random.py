"""The random stream of a sequence: a counter-based hash, so that no generator state is kept.

The number for the token at output position p of sample i with seed s is a function of (s, i, p)
and of nothing else. The hash is splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
number generators", 2014), evaluated at the counter instead of stepped.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SAMPLE_STEP = 0xD1B54A32D192ED03
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MUL_1) & _MASK
    z = ((z ^ (z >> 27)) * _MUL_2) & _MASK
    return z ^ (z >> 31)


def stream_key(seed: int, sample_index: int) -> int:
    """The 64-bit key of one sample's stream; any Python int is a seed (taken modulo 2**64)."""
    return _mix((_mix((seed + _GOLDEN) & _MASK) + sample_index * _SAMPLE_STEP) & _MASK)


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (stream key, position) pair."""
    z = keys + (positions + np.uint64(1)) * np.uint64(_GOLDEN)  # wraps modulo 2**64
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MUL_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MUL_2)
    z = z ^ (z >> np.uint64(31))
    numbers: NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers
