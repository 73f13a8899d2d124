"""Rotary embedding out of a `config.json`, in each of the spellings it has had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.arch import ROPE_SCALING_TYPES, RopeConfig
from octavo.hf_config.fields import Fields

_REFUSED = ("mrope_section", "short_mscale", "long_mscale", "llama_4_scaling_beta")
"""Fields of variants that octavo does not have, which would be wrong to leave out."""


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """What a family has where its file says nothing."""

    theta: float = 10000.0
    partial: float = 1.0
    theta_field: str = "rope_theta"
    partial_field: str = "partial_rotary_factor"
    original: int | None = None
    """The trained context, where it is not what the file states as its longest."""
    types: tuple[str, ...] = ROPE_SCALING_TYPES
    """Scalings that the family has."""
    renamed: tuple[tuple[str, str], ...] = (("su", "longrope"),)
    """Older names of scalings."""
    interleaved: bool = False
    """Rotated pairs are neighbours."""


def rope_parameters(f: Fields) -> Mapping[str, Any]:
    """`rope_scaling` (with `rope_theta` beside it) or transformers 5's `rope_parameters`."""
    parameters = f.table("rope_scaling") or f.table("rope_parameters")
    nested = [v for v in parameters.values() if isinstance(v, Mapping)]
    if not nested:
        return parameters
    if any(v != nested[0] for v in nested):
        raise f.refuse("rope_parameters that differ between layer types are not supported")
    return nested[0]


def read_rope(
    f: Fields,
    head_dim: int,
    stated: int,
    defaults: RopeDefaults,
    parameters: Mapping[str, Any] | None = None,
) -> tuple[RopeConfig, int]:
    """Rope, and the context it is good for.

    head_dim: elements of a head that could be rotated; stated: `max_position_embeddings`.
    """
    p = rope_parameters(f) if parameters is None else parameters
    kind = p.get("rope_type") or p.get("type") or "default"
    kind = dict(defaults.renamed).get(kind, kind)
    if kind not in defaults.types:
        raise f.refuse(
            f"rope scaling {kind!r} is not supported; known: {', '.join(defaults.types)}"
        )
    for name in _REFUSED:
        if p.get(name) is not None:
            raise f.refuse(f"rope field {name} ({p[name]!r:.80}) is not supported")
    theta = f.number(p, "rope_theta", f.positive(defaults.theta_field, defaults.theta))
    stated_partial = f.raw(defaults.partial_field)
    partial = p.get("partial_rotary_factor", stated_partial) or defaults.partial
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise f.refuse(f"cannot rotate {rotary_dim} of {head_dim} head dimensions")
    if kind == "default":
        plain = RopeConfig(theta=theta, rotary_dim=rotary_dim, interleaved=defaults.interleaved)
        return plain, stated
    rope = _scaled(f, kind, p, stated, defaults, theta, rotary_dim)
    return rope, stretched_context(rope, stated)


def _scaled(
    f: Fields,
    kind: str,
    p: Mapping[str, Any],
    stated: int,
    defaults: RopeDefaults,
    theta: float,
    rotary_dim: int,
) -> RopeConfig:
    original = f.config.get("original_max_position_embeddings", defaults.original)
    original = original or p.get("original_max_position_embeddings")
    # dynamic stretches what the file calls max_position_embeddings, whatever else it says
    original = stated if kind == "dynamic" or original is None else int(original)
    if original < 1:
        raise f.refuse(f"original_max_position_embeddings must be above 0, got {original}")
    if kind in ("yarn", "longrope") and p.get("factor") is None:
        factor = stated / original
    else:
        factor = _required(f, p, "factor", kind)
    attention_factor = p.get("attention_factor")
    is_llama3, is_long = kind == "llama3", kind == "longrope"
    return RopeConfig(
        theta=theta,
        rotary_dim=rotary_dim,
        scaling_type=kind,
        interleaved=defaults.interleaved,
        factor=factor,
        original_max_position=original,
        low_freq_factor=_required(f, p, "low_freq_factor", kind) if is_llama3 else 1.0,
        high_freq_factor=_required(f, p, "high_freq_factor", kind) if is_llama3 else 4.0,
        beta_fast=float(p.get("beta_fast") or 32),
        beta_slow=float(p.get("beta_slow") or 1),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=p.get("mscale"),
        mscale_all_dim=p.get("mscale_all_dim"),
        truncate=bool(p.get("truncate", True)),
        short_factor=_factors(f, p, "short_factor", rotary_dim) if is_long else (),
        long_factor=_factors(f, p, "long_factor", rotary_dim) if is_long else (),
    )


def _required(f: Fields, parameters: Mapping[str, Any], name: str, kind: str) -> float:
    if parameters.get(name) is None:
        raise f.refuse(f"rope scaling {kind!r} needs {name}")
    return f.number(parameters, name, 1.0)


def _factors(f: Fields, p: Mapping[str, Any], name: str, rotary_dim: int) -> tuple[float, ...]:
    values = p.get(name)
    if not isinstance(values, list) or len(values) != rotary_dim // 2:
        raise f.refuse(
            f"rope scaling 'longrope' needs {rotary_dim // 2} numbers in {name}, got {values!r:.80}"
        )
    return tuple(f.number({name: value}, name, 1.0) for value in values)


def stretched_context(rope: RopeConfig, stated: int) -> int:
    """Longest context in tokens under a rope scaling, given what the checkpoint states.

    yarn and dynamic reach `factor` times the trained context, and configs are often left at the
    trained figure; linear, llama3 and longrope checkpoints state the stretched one.
    """
    if rope.scaling_type in ("yarn", "dynamic"):
        return max(stated, int(rope.original_max_position * rope.factor))
    return stated
