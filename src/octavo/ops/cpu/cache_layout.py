"""What launchers ask of the KV cache's layout."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=256)
def is_dense_within_blocks(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether all but the first dimension of such a tensor are contiguous."""
    expected = 1
    for size, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return strides[0] >= expected or shape[0] <= 1


def are_scales_of(cache_shape: torch.Size, kv_scales: torch.Tensor) -> bool:
    """Whether there is a float16 scale for each token's head of such a cache, its blocks dense."""
    return (
        kv_scales.dtype == torch.float16
        and kv_scales.shape == cache_shape[:-1]
        and is_dense_within_blocks(kv_scales.shape, kv_scales.stride())
    )
