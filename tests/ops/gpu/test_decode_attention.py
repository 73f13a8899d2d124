"""Paged decode attention against a dense float64 computation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention.work import plan_decode
from octavo.ops import reference

triton = pytest.importorskip("triton")

from octavo.ops.gpu import decode_attention  # noqa: E402
from octavo.ops.gpu.decode_attention import DecodeConfig, contiguous_decode, paged_decode  # noqa: E402

LENS = [1, 37, 100, 16, 65]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
TINY = DecodeConfig(tile=32)


def expected(
    query: Tensor, paged: Any, scale: float, window: int, soft_cap: float,
    alibi: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """float64, of `paged_decode`'s formula."""
    cache = paged.wide()
    if not soft_cap or alibi is not None:
        starts = torch.arange(len(query) + 1)
        return reference.paged_attention(
            query.double(), cache, 1, paged.tables(), paged.seq_lens, starts, scale, window,
            soft_cap=soft_cap, alibi=alibi,
        )  # fmt: skip
    rows = []
    group = query.shape[1] // cache.shape[3]
    for q, table, length in zip(query, paged.tables(), paged.seq_lens.tolist(), strict=True):
        low = max(0, length - window) if window else 0
        k, v = reference.gather_sequence(cache, 1, table, low, length)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("hd,khd->hk", q.double(), k) * scale
        weights = (soft_cap * torch.tanh(scores / soft_cap)).softmax(-1)
        rows.append(torch.einsum("hk,khd->hd", weights, v))
    return torch.stack(rows)


def work(
    seq_lens: list[int], max_items: int, device: torch.device, padding: int = 0
) -> tuple[Tensor, Tensor, int]:
    """Items padded to max_items, item_start padded for more sequences, and the number of items."""
    items, starts = plan_decode(seq_lens, max_items - padding, min_tokens=32)
    padded = torch.full((max_items, 3), -1, dtype=torch.int32)
    padded[: len(items)] = torch.from_numpy(items)
    start = torch.full((len(seq_lens) + padding + 1,), len(items), dtype=torch.int32)
    start[: len(starts)] = torch.from_numpy(starts)
    return padded.to(device), start.to(device), len(items)


def run(
    query: Tensor,
    paged: Any,
    *,
    max_items: int = 12,
    window: int = 0,
    soft_cap: float = 0.0,
    config: DecodeConfig = TINY,
    alibi: Tensor | None = None,
) -> Tensor:
    """`paged_decode` with everything poisoned that it must not read, or must write."""
    device, (num_seqs, num_heads, head_dim) = query.device, query.shape
    items, starts, _ = work(paged.seq_lens.tolist(), max_items, device)
    wide = torch.full((num_seqs, num_heads + 2, head_dim), torch.nan, dtype=query.dtype)
    wide = wide.to(device)
    wide[:, :num_heads] = query
    out = torch.full_like(query, torch.nan)
    partial = torch.full((max_items, num_heads, head_dim), torch.nan, device=device)
    lse = torch.full((max_items, num_heads), torch.nan, device=device)
    paged_decode(
        out, wide[:, :num_heads], paged.kv_cache, paged.kv_scales, 1, paged.block_tables,
        paged.table_rows, paged.seq_lens, items, starts, partial, lse, head_dim**-0.5, window,
        soft_cap, config, alibi=alibi,
    )  # fmt: skip
    return out


