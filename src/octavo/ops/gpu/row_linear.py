"""Matrix products of one row: the weight streamed once, with norm, gating and residual fused in.

A model's decode step at batch size 1 is the reading of its weights. Each program owns a contiguous
range of output features, so that it reads one contiguous piece of the weight; ranges differ by at
most one row, so that all multiprocessors finish together. The first rows are read while the kernel
before still runs (`ops.gpu.pdl`), and always some more while the last ones are used.

Measured on an H200: a layer of Llama-3.1-8B, its four products and what is fused into them, takes
106.6 us, and 121 us by cuBLAS with kernels for the rest. For two rows and more, cuBLAS was faster
than every kernel tried.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.gpu import pdl
from octavo.ops.gpu.activation import activated

_MAX_IN_FEATURES = 16384
_BLOCK_N = 2
"""Output features at a time."""
_MANY_WEIGHTS = 4 << 20
"""Of fewer, every program reads its own at once."""


@triton.jit
def _weights(weight, rows, last, k, in_features, EVEN_K: tl.constexpr):
    """[rows, k] of the weight, zero outside; nobody reads them again this step."""
    at = weight + rows.to(tl.int64)[:, None] * in_features + k[None, :]
    mask = (rows < last)[:, None]
    if not EVEN_K:
        mask = mask & (k < in_features)[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _row_kernel(
    x, weight, bias, norm_weight, out, out_features, in_features, eps,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, GATED: tl.constexpr,
    NORM: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[n] (+)= sum_k weight[n, k] x[k] + bias[n], in float32, x held in registers.

    x [in_features] (normalised first under NORM); weight [out_features, in_features], or gate over
    up [2 * out_features, in_features] under GATED, whose result is silu(gate) * up. Program p of P
    has the output features [p N / P, (p + 1) N / P) of N.
    """
    pid = tl.program_id(0).to(tl.int64)
    num_programs = tl.num_programs(0)
    begin = pid * out_features // num_programs
    end = (pid + 1) * out_features // num_programs
    first, last = begin.to(tl.int32), end.to(tl.int32)
    lanes, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    up = weight + tl.cast(out_features, tl.int64) * in_features
    next_w = _weights(weight, first + lanes, last, k, in_features, EVEN_K)
    next_u = _weights(up, first + lanes, last, k, in_features, EVEN_K) if GATED else next_w
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    inside = k < in_features
    row = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(row * row, 0) / in_features + eps)
        row *= scale
        if norm_weight.dtype.element_ty != tl.float32:
            row = row.to(x.dtype.element_ty).to(tl.float32)
        row *= tl.load(norm_weight + k, mask=inside, other=0.0).to(tl.float32)
        row = row.to(x.dtype.element_ty).to(tl.float32)
    for start in tl.range(first, last, BLOCK_N, num_stages=1):
        rows = start + lanes
        mask = rows < last
        # Registers hold the next rows while these are summed.
        w, u = next_w, next_u
        next_w = _weights(weight, rows + BLOCK_N, last, k, in_features, EVEN_K)
        next_u = _weights(up, rows + BLOCK_N, last, k, in_features, EVEN_K) if GATED else next_w
        value = tl.sum(w.to(tl.float32) * row[None, :], 1)
        value_up = tl.sum(u.to(tl.float32) * row[None, :], 1) if GATED else value
        if HAS_BIAS:
            value += tl.load(bias + rows, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            if HAS_BIAS:
                value_up += tl.load(bias + out_features + rows, mask=mask, other=0.0).to(tl.float32)
            value = activated(value, "silu") * value_up
        if RESIDUAL:
            value += tl.load(out + rows, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + rows, value.to(out.dtype.element_ty), mask=mask)


def is_row_product(num_tokens: int, in_features: int, dtype: torch.dtype) -> bool:
    """Whether these kernels beat cuBLAS there: measured on an H200."""
    return num_tokens == 1 and dtype.itemsize == 2 and in_features <= _MAX_IN_FEATURES


def row_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    residual: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`out (+)= rms_norm(x) weight^T + bias`, accumulated in float32 and rounded once.

    Args:
        x: [1, in_features], dense; in_features at most 16384.
        weight: [out_features, in_features], contiguous, x's type.
        out: [1, out_features], dense, in x's type or float32.
        bias: [out_features], dense, x's type.
        residual: add to what out holds.
        norm_weight: [in_features], dense, x's type or float32: x is normalised first, rounded as
            `norm.rms_norm` rounds.
        eps: of the norm.

    Returns: out.
    Raises: ValueError for shapes and strides; TypeError for dtypes.
    """
    _check(x, weight, out, bias, norm_weight, len(weight))
    _launch(x, weight, out, bias, norm_weight, eps, gated=False, residual=residual)
    return out


def row_gated(
    x: Tensor,
    gate_up_weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`silu(gate) * up` for gate over up in one weight [2 * intermediate, in_features].

    Arguments and errors as of `row_linear`; bias is gate's, then up's; out is [1, intermediate].
    """
    _check(x, gate_up_weight, out, bias, norm_weight, len(gate_up_weight) // 2)
    _launch(x, gate_up_weight, out, bias, norm_weight, eps, gated=True, residual=False)
    return out


def _cut(in_features: int, out_features: int, num_sms: int) -> tuple[int, int]:
    """Programs, and warps of each: the fastest found on an H200. A gated pair is one feature."""
    block_k = triton.next_power_of_2(in_features)
    num_programs = triton.cdiv(out_features, _BLOCK_N)
    if out_features * in_features >= _MANY_WEIGHTS:
        # 32 KiB of weights in registers of each multiprocessor and as many under way, twice that
        # for gate and up, whose programs then fill it: with room left, the kernels that start early
        # beside them cost more than they save.
        num_programs = min(num_programs, min(16384 // block_k, 16) * num_sms)
    return num_programs, max(block_k // 1024, 1)


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    *,
    gated: bool,
    residual: bool,
) -> None:
    in_features, out_features = x.shape[1], out.shape[1]
    num_programs, num_warps = _cut(in_features, out_features, pdl.num_sms(x.device))
    block_k = triton.next_power_of_2(in_features)
    _row_kernel[(num_programs,)](
        x,
        weight,
        x if bias is None else bias,
        x if norm_weight is None else norm_weight,
        out,
        out_features,
        in_features,
        eps,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=block_k,
        EVEN_K=block_k == in_features,
        GATED=gated,
        NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        RESIDUAL=residual,
        num_warps=num_warps,
        **pdl.launch_options(x.device),
    )


def _check(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    out_features: int,
) -> None:
    num_tokens, in_features = x.shape
    if num_tokens != 1:
        raise ValueError(f"these kernels take exactly 1 row: {num_tokens}; use torch.mm")
    if in_features > _MAX_IN_FEATURES:
        raise ValueError(
            f"these kernels take at most {_MAX_IN_FEATURES} input features: {in_features};"
            " use torch.mm"
        )
    if weight.shape[1] != in_features or not weight.is_contiguous():
        raise ValueError(
            f"weight must be contiguous [out_features, {in_features}]: {tuple(weight.shape)},"
            f" strides {weight.stride()}"
        )
    if out.shape != (1, out_features):
        raise ValueError(f"out must be {(1, out_features)}: {tuple(out.shape)}")
    for name, vector, size in (
        ("bias", bias, len(weight)),
        ("norm_weight", norm_weight, in_features),
    ):
        if vector is not None and (vector.shape != (size,) or vector.stride(0) != 1):
            raise ValueError(f"{name} must be dense [{size}]: {tuple(vector.shape)}")
        wide = name == "norm_weight" and vector is not None and vector.dtype == torch.float32
        if vector is not None and vector.dtype != x.dtype and not wide:
            raise TypeError(f"{name} must have x's type {x.dtype}: {vector.dtype}")
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(f"rows of x and out must be dense: {x.stride()}, {out.stride()}")
    if weight.dtype != x.dtype or out.dtype not in (x.dtype, torch.float32):
        raise TypeError(
            f"weight must have x's type {x.dtype}, out that or float32: {weight.dtype}, {out.dtype}"
        )
