"""Prefill attention against the dense reference: chunks, prefixes, odd shapes, mixed steps."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.attention.work import plan_prefill, prefill_tile_tokens
from octavo.ops.gpu import prefill_attention
from octavo.ops.gpu.fresh_attention import fresh_prefill
from octavo.ops.gpu.prefill_attention import PrefillShape, paged_prefill

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SMALL = PrefillShape(rows=16, tile=32, num_warps=4, num_stages=2, mask_tile=16)
"""Many tiles of few rows, so that short contexts reach every loop."""


def dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    alibi: Tensor | None = None,
) -> Tensor:
    """float64 attention of a chunk, the last tokens of keys and values [length, kv_heads, dim]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    length = len(keys)
    place = torch.arange(length - len(query), length, device=query.device)[:, None]
    other = torch.arange(length, device=query.device)
    if alibi is not None:
        scores += alibi[:, None, None] * (other - place)
    hidden = other > place
    if window:
        hidden |= other <= place - window
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def starts(query_lens: Sequence[int], device: torch.device) -> Tensor:
    """int32 [num_seqs + 1]"""
    return torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32, device=device)


def plan(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    first: int,
    tokens: int,
    device: torch.device,
) -> Tensor:
    """The tiles of all sequences but the first ones, and one of padding."""
    tiles = plan_prefill(query_lens[first:], seq_lens[first:], first, tokens)
    return torch.from_numpy(np.concatenate([tiles, np.int32([[-1, 0]])])).to(device)


def qkv_views(
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as views of one buffer; two more rows are NaN, as padding may be."""
    num_heads, num_kv_heads = heads
    widths = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    both = torch.randn(
        (num_tokens + 2, sum(widths)), generator=generator, device=generator.device
    ).to(dtype)
    both[num_tokens:] = torch.nan
    query, key, value = (x.view(num_tokens + 2, -1, head_dim) for x in both.split(widths, 1))
    return query, key, value


def check_paged(
    make_paged: Callable,
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    block_size: int = 4,
    num_decodes: int = 0,
    window: int = 0,
    soft_cap: float = 0.0,
    fp8: bool = False,
    shape: PrefillShape | None = SMALL,
    rows: bool = True,
    dense_pool: bool = False,
    alibi: bool = False,
    entry: int | None = None,
) -> None:
    """Chunks of `seq_lens` in a pool with gaps between its blocks, unless `dense_pool`; with an
    `entry` of the block table for blocks behind the window, which then hold NaN."""
    device = generator.device
    group = heads[0] // heads[1]
    paged = make_paged(
        seq_lens,
        block_size=block_size,
        num_kv_heads=heads[1],
        head_dim=head_dim,
        dtype=dtype,
        fp8=fp8,
    )
    num_tokens = sum(query_lens)
    query, _, _ = qkv_views(num_tokens, heads, head_dim, dtype, generator)
    out = torch.full(query.shape, torch.nan, dtype=dtype, device=device)
    tokens = prefill_tile_tokens(group, head_dim) if shape is None else shape.tile_tokens(group)
    loc = starts(query_lens, device)
    scale = head_dim**-0.5
    pool = paged.kv_cache.contiguous() if dense_pool else paged.kv_cache
    tables = paged.block_tables if rows else paged.block_tables[paged.table_rows.long()]
    slopes = None
    if alibi:
        slopes = torch.rand(heads[0], generator=generator, device=device)
    wide, whole_tables = paged.wide(), paged.tables().long()
    if entry is not None:
        needed = [n - m - window + 1 for m, n in zip(query_lens, seq_lens, strict=True)]
        paged.give_back([max(0, position) for position in needed], entry)
        assert rows and paged.wide().ne(wide).any(), "nothing was given back"
    paged_prefill(
        out, query, pool, paged.kv_scales, 1, tables, paged.table_rows if rows else None,
        paged.seq_lens, loc, plan(query_lens, seq_lens, num_decodes, tokens, device), scale, window,
        soft_cap, shape, alibi=slopes,
    )  # fmt: skip
    tables = whole_tables
    for i, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        part = slice(int(loc[i]), int(loc[i + 1]))
        if i < num_decodes:
            assert out[part].isnan().all(), "a decode's row was written"
            continue
        at = torch.arange(length, device=device)
        kv = wide[tables[i, at // block_size], 1, :, :, at % block_size]
        expected = dense(query[part], kv[:, 0], kv[:, 1], scale, window, soft_cap, slopes)
        error = float((out[part].double() - expected).norm() / expected.norm())
        assert error < TOLERANCE[dtype], (i, count, length, error)
    assert out[num_tokens:].isnan().all(), "padding was written"


@pytest.fixture
def plain(device: torch.device) -> torch.dtype:
    """The type of tests that need only one."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def test_chunks_behind_prefixes(make_paged, generator, dtype) -> None:
    check_paged(
        make_paged, generator, dtype, query_lens=[5, 20, 3, 1], seq_lens=[5, 37, 50, 33]
    )  # fmt: skip


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_block_sizes(make_paged, generator, plain, block_size) -> None:
    check_paged(
        make_paged, generator, plain, query_lens=[20, 3], seq_lens=[37, 70], block_size=block_size
    )  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 112, 128, 256])
