"""Matrix products of few rows: weights streamed once, with norm, gating and residual fused in.

A model's decode step at small batches is the reading of its weights. Each program owns a contiguous
range of output features, so that it reads one contiguous piece of the weight; ranges differ by at
most one row, so that all multiprocessors finish together. While the kernel before it still runs, a
program already prefetches the head of its piece into the L2 cache (`ops.gpu.pdl`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from octavo.ops.gpu import pdl
from octavo.ops.gpu.linear_kernels import row_kernel, tile_kernel

_MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class SkinnyPlan:
    """How a product is cut up."""

    block_n: int
    """Output features at a time."""
    block_k: int
    """Input features at a time; at least in_features (`resident`) for x held in registers."""
    programs_per_sm: int
    """Programs for each multiprocessor; 0: one program for every block_n features."""
    num_warps: int = 4
    num_stages: int = 1
    """1: the next tile's weights wait in registers; more: shared memory holds so many tiles."""
    dot: bool = False
    """Tensor cores, for any number of rows, instead of multiply and sum, for one row of which
    block_k holds everything."""
    prefetch_bytes: int = 0
    """What a program asks the L2 cache for before its inputs are ready."""
    after_bytes: int = 0
    """The same once they are, while it reads them. Both a multiple of 16 bytes for every thread."""
    early: int = 0
    """The next kernel may start so many tiles before the last; 0: with the first."""


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    plan: SkinnyPlan | None = None,
) -> Tensor:
    """`out (+)= rms_norm(x) weight^T + bias`, accumulated in float32 and rounded once.

    Args:
        x: [num_tokens, in_features], at most 64 rows, any stride between them.
        weight: [out_features, in_features], contiguous, x's type.
        out: [num_tokens, out_features] in x's type or float32, any stride between rows.
        bias: [out_features].
        residual: add to what out holds.
        norm_weight: [in_features]: x is normalised first, rounded as `norm.rms_norm` rounds.
        eps: of the norm.
        plan: how to cut the work up; default by shape.

    Returns: out.
    Raises: ValueError, TypeError for shapes, strides and dtypes.
    """
    _check(x, weight, out, bias, norm_weight, len(weight))
    _launch(x, weight, out, bias, norm_weight, eps, plan, gated=False, residual=residual)
    return out


def skinny_gated(
    x: Tensor,
    gate_up_weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    plan: SkinnyPlan | None = None,
) -> Tensor:
    """`silu(gate) * up` for gate over up in one weight [2 * intermediate, in_features].

    Arguments and errors as of `skinny_linear`; bias is gate's, then up's; out is
    [num_tokens, intermediate].
    """
    _check(x, gate_up_weight, out, bias, norm_weight, len(gate_up_weight) // 2)
    _launch(x, gate_up_weight, out, bias, norm_weight, eps, plan, gated=True, residual=False)
    return out


def is_skinny(num_tokens: int, in_features: int, out_features: int, dtype: torch.dtype) -> bool:
    """Whether these kernels beat the vendor's matrix product there: measured on an H200."""
    return num_tokens == 1 and dtype.itemsize == 2 and in_features <= 16384


def default_plan(
    num_tokens: int, in_features: int, out_features: int, *, gated: bool = False
) -> SkinnyPlan:
    """The fastest cut found on an H200; out_features counts results (pairs when gated)."""
    block_k = triton.next_power_of_2(in_features)
    if num_tokens > 1 or block_k > 16384:
        return SkinnyPlan(32, 128, 2, num_stages=4, dot=True)
    num_warps = max(block_k // 1024, 1)
    if out_features * in_features < 4 << 20:  # few bytes: every program reads its own at once
        return SkinnyPlan(2, block_k, 0, num_warps)
    # 32 KiB of weights in registers of each multiprocessor, and as many under way
    return SkinnyPlan(1 if gated else 2, block_k, min(16384 // block_k, 16), num_warps)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    plan: SkinnyPlan | None,
    *,
    gated: bool,
    residual: bool,
) -> None:
    num_tokens, in_features = x.shape
    out_features = out.shape[1]
    if num_tokens == 0:
        return
    if plan is None:
        plan = default_plan(num_tokens, in_features, out_features, gated=gated)
    num_programs = triton.cdiv(out_features, plan.block_n)
    if plan.programs_per_sm:
        num_programs = min(num_programs, plan.programs_per_sm * pdl.num_sms(x.device))
    options = {
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "EVEN_K": in_features % plan.block_k == 0,
        "STAGES": plan.num_stages,
        "GATED": gated,
        "NORM": norm_weight is not None,
        "HAS_BIAS": bias is not None,
        "RESIDUAL": residual,
        "EARLY": plan.early,
        # Prefetches want 16-byte alignment.
        "PREFETCH": plan.prefetch_bytes if in_features * x.element_size() % 16 == 0 else 0,
        "AFTER": plan.after_bytes if in_features * x.element_size() % 16 == 0 else 0,
        "THREADS": 32 * plan.num_warps,
        "num_warps": plan.num_warps,
        **pdl.launch_options(x.device),
    }
    vectors = (x if bias is None else bias, x if norm_weight is None else norm_weight)
    if not plan.dot:
        assert num_tokens == 1 and plan.block_k >= in_features, "one row, all of it"
        row_kernel[(num_programs,)](
            x, weight, *vectors, out, out_features, in_features, eps, **options
        )
        return
    tile_kernel[(num_programs,)](
        x, weight, *vectors, out, num_tokens, out_features, in_features, x.stride(0),
        out.stride(0), eps, BLOCK_M=max(16, triton.next_power_of_2(num_tokens)), **options,
    )  # fmt: skip


def _check(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    out_features: int,
) -> None:
    num_tokens, in_features = x.shape
    if weight.shape[1] != in_features or not weight.is_contiguous():
        raise ValueError(
            f"weight must be contiguous [out_features, {in_features}]: {tuple(weight.shape)},"
            f" strides {weight.stride()}"
        )
    if out.shape != (num_tokens, out_features):
        raise ValueError(f"out must be {(num_tokens, out_features)}: {tuple(out.shape)}")
    if num_tokens > _MAX_TOKENS:
        raise ValueError(
            f"these kernels take at most {_MAX_TOKENS} rows: {num_tokens}; use torch.mm"
        )
    for name, vector, size in (
        ("bias", bias, len(weight)),
        ("norm_weight", norm_weight, in_features),
    ):
        if vector is not None and (vector.shape != (size,) or vector.stride(0) != 1):
            raise ValueError(f"{name} must be dense [{size}]: {tuple(vector.shape)}")
        if vector is not None and vector.dtype != x.dtype:
            raise TypeError(f"{name} must have x's type {x.dtype}: {vector.dtype}")
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"rows of x and out must be dense: {x.stride()}, {out.stride()}")
    if weight.dtype != x.dtype or out.dtype not in (x.dtype, torch.float32):
        raise TypeError(
            f"weight must have x's type {x.dtype}, out that or float32: {weight.dtype}, {out.dtype}"
        )
