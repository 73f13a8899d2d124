"""GGUF's formats repacked for GPUs, against package `gguf`."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.layers.gguf_grouped import GROUPED_FORMATS, grouped_from_gguf
from octavo.layers.gguf_weight import GGUFWeight
from octavo.layers.quantized_gpu import GroupedLinear, make_quantized_linear, why_expanded

_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where a block has float16 numbers: random bytes there would be anything."""


def _weight(name: str, num_rows: int, width: int) -> tuple[GGUFWeight, Tensor]:
    """Random bytes of a format, and what package `gguf` makes of them."""
    rng = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType[name]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (num_rows, width // block, block_bytes), dtype=np.uint8)
    for start in _HALVES[name]:
        halves = (rng.random((num_rows, width // block, 1)) * 0.02 - 0.005).astype(np.float16)
        raw[..., start : start + 2] = halves.view(np.uint8)
    raw = raw.reshape(num_rows, -1)
    weight = GGUFWeight.of(torch.from_numpy(raw), kind.value, width)
    return weight, torch.from_numpy(gguf.dequantize(raw, kind))


@pytest.mark.parametrize("name", GROUPED_FORMATS)
def test_repacked(name: str, device: torch.device) -> None:
    weight, expected = _weight(name, 5, 512)
    grouped = grouped_from_gguf(weight.to(device))
    assert grouped.format == name
    # simple blocks exactly; of super-blocks products of scales are rounded to float16
    tolerance = 0.0 if not name.endswith("_K") else 2**-11
    error = (grouped.dequantize(torch.float32).cpu() - expected).abs().max()
    assert error <= tolerance * expected.abs().max()
    assert grouped.num_bytes <= (0.63 if grouped.bits == 4 else 1.13) * expected.numel() + (
        0.13 * expected.numel() if name in ("Q2_K", "Q5_K", "Q5_1", "Q3_K") else 0
    )


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_layer(
    name: str, device: torch.device, relative_error: Callable[[Tensor, Tensor], float]
) -> None:
    weight, expected = _weight(name, 8, 256)
    layer = make_quantized_linear(weight.to(device))
    assert isinstance(layer, GroupedLinear)
    torch.manual_seed(0)
    for num_rows in (1, 3):
        x = torch.randn(num_rows, 256, device=device)
        out = torch.full((num_rows, 8), torch.nan, device=device)
        assert relative_error(layer(x, out), x.double() @ expected.to(device).double().t()) < 1e-3


def test_formats_without_a_kernel_are_expanded(device: torch.device) -> None:
    assert why_expanded("gguf", device, ("Q4_K", "F32", "Q6_K")) is None
    reason = why_expanded("gguf", device, ("IQ2_XS", "Q4_K", "IQ1_S"))
    assert reason == "there is no kernel for IQ1_S, IQ2_XS"
