"""One step's logits in, one token a row out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.errors import NumericsError
from octavo.plan import TokenLogprobs
from octavo.request import MAX_BEAM_WIDTH
from octavo.sampling.adjust import adjust
from octavo.sampling.batch import SamplingState
from octavo.sampling.beams import merge_bytes
from octavo.sampling.draw import draw, rows_per_chunk, rows_per_sort
from octavo.sampling.layout import RowLayout
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.select import argmax

_BYTES_PER_ELEMENT = 32
"""Most that the work on one piece of the logits holds at a time, for each of its elements."""
_BYTES_PER_SORTED_ELEMENT = 72
"""The same where whole rows of packed 64-bit integers are sorted."""


def not_finite(seq_ids: list[int]) -> NumericsError:
    """The error of sequences whose logits are not finite."""
    return NumericsError(
        f"the model computed NaN or infinity for sequences {seq_ids}: its weights are damaged, or "
        "too large for their type (try --dtype float32)"
    )


class Sampled(NamedTuple):
    """What a step's rows drew, in the order of the rows."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    """None for a row that asked for none."""


def sample(logits: Tensor, rows: Sequence[int], state: SamplingState) -> Sampled:
    """Sample one token for each row, and its logprobs where asked for.

    logits: [num_rows, vocab] float32, contiguous; used up (masks and penalties are written into
    it). rows: the sequence of each row. `state` is not advanced: `state.append` does that.

    Order: raw logprobs are kept aside; allowed ids, bad words, `min_tokens`, logit bias, penalties
    (repetition, frequency, presence), temperature, min_p, top_k, top_p, draw. Where bad words and
    `min_tokens` forbid every allowed token they are lifted for that token; a row without any
    finite logit yields token 0.
    """
    layout = state.layout(rows, logits.device)
    if layout.all_plain:
        return Sampled(argmax(_checked(logits, layout)).tolist(), [None] * len(layout.seqs))
    # Rows that are about to be changed and want logprobs are the only ones copied.
    raw = layout.raw_logprobs.copy(logits)
    token_ids = choose_tokens(logits, rows, state)
    logprobs: list[TokenLogprobs | None] = [None] * len(layout.seqs)
    for group, source in ((layout.late_logprobs, logits), (layout.raw_logprobs, raw)):
        if len(group):
            within = group if source is logits else group.renumbered()
            num_top = [layout.seqs[row].params.num_logprobs or 0 for row in group.rows]
            chosen = token_ids[group.index]
            for row, found in zip(
                group.rows, token_logprobs(source, within, chosen, num_top), strict=True
            ):
                logprobs[row] = found
    return Sampled(token_ids.tolist(), logprobs)


def choose_tokens(logits: Tensor, rows: Sequence[int], state: SamplingState) -> Tensor:
    """[num_rows] int64 on the logits' device: `sample` without logprobs and without lists."""
    layout = state.layout(rows, logits.device)
    logits = _checked(logits, layout)
    if layout.all_plain:
        return argmax(logits)
    adjust(logits, layout)
    out = torch.zeros(len(layout.seqs), dtype=torch.int64, device=logits.device)
    for first, last in layout.greedy.chunks(rows_per_chunk(layout.vocab_size)):
        out[layout.greedy.index[first:last]] = argmax(layout.greedy.take(logits, first, last))
    for group in layout.draws:
        draw(logits, group, out)
    return out


def _checked(logits: Tensor, layout: RowLayout) -> Tensor:
    expected = (len(layout.seqs), layout.vocab_size)
    assert tuple(logits.shape) == expected, f"logits {tuple(logits.shape)}, expected {expected}"
    assert logits.dtype == torch.float32 and logits.is_contiguous(), "logits: contiguous float32"
    return logits


def sampling_bytes(num_rows: int, vocab_size: int) -> int:
    """Upper bound of what sampling a step holds besides the logits themselves.

    All rows may want logprobs and change their logits (each is copied once). Masks, counts and
    results are small and covered by the piece's bound.
    Beams, first tokens of further samples (a piece's rows again, and their copy for logprobs) and
    ordinary rows come one after the other. There may be more further samples than rows.
    """
    piece = rows_per_chunk(vocab_size)
    per_sort = rows_per_sort(vocab_size) * _BYTES_PER_SORTED_ELEMENT
    at_work = vocab_size * max(piece * _BYTES_PER_ELEMENT, per_sort)
    copies = vocab_size * 4 * max(num_rows, 2 * piece)
    return at_work + max(copies, merge_bytes(num_rows, vocab_size, MAX_BEAM_WIDTH))