def test_head_sizes_as_cut_for_the_gpu(make_paged, generator, plain, head_dim) -> None:
    check_paged(
        make_paged, generator, plain, query_lens=[9], seq_lens=[75], head_dim=head_dim,
        block_size=16, shape=None,
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "pack"), [((4, 4), True), ((6, 2), True), ((6, 2), False)])
def test_groups_of_heads(make_paged, generator, plain, heads, pack) -> None:
    shape = PrefillShape(16, 16, 4, 2, pack=pack)
    check_paged(
        make_paged, generator, plain, query_lens=[9, 21], seq_lens=[30, 21], heads=heads,
        shape=shape,
    )  # fmt: skip


@pytest.mark.parametrize("window", [1, 7, 30, 1000])
def test_sliding_window(make_paged, generator, plain, window) -> None:
    check_paged(
        make_paged, generator, plain, query_lens=[5, 20, 3], seq_lens=[5, 47, 70], window=window
    )  # fmt: skip


def test_soft_cap(make_paged, generator, plain) -> None:
    check_paged(make_paged, generator, plain, query_lens=[20], seq_lens=[57], soft_cap=0.7)


@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("window", [0, 20])
def test_alibi(make_paged, generator, plain, window, soft_cap) -> None:
    check_paged(
        make_paged, generator, plain, query_lens=[20, 3], seq_lens=[57, 40], heads=(6, 2),
        window=window, soft_cap=soft_cap, alibi=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fp8", "block_size", "entry"),
    [  # any two of the values meet
        (False, 4, -1), (False, 24, 0), (False, 64, -1), (True, 4, 0), (True, 24, -1),
        (True, 64, 0),
    ],
)  # fmt: skip
def test_blocks_behind_the_window_are_not_read(
    make_paged, generator, plain, fp8, block_size, entry
) -> None:
    check_paged(
        make_paged, generator, plain, query_lens=[5, 20, 1, 3], seq_lens=[5, 107, 200, 139],
        block_size=block_size, window=10, fp8=fp8, entry=entry,
    )  # fmt: skip


@pytest.mark.parametrize("block_size", [3, 32])
def test_fp8_cache(make_paged, generator, plain, block_size) -> None:
    check_paged(
        make_paged, generator, plain, query_lens=[5, 20], seq_lens=[5, 57], fp8=True,
        block_size=block_size,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [True, False])
def test_decodes_of_the_same_step_are_left_alone(make_paged, generator, plain, rows) -> None:
    check_paged(
        make_paged, generator, plain, query_lens=[1, 1, 18, 4], seq_lens=[40, 1, 18, 19],
        num_decodes=2, rows=rows,
    )  # fmt: skip


def test_nothing_to_do(make_paged, generator, plain) -> None:
    check_paged(make_paged, generator, plain, query_lens=[1], seq_lens=[8], num_decodes=1)


