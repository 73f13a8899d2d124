"""Rotary position embedding: inverse frequencies of each scaling type, and their table.

Su et al. 2021 (rope), Peng et al. 2023 (yarn), Meta 2024 (llama3), Ding et al. 2024 (longrope).
Formulas agree with
transformers' `modeling_rope_utils` in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.arch import RopeConfig


def _base_inv_freq(theta: float, rotary_dim: int) -> Tensor:
    """`theta ** (-2 i / rotary_dim)` for i = 0 .. rotary_dim / 2 - 1, float32."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    return 1.0 / (theta**exponents)


def _llama3_inv_freq(cfg: RopeConfig) -> Tensor:
    inv_freq = _base_inv_freq(cfg.theta, cfg.rotary_dim)
    low_wavelen = cfg.original_max_position / cfg.low_freq_factor
    high_wavelen = cfg.original_max_position / cfg.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    scaled = torch.where(wavelen > low_wavelen, inv_freq / cfg.factor, inv_freq)
    smooth = (cfg.original_max_position / wavelen - cfg.low_freq_factor) / (
        cfg.high_freq_factor - cfg.low_freq_factor
    )
    smoothed = (1 - smooth) * scaled / cfg.factor + smooth * scaled
    between = (wavelen <= low_wavelen) & (wavelen >= high_wavelen)
    return torch.where(between, smoothed, scaled)


def _yarn_inv_freq(cfg: RopeConfig) -> Tensor:
    dim, theta = cfg.rotary_dim, cfg.theta

    def correction_dim(num_rotations: float) -> float:
        turns = cfg.original_max_position / (num_rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low, high = correction_dim(cfg.beta_fast), correction_dim(cfg.beta_slow)
    if cfg.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    extrapolation = _base_inv_freq(theta, dim)
    interpolation = extrapolation / cfg.factor
    keep = 1 - ramp
    return interpolation * (1 - keep) + extrapolation * keep


def _yarn_attention_factor(cfg: RopeConfig) -> float:
    def mscale(factor: float, scale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if cfg.attention_factor is not None:
        return cfg.attention_factor
    if cfg.mscale and cfg.mscale_all_dim:
        return mscale(cfg.factor, cfg.mscale) / mscale(cfg.factor, cfg.mscale_all_dim)
    return mscale(cfg.factor)


def _longrope_inv_freq(cfg: RopeConfig, factors: tuple[float, ...]) -> Tensor:
    return _base_inv_freq(cfg.theta, cfg.rotary_dim) / torch.tensor(factors, dtype=torch.float32)


def _longrope_attention_factor(cfg: RopeConfig) -> float:
    if cfg.attention_factor is not None:
        return cfg.attention_factor
    if cfg.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(cfg.factor) / math.log(cfg.original_max_position))


def _dynamic_inv_freq(cfg: RopeConfig, seq_len: int) -> Tensor:
    """NTK-aware scaling: the base grows with the sequence once it passes the trained context."""
    if seq_len <= cfg.original_max_position:
        return _base_inv_freq(cfg.theta, cfg.rotary_dim)
    stretch = (cfg.factor * seq_len / cfg.original_max_position) - (cfg.factor - 1)
    theta = cfg.theta * stretch ** (cfg.rotary_dim / (cfg.rotary_dim - 2))
    return _base_inv_freq(theta, cfg.rotary_dim)


def _cos_sin(inv_freq: Tensor, positions: Tensor, factor: float) -> Tensor:
    angles = positions.float()[:, None] * inv_freq[None, :]
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)


class RotaryTable:
    """cos and sin for every position, made once; rows on demand for dynamic rope.

    Under dynamic rope and longrope frequencies depend on how long the sequence is. As in
    transformers, a prompt is rotated with those of its whole length and each later token with those
    of its own position, so that a row is a function of (position, prompt length) alone: chunking
    and recomputing after a preemption cannot change it. (transformers' Phi-3 computes its cache
    anew when a generated token is the first one beyond the trained context; here earlier keys keep
    their rotation.)

    cfg: None for models without rope, which have a table without rows.
    """

    def __init__(self, cfg: RopeConfig | None, max_position: int, device: torch.device) -> None:
        self.cfg = cfg or RopeConfig()
        self.max_position = max_position
        stretches = self.cfg.scaling_type in ("dynamic", "longrope") and cfg is not None
        self.is_dynamic = stretches and max_position > self.cfg.original_max_position
        """Whether rows depend on the prompt's length."""
        self.table = (torch.empty((0, 0)) if cfg is None else self._make()).to(device)
        """[num_rows, rotary_dim] float32: cosines, then sines. For longrope rows of the trained
        context by short factors, then rows of all positions by long ones."""

    def _make(self) -> Tensor:
        cfg, kind, factor = self.cfg, self.cfg.scaling_type, 1.0
        num_rows = cfg.original_max_position if self.is_dynamic else self.max_position
        if kind == "llama3":
            inv_freq = _llama3_inv_freq(cfg)
        elif kind == "yarn":
            inv_freq, factor = _yarn_inv_freq(cfg), _yarn_attention_factor(cfg)
        elif kind == "longrope":
            inv_freq = _longrope_inv_freq(cfg, cfg.short_factor)
            factor = _longrope_attention_factor(cfg)
        else:
            inv_freq = _base_inv_freq(cfg.theta, cfg.rotary_dim)
        if kind == "linear":
            inv_freq = inv_freq / cfg.factor
        table = _cos_sin(inv_freq, torch.arange(num_rows), factor)
        if kind != "longrope" or not self.is_dynamic:
            return table
        inv_freq = _longrope_inv_freq(cfg, cfg.long_factor)
        return torch.cat((table, _cos_sin(inv_freq, torch.arange(self.max_position), factor)))

    def rows(self, positions: Tensor, prompt_lens: Tensor) -> tuple[Tensor, Tensor]:
        """(cos_sin, row of each token) for tokens at `positions` of prompts of `prompt_lens`.

        positions, prompt_lens: [num_tokens] int64. Only where the table is dynamic do the prompt
        lengths matter.
        """
        if not self.is_dynamic:
            return self.table, positions
        lens = torch.maximum(positions + 1, prompt_lens)
        original = self.cfg.original_max_position
        if self.cfg.scaling_type == "longrope":
            return self.table, torch.where(lens > original, positions + original, positions)
        if int(lens.max()) <= original:
            return self.table, positions
        rows = torch.empty((len(positions), self.cfg.rotary_dim), dtype=torch.float32)
        for seq_len in lens.unique().tolist():
            mine = lens == seq_len
            inv_freq = _dynamic_inv_freq(self.cfg, seq_len)
            rows[mine] = _cos_sin(inv_freq, positions[mine], 1.0)
        return rows.to(self.table.device), torch.arange(len(positions), device=positions.device)
