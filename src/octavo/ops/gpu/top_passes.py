"""Parts of `sampling_top`: passes over a row, or over what was copied out of it.

A bracket is held as keys: integers in the order of float32 values, without gaps.
"""

from __future__ import annotations

import triton
import triton.language as tl

_STAGES = tl.constexpr(4)


@triton.jit
def key_of(value):
    """int64 whose order is the float32's."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def value_of(key):
    """float32 of an int64 key."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, best, rate, min_p):
    """Probability over that of the best token; 0 under min_p."""
    weight = tl.exp2((x - best) * rate)
    return tl.where((x > -float("inf")) & (weight >= min_p), weight, 0.0)


@triton.jit
def _part(x, more, weight, more_weight, cut, count, mass):
    above, more_above = x >= cut, more >= cut
    count += tl.sum(above.to(tl.int32) + more_above.to(tl.int32), axis=1)
    # One conversion to float64 for eight values: it is slow.
    own = tl.where(above, weight, 0.0) + tl.where(more_above, more_weight, 0.0)
    mass += tl.sum(own, axis=1).to(tl.float64)
    return count, mass


@triton.jit
def _above(
    values, size, best, rate, min_p, t0, t1, t2, t3, t4, t5, t6, t7, LANES: tl.constexpr
):  # fmt: skip
    """Number and weight of the values at or above each of eight cuts."""
    at = tl.arange(0, LANES)[:, None] * 4 + tl.arange(0, 4)[None, :]
    c0 = tl.zeros([LANES], tl.int32)
    m0 = tl.zeros([LANES], tl.float64)
    c1, c2, c3, c4, c5, c6, c7 = c0, c0, c0, c0, c0, c0, c0
    m1, m2, m3, m4, m5, m6, m7 = m0, m0, m0, m0, m0, m0, m0
    for start in tl.range(0, size, LANES * 8, num_stages=_STAGES):
        ids = start + at
        x = tl.load(values + ids, mask=ids < size, other=-float("inf"))
        ids += LANES * 4
        y = tl.load(values + ids, mask=ids < size, other=-float("inf"))
        w = weight_of(x, best, rate, min_p)
        v = weight_of(y, best, rate, min_p)
        c0, m0 = _part(x, y, w, v, t0, c0, m0)
        c1, m1 = _part(x, y, w, v, t1, c1, m1)
        c2, m2 = _part(x, y, w, v, t2, c2, m2)
        c3, m3 = _part(x, y, w, v, t3, c3, m3)
        c4, m4 = _part(x, y, w, v, t4, c4, m4)
        c5, m5 = _part(x, y, w, v, t5, c5, m5)
        c6, m6 = _part(x, y, w, v, t6, c6, m6)
        c7, m7 = _part(x, y, w, v, t7, c7, m7)
    return (
        tl.sum(c0, 0), tl.sum(c1, 0), tl.sum(c2, 0), tl.sum(c3, 0),
        tl.sum(c4, 0), tl.sum(c5, 0), tl.sum(c6, 0), tl.sum(c7, 0),
        tl.sum(m0, 0), tl.sum(m1, 0), tl.sum(m2, 0), tl.sum(m3, 0),
        tl.sum(m4, 0), tl.sum(m5, 0), tl.sum(m6, 0), tl.sum(m7, 0),
    )  # fmt: skip


