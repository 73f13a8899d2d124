"""An int8 KV cache on a CPU: what it costs in precision, and that both backends read it alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention.base import AttentionBackend, ForwardContext
from octavo.attention.cpu import CpuAttention
from octavo.attention.gather import GatherAttention
from octavo.ops import reference
from octavo.runner.kv_store import KVStore

HEADS, KV_HEADS, DIM, BLOCK, LENS = 6, 2, 64, 16, (300, 45)
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def step(store: KVStore, first: int, counts: tuple[int, ...]) -> ForwardContext:
    """Tokens `first` and on of two sequences, whose blocks alternate in the pool."""
    num = -(-max(LENS) // BLOCK)
    tables = torch.stack((torch.arange(num) * 2, torch.arange(num) * 2 + 1)).int()
    slots, rows = [], []
    for table, count in zip(tables, counts, strict=True):
        positions = torch.arange(first, first + count)
        slots.append(table[positions // BLOCK].long() * BLOCK + positions % BLOCK)
        rows.append(positions)
    nothing: Any = None
    return ForwardContext(
        kv_cache=store.data,
        block_tables=tables,
        seq_lens=torch.tensor([first + count for count in counts], dtype=torch.int32),
        query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
        slot_mapping=torch.cat(slots),
        rope_rows=torch.cat(rows),
        cos_sin=nothing,
        workspace=nothing,
        kv_scales=store.scales,
    )


def attended(
    backend: AttentionBackend, kv_dtype: torch.dtype, qkv: Tensor, **options: Any
) -> Tensor:
    """What the last 45 tokens of one and all of the other sequence see of a pool of `kv_dtype`."""
    store = KVStore(40, 1, KV_HEADS, BLOCK, DIM, kv_dtype, CPU)
    assert (store.scales is not None) == (kv_dtype == torch.int8)
    query, key, value = qkv.clone().split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    query, out = query.contiguous(), torch.empty((len(qkv), HEADS, DIM), dtype=qkv.dtype)
    context = step(store, 0, LENS)
    backend.rope_and_cache(query, key, value, 0, context, None, cos_sin=None)
    backend.attend(query, 0, DIM**-0.5, 0, context, out, **options)
    return out.double()


def relative(x: Tensor, exact: Tensor) -> float:
    return float((x - exact).norm() / exact.norm())


@pytest.fixture
def qkv() -> Tensor:
    """Keys some of whose channels are large, as models have them."""
    torch.manual_seed(0)
    x = torch.randn(sum(LENS), HEADS + 2 * KV_HEADS, DIM)
    x[:, HEADS : HEADS + KV_HEADS, :3] *= 4.0
    return x


@pytest.mark.parametrize("backend", [CpuAttention(), GatherAttention()], ids=["cpu", "gather"])
def test_error_of_float32(backend: AttentionBackend, qkv: Tensor) -> None:
    """Within what rounding to codes allows: half a code of each number of keys and values."""
    exact = attended(GatherAttention(), torch.float32, qkv)
    found = attended(backend, torch.int8, qkv)
    query, key, value = (x.double() for x in qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1))
    half = (1 + 2**-10) / 254
    shift = half * DIM**-0.5 * query.abs().sum(-1).max() * key.abs().amax(-1).max()
    largest = value.abs().max()
    bound = (half + float((2 * shift).exp() - 1)) * largest
    assert (found - exact).abs().max() < bound
    assert 1e-4 < relative(found, exact) < 0.02


def test_error_against_bfloat16s(qkv: Tensor) -> None:
    """A code is a 254th of a head's largest number and bfloat16 a 256th of each: about five times
    the error of a cache in bfloat16, at half its bytes."""
    exact = attended(GatherAttention(), torch.float32, qkv)
    plain, coded = (
        relative(attended(CpuAttention(), kv_dtype, qkv.bfloat16()), exact)
        for kv_dtype in (torch.bfloat16, torch.int8)
    )
    assert plain < coded < 6 * plain
    assert coded < 0.02


@pytest.mark.parametrize(
    "options",
    [{}, {"soft_cap": 5.0}, {"alibi": torch.linspace(0.1, 0.9, HEADS)}],
    ids=["plain", "soft cap", "alibi"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_backends_agree(dtype: torch.dtype, options: dict[str, Any], qkv: Tensor) -> None:
    x = qkv.to(dtype)
    mine, other = (attended(b(), torch.int8, x, **options) for b in (CpuAttention, GatherAttention))
    assert relative(mine, other) < (1e-6 if dtype == torch.float32 else 5e-3)


def test_codes_are_within_half_a_step() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 3, DIM) * torch.logspace(-3, 3, 50)[:, None, None]
    codes, scales = reference.int8_codes(x)
    step_size = scales.float()[..., None]
    assert (codes * step_size - x).abs().le(step_size / 2 * (1 + 1e-6)).all()
    assert step_size.le(x.abs().amax(-1, keepdim=True) / 127 * (1 + 2**-10) + 2**-14).all()
    assert codes.abs().max() == 127
