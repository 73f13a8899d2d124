"""Draws among the most probable tokens (top_k, top_p, min_p) without sorting the vocabulary.

A row keeps the tokens above a cut value and the first few, by id, of those equal to it. One program
a row finds the cut by narrowing a bracket around it, eight ways a pass over the row; as soon as few
enough tokens are left in it, they are copied out and the row is not read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.gpu.top_passes import (
    copy_out,
    key_of,
    narrow,
    nth_equal,
    rank_of,
    value_of,
    weight_of,
)

CAPACITY = 8192
"""Tokens of a row that can be copied out."""
PAIRS = 512
"""Tokens that are compared each with each."""
MAX_ROWS = 256
"""Rows at a time, which bounds the scratch memory."""

_LANES = 256
_WARPS = 8
_MAX_REGISTERS = 128  # so that two rows share a multiprocessor
_TILE = 2048
_STAGES = tl.constexpr(4)
_BY_ROW = [
    "rows", "rates", "min_ps", "top_ks", "top_ps", "numbers", "bests", "leasts", "totals",
    "token_ids", "cuts", "ties",
]  # fmt: skip


@triton.jit
def _kept(values, ids, size, at, best, rate, min_p, cut, tie, HAS_IDS: tl.constexpr):
    """(token, weight) of the entries `at`; weight 0 of tokens that are not kept."""
    x = tl.load(values + at, mask=at < size, other=-float("inf"))
    token = at
    if HAS_IDS:
        token = tl.load(ids + at, mask=at < size, other=0)
    weight = weight_of(x, best, rate, min_p)
    return token, tl.where((x > cut) | ((x == cut) & (token <= tie)), weight, 0.0)


@triton.jit
def _invert(
    values, ids, size, best, rate, min_p, cut, tie, number, total,
    HAS_IDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The kept token at `number` in [0, 1) of the cumulative weight, in the vocabulary's order.
    total: all kept weight; < 0: not known yet."""
    # Four to a thread are added before they are float64: the conversion is slow.
    fours = tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    if total < 0:
        sums = tl.zeros([TILE // 4], tl.float64)
        for start in tl.range(0, size, TILE, num_stages=_STAGES):
            token, weight = _kept(
                values, ids, size, start + fours, best, rate, min_p, cut, tie, HAS_IDS
            )
            sums += tl.sum(weight, axis=1).to(tl.float64)
        total = tl.sum(sums, axis=0)
    target = number * total
    found = 0
    at = 0
    before = target * 0
    upto = target * 0
    for start in tl.range(0, size, TILE):
        if found == 0:
            token, weight = _kept(
                values, ids, size, start + fours, best, rate, min_p, cut, tie, HAS_IDS
            )
            own = tl.sum(tl.sum(weight, axis=1).to(tl.float64), axis=0)
            if own > 0:
                at = start
                before = upto
                upto += own
                if upto > target:
                    found = 1
    lanes = tl.arange(0, TILE)
    token, weight = _kept(values, ids, size, at + lanes, best, rate, min_p, cut, tie, HAS_IDS)
    passed = (before + tl.cumsum(weight.to(tl.float64), axis=0) > target) & (weight > 0)
    chosen = tl.min(tl.where(passed, lanes, TILE), axis=0)
    # Where rounding leaves none, the last with weight.
    chosen = tl.minimum(chosen, tl.max(tl.where(weight > 0, lanes, 0), axis=0))
    return tl.max(tl.where(lanes == chosen, token, 0), axis=0)


@triton.jit
def _settle(
    logits, vocab_size, values, ids, size, copied, best, rate, min_p, low, high,
    c_low, c_high, m_low, m_high, by_count, top_k, need,
    CAPACITY: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The cut that lies in a bracket of few tokens or of equal ones: (its key, the last id that is
    kept of those equal to it, how many tokens are kept, their weight, how many are not below it).

    logits are the row's, values and ids what was copied out of them; for the bracket see `narrow`.
    """
    if copied & (high > low) & (c_low > c_high) & (c_low - c_high <= PAIRS):
        few = copy_out(
            values, ids, size, value_of(low), value_of(high), values + CAPACITY,
            ids + CAPACITY, True, TILE,
        )  # fmt: skip
        tl.debug_barrier()
        cut, tie, num_left, total, c_low = rank_of(
            values + CAPACITY, ids + CAPACITY, few, best, rate, min_p, low, c_high, m_high,
            by_count, top_k, need, PAIRS,
        )  # fmt: skip
        low = key_of(cut)
    else:
        # All left in the bracket are equal, or all are kept.
        cut = value_of(low)
        one = weight_of(cut, best, rate, min_p).to(tl.float64)
        nth = top_k - c_high
        if by_count == 0:
            left = tl.minimum((need - m_high) / tl.maximum(one, 1e-300), 1e9)
            nth = tl.ceil(left).to(tl.int32)
        nth = tl.maximum(nth, 1)
        tie = vocab_size
        num_left = c_low
        total = m_low
        if (high > low) & (nth < c_low - c_high):
            num_left = c_high + nth
            total = m_high + nth * one
            if copied:
                tie = nth_equal(values, ids, size, cut, nth, True, TILE)
            else:
                tie = nth_equal(logits, ids, vocab_size, cut, nth, False, TILE)
    return low, tie, num_left, total, c_low


@triton.jit(do_not_specialize_on_alignment=_BY_ROW)
def _draw_top(
    logits, rows, rates, min_ps, top_ks, top_ps, numbers, bests, leasts, totals,
    values, ids, token_ids, cuts, ties, vocab_size,
    CAPACITY: tl.constexpr, PAIRS: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row: its cut by top_k, then by top_p of what that keeps, then the draw."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    row_logits = logits + row * vocab_size
    values += tl.program_id(0).to(tl.int64) * (CAPACITY + PAIRS)
    ids += tl.program_id(0).to(tl.int64) * (CAPACITY + PAIRS)
    rate, min_p = tl.load(rates + row), tl.load(min_ps + row)
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    best = tl.load(bests + row)
    # From here on the arithmetic must end whatever a damaged row holds.
    sane = (best < float("inf")) & (best > -float("inf"))
    best = tl.where(sane, best, 0.0)
    least = tl.minimum(tl.load(leasts + row), best)
    slack = 0.01 / rate + tl.abs(best) * 1e-6
    lowest = tl.where(min_p > 0, best + tl.log2(tl.maximum(min_p, 1e-37)) / rate - slack, least)
    least = tl.maximum(least, tl.minimum(lowest, best))

    low = key_of(least)
    tie = vocab_size
    has_k, has_p = sane & (top_k > 0), sane & (top_p < 1.0)
    total = tl.where(min_p > 0, -1.0, tl.load(totals + row))
    num_left = vocab_size
    whole = False  # whether all that may be kept was copied out
    size = 0
    c_low = vocab_size  # tokens at or above the cut, as far as known
    for search in tl.range(0, 2):
        by_count = search == 0
        active = (by_count & has_k) | ((search == 1) & has_p)
        old_cut, old_tie = low, tie
        high = key_of(best) + 1
        c_high = 0
        m_low, m_high = total * 0, total * 0
        need = tl.where(total < 0, -1.0, top_p * total)
        if active & (search == 1) & (total >= 0) & (whole == 0):
            # Tokens of less than (1 - top_p) / n of the total are not needed, all together.
            tail = ((1.0 - top_p) * total / num_left).to(tl.float32)
            lowest = best + tl.log2(tl.maximum(tail, 1e-37)) / rate - slack
            low = tl.maximum(low, key_of(tl.minimum(lowest, best)))
        passes = 0
        going = active & (whole == 0)
        while going:
            low, high, c_low, c_high, m_low, m_high, need = narrow(
                row_logits, vocab_size, best, rate, min_p, low, high, c_high, m_high,
                0, total * 0, by_count, top_k, need, top_p, passes < 3, LANES,
            )  # fmt: skip
            passes += 1
            going = (high - low > 1) & (c_low > CAPACITY) & (c_low - c_high > CAPACITY)
        c_base, m_base = 0, total * 0
        copied = whole
        if active & (whole == 0) & ((c_low <= CAPACITY) | (c_low - c_high <= CAPACITY)):
            whole = c_low <= CAPACITY
            copied = True
            if whole == 0:
                c_base, m_base = c_high, m_high
            end = tl.where(whole, float("inf"), value_of(high))
            size = copy_out(
                row_logits, ids, vocab_size, value_of(low), end, values, ids, False, TILE
            )
            tl.debug_barrier()
        going = active & copied & (high - low > 1) & (c_low - c_high > PAIRS)
        while going:
            low, high, c_low, c_high, m_low, m_high, need = narrow(
                values, size, best, rate, min_p, low, high, c_high, m_high,
                c_base, m_base, by_count, top_k, need, top_p, passes < 4, LANES,
            )  # fmt: skip
            passes += 1
            going = (high - low > 1) & (c_low - c_high > PAIRS)
        if active:
            low, tie, num_left, total, c_low = _settle(
                row_logits, vocab_size, values, ids, size, copied, best, rate, min_p, low, high,
                c_low, c_high, m_low, m_high, by_count, top_k, need, CAPACITY, PAIRS, TILE,
            )  # fmt: skip
            if low == old_cut:
                tie = tl.minimum(tie, old_tie)
    cut = value_of(low)
    number = tl.load(numbers + row)
    token = 0
    if sane:
        if whole:
            token = _invert(
                values, ids, size, best, rate, min_p, cut, tie, number, total, True, TILE
            )
        else:
            total = tl.where(has_k | has_p, total, -1.0)
            token = _invert(
                row_logits, ids, vocab_size, best, rate, min_p, cut, tie, number, total, False, TILE
            )
    tl.store(token_ids + row, token)
    if cuts is not None:
        tl.store(cuts + row, cut)
        tl.store(ties + row, tie)


def top_scratch(max_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For `draw_top`: values float32 and ids int32, each [min(max_rows, MAX_ROWS), CAPACITY +
    PAIRS]."""
    shape = (min(max_rows, MAX_ROWS), CAPACITY + PAIRS)
    return (
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
    )


def draw_top(
    logits: Tensor, rows: Tensor, rates: Tensor, min_ps: Tensor, top_ks: Tensor, top_ps: Tensor,
    numbers: Tensor, bests: Tensor, leasts: Tensor, totals: Tensor,
    scratch: tuple[Tensor, Tensor], token_ids: Tensor,
    cuts: Tensor | None = None, ties: Tensor | None = None,
) -> None:  # fmt: skip
    """Draw for some rows of `logits` [num_rows, vocab] float32 (contiguous), after `draw_all`.

    rows: [num_top] int32, which; all else is by row of the logits: rates, bests, leasts, totals as
    in `draw_all`; min_ps float32; top_ks int32, 0 for none; top_ps, numbers float64. Kept are the
    tokens of at least `min_p` times the best one's weight, of these the `top_k` most probable
    (equal ones by id), and of these the first that reach `top_p` of their weight. Writes
    token_ids [num_rows] int64 and, for who wants to look, cuts (float32) and ties (int32): kept are
    logits above the cut, and equal ones of ids up to the tie.
    """
    assert logits.is_contiguous() and logits.dtype == torch.float32
    assert rows.dtype == top_ks.dtype == torch.int32
    assert top_ps.dtype == numbers.dtype == totals.dtype == torch.float64
    values, ids = scratch
    for first in range(0, len(rows), len(values)):
        some = rows[first : first + len(values)]
        _draw_top[(len(some),)](
            logits, some, rates, min_ps, top_ks, top_ps, numbers, bests, leasts, totals,
            values, ids, token_ids, cuts, ties, logits.shape[1],
            CAPACITY=values.shape[1] - PAIRS, PAIRS=PAIRS, LANES=_LANES, TILE=_TILE,
            num_warps=_WARPS, maxnreg=_MAX_REGISTERS,
        )  # fmt: skip