def test_tiles_by_descriptor(make_paged, generator, plain) -> None:
    """Blocks that hold whole tiles, in a pool whose blocks lie apart."""
    shape = PrefillShape(64, 16, 4, 2, descriptors=True)
    check_paged(
        make_paged, generator, plain, query_lens=[5, 20], seq_lens=[5, 67], block_size=32,
        head_dim=32, shape=shape,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("window", "heads", "head_dim", "descriptors", "soft_cap", "alibi"),
    [
        (0, (4, 2), 32, True, 0.0, False), (9, (4, 2), 32, True, 0.0, True),
        (0, (3, 1), 48, False, 2.0, False), (9, (3, 3), 32, False, 0.0, False),
        (0, (6, 2), 32, True, 2.0, True),
    ],
)  # fmt: skip
def test_fresh_chunks(
    generator, plain, heads, head_dim, window, descriptors, soft_cap, alibi
) -> None:
    query_lens = [1, 6, 50, 17]
    num_tokens, device = sum(query_lens), generator.device
    rows = 64 if device.type == "cuda" else 16
    shape = PrefillShape(rows, 32, 4, 2, mask_tile=16, descriptors=descriptors)
    query, key, value = qkv_views(num_tokens, heads, head_dim, plain, generator)
    out = torch.full(query.shape, torch.nan, dtype=plain, device=device)
    loc = starts(query_lens, device)
    tiles = plan(query_lens, query_lens, 1, shape.tile_tokens(heads[0] // heads[1]), device)
    slopes = torch.rand(heads[0], generator=generator, device=device) if alibi else None
    scale = head_dim**-0.5
    fresh_prefill(
        out, query, key, value, loc, tiles, scale, window, soft_cap, shape, alibi=slopes
    )  # fmt: skip
    for i in range(1, len(query_lens)):
        part = slice(int(loc[i]), int(loc[i + 1]))
        expected = dense(query[part], key[part], value[part], scale, window, soft_cap, slopes)
        error = float((out[part].double() - expected).norm() / expected.norm())
        assert error < TOLERANCE[plain], (i, error)
    assert out[:1].isnan().all() and out[num_tokens:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [8, 16, 64, 256])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (32, 1)])
def test_roles_of_warps_on_hopper(
    make_paged, generator, plain, heads, block_size, monkeypatch
) -> None:
    monkeypatch.setattr(prefill_attention, "USE_HOPPER", True)
    query, _, _ = qkv_views(1, heads, 128, plain, generator)
    assert prefill_attention.hopper_takes(query, heads[0] // heads[1], block_size)
    check_paged(
        make_paged, generator, plain, query_lens=[1, 1, 300, 17, 513, 64, 5],
        seq_lens=[77, 300, 300, 1017, 700, 128, 2005], num_decodes=2, heads=heads, head_dim=128,
        block_size=block_size, shape=None, dense_pool=True,
    )  # fmt: skip


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from octavo.ops.gpu import hopper_attention

kernel = hopper_attention._prefill_kernel
rows, three = (f"tensordesc<bf16[{box}],{hopper_attention._layout(rank)!r}>"
               for box, rank in (("16,64", 2), ("16,4,64", 3)))
constants = dict(PAGED=True, ROWED=True, GROUP=4, NUM_KV_HEADS=8, PACK=4, BLOCK=16, BOX=16,
                 TILE=128, STAGES=2)
kinds = dict(out="*bf16", desc_q=three, desc_k=rows, desc_v=rows, tables="*i32", table_rows="*i32",
             seq_lens="*i32", query_start="*i32", tiles="*i32", scale="fp32")
names = kernel.arg_names
signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in names}
source = GluonASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()})
made = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 4, "maxnreg": 168})
assert "wgmma.mma_async" in made.asm["ptx"] and "cp.async.bulk.tensor" in made.asm["ptx"]
print("shared", made.metadata.shared)
"""


def test_roles_of_warps_compile_without_a_gpu(tmp_path: Path) -> None:
    """The interpreter does not know Gluon: without a Hopper GPU this is all that can be seen."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ran = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout.split("shared")[1]) <= 227 * 1024