def draw(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


@pytest.mark.parametrize("num_heads,num_kv_heads", [(4, 2), (3, 1), (2, 2)])
def test_grouped_heads(
    num_heads: int, num_kv_heads: int, dtype: torch.dtype, make_paged: Any,
    generator: torch.Generator, relative_error: Callable[[Tensor, Tensor], float],
) -> None:  # fmt: skip
    paged = make_paged(LENS, block_size=16, num_kv_heads=num_kv_heads, head_dim=64, dtype=dtype)
    query = draw((len(LENS), num_heads, 64), dtype, generator)
    out = run(query, paged)
    assert relative_error(out, expected(query, paged, 64**-0.5, 0, 0.0)) < TOLERANCE[dtype]


@pytest.mark.parametrize("head_dim", [72, 80, 96, 112, 128, 256])
def test_head_sizes(
    head_dim: int, make_paged: Any, generator: torch.Generator,
    relative_error: Callable[[Tensor, Tensor], float],
) -> None:  # fmt: skip
    dtype = torch.float16
    paged = make_paged([70, 5], block_size=16, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    query = draw((2, 2, head_dim), dtype, generator)
    config = decode_attention.default_config(head_dim, 2, 2)
    out = run(query, paged, max_items=5, config=config)
    assert relative_error(out, expected(query, paged, head_dim**-0.5, 0, 0.0)) < TOLERANCE[dtype]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("block_size", [1, 8, 24, 64])
def test_block_sizes_and_windows(
    block_size: int, grouped: bool, make_paged: Any, generator: torch.Generator,
    relative_error: Callable[[Tensor, Tensor], float],
) -> None:  # fmt: skip
    dtype = torch.float16
    paged = make_paged(LENS, block_size=block_size, num_kv_heads=1, head_dim=16, dtype=dtype)
    query = draw((len(LENS), 2, 16), dtype, generator)
    config = dataclasses.replace(TINY, grouped=grouped)
    for window in (0, 19):
        out = run(query, paged, window=window, config=config)
        assert relative_error(out, expected(query, paged, 0.25, window, 0.0)) < TOLERANCE[dtype]


def test_soft_cap(
    make_paged: Any, generator: torch.Generator, relative_error: Callable[[Tensor, Tensor], float]
) -> None:
    paged = make_paged(LENS, block_size=16, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    query = 40 * draw((len(LENS), 2, 16), torch.float32, generator)
    exact = expected(query, paged, 0.25, 0, 5.0)
    assert relative_error(run(query, paged, soft_cap=5.0), exact) < 1e-5
    assert relative_error(run(query, paged), exact) > 0.05


@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("window", [0, 40])
def test_alibi(
    soft_cap: float, window: int, make_paged: Any, generator: torch.Generator,
    relative_error: Callable[[Tensor, Tensor], float],
) -> None:  # fmt: skip
    paged = make_paged(LENS, block_size=16, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    query = draw((len(LENS), 6, 16), torch.float32, generator)
    slopes = draw((6,), torch.float32, generator).abs()
    options = {"soft_cap": soft_cap, "alibi": slopes, "window": window}
    out, exact = run(query, paged, **options), expected(query, paged, scale=0.25, **options)
    assert relative_error(out, exact) < 3e-6
    with pytest.raises(ValueError, match=r"alibi must be contiguous float32 \[6\]"):
        run(query, paged, alibi=slopes[:3])


@pytest.mark.parametrize(
    ("fp8", "block_size", "grouped", "entry"),
    [  # any two of the values meet
        (False, 8, False, -1), (False, 8, True, 0), (False, 48, False, 0), (False, 48, True, -1),
        (True, 8, False, 0), (True, 8, True, -1), (True, 48, False, -1), (True, 48, True, 0),
    ],
)  # fmt: skip
def test_blocks_behind_the_window_are_not_read(
    fp8: bool, block_size: int, grouped: bool, entry: int, make_paged: Any,
    generator: torch.Generator,
) -> None:  # fmt: skip
    lens = [200, 37, 100, 9, 151]
    paged = make_paged(
        lens, block_size=block_size, num_kv_heads=1, head_dim=32, dtype=torch.float16, fp8=fp8
    )
    query = draw((len(lens), 2, 32), torch.float16, generator)
    config = dataclasses.replace(TINY, grouped=grouped)
    before = run(query, paged, max_items=20, window=33, config=config)
    assert before.isfinite().all()
    paged.give_back([max(0, length - 33) for length in lens], entry)
    assert torch.equal(run(query, paged, max_items=20, window=33, config=config), before)


@pytest.mark.parametrize("grouped", [False, True])
def test_fp8_cache(
    grouped: bool, dtype: torch.dtype, make_paged: Any, generator: torch.Generator,
    relative_error: Callable[[Tensor, Tensor], float],
) -> None:  # fmt: skip
    paged = make_paged(LENS, block_size=16, num_kv_heads=2, head_dim=64, dtype=dtype, fp8=True)
    query = draw((len(LENS), 4, 64), dtype, generator)
    out = run(query, paged, config=dataclasses.replace(TINY, grouped=grouped), window=90)
    exact = expected(query, paged, 0.125, 90, 0.0)
    # Codes and scales are exact in either type: only products and the result are rounded.
    assert relative_error(out, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("odd", [False, True])
def test_fp8_scales_are_read_in_pairs(
    odd: bool, make_paged: Any, generator: torch.Generator,
    relative_error: Callable[[Tensor, Tensor], float],
) -> None:  # fmt: skip
    """Windows and lengths end between two of a pair; at odd distances of blocks there is none."""
    lens, dtype = [100, 37, 64], torch.float16
    paged = make_paged(lens, block_size=16, num_kv_heads=1, head_dim=16, dtype=dtype, fp8=True)
    scales = paged.kv_scales
    apart = torch.full((len(scales), scales[0].numel() + 1), torch.nan, dtype=dtype)
    apart = apart.to(scales.device)[:, :-1] if odd else apart.to(scales.device)[:, 1:]
    apart = apart.unflatten(1, scales.shape[1:])
    apart.copy_(scales)
    query = draw((3, 2, 16), dtype, generator)
    if not odd:
        with pytest.raises(ValueError, match="at a multiple of 4 bytes"):
            run(query, dataclasses.replace(paged, kv_scales=apart))
        apart = scales
    paged = dataclasses.replace(paged, kv_scales=apart)
    for window in (33, 0):
        out = run(query, paged, window=window)
        assert relative_error(out, expected(query, paged, 0.25, window, 0.0)) < TOLERANCE[dtype]


def test_fp8_tiles_that_count_for_nothing(
    make_paged: Any, generator: torch.Generator, relative_error: Callable[[Tensor, Tensor], float]
) -> None:
    """One token has all of the weight: that of others is 0, before it and behind."""
    dtype = torch.float16
    paged = make_paged(LENS, block_size=1, num_kv_heads=1, head_dim=16, dtype=dtype, fp8=True)
    query = 1000 * draw((len(LENS), 3, 16), dtype, generator)
    out = run(query, paged, max_items=len(LENS))
    assert relative_error(out, expected(query, paged, 0.25, 0, 0.0)) < TOLERANCE[dtype]


@pytest.mark.parametrize("distance", [9.0, 10.5])
@pytest.mark.parametrize("scale,growing", [(7e-5, 0), (60_000.0, 0), (1.0, 4), (1.0, -4)])
def test_fp8_values_of_any_size_beside_a_sink(
    scale: float, growing: int, distance: float, make_paged: Any,
    relative_error: Callable[[Tensor, Tensor], float],
) -> None:  # fmt: skip
    """The first token has nearly all of the weight and values of 0: the result is made of what the
    others add. Their scales are equal, or change by 10^4 from the first token to the last."""
    paged = make_paged([100], block_size=16, num_kv_heads=1, head_dim=16, dtype=torch.float16,
                       fp8=True)  # fmt: skip
    blocks = paged.tables()[0, :7].long()
    keys, values = (
        paged.kv_cache[:, 1, part, 0].float()[blocks].reshape(112, 16) for part in (0, 1)
    )
    keys[:], keys[0, 0], values[0] = 0.0, 1.0, 0.0
    values = values.abs().nan_to_num(1.0)
    scales = scale * 10 ** (growing * torch.linspace(0, 1, 112, device=keys.device))
    for part, x in ((0, keys), (1, values if scale < 1 else values / 448)):
        codes = x.to(torch.float8_e4m3fn).view(torch.uint8)
        paged.kv_cache.view(torch.uint8)[blocks, 1, part, 0] = codes.view(7, 16, 16)
    assert paged.kv_scales is not None
    paged.kv_scales[blocks, 1, 0, 0] = 1.0
    paged.kv_scales[blocks, 1, 1, 0] = scales.half().view(7, 16)
    query = torch.zeros((1, 2, 16), dtype=torch.float16, device=keys.device)
    query[:, :, 0] = 4 * distance
    exact = expected(query, paged, 0.25, 0, 0.0)
    assert relative_error(run(query, paged, max_items=3), exact) < 3e-3


def test_two_warps_where_their_registers_hold_the_sums() -> None:
    """Head sizes, bytes of a number, query heads of a KV head."""
    for case, num_warps in {
        (128, 1, 4): 2, (128, 1, 32): 4, (128, 1, 48): 4, (256, 1, 4): 4, (128, 2, 4): 4,
        (64, 2, 4): 2, (64, 2, 71): 4, (512, 2, 4): 4,
    }.items():  # fmt: skip
        assert decode_attention.default_config(*case).num_warps == num_warps, case


def test_more_query_heads_than_a_product_has_rows(
    make_paged: Any, generator: torch.Generator, relative_error: Callable[[Tensor, Tensor], float]
) -> None:
    dtype = torch.float16
    for num_heads in (20, 71):
        paged = make_paged([40, 3], block_size=16, num_kv_heads=1, head_dim=16, dtype=dtype)
        query = draw((2, num_heads, 16), dtype, generator)
        out = run(query, paged, max_items=4)
        assert relative_error(out, expected(query, paged, 0.25, 0, 0.0)) < TOLERANCE[dtype]


def test_padding_rows_get_zeros_and_read_nothing(
    device: torch.device, make_paged: Any, generator: torch.Generator,
    relative_error: Callable[[Tensor, Tensor], float],
) -> None:  # fmt: skip
    lens, padding, dtype = [50, 33], 3, torch.float16
    paged = make_paged(lens, block_size=16, num_kv_heads=1, head_dim=16, dtype=dtype)
    num_seqs = len(lens) + padding
    query = draw((num_seqs, 2, 16), dtype, generator)
    query[2:] = torch.nan
    for max_items in (num_seqs, num_seqs + 4):
        items, starts, _ = work(lens, max_items, device, padding)
        out = torch.full_like(query, torch.nan)
        partial = torch.full((max_items, 2, 16), torch.nan, device=device)
        paged_decode(
            out, query, paged.kv_cache, None, 1, paged.block_tables,
            torch.cat((paged.table_rows, torch.full_like(paged.table_rows, 0)[:1].expand(3))),
            torch.tensor([*lens, 0, 0, 0], dtype=torch.int32, device=device), items, starts,
            partial, partial[..., 0].contiguous(), 0.25,
            config=TINY,
        )  # fmt: skip
        assert (out[2:] == 0).all()
        assert relative_error(out[:2], expected(query[:2], paged, 0.25, 0, 0.0)) < 1.5e-3


def test_an_item_outside_the_window_counts_for_nothing(
    make_paged: Any, generator: torch.Generator, relative_error: Callable[[Tensor, Tensor], float]
) -> None:
    paged = make_paged([128], block_size=16, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    query = draw((1, 2, 16), torch.float32, generator)
    for window in (3, 64, 65):
        out = run(query, paged, max_items=5, window=window)
        assert relative_error(out, expected(query, paged, 0.25, window, 0.0)) < 2e-6


def test_contiguous_is_the_same_formula(
    device: torch.device, make_paged: Any, generator: torch.Generator,
    relative_error: Callable[[Tensor, Tensor], float],
) -> None:  # fmt: skip
    dtype = torch.float16
    paged = make_paged(LENS, block_size=100, num_kv_heads=2, head_dim=16, dtype=dtype)
    keys, values = (
        paged.kv_cache[paged.tables()[:, 0].long(), 1, part].contiguous() for part in range(2)
    )
    query = draw((len(LENS), 4, 16), dtype, generator)
    items, starts, num_items = work(LENS, 12, device)
    assert num_items > len(LENS)
    out = torch.full_like(query, torch.nan)
    partial = torch.full((12, 4, 16), torch.nan, device=device)
    contiguous_decode(
        out, query, keys, values, paged.seq_lens, items, starts, partial,
        partial[..., 0].contiguous(), 0.25, config=TINY,
    )  # fmt: skip
    assert relative_error(out, expected(query, paged, 0.25, 0, 0.0)) < TOLERANCE[dtype]


def test_refusals_name_the_argument(make_paged: Any, generator: torch.Generator) -> None:
    paged = make_paged([5], block_size=16, num_kv_heads=2, head_dim=16, dtype=torch.float16)
    query = draw((1, 4, 16), torch.float16, generator)
    with pytest.raises(TypeError, match="kv_cache must have query's type"):
        run(query.float(), paged)
    for name in ("seq_lens", "table_rows", "block_tables"):
        wide = dataclasses.replace(paged, **{name: getattr(paged, name).long()})
        with pytest.raises(TypeError, match=rf"must be int32.*{name} torch.int64"):
            run(query, wide)
        x = getattr(paged, name)
        apart = dataclasses.replace(paged, **{name: x.repeat_interleave(2, -1)[..., ::2]})
        with pytest.raises(TypeError, match=rf"{name} torch.int32 strides"):
            run(query, apart)
    with pytest.raises(ValueError, match="do not fit"):
        run(query[:, :3], paged)
    with pytest.raises(ValueError, match="room for 1 sequences"):
        run_without_items(query, paged)


def run_without_items(query: Tensor, paged: Any) -> None:
    empty = torch.zeros((0, 3), dtype=torch.int32, device=query.device)
    scratch = torch.zeros((0, 4, 16), device=query.device)
    paged_decode(
        query.clone(), query, paged.kv_cache, None, 1, paged.block_tables, None, paged.seq_lens,
        empty, paged.seq_lens, scratch, scratch[..., 0], 0.25,
    )  # fmt: skip
