"""The paged attention kernel against the dense float64 reference, on every instruction set."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops import reference
from octavo.ops.cpu import native
from octavo.ops.cpu.attention import paged_attention

ISAS = native.ISA_LEVELS if native.load() is not None else ("none",)
DTYPES = (torch.float32, torch.bfloat16)
# bf16: the output's own rounding (2^-9) and that of the probabilities
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


pytestmark = pytest.mark.usefixtures("best_isa_afterwards", "one_torch_thread")


def use_isa(name: str) -> None:
    if name != "none" and native.set_isa(name) != name:
        pytest.skip(f"this machine has no {name}")


@dataclass
class Batch:
    """Arguments of one call; sequences are (context length, query tokens)."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scale: float
    window: int = 0
    layer: int = 1
    soft_cap: float = 0.0
    alibi: torch.Tensor | None = None
    kv_scales: torch.Tensor | None = None
    value_dim: int | None = None
    """Where the cache has one plane."""

    def run(self, num_threads: int = 1) -> torch.Tensor:
        shape = (*self.query.shape[:2], self.value_dim or self.query.shape[2])
        out = torch.full(shape, math.nan, dtype=self.query.dtype)
        paged_attention(out, **self.args(), num_threads=num_threads)
        return out

    def args(self) -> dict[str, Any]:
        return {
            "query": self.query,
            "kv_cache": self.kv_cache,
            "layer": self.layer,
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "query_start_loc": self.query_start_loc,
            "scale": self.scale,
            "sliding_window": self.window,
            "soft_cap": self.soft_cap,
            "alibi": self.alibi,
            "kv_scales": self.kv_scales,
        }

    def expected(self) -> torch.Tensor:
        return reference.paged_attention(**self.args(), value_dim=self.value_dim)

    def only(self, seq: int) -> Batch:
        """The same sequence alone, its query copied elsewhere."""
        first, end = self.query_start_loc[seq : seq + 2].tolist()
        return replace(
            self,
            query=self.query[first:end].clone(),
            block_tables=self.block_tables[seq : seq + 1],
            seq_lens=self.seq_lens[seq : seq + 1],
            query_start_loc=torch.tensor([0, end - first], dtype=torch.int32),
        )


def make_batch(
    seqs: list[tuple[int, int]],
    *,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    soft_cap: float = 0.0,
    alibi: bool = False,
    int8: bool = False,
    value_dim: int | None = None,
) -> Batch:
    """Random tensors; slots and table entries that nobody may read hold NaN (of an int8 cache
    scales of NaN) and -7. value_dim: have one plane, a latent."""
    rng = torch.Generator().manual_seed(seed)
    counts = [-(-length // block_size) for length, _ in seqs]
    num_blocks = sum(counts) + 2
    planes = 1 if value_dim else 2
    shape = (num_blocks, 2, planes, kv_heads, block_size, head_dim)
    kv_cache = torch.full(shape, math.nan, dtype=dtype)
    order = torch.randperm(num_blocks, generator=rng, dtype=torch.int64).tolist()
    order.remove(num_blocks - 1)
    order.insert(0, num_blocks - 1)  # the far end of the pool is always in use
    tables = torch.full((len(seqs), max(counts) + 1), -7, dtype=torch.int32)
    for i, (length, num_query) in enumerate(seqs):
        blocks, order = order[: counts[i]], order[counts[i] :]
        low = max(0, length - num_query + 1 - window) if window else 0
        positions = torch.arange(low, length)
        where = torch.tensor(blocks)[positions // block_size]
        tables[i, positions // block_size] = where.int()
        values = torch.randn((len(positions), 2, planes, kv_heads, head_dim), generator=rng)
        kv_cache[where, :, :, :, positions % block_size] = values.to(dtype)
    starts = torch.tensor([0] + [n for _, n in seqs]).cumsum(0).int()
    query = torch.randn((int(starts[-1]), kv_heads * group, head_dim), generator=rng).to(dtype)
    lengths = torch.tensor([length for length, _ in seqs], dtype=torch.int32)
    batch = Batch(query, kv_cache, tables, lengths, starts, head_dim**-0.5, window)
    batch.soft_cap, batch.value_dim = soft_cap, value_dim
    if alibi:
        batch.alibi = torch.rand(kv_heads * group, generator=rng) - 0.2
    if int8:
        batch.kv_cache, batch.kv_scales = reference.int8_codes(kv_cache)
    return batch


def check(batch: Batch, num_threads: int = 1) -> None:
    out = batch.run(num_threads)
    error = (out.double() - batch.expected()).abs().max().item()
    assert error <= TOLERANCE[out.dtype], f"error {error}"


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    seqs = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 90) | st.integers(240, 300))
        num_query = draw(st.just(1) | st.integers(1, min(length, 70)))
        seqs.append((length, num_query))
    return make_batch(
        seqs,
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 8)),
        head_dim=draw(st.sampled_from([16, 32, 48, 64, 80, 96, 128, 160, 256])),
        block_size=draw(st.sampled_from([1, 3, 8, 16, 32, 128])),
        window=draw(st.just(0) | st.integers(1, 100)),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 99)),
        soft_cap=draw(st.sampled_from([0.0, 0.0, 0.7, 50.0])),
        alibi=draw(st.sampled_from([False, False, True])),
        int8=draw(st.booleans()),
    )


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(batch=batches(), num_threads=st.integers(1, 3))
def test_random_batches(isa: str, batch: Batch, num_threads: int) -> None:
    use_isa(isa)
    check(batch, num_threads)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 5, 18, 24, 40, 72, 200, 320])
