"""Which experts serve a token, and how much each counts, in one kernel: `layers.experts.route`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.arch import MoEConfig
from octavo.ops.gpu import pdl


@triton.jit
def _first_largest(scores, lanes, num_experts):
    """(Largest score, first lane that has it): of NaN alone the last lane of an expert."""
    best = tl.max(scores, 0)
    return best, tl.minimum(
        tl.min(tl.where(scores == best, lanes, num_experts), 0), num_experts - 1
    )


@triton.jit
def _route_kernel(
    logits, ids, weights, stride, num_experts, scale,
    TOP_K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr, GROUPS_PER_TOKEN: tl.constexpr,
    LANES: tl.constexpr, CHOICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ids[t], weights[t] = TOP_K best experts of token t, best first. Under GROUP_SIZE those
    outside the groups with the GROUPS_PER_TOKEN best experts count 0."""
    token = tl.program_id(0).to(tl.int64)
    lanes, choices = tl.arange(0, LANES), tl.arange(0, CHOICES)
    real = lanes < num_experts
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(logits + token * stride + lanes, mask=real, other=-float("inf")).to(tl.float32)
    if SOFTMAX:
        scores = tl.exp(x - tl.max(x, 0))
        scores /= tl.sum(scores, 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-x))
    # A maximum passes over NaN: this is 0, or NaN, which then no weight is without.
    wrong = 0.0 * tl.sum(tl.where(real, scores, 0.0), 0)
    scores = tl.where(real, scores, -1.0)
    if GROUP_SIZE:
        left = scores
        for _ in tl.static_range(GROUPS_PER_TOKEN):
            _, expert = _first_largest(left, lanes, num_experts)
            left = tl.where(lanes // GROUP_SIZE == expert // GROUP_SIZE, -1.0, left)
        scores = tl.where(real & (left >= 0.0), 0.0, scores)
    chosen = tl.zeros((CHOICES,), tl.int32)
    counts = tl.zeros((CHOICES,), tl.float32)
    for i in tl.static_range(TOP_K):
        best, expert = _first_largest(scores, lanes, num_experts)
        chosen = tl.where(choices == i, expert, chosen)
        counts = tl.where(choices == i, best, counts)
        scores = tl.where(lanes == expert, -2.0, scores)
    if NORMALIZE:
        counts /= tl.sum(counts, 0)
    wanted = choices < TOP_K
    tl.store(ids + token * TOP_K + choices, chosen, mask=wanted)
    tl.store(weights + token * TOP_K + choices, counts * scale + wrong, mask=wanted)


def route(logits: Tensor, moe: MoEConfig) -> tuple[Tensor, Tensor]:
    """As `layers.experts.route`; of equal scores the first expert's counts as the largest.

    logits: [num_tokens, num_experts], rows dense, floating point. Experts are in range whatever the
    logits are.

    Returns: [num_tokens, experts_per_token] int32, and float32 of the same shape.
    Raises: ValueError for shapes and strides.
    """
    num_tokens, num_experts = logits.shape
    if num_experts != moe.num_experts or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be dense [num_tokens, {moe.num_experts}]: {tuple(logits.shape)}, "
            f"strides {logits.stride()}"
        )
    top_k, in_groups = moe.experts_per_token, moe.num_groups > 1
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits, ids, weights, logits.stride(0), num_experts, moe.routed_scale,
            TOP_K=top_k, SOFTMAX=moe.scoring == "softmax", NORMALIZE=moe.normalize,
            GROUP_SIZE=num_experts // moe.num_groups if in_groups else 0,
            GROUPS_PER_TOKEN=moe.groups_per_token if in_groups else 0,
            LANES=triton.next_power_of_2(num_experts), CHOICES=triton.next_power_of_2(top_k),
            num_warps=1, **pdl.launch_options(logits.device),
        )  # fmt: skip
    return ids, weights
