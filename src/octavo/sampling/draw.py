"""Drawing tokens by the inverse of the cumulative distribution, one uniform number a row.

A row without top_k and top_p draws in the order of the vocabulary: no sort, two passes. Otherwise
the most probable tokens are taken first, in a fixed order, and only a row whose candidates do not
reach `top_p` looks at more of them. Sums that decide are float64, and each row's result is the same
in whatever group it is drawn.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.layout import DrawGroup, DrawParams
from octavo.sampling.random import uniforms
from octavo.sampling.select import looks_at_all, rung_of, top_candidates

CHUNK_ELEMENTS = 1 << 19
"""Logits that are worked on at a time: bounds the memory, and stays within a CPU's cache."""

_BLOCK = 256


def rows_per_chunk(vocab_size: int) -> int:
    """Rows that are worked on at a time, at least one."""
    return max(1, CHUNK_ELEMENTS // vocab_size)


def rows_per_sort(vocab_size: int) -> int:
    """Rows that are sorted at a time: an element costs several times as much memory there."""
    return max(1, CHUNK_ELEMENTS // 4 // vocab_size)


def block_sums(weights: Tensor) -> Tensor:
    """[num_rows, ceil(vocab / 256)] float64: sums over runs of 256 tokens.

    Two steps on purpose: one reduction over a long row is split between threads differently for
    one row than for many, and its rounding would depend on the company.
    """
    num_rows, vocab_size = weights.shape
    num_blocks = vocab_size // _BLOCK
    whole = num_blocks * _BLOCK
    sums = weights[:, :whole].view(num_rows, num_blocks, _BLOCK).sum(dim=-1)
    if whole < vocab_size:
        rest = weights[:, whole:].sum(dim=-1, keepdim=True)
        sums = torch.cat([sums, rest], dim=1)
    return sums.to(torch.float64)


def draw(logits: Tensor, group: DrawGroup, out: Tensor) -> None:
    """Draw for every row of the group; `out[row]` (int64) is set for its rows.

    logits: [num_rows, vocab] float32 of the whole step, not changed. A row without a finite logit
    yields token 0.
    """
    positions = np.array([seq.num_output for seq in group.seqs], dtype=np.uint64)
    number = torch.from_numpy(uniforms(group.keys, positions)).to(logits.device)[:, None]
    vocab_size = logits.shape[1]
    sorts = looks_at_all(group.params.num_candidates, vocab_size)
    max_rows = rows_per_sort(vocab_size) if sorts else rows_per_chunk(vocab_size)
    for first, last in group.rows.chunks(max_rows):
        chunk = group.rows.take(logits, first, last)
        params = group.params.pick(slice(first, last))
        way = _draw_from_top if params.num_candidates else _draw_from_all
        out[group.rows.index[first:last]] = way(chunk, params, number[first:last])


def _weights(logits: Tensor, params: DrawParams) -> Tensor:
    """[n, vocab] float32: probabilities times a constant a row, the most probable token's being 1.

    `min_p` is relative to that token, so that here it is a plain threshold.
    """
    weights = logits - logits.amax(dim=-1, keepdim=True)
    weights.div_(params.temperature).exp_()
    if params.min_p is not None:
        weights.masked_fill_(weights < params.min_p, 0.0)
    return weights


def _invert(cumulative: Tensor, target: Tensor, total: Tensor) -> Tensor:
    """[n, 1] index of the first entry above `target`, an entry with weight of its own.

    cumulative: [n, m] rising; total: [n, 1] the entry that `target` [n, 1] stays below, also where
    rounding has brought it there.
    """
    below = torch.nextafter(total, torch.zeros_like(total))
    index = torch.searchsorted(cumulative, torch.minimum(target, below), right=True)
    return index.clamp_(max=cumulative.shape[1] - 1)


def _draw_from_all(logits: Tensor, params: DrawParams, number: Tensor) -> Tensor:
    weights = _weights(logits, params)
    cumulative = block_sums(weights).cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = number * total
    block = _invert(cumulative, target, total)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    last_id = logits.shape[1] - 1
    inside = weights.gather(1, ids.clamp(max=last_id)).to(torch.float64)
    inside.masked_fill_(ids > last_id, 0.0)
    within = inside.cumsum(dim=-1)
    drawn = block * _BLOCK + _invert(within, target - before, within[:, -1:])
    return torch.where(total > 0, drawn, 0)[:, 0]


def _draw_from_top(logits: Tensor, params: DrawParams, number: Tensor) -> Tensor:
    drawn, reached = _draw_from_candidates(logits, params, number)
    vocab_size = logits.shape[1]
    if params.top_k is not None or params.num_candidates == vocab_size or bool(reached.all()):
        return drawn
    # The one place where the host looks at a result: few rows get here, and they are small work.
    left = (~reached).nonzero()[:, 0]
    rung = rung_of(params.num_candidates + 1, vocab_size)
    for some in left.split(rows_per_sort(vocab_size)):
        more = params.pick(some, rung)
        drawn[some] = _draw_from_top(logits[some], more, number[some])
    return drawn


def _draw_from_candidates(
    logits: Tensor, params: DrawParams, number: Tensor
) -> tuple[Tensor, Tensor]:
    """([n] drawn, [n] whether the candidates suffice), out of the most probable tokens."""
    ids = top_candidates(logits, params.num_candidates)
    values = logits.gather(1, ids)
    weights = ((values - values[:, :1]).to(torch.float64) / params.temperature).exp_()
    if params.min_p is not None:
        weights.masked_fill_(weights < params.min_p, 0.0)
    if params.top_k is not None:
        rank = torch.arange(params.num_candidates, device=logits.device)
        weights.masked_fill_(rank >= params.top_k, 0.0)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    if params.top_k is None and params.num_candidates < logits.shape[1]:
        total = block_sums(_weights(logits, params)).sum(dim=-1, keepdim=True)
    enough = params.top_p * total
    last = (cumulative < enough).sum(dim=-1, keepdim=True)  # the token that reaches top_p
    reached = last[:, 0] < params.num_candidates
    last.clamp_(max=params.num_candidates - 1)
    kept = cumulative.gather(1, last)
    drawn = ids.gather(1, _invert(cumulative, number * kept, kept))
    return torch.where(kept > 0, drawn, 0)[:, 0], reached
