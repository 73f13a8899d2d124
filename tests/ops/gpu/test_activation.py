"""Activations, gated and not, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.arch import ACTIVATIONS
from octavo.ops import reference
from octavo.ops.gpu import activation

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}


@pytest.mark.filterwarnings("ignore:overflow")  # of exp, on purpose
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
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
    activation.gated(both, whole[:, :width], name)
    gate, up = both.double().chunk(2, dim=1)
    expected = reference.activation(gate, name)
    assert relative_error(whole[:, :width], expected * up) < TOLERANCE[dtype]
    assert whole[:, width:].isnan().all()
    activation.activate(both[:, :width], name)
    assert relative_error(both[:, :width], expected) < TOLERANCE[dtype]
    assert torch.equal(both[:, width:].double(), up)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    both = torch.zeros(2, 32, device=device)
    with pytest.raises(ValueError, match="gate and up must be"):
        activation.gated(both, both.new_empty(2, 15), "silu")
    with pytest.raises(TypeError, match="the input's type"):
        activation.gated(both, both.new_empty(2, 16).half(), "silu")
    with pytest.raises(ValueError, match="activation must be"):
        activation.gated(both, both.new_empty(2, 16), "tanh")
    with pytest.raises(ValueError, match="rows must be dense"):
        activation.activate(both.t(), "relu")
