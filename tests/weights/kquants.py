"""Plain quantizers for the types that package gguf only reads: Q4_K, Q5_K and Q6_K.

Each group of values is rounded to the nearest step between its smallest and largest; llama.cpp
searches for better scales, which changes nothing about the format.
"""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Quant

BLOCK = 256


def quantize(values: np.ndarray, kind: Quant) -> np.ndarray:
    """[rows, columns] float32 -> [rows, bytes]; other types are package gguf's."""
    if kind not in (Quant.Q4_K, Quant.Q5_K, Quant.Q6_K):
        return gguf.quantize(values, kind)
    blocks = values.astype(np.float32).reshape(-1, BLOCK)
    packed = _q6(blocks) if kind is Quant.Q6_K else _q45(blocks, kind)
    return packed.reshape(*values.shape[:-1], -1)


def _half(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As float16 bytes and as the float32 that they stand for."""
    half = values.astype(np.float16)
    return half.reshape(-1, 1).view(np.uint8), half.astype(np.float32)


def _divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0)


def _q6(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    wanted = np.abs(groups).max(-1) / 31
    raw_d, d = _half(wanted.max(-1) / 127)
    scales = np.rint(_divided(wanted, d[:, None] + 0 * wanted)).clip(0, 127)
    steps = (scales * d[:, None])[..., None] + 0 * groups
    q = (np.rint(_divided(groups, steps)).clip(-32, 31) + 32).astype(np.uint8)
    q = q.reshape(-1, 2, 4, 32)  # halves of 128, quarters of them
    low = np.concatenate([q[:, :, i] & 15 | (q[:, :, i + 2] & 15) << 4 for i in (0, 1)], -1)
    high = sum((q[:, :, i] >> 4) << 2 * i for i in range(4))
    parts = [low.reshape(-1, 128), high.reshape(-1, 64), scales.astype(np.int8).view(np.uint8)]
    return np.concatenate([*parts, raw_d], axis=1).astype(np.uint8)


def _q45(blocks: np.ndarray, kind: Quant) -> np.ndarray:
    most = 15 if kind is Quant.Q4_K else 31
    groups = blocks.reshape(-1, 8, 32)
    lowest = np.minimum(groups.min(-1), 0)
    wanted = (groups.max(-1) - lowest) / most
    raw_d, d = _half(wanted.max(-1) / 63)
    raw_min, dmin = _half(-lowest.min(-1) / 63)
    scales = np.ceil(_divided(wanted, d[:, None] + 0 * wanted)).clip(0, 63)
    mins = np.rint(_divided(-lowest, dmin[:, None] + 0 * lowest)).clip(0, 63)
    steps = (scales * d[:, None])[..., None] + 0 * groups
    shifted = groups + (mins * dmin[:, None])[..., None]
    q = np.rint(_divided(shifted, steps)).clip(0, most).astype(np.uint8)
    pairs = q.reshape(-1, 4, 2, 32)
    low = pairs[:, :, 0] & 15 | (pairs[:, :, 1] & 15) << 4
    parts = [raw_d, raw_min, _six_bits(scales.astype(np.uint8), mins.astype(np.uint8))]
    if kind is Quant.Q5_K:
        parts.append(sum((q[:, i] >> 4) << i for i in range(8)))
    return np.concatenate([*parts, low.reshape(-1, 128)], axis=1).astype(np.uint8)


def _six_bits(scales: np.ndarray, mins: np.ndarray) -> np.ndarray:
    """8 scales and 8 minimums of 6 bits in 12 bytes."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = mins[:, :4] | (mins[:, 4:] >> 4) << 6
    third = scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)
