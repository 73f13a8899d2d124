"""Activations: act(gate) * up of rows that hold gate, then up; and act(x) alone, in place."""

import triton
import triton.language as tl
from torch import Tensor

from octavo.arch import ACTIVATIONS
from octavo.ops.gpu import pdl

_BLOCK = 1024


@triton.jit
def _tanh(x):
    """tanh by one exponential that cannot overflow."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr, ASM: tl.constexpr = False):
    """act(x), in float32; ASM: with an exponential and a reciprocal that leave out what makes them
    exact to the last bit, a third of the instructions."""
    if ACTIVATION == "silu" and ASM:
        value = x * tl.inline_asm_elementwise(
            """{
            .reg .f32 e;
            mul.f32 e, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 e, e;
            add.f32 e, e, 0f3F800000;
            rcp.approx.ftz.f32 $0, e;
            }""",  # 1 / (1 + 2^(-log2(e) x))
            "=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    elif ACTIVATION == "silu":
        value = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        value = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu":
        value = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        value = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        value = 0.5 * x * (1.0 + _tanh(inner))
    return value


@triton.jit
def _activation_kernel(
    both, out, both_stride, out_stride, width,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[r, j] = act(both[r, j]) * both[r, width + j] in float32, rounded once; without the
    factor where not GATED.

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
    value = activated(gate, ACTIVATION)
    if GATED:
        value *= tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + j, value.to(out.dtype.element_ty), mask=inside)


def gated(both: Tensor, out: Tensor, activation: str) -> Tensor:
    """act(gate) * up, rounded once.

    Args:
        both: [num_tokens, 2 * width], gate first; any stride between rows.
        out: [num_tokens, width], both's type; not overlapping both.
        activation: one of `octavo.arch.ACTIVATIONS`.

    Returns: out.
    Raises: TypeError for dtypes; ValueError for shapes, strides and activations.
    """
    num_tokens, width = out.shape
    if both.shape != (num_tokens, 2 * width) or both.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError(
            f"gate and up must be dense {(num_tokens, 2 * width)} for an out of {tuple(out.shape)}:"
            f" {tuple(both.shape)}, strides {both.stride()} and {out.stride()}"
        )
    if both.dtype != out.dtype:
        raise TypeError(f"out must have the input's type {both.dtype}: {out.dtype}")
    return _launch(both, out, activation, gated=True)


def activate(x: Tensor, activation: str) -> Tensor:
    """act(x) in place, rounded once.

    x: [num_tokens, width], dense rows at any stride; activation: as of `gated`.
    Returns: x. Raises: ValueError for strides and activations.
    """
    if x.stride(1) != 1:
        raise ValueError(f"x's rows must be dense: strides {x.stride()}")
    return _launch(x, x, activation, gated=False)


def _launch(x: Tensor, out: Tensor, activation: str, gated: bool) -> Tensor:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}: {activation!r}")
    num_tokens, width = out.shape
    if num_tokens == 0:
        return out
    _activation_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
        x, out, x.stride(0), out.stride(0), width,
        ACTIVATION=activation, GATED=gated, BLOCK=_BLOCK, num_warps=4,
        **pdl.launch_options(x.device),
    )  # fmt: skip
    return out
