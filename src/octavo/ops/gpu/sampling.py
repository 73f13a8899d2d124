"""Sampling kernels: argmax, edits of single logits, and draws from the whole distribution.

Every sum is over fixed runs of `TILE` tokens, then over runs in order: a row's result depends on
nothing but the row. Rows with top_k, top_p or min_p go on in `sampling_top`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Tokens of a run."""
MAX_SPLITS = 64
"""Most pieces that the argmax of a row is cut into."""
GREEDY, DRAW, TOP = 0, 1, 2
"""What a row does: take its best token, draw from all, draw from some (top_k, top_p, min_p)."""
_DRAW, _TOP = tl.constexpr(DRAW), tl.constexpr(TOP)

_ARGMAX_TILE = 2048
_ARGMAX_WARPS = 4
_PROGRAMS = 1056  # eight on each of 132 multiprocessors
_EDITS = 256
_BY_ROW = [
    "modes", "rates", "numbers", "token_ids", "finite", "bests", "leasts", "totals"
]  # fmt: skip


@triton.jit(do_not_specialize=["span"])
def _argmax_part(
    logits, values, ids, vocab_size, span, stride, SPLITS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Best value and its smallest id in tokens `split * span ..` of a row; NaN counts as infinity.

    values, ids: [num_rows, SPLITS].
    """
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lanes = tl.arange(0, TILE)
    first = split * span
    last = tl.minimum(first + span, vocab_size)
    best = tl.full([TILE], -float("inf"), tl.float32)
    where = first + lanes
    for start in tl.range(first, last, TILE):
        at = start + lanes
        x = tl.load(logits + row * stride + at, mask=at < last, other=-float("inf"))
        x = tl.where(x != x, float("inf"), x)
        better = x > best
        best = tl.where(better, x, best)
        where = tl.where(better, at, where)
    top = tl.max(best, axis=0)
    tl.store(values + row * SPLITS + split, top)
    tl.store(ids + row * SPLITS + split, tl.min(tl.where(best == top, where, vocab_size), axis=0))


@triton.jit(
    do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["token_ids", "finite"]
)
def _argmax_join(values, ids, token_ids, finite, num_splits, SPLITS: tl.constexpr):
    """token_ids[row] = argmax, finite[row] = 1 where the maximum is finite."""
    row = tl.program_id(0)
    lanes = tl.arange(0, SPLITS)
    held = lanes < num_splits
    value = tl.load(values + row * SPLITS + lanes, mask=held, other=-float("inf"))
    token = tl.load(ids + row * SPLITS + lanes, mask=held, other=2147483647)
    top = tl.max(value, axis=0)
    tl.store(
        token_ids + row, tl.min(tl.where(value == top, token, 2147483647), axis=0).to(tl.int64)
    )
    tl.store(finite + row, ((top < float("inf")) & (top > -float("inf"))).to(tl.int32))


@triton.jit(do_not_specialize_on_alignment=["rates"])
def _weigh(logits, rates, best, ids, least, sums, vocab_size, num_tiles, TILE: tl.constexpr):
    """Of each run of TILE tokens: best value and its smallest id, least finite value, and
    sum(2^((x - best) * rate)); all [num_rows, num_tiles]. NaN counts as infinity."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * vocab_size + at, mask=at < vocab_size, other=-float("inf"))
    x = tl.where(x != x, float("inf"), x)
    top = tl.max(x, axis=0)
    finite = x > -float("inf")
    place = row * num_tiles + tile
    tl.store(best + place, top)
    tl.store(ids + place, tl.min(tl.where(x == top, at, 2147483647), axis=0))
    tl.store(least + place, tl.min(tl.where(finite, x, float("inf")), axis=0))
    rate = tl.load(rates + row)
    weights = tl.where(finite, tl.exp2((x - top) * rate), 0.0)
    tl.store(sums + place, tl.sum(weights, axis=0))


@triton.jit(do_not_specialize_on_alignment=_BY_ROW)
def _draw(
    logits, modes, rates, numbers, best, ids, least, sums,
    token_ids, finite, bests, leasts, totals,
    vocab_size, num_tiles, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row: joins its runs; mode GREEDY stores the argmax, DRAW the inverse of the cumulative
    distribution at `numbers[row]` in the order of the vocabulary, TOP nothing yet.

    bests, leasts [num_rows] float32, totals [num_rows] float64: of the whole row.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, TILES)
    held = lanes < num_tiles
    place = row * num_tiles + lanes
    value = tl.load(best + place, mask=held, other=-float("inf"))
    token = tl.load(ids + place, mask=held, other=2147483647)
    top = tl.max(value, axis=0)
    mode = tl.load(modes + row)
    rate = tl.load(rates + row)
    tl.store(finite + row, ((top < float("inf")) & (top > -float("inf"))).to(tl.int32))
    drawn = tl.min(tl.where(value == top, token, 2147483647), axis=0)
    scale = tl.where(value > -float("inf"), tl.exp2((value - top) * rate), 0.0).to(tl.float64)
    share = tl.load(sums + place, mask=held, other=0.0).to(tl.float64) * scale
    total = tl.sum(share, axis=0)
    tl.store(bests + row, top)
    tl.store(leasts + row, tl.min(tl.load(least + place, mask=held, other=float("inf")), axis=0))
    tl.store(totals + row, total)
    if mode == _DRAW:
        target = tl.load(numbers + row) * total
        upto = tl.cumsum(share, axis=0)
        # The first run that passes the target; where rounding leaves none, the last with weight.
        tile = tl.min(tl.where((upto > target) & (share > 0), lanes, TILES), axis=0)
        last = tl.max(tl.where(share > 0, lanes, 0), axis=0)
        tile = tl.minimum(tile, last)
        before = tl.sum(tl.where(lanes < tile, share, 0.0), axis=0)
        inside = tl.arange(0, TILE)
        at = tile * TILE + inside
        x = tl.load(logits + row * vocab_size + at, mask=at < vocab_size, other=-float("inf"))
        weights = tl.where(x > -float("inf"), tl.exp2((x - top) * rate), 0.0).to(tl.float64)
        passed = (before + tl.cumsum(weights, axis=0) > target) & (weights > 0)
        chosen = tl.min(tl.where(passed, inside, TILE), axis=0)
        chosen = tl.minimum(chosen, tl.max(tl.where(weights > 0, inside, 0), axis=0))
        drawn = tile * TILE + chosen
    if mode != _TOP:
        tl.store(token_ids + row, drawn.to(tl.int64))


@triton.jit(
    do_not_specialize=["num_edits"],
    do_not_specialize_on_alignment=["repetition", "frequency", "presence"],
)
def _edit(
    logits, rows, ids, counts, biases, olds, repetition, frequency, presence,
    vocab_size, num_edits, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per edit: x += bias (-inf bans); where count >= 0, x = x / r if x > 0 else x * r, then
    x -= frequency * count, then x -= presence if count > 0."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = at < num_edits
    row = tl.load(rows + at, mask=held, other=0)
    place = row.to(tl.int64) * vocab_size + tl.load(ids + at, mask=held, other=0)
    count = tl.load(counts + at, mask=held, other=-1.0)
    x = tl.load(logits + place, mask=held, other=0.0)
    tl.store(olds + at, x, mask=held)
    x += tl.load(biases + at, mask=held, other=0.0)
    counted = held & (count >= 0)
    rate = tl.load(repetition + row, mask=counted, other=1.0)
    x = tl.where(x > 0, tl.div_rn(x, rate), x * rate)
    x -= tl.load(frequency + row, mask=counted, other=0.0) * tl.where(counted, count, 0.0)
    x -= tl.load(presence + row, mask=counted & (count > 0), other=0.0)
    tl.store(logits + place, x, mask=held)


@triton.jit(do_not_specialize=["num_edits"])
def _restore(logits, rows, ids, olds, vocab_size, num_edits, BLOCK: tl.constexpr):
    """logits[row, id] = old."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = at < num_edits
    row = tl.load(rows + at, mask=held, other=0).to(tl.int64)
    place = row * vocab_size + tl.load(ids + at, mask=held, other=0)
    tl.store(logits + place, tl.load(olds + at, mask=held, other=0.0), mask=held)


def num_tiles(vocab_size: int) -> int:
    """Runs of tokens that a row's sums are made of."""
    return -(-vocab_size // TILE)


class Runs(NamedTuple):
    """Scratch by run of tokens, each [max_rows, num_tiles]."""

    best: Tensor
    """float32"""
    ids: Tensor
    """int32"""
    least: Tensor
    """float32"""
    sums: Tensor
    """float32"""

    @classmethod
    def of(cls, max_rows: int, vocab_size: int, device: torch.device) -> Runs:
        """For so many rows at most."""
        shape = (max_rows, num_tiles(vocab_size))
        kinds = (torch.float32, torch.int32, torch.float32, torch.float32)
        return cls(*(torch.empty(shape, dtype=dtype, device=device) for dtype in kinds))


def argmax_scratch(max_rows: int, device: torch.device) -> Tensor:
    """[2, max_rows, MAX_SPLITS] int32: what `argmax_into` works in."""
    return torch.empty((2, max_rows, MAX_SPLITS), dtype=torch.int32, device=device)


def argmax_into(logits: Tensor, token_ids: Tensor, finite: Tensor, scratch: Tensor) -> None:
    """token_ids[row] = the smallest id of the row's largest logit; finite[row] = 1 if that is
    finite and the row has no NaN, else 0. Two launches that a CUDA graph can hold.

    logits: [num_rows, vocab] float32, unit stride in a row; token_ids: [num_rows] int64; finite:
    [num_rows] int32; scratch: `argmax_scratch` of at least as many rows.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "logits: float32 rows"
    assert token_ids.shape == finite.shape == (num_rows,) and scratch.shape[1] >= num_rows
    assert token_ids.dtype == torch.int64 and finite.dtype == torch.int32
    assert token_ids.is_contiguous() and finite.is_contiguous() and scratch.is_contiguous()
    if not num_rows:
        return
    splits = min(MAX_SPLITS, max(1, _PROGRAMS // num_rows))
    span = -(-vocab_size // (splits * _ARGMAX_TILE)) * _ARGMAX_TILE
    splits = -(-vocab_size // span)
    values = scratch[0].view(torch.float32)
    _argmax_part[(splits, num_rows)](
        logits, values, scratch[1], vocab_size, span, logits.stride(0),
        SPLITS=MAX_SPLITS, TILE=_ARGMAX_TILE, num_warps=_ARGMAX_WARPS,
    )  # fmt: skip
    _argmax_join[(num_rows,)](
        values, scratch[1], token_ids, finite, splits, SPLITS=MAX_SPLITS, num_warps=1
    )


def edit_logits(
    logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, biases: Tensor,
    repetition: Tensor, frequency: Tensor, presence: Tensor,
) -> Tensor:  # fmt: skip
    """Bans, biases and penalties of single tokens, in place, each (row, id) at most once.

    logits: [num_rows, vocab] float32, contiguous; rows, ids: [num_edits] int32; counts: [num_edits]
    float32, -1 where no penalty looks at the token; biases: [num_edits] float32, -inf bans;
    repetition, frequency, presence: [num_rows] float32. The arithmetic of `sampling.adjust`.
    Returns what the logits were, [num_edits] float32, for `restore_logits`.
    """
    num_edits = len(rows)
    assert logits.is_contiguous() and logits.dtype == torch.float32
    assert len(ids) == len(counts) == len(biases) == num_edits
    olds = torch.empty(num_edits, dtype=torch.float32, device=logits.device)
    if num_edits:
        _edit[(-(-num_edits // _EDITS),)](
            logits, rows, ids, counts, biases, olds, repetition, frequency, presence,
            logits.shape[1], num_edits, BLOCK=_EDITS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return olds


def restore_logits(logits: Tensor, rows: Tensor, ids: Tensor, olds: Tensor) -> None:
    """Undo `edit_logits`, of the same rows and ids."""
    num_edits = len(rows)
    assert len(ids) == len(olds) == num_edits
    if num_edits:
        _restore[(-(-num_edits // _EDITS),)](
            logits, rows, ids, olds, logits.shape[1], num_edits, BLOCK=_EDITS, num_warps=4
        )


def draw_all(
    logits: Tensor, modes: Tensor, rates: Tensor, numbers: Tensor, runs: Runs,
    token_ids: Tensor, finite: Tensor, bests: Tensor, leasts: Tensor, totals: Tensor,
) -> None:  # fmt: skip
    """Tokens of GREEDY and DRAW rows, and every row's statistics; two launches.

    logits: [num_rows, vocab] float32, contiguous; modes: [num_rows] int32; rates: [num_rows]
    float32, log2(e) / temperature; numbers: [num_rows] float64 in [0, 1); runs: scratch of
    at least as many rows; token_ids: [num_rows] int64 and finite: [num_rows] int32 as in
    `argmax_into`; bests, leasts: float32, totals: float64, [max_rows]: largest and least finite
    logit, and the sum of 2^((x - best) * rate).
    """
    num_rows, vocab_size = logits.shape
    tiles = num_tiles(vocab_size)
    assert logits.is_contiguous() and logits.dtype == torch.float32
    assert len(runs.best) >= num_rows and runs.best.shape[1] == tiles
    assert totals.dtype == numbers.dtype == torch.float64 and modes.dtype == torch.int32
    best, ids, least, sums = runs
    _weigh[(tiles, num_rows)](
        logits, rates, best, ids, least, sums, vocab_size, tiles, TILE=TILE, num_warps=4
    )
    _draw[(num_rows,)](
        logits, modes, rates, numbers, best, ids, least, sums,
        token_ids, finite, bests, leasts, totals, vocab_size, tiles,
        TILES=triton.next_power_of_2(tiles), TILE=TILE, num_warps=8,
    )  # fmt: skip