def test_unusual_head_dims(isa: str, dtype: torch.dtype, head_dim: int) -> None:
    use_isa(isa)
    for int8 in (False, True):
        options = {"head_dim": head_dim, "block_size": 8, "dtype": dtype, "int8": int8}
        check(make_batch([(37, 1), (20, 20)], **options))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dims", [(96, 64), (40, 33), (576, 512)])
def test_values_that_are_part_of_their_keys(
    isa: str, dtype: torch.dtype, int8: bool, dims: tuple[int, int]
) -> None:
    use_isa(isa)
    options = {"head_dim": dims[0], "value_dim": dims[1], "kv_heads": 1, "group": 5}
    check(make_batch([(37, 1), (300, 1), (20, 20)], **options, dtype=dtype, int8=int8), 2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.5, 20.0])
def test_soft_cap_of_large_scores(isa: str, dtype: torch.dtype, cap: float) -> None:
    """Far beyond the cap, where e^2s is no float; and a query that is no number stays none."""
    use_isa(isa)
    batch = make_batch([(70, 1), (20, 20)], dtype=dtype, soft_cap=cap)
    batch.query *= 1000.0
    check(batch)
    batch.query[3] = math.nan
    assert batch.run()[3].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_blocks_behind_the_window_are_not_read(
    isa: str, dtype: torch.dtype, int8: bool, num_threads: int
) -> None:
    """Entries of given-back blocks are -1, or name a block that others have filled with NaN."""
    use_isa(isa)
    seqs = [(900, 1), (300, 40), (64, 64), (530, 1), (33, 2)]
    batch = make_batch(seqs, window=32, dtype=dtype, int8=int8, block_size=16)
    expected = batch.run(num_threads)
    check(batch, num_threads)
    poisoned = len(batch.kv_cache) - 2  # of no sequence
    assert not (batch.block_tables == poisoned).any()
    if int8:
        batch.kv_scales[poisoned] = math.nan
    else:
        batch.kv_cache[poisoned] = math.nan
    for entry in (-1, poisoned):
        for i, (length, num_query) in enumerate(seqs):
            behind = max(0, length - num_query + 1 - 32) // 16
            batch.block_tables[i, :behind] = entry
        if isa == "none":
            check(batch)
        else:
            assert torch.equal(batch.run(num_threads), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_context_split_among_threads(dtype: torch.dtype) -> None:
    batch = make_batch([(1500, 1)], kv_heads=1, dtype=dtype)
    check(batch, num_threads=4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("options", [{}, {"int8": True, "soft_cap": 5.0, "alibi": True}])
def test_a_sequence_does_not_depend_on_its_batch(
    isa: str, dtype: torch.dtype, window: int, options: dict[str, Any]
) -> None:
    """Bit for bit: alone, in a crowd, and with its chunks spread over threads."""
    if isa == "none":
        pytest.skip("torch's products depend on their shapes")
    use_isa(isa)
    seqs = [(700, 1), (5, 1), (300, 40), (1, 1), (64, 64), (530, 1), (100, 3)]
    batch = make_batch(seqs, window=window, dtype=dtype, **options)
    crowd = batch.run(num_threads=2)
    starts = batch.query_start_loc.tolist()
    for seq in range(len(seqs)):
        rows = crowd[starts[seq] : starts[seq + 1]]
        for num_threads in (1, 3):
            assert torch.equal(batch.only(seq).run(num_threads), rows), f"sequence {seq}"


@pytest.mark.parametrize("isa", ISAS)
def test_chunking_a_prefill_changes_no_float32_result(isa: str) -> None:
    if isa == "none":
        pytest.skip("torch's products depend on their shapes")
    use_isa(isa)
    whole = make_batch([(100, 100)], group=2)
    expected, parts, done = whole.run(), [], 0
    for size in (1, 33, 50, 16):
        chunk = Batch(**vars(whole))
        chunk.query = whole.query[done : done + size]
        chunk.query_start_loc = torch.tensor([0, size], dtype=torch.int32)
        done += size
        chunk.seq_lens = torch.tensor([done], dtype=torch.int32)
        parts.append(chunk.run())
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_query_and_out_as_views_of_wider_rows(dtype: torch.dtype) -> None:
    batch = make_batch([(40, 1), (9, 9)], dtype=dtype)
    expected = batch.run()
    tokens, heads, dim = batch.query.shape
    wide = torch.randn(tokens, heads * dim + 24).to(dtype)
    wide[:, 8 : 8 + heads * dim] = batch.query.flatten(1)
    batch.query = wide[:, 8 : 8 + heads * dim].view(tokens, heads, dim)
    buffer = torch.zeros(tokens, heads * dim + 5, dtype=dtype)
    out = buffer[:, : heads * dim].view(tokens, heads, dim)
    paged_attention(out, **batch.args())
    assert torch.equal(out, expected)
    assert not buffer[:, heads * dim :].any()


def test_large_scores_stay_finite() -> None:
    batch = make_batch([(70, 1), (70, 70)])
    batch.query *= 1e4
    assert (batch.run().double() - batch.expected()).abs().max() < 1e-3


def test_rows_after_the_last_query_token_are_left_alone() -> None:
    batch = make_batch([(8, 1)])
    query = torch.cat([batch.query, batch.query])
    out = torch.full_like(query, math.nan)
    batch.query = query
    paged_attention(out, **batch.args())
    assert out[1].isnan().all() and not out[0].isnan().any()


def test_empty_batches_and_sequences_without_query() -> None:
    batch = make_batch([(8, 1), (5, 1)])
    batch.query_start_loc = torch.tensor([0, 1, 1], dtype=torch.int32)
    batch.query = batch.query[:1]
    check(batch)
    empty = Batch(batch.query[:0], batch.kv_cache, batch.block_tables[:0], batch.seq_lens[:0],
                  torch.zeros(1, dtype=torch.int32), 1.0)  # fmt: skip
    assert empty.run().shape[0] == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batch=batches())
def test_gather_fallback(batch: Batch) -> None:
    out = reference.gather_attention(**batch.args(), value_dim=batch.value_dim)
    assert (out.double() - batch.expected()).abs().max() <= TOLERANCE[out.dtype]


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "float16 cache": ({"kv_cache": lambda x: x.half()}, TypeError, "kv_cache must have query's"),
    "float16": ({"query": lambda x: x.half()}, TypeError, "query must be float32 or bfloat16"),
    "mixed types": ({"query": lambda x: x.bfloat16()}, TypeError, "kv_cache must have query's"),
    "codes only": ({"kv_cache": lambda x: x.to(torch.int8)}, TypeError, "int8 without kv_scales"),
    "scales only": ({"kv_scales": lambda _: torch.ones(1).half()}, TypeError, "with kv_scales"),
    "scales' type": (
        {"kv_cache": lambda x: x.to(torch.int8), "kv_scales": lambda _: torch.ones(3)},
        ValueError,
        "kv_scales must be float16",
    ),
    "slopes": ({"alibi": lambda _: torch.ones(3)}, ValueError, r"alibi must be contiguous"),
    "soft cap": ({"soft_cap": lambda _: -1.0}, ValueError, "soft_cap must be 0 or positive"),
    "int64 lengths": ({"seq_lens": lambda x: x.long()}, TypeError, "seq_lens must be int32"),
    "int64 tables": ({"block_tables": lambda x: x.long()}, TypeError, "block_tables must be"),
    "layer": ({"layer": lambda _: 2}, ValueError, r"layer must be in \[0, 2\)"),
    "window": ({"window": lambda _: -1}, ValueError, "sliding_window"),
    "head_dim": ({"query": lambda x: x[..., :32].contiguous()}, ValueError, "head_dim"),
    "heads": ({"query": lambda x: x[:, :5].contiguous()}, ValueError, "multiple of 2"),
    "strided heads": ({"query": lambda x: x.mT.contiguous().mT}, ValueError, "dense"),
    "lengths' shape": ({"seq_lens": lambda x: x[:1]}, ValueError, "seq_lens must be"),
    "strided cache": ({"kv_cache": lambda x: x[:, :, :, :, ::2]}, ValueError, "contiguous"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments(name: str) -> None:
    changes, error, message = BAD_ARGUMENTS[name]
    batch = make_batch([(8, 1), (5, 2)])
    for field, change in changes.items():
        setattr(batch, field, change(getattr(batch, field)))
    with pytest.raises(error, match=message):
        batch.run()


def test_out_must_match() -> None:
    batch = make_batch([(8, 1)])
    with pytest.raises(ValueError, match="out must have"):
        paged_attention(torch.empty(2, 6, 64), **batch.args())


BAD_CONTENTS: dict[str, tuple[str, list[int], str]] = {
    "falling starts": ("query_start_loc", [0, 3, 2], "query_start_loc"),
    "starts past the end": ("query_start_loc", [0, 1, 4], "query_start_loc"),
    "first start": ("query_start_loc", [1, 1, 3], "query_start_loc"),
    "shorter than its query": ("seq_lens", [8, 1], r"seq_lens\[1\]"),
    "longer than its table": ("seq_lens", [33, 5], r"seq_lens\[0\]"),
    "unset table entry": ("seq_lens", [8, 20], r"block_tables\[1\]"),
}


@pytest.mark.skipif(ISAS == ("none",), reason="checked by the library")
@pytest.mark.parametrize("name", BAD_CONTENTS)
def test_bad_contents(name: str) -> None:
    field, values, message = BAD_CONTENTS[name]
    batch = make_batch([(8, 1), (5, 2)])
    setattr(batch, field, torch.tensor(values, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        batch.run()
