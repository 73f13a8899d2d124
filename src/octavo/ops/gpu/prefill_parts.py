"""What prefill over the pool and over a step's own keys and values have in common."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)


def score_factors(scale: float, soft_cap: float) -> tuple[float, float]:
    """`fold_tile`'s scale and soft_cap."""
    if soft_cap > 0.0:
        return 2.0 * LOG2_E * scale / soft_cap, soft_cap * LOG2_E
    return scale * LOG2_E, 0.0


@triton.jit
def fold_tile(
    scores, v, acc, best, total, start, row_positions, slopes, scale, soft_cap, window,
    MASKED: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys joins the running softmax of its rows.

    With s the scores times `scale` (which includes log2 e): best' = max(best, max_j s_j),
    total' = total 2^(best - best') + sum_j 2^(s_j - best'), acc' alike with v_j. With SOFT_CAP,
    s_j is `soft_cap` tanh(scores_j scale), and the caller's `scale` and `soft_cap` are the factors
    inside and outside. With ALIBI, slopes [ROWS] (which include log2 e) times key less row position
    are added.

    scores [ROWS, TILE] float32, v [TILE, DIM], acc [ROWS, DIM], best and total [ROWS].
    """
    if SOFT_CAP:
        # tanh(x) = 1 - 2 / (1 + 2^(2 x log2 e)); the factor 2 log2 e is in `scale`.
        scores = soft_cap - 2.0 * soft_cap / (1.0 + tl.exp2(scores * scale))
        factor = 1.0
    elif ALIBI:
        scores = scores * scale
        factor = 1.0
    else:
        factor = scale
    if ALIBI:
        distance = (start + tl.arange(0, TILE))[None, :] - row_positions[:, None]
        scores += slopes[:, None] * distance.to(tl.float32)
    if MASKED:
        positions = (start + tl.arange(0, TILE))[None, :]
        seen = positions <= row_positions[:, None]
        if WINDOW:
            seen = seen & (positions > row_positions[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
    new_best = tl.maximum(best, tl.max(scores, 1) * factor)
    shift = new_best
    if MASKED and WINDOW:
        # A row may see nothing of its first tiles; inf - inf is no weight.
        shift = tl.where(new_best == -float("inf"), 0.0, new_best)
    weights = tl.exp2(scores * factor - shift[:, None])
    fade = tl.exp2(best - shift)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_best, total


@triton.jit
def row_slopes(alibi, heads):
    """`fold_tile`'s slopes of rows whose query heads are `heads`."""
    return tl.load(alibi + heads) * _LOG2_E


@triton.jit
def load_tile(
    keys, values, at, inside, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """K and V [TILE, DIM] at the offsets `at`; zeros past HEAD_DIM and, under MASKED, in rows that
    are not `inside`: 0 times NaN is NaN."""
    if MASKED:
        mask = inside[:, None]
        if DIM != HEAD_DIM:
            mask = mask & (tl.arange(0, DIM) < HEAD_DIM)[None, :]
        k = tl.load(keys + at, mask=mask, other=0.0)
        v = tl.load(values + at, mask=mask, other=0.0)
    elif DIM != HEAD_DIM:
        k = tl.load(keys + at, mask=(tl.arange(0, DIM) < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(values + at, mask=(tl.arange(0, DIM) < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(keys + at)
        v = tl.load(values + at)
    return k, v


@triton.jit
def key_bounds(
    lowest, highest, window, WINDOW: tl.constexpr, TILE: tl.constexpr, MASK_TILE: tl.constexpr
):  # fmt: skip
    """(low, begin, full) of a tile whose rows are at positions lowest to highest: every row sees
    all keys [begin, full); those of [low, begin), before the window, and of [full, highest] need
    masks."""
    begin, low = 0, 0
    if WINDOW:
        low = tl.maximum(lowest - window + 1, 0) // MASK_TILE * MASK_TILE
        begin = tl.cdiv(tl.maximum(highest - window + 1, 0), TILE) * TILE
        begin = tl.minimum(begin, (highest + MASK_TILE) // MASK_TILE * MASK_TILE)
    return low, begin, tl.maximum((lowest + 1) // TILE * TILE, begin)
