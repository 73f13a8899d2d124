"""Prepared launches compute what ordinary ones do, whatever the pointers' alignment."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from octavo.ops.gpu.launch import Prepared  # noqa: E402


@triton.jit(do_not_specialize=["count"])
def _scale(out, x, extra, count, factor, SIZE: tl.constexpr, TWICE: tl.constexpr):
    at = tl.arange(0, SIZE)
    value = tl.load(x + at, mask=at < count, other=0.0) * factor
    if extra is not None:
        value += tl.load(extra + at, mask=at < count, other=0.0)
    if TWICE:
        value *= 2
    tl.store(out + at, value, mask=at < count)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("with_extra", [False, True])
def test_prepared(shift: int, with_extra: bool, device: torch.device) -> None:
    x = torch.arange(20.0, device=device)[shift : shift + 16]
    extra = torch.ones(16, device=device) if with_extra else None
    out = torch.full((17,), torch.nan, device=device)[shift : shift + 16]
    call = Prepared(_scale, (out, x, extra, 1, 1.0), (16, True), num_warps=1)
    for count, factor in ((16, 3.0), (1, 0.5)):
        out.fill_(torch.nan)
        call((1, 1, 1), out, x, extra, count, factor)
        expected = 2 * (x * factor + (1 if with_extra else 0))
        assert torch.equal(out[:count], expected[:count])
        assert out[count:].isnan().all()


def test_other_types_are_refused(device: torch.device) -> None:
    x = torch.arange(16.0, device=device)
    call = Prepared(_scale, (x, x, None, 1, 1.0), (16, False), num_warps=1)
    for arguments in ((x, x.int(), None), (x, x, x), (x.half(), x, None)):
        with pytest.raises(TypeError, match="compiled for"):
            call((1, 1, 1), *arguments, 16, 1.0)


@pytest.mark.gpu
def test_what_is_compiled_is_launched(device: torch.device) -> None:
    """Not by the way that looks the kernel up, unless a pointer is not aligned."""
    x, out = torch.arange(16.0, device=device), torch.full((16,), torch.nan, device=device)
    call = Prepared(_scale, (out, x, None, 1, 1.0), (16, True), num_warps=1)
    assert call._compiled is not None
    call._kernel = None
    call((1, 1, 1), out, x, None, 16, 3.0)
    assert torch.equal(out, 6 * x)
    with pytest.raises(TypeError, match="NoneType"):
        call((1, 1, 1), out, x[1:], None, 15, 3.0)
