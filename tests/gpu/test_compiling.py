"""Kernels that are compiled in threads before they are launched."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.gpu import norm

pytestmark = pytest.mark.gpu


def test_compiling_only_runs_nothing_and_leaves_the_kernel_ready() -> None:
    from octavo.ops.gpu.compiling import compiling_only, is_compiling_only

    x = torch.randn(3, 200, device="cuda")  # a size that no other test has
    weight, out = torch.ones(200, device="cuda"), torch.full_like(x, 7.0)
    with compiling_only():
        assert is_compiling_only()
        norm.rms_norm(x, weight, 1e-6, out)
    torch.cuda.synchronize()
    assert not is_compiling_only()
    assert (out == 7.0).all(), "nothing was launched"
    norm.rms_norm(x, weight, 1e-6, out)
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(out, expected)
