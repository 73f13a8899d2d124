"""Gated activations: act(gate) * up of rows that hold gate, then up.

The models served so far take silu; gelu in both forms is for those of other families.
"""

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.gpu import pdl

_BLOCK = 1024


@triton.jit
def _tanh(x):
    """tanh by one exponential that cannot overflow."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _gated_kernel(
    both, out, both_stride, out_stride, width,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[r, j] = act(both[r, j]) * both[r, width + j] in float32, rounded once.

    Program (r, b) has elements b * BLOCK + [0, BLOCK) of row r.
    """
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = j < width
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = both + row * both_stride + j
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        value = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        value = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        value = 0.5 * gate * (1.0 + _tanh(inner))
    tl.store(out + row * out_stride + j, (value * up).to(out.dtype.element_ty), mask=inside)


def silu_and_mul(both: Tensor, out: Tensor) -> Tensor:
    """silu(gate) * up, rounded once.

    Args:
        both: [num_tokens, 2 * width], gate first; any stride between rows.
        out: [num_tokens, width], both's type; not overlapping both.

    Returns: out.
    Raises: TypeError for dtypes; ValueError for shapes and strides.
    """
    return _gated(both, out, "silu")


def gelu_and_mul(both: Tensor, out: Tensor) -> Tensor:
    """gelu(gate) * up with the exact gelu; arguments as of `silu_and_mul`."""
    return _gated(both, out, "gelu")


def gelu_tanh_and_mul(both: Tensor, out: Tensor) -> Tensor:
    """gelu(gate) * up with tanh's approximation; arguments as of `silu_and_mul`."""
    return _gated(both, out, "gelu_tanh")


def _gated(both: Tensor, out: Tensor, activation: str) -> Tensor:
    num_tokens, width = out.shape
    if both.shape != (num_tokens, 2 * width) or both.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(
            f"gate and up must be dense {(num_tokens, 2 * width)} for an out of {tuple(out.shape)}:"
            f" {tuple(both.shape)}, strides {both.stride()} and {out.stride()}"
        )
    if both.dtype != out.dtype:
        raise TypeError(f"out must have the input's type {both.dtype}: {out.dtype}")
    if num_tokens == 0:
        return out
    _gated_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
        both, out, both.stride(0), out.stride(0), width,
        ACTIVATION=activation, BLOCK=_BLOCK, num_warps=4, **pdl.launch_options(both.device),
    )  # fmt: skip
    return out
