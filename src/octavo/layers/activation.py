"""Activations of the MLP by name, gated and not: `octavo.arch.ACTIVATIONS`.

silu (Elfwing et al. 2018), gelu and its tanh approximation (Hendrycks & Gimpel 2016), relu, and
relu squared (So et al. 2021). All are computed in float32 and rounded once.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops import reference
from octavo.ops.cpu import elementwise


def activation_replayable(activation: str) -> bool:
    """Whether `activate` is one call that `ops.cpu.trace` records."""
    return False


def gated(both: Tensor, activation: str, out: Tensor) -> Tensor:
    """act(gate) * up into out.

    both: [num_tokens, 2 * width], gate first; out: [num_tokens, width], of its dtype.
    """
    if both.is_cuda:
        from octavo.ops.gpu.activation import gated as gpu_gated

        return gpu_gated(both, out, activation)
    if activation == "silu":
        return elementwise.silu_and_mul(both, out)
    gate, up = both.chunk(2, dim=-1)
    return out.copy_(reference.activation(gate.float(), activation).mul_(up))


def activate(x: Tensor, activation: str) -> Tensor:
    """act(x), [num_tokens, width], in place."""
    if x.is_cuda:
        from octavo.ops.gpu.activation import activate as gpu_activate

        return gpu_activate(x, activation)
    return x.copy_(reference.activation(x.float(), activation))
