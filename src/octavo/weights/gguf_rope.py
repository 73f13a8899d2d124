"""Rotary embedding out of a GGUF file.

Of llama3 scaling the file holds the result instead of the parameters: `rope_freqs.weight` is, per
pair of dimensions, by what the frequency is divided. Since the smooth part is linear in the
frequency, the parameters can be fitted back exactly; what the fit does not reproduce is refused.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from octavo.arch import RopeConfig
from octavo.errors import UnsupportedModelError
from octavo.weights.gguf_metadata import Metadata, shortest

Floats = npt.NDArray[np.float64]

_STANDARD = (1.0, 4.0, 8192)
"""low_freq_factor, high_freq_factor, original context of every Llama 3.1 to 3.3 checkpoint."""
_TOLERANCE = 1e-3
_F32 = 0
"""`gguf.GGMLQuantizationType`."""
_FREQS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"


def read_rope(metadata: Metadata, head_dim: int) -> RopeConfig:
    """Rope of the layers without a window.

    Raises `UnsupportedModelError` for a scaling that is not known.
    """
    theta = metadata.real("rope.freq_base", 10000.0)
    rotary_dim = metadata.number("rope.dimension_count", head_dim)
    plain = RopeConfig(theta=theta, rotary_dim=rotary_dim)
    if metadata.holds(_LONG, _SHORT):
        return _longrope(metadata, plain)
    if metadata.holds(_FREQS):
        return fit_llama3(_factors(metadata, _FREQS), theta, rotary_dim, str(metadata.path))
    kind = metadata.get("rope.scaling.type", "none")
    # before there were types there was one number, which meant linear scaling
    factor = metadata.real("rope.scaling.factor", metadata.real("rope.scale_linear", 1.0))
    if not metadata.has("rope.scaling.type") and factor not in (0.0, 1.0):
        kind = "linear"
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return plain
    if kind == "longrope":
        raise metadata.refuse(f"rope scaling 'longrope' without the tensor {_LONG}")
    if kind not in ("linear", "yarn"):
        raise metadata.refuse(
            f"rope scaling {kind!r} is not supported; known: linear, yarn, llama3, longrope"
        )
    return replace(
        plain,
        scaling_type=kind,
        factor=factor,
        original_max_position=_original(metadata),
        beta_fast=metadata.real("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.real("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=_attention_factor(metadata, factor),
    )


def _original(metadata: Metadata) -> int:
    context = metadata.required("context_length")
    return metadata.number("rope.scaling.original_context_length", context)


def _attention_factor(metadata: Metadata, factor: float) -> float | None:
    """What replaces yarn's own factor, as `config.json` has it; an older key multiplied it."""
    if metadata.has("rope.scaling.yarn_attn_factor"):
        return metadata.real("rope.scaling.yarn_attn_factor", 1.0)
    extra = metadata.real("rope.scaling.attn_factor", 1.0)
    default = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return None if extra == 1.0 else extra * default


def _longrope(metadata: Metadata, plain: RopeConfig) -> RopeConfig:
    """Two lists of factors, for short and for long contexts (Phi-3)."""
    short, long = (_factors(metadata, name) for name in (_SHORT, _LONG))
    wanted = (plain.rotary_dim // 2,)
    if short.shape != wanted or long.shape != wanted:
        raise metadata.refuse(
            f"{_SHORT} and {_LONG} have shapes {short.shape} and {long.shape}, expected {wanted}"
        )
    original, context = _original(metadata), metadata.required("context_length")
    stretched = max(context / original, 1.0)
    default = math.sqrt(1.0 + math.log(stretched) / math.log(original))
    stated = metadata.real("rope.scaling.attn_factor", default)
    return replace(
        plain,
        scaling_type="longrope",
        factor=stretched,
        original_max_position=original,
        # the file has it in float32
        attention_factor=None if math.isclose(stated, default, rel_tol=1e-6) else stated,
        short_factor=tuple(shortest(float(f)) for f in short),
        long_factor=tuple(shortest(float(f)) for f in long),
    )


def _factors(metadata: Metadata, name: str) -> npt.NDArray[np.float32]:
    tensor = metadata.tensor(name)
    if tensor.type_id != _F32:
        raise metadata.refuse(f"{name} is not of type F32")
    return metadata.file.data(tensor).view(np.float32)


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
