"""Log probability and rank of one token a row, in one pass over the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.gpu.sampling import TILE, Runs, num_tiles

_BY_ROW = ["rows", "token_rows", "token_ids", "logprobs", "ranks", "tops", "log_sums"]


@triton.jit(do_not_specialize_on_alignment=_BY_ROW[:3])
def _look(
    logits, rows, token_rows, token_ids, best, sums, above, vocab_size, num_tiles,
    TILE: tl.constexpr,
):  # fmt: skip
    """Of each run of TILE tokens: best value, sum(exp(x - best)), tokens above the row's own."""
    tile, place = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + place).to(tl.int64) * vocab_size
    own = tl.load(logits + row + tl.load(token_ids + tl.load(token_rows + place)))
    at = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row + at, mask=at < vocab_size, other=-float("inf"))
    top = tl.max(x, axis=0)
    out = place * num_tiles + tile
    tl.store(best + out, top)
    weights = tl.where(x > -float("inf"), tl.exp(x - top), 0.0)
    tl.store(sums + out, tl.sum(weights, axis=0))
    tl.store(above + out, tl.sum((x > own).to(tl.int32), axis=0))


@triton.jit(do_not_specialize_on_alignment=_BY_ROW)
def _tell(
    logits, rows, token_rows, token_ids, best, sums, above, logprobs, ranks, tops, log_sums,
    vocab_size, num_tiles, TILES: tl.constexpr,
):  # fmt: skip
    """A row's own: x - top - log_sum, and 1 + the number of tokens above."""
    place = tl.program_id(0)
    row = tl.load(rows + place).to(tl.int64) * vocab_size
    own = tl.load(logits + row + tl.load(token_ids + tl.load(token_rows + place)))
    lanes = tl.arange(0, TILES)
    held = lanes < num_tiles
    at = place * num_tiles + lanes
    value = tl.load(best + at, mask=held, other=-float("inf"))
    top = tl.max(value, axis=0)
    scale = tl.where(value > -float("inf"), tl.exp(value - top), 0.0).to(tl.float64)
    total = tl.sum(tl.load(sums + at, mask=held, other=0.0).to(tl.float64) * scale, axis=0)
    log_sum = tl.log(total).to(tl.float32)
    tl.store(logprobs + place, own - top - log_sum)
    tl.store(ranks + place, 1 + tl.sum(tl.load(above + at, mask=held, other=0), axis=0))
    tl.store(tops + place, top)
    tl.store(log_sums + place, log_sum)


def token_logprobs(
    logits: Tensor, rows: Tensor, token_rows: Tensor, token_ids: Tensor, runs: Runs,
    logprobs: Tensor, ranks: Tensor, tops: Tensor, log_sums: Tensor,
) -> None:  # fmt: skip
    """Log probability and rank of token `token_ids[token_rows[i]]` in row `rows[i]` of the logits.

    logits: [num_rows, vocab] float32, contiguous; rows, token_rows: [n] int32; token_ids: int64;
    runs: scratch of at least as many rows. Written, all [n]: logprobs float32, ranks int32 (1 +
    tokens strictly above), and what other tokens' logprobs are made of: x - tops - log_sums.
    """
    num, vocab_size = len(rows), logits.shape[1]
    tiles = num_tiles(vocab_size)
    assert logits.is_contiguous() and logits.dtype == torch.float32
    assert len(runs.best) >= num and runs.best.shape[1] == tiles and len(token_rows) == num
    if not num:
        return
    best, above, _, sums = runs
    _look[(tiles, num)](
        logits, rows, token_rows, token_ids, best, sums, above, vocab_size, tiles,
        TILE=TILE, num_warps=4,
    )  # fmt: skip
    _tell[(num,)](
        logits, rows, token_rows, token_ids, best, sums, above, logprobs, ranks, tops, log_sums,
        vocab_size, tiles, TILES=triton.next_power_of_2(tiles), num_warps=1,
    )  # fmt: skip