@triton.jit
def _cut(low, high, eighths, by_value):
    """A key inside the bracket: linear in the values, or in the keys."""
    first, last = value_of(low), value_of(high)
    linear = key_of(first + (last - first) * (eighths * 0.125))
    linear = tl.minimum(tl.maximum(linear, low), high)
    return tl.where(by_value, linear, low + ((high - low) * eighths) // 8)


@triton.jit
def _step(
    key, count, mass, by_count, top_k, need, low, high, c_low, c_high, m_low, m_high
):  # fmt: skip
    """A cut that holds enough becomes the lower end of the bracket, the first that does not the
    upper end."""
    holds = tl.where(by_count, count >= top_k, mass >= need)
    is_high = (holds == 0) & (key < high)
    high = tl.where(is_high, key, high)
    c_high = tl.where(is_high, count, c_high)
    m_high = tl.where(is_high, mass, m_high)
    is_low = holds & (key >= low)
    low = tl.where(is_low, key, low)
    c_low = tl.where(is_low, count, c_low)
    m_low = tl.where(is_low, mass, m_low)
    return low, high, c_low, c_high, m_low, m_high


@triton.jit
def narrow(
    values, size, best, rate, min_p, low, high, c_high, m_high, c_base, m_base,
    by_count, top_k, need, share, by_value, LANES: tl.constexpr,
):  # fmt: skip
    """One pass over the values: the bracket [low, high) of keys around the largest cut that holds
    `top_k` tokens, or weight `need`; need < 0: it is `share` of all weight from `low` on. Counts
    and weights at both ends come with it; c_base, m_base: of tokens above all of the values."""
    k1 = _cut(low, high, 1, by_value)
    k2 = _cut(low, high, 2, by_value)
    k3 = _cut(low, high, 3, by_value)
    k4 = _cut(low, high, 4, by_value)
    k5 = _cut(low, high, 5, by_value)
    k6 = _cut(low, high, 6, by_value)
    k7 = _cut(low, high, 7, by_value)
    c0, c1, c2, c3, c4, c5, c6, c7, m0, m1, m2, m3, m4, m5, m6, m7 = _above(
        values, size, best, rate, min_p, value_of(low), value_of(k1), value_of(k2), value_of(k3),
        value_of(k4), value_of(k5), value_of(k6), value_of(k7), LANES,
    )  # fmt: skip
    need = tl.where(need < 0, share * (m_base + m0), need)
    top_k -= c_base
    least = need - m_base
    c_low, c_high, m_low, m_high = c0, c_high - c_base, m0, m_high - m_base
    k0 = low
    low, high, c_low, c_high, m_low, m_high = _step(
        k0, c0, m0, by_count, top_k, least, low, high, c_low, c_high, m_low, m_high
    )
    low, high, c_low, c_high, m_low, m_high = _step(
        k1, c1, m1, by_count, top_k, least, low, high, c_low, c_high, m_low, m_high
    )
    low, high, c_low, c_high, m_low, m_high = _step(
        k2, c2, m2, by_count, top_k, least, low, high, c_low, c_high, m_low, m_high
    )
    low, high, c_low, c_high, m_low, m_high = _step(
        k3, c3, m3, by_count, top_k, least, low, high, c_low, c_high, m_low, m_high
    )
    low, high, c_low, c_high, m_low, m_high = _step(
        k4, c4, m4, by_count, top_k, least, low, high, c_low, c_high, m_low, m_high
    )
    low, high, c_low, c_high, m_low, m_high = _step(
        k5, c5, m5, by_count, top_k, least, low, high, c_low, c_high, m_low, m_high
    )
    low, high, c_low, c_high, m_low, m_high = _step(
        k6, c6, m6, by_count, top_k, least, low, high, c_low, c_high, m_low, m_high
    )
    low, high, c_low, c_high, m_low, m_high = _step(
        k7, c7, m7, by_count, top_k, least, low, high, c_low, c_high, m_low, m_high
    )
    return low, high, c_low + c_base, c_high + c_base, m_low + m_base, m_high + m_base, need


@triton.jit
def copy_out(
    values, ids, size, low, high, to_values, to_ids, HAS_IDS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Entries with low <= x < high, in their order; how many they are."""
    # Four to a thread: only their numbers are scanned across threads.
    at = tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    num = 0
    for start in tl.range(0, size, TILE, num_stages=_STAGES):
        place = start + at
        x = tl.load(values + place, mask=place < size, other=-float("inf"))
        token = place
        if HAS_IDS:
            token = tl.load(ids + place, mask=place < size, other=0)
        take = ((x >= low) & (x < high)).to(tl.int32)
        own = tl.sum(take, axis=1)
        before = num + tl.cumsum(own, axis=0) - own
        to = before[:, None] + tl.cumsum(take, axis=1) - 1
        tl.store(to_values + to, x, mask=take > 0)
        tl.store(to_ids + to, token, mask=take > 0)
        num += tl.sum(own, axis=0)
    return num


@triton.jit
def rank_of(
    values, ids, size, best, rate, min_p, low, c_high, m_high, by_count, top_k, need,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """(cut, tie, tokens kept, their weight, tokens not below the cut) of a bracket's few entries,
    each compared with each."""
    lanes = tl.arange(0, PAIRS)
    held = lanes < size
    x = tl.load(values + lanes, mask=held, other=-float("inf"))
    rank = tl.zeros([PAIRS], tl.int32)
    mass = tl.zeros([PAIRS], tl.float64)
    for start in tl.range(0, size, 8):
        j = start + tl.arange(0, 8)
        other = tl.load(values + j, mask=j < size, other=-float("inf"))
        weight = weight_of(other, best, rate, min_p)
        first = (other[None, :] > x[:, None]) | (
            (other[None, :] == x[:, None]) & (j[None, :] <= lanes[:, None])
        )
        rank += tl.sum(first.to(tl.int32), axis=1)
        mass += tl.sum(tl.where(first, weight[None, :], 0.0), axis=1).to(tl.float64)
    holds = held & tl.where(by_count, c_high + rank >= top_k, m_high + mass >= need)
    last = tl.min(tl.where(holds, rank, PAIRS + 1), axis=0)
    # Where none holds, all are kept.
    last = tl.minimum(last, size)
    is_last = held & (rank == last)
    cut = tl.max(tl.where(is_last, x, -float("inf")), axis=0)
    tie = tl.max(tl.where(is_last, tl.load(ids + lanes, mask=held, other=0), 0), axis=0)
    total = m_high + tl.max(tl.where(is_last, mass, 0.0), axis=0)
    above = c_high + tl.sum((held & (x >= cut)).to(tl.int32), axis=0)
    return cut, tie, c_high + last, total, above


@triton.jit
def nth_equal(values, ids, size, value, nth, HAS_IDS: tl.constexpr, TILE: tl.constexpr):
    """The id of the nth (from 1) entry that equals `value`."""
    lanes = tl.arange(0, TILE)
    seen = 0
    found = 2147483647
    for start in tl.range(0, size, TILE):
        at = start + lanes
        x = tl.load(values + at, mask=at < size, other=float("nan"))
        equal = (x == value).to(tl.int32)
        hit = (equal > 0) & (seen + tl.cumsum(equal, axis=0) == nth)
        token = at
        if HAS_IDS:
            token = tl.load(ids + at, mask=at < size, other=0)
        found = tl.minimum(found, tl.min(tl.where(hit, token, 2147483647), axis=0))
        seen += tl.sum(equal, axis=0)
    return found
