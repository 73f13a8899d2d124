"""Gated activations against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from octavo.ops.gpu import activation

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}
KERNELS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (activation.silu_and_mul, silu),
    "gelu": (activation.gelu_and_mul, gelu),
    "gelu_tanh": (activation.gelu_tanh_and_mul, lambda x: gelu(x, approximate="tanh")),
}


@pytest.mark.filterwarnings("ignore:overflow")  # of exp, on purpose
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("num_tokens", "width"), [(3, 48), (1, 1500)])
def test_gated(
    name: str,
    num_tokens: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    relative_error: Callable[[Tensor, Tensor], float],
) -> None:
    torch.manual_seed(width)
    both = (torch.randn(num_tokens, 2 * width + 16, device=device) * 3).to(dtype)[:, : 2 * width]
    both[0, :4] = torch.tensor([90.0, -90.0, 0.0, -0.5])  # exponentials overflow
    whole = torch.full((num_tokens, width + 16), torch.nan, dtype=dtype, device=device)
    kernel, formula = KERNELS[name]
    kernel(both, whole[:, :width])
    gate, up = both.double().chunk(2, dim=1)
    assert relative_error(whole[:, :width], formula(gate) * up) < TOLERANCE[dtype]
    assert whole[:, width:].isnan().all()


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    both = torch.zeros(2, 32, device=device)
    with pytest.raises(ValueError, match="gate and up must be"):
        activation.silu_and_mul(both, both.new_empty(2, 15))
    with pytest.raises(TypeError, match="the input's type"):
        activation.silu_and_mul(both, both.new_empty(2, 16).half())
