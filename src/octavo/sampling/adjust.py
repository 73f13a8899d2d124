"""What changes the logits of single tokens: masks, biases, penalties. In place, sparsely."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.sampling.layout import RowLayout
from octavo.sampling.penalties import TokenCounts, apply_penalties

if TYPE_CHECKING:
    from octavo.sampling.batch import SeqSampling


def adjust(logits: Tensor, layout: RowLayout) -> None:
    """Apply, in this order: allowed ids, bad words, `min_tokens`, bias, penalties.

    logits: [num_rows, vocab] float32, contiguous, overwritten.
    """
    for row, ids in layout.allowed:
        kept = logits[row, ids]
        logits[row].fill_(-math.inf)
        logits[row, ids] = kept
    if layout.bannable:
        _ban(logits, layout)
    if layout.bias is not None:
        logits.view(-1).index_add_(0, layout.bias.place, layout.bias.value)
    if layout.penalised:
        counts: list[TokenCounts] = []
        for row in layout.penalised:
            count = layout.seqs[row].counts
            assert count is not None
            counts.append(count)
        params = [layout.seqs[row].params for row in layout.penalised]
        apply_penalties(logits, layout.penalised, params, counts)


def _ban(logits: Tensor, layout: RowLayout) -> None:
    """Mask what bad words and `min_tokens` forbid at each row's position."""
    places: list[int] = []
    for row in layout.bannable:
        banned = bans_of(layout.seqs[row], layout.vocab_size)
        places.extend(row * layout.vocab_size + token_id for token_id in banned)
    if places:
        index = torch.tensor(places, dtype=torch.int64, device=logits.device)
        logits.view(-1).index_fill_(0, index, -math.inf)


def bans_of(seq: SeqSampling, vocab_size: int) -> set[int]:
    """Tokens that bad words and `min_tokens` forbid a sequence at its position.

    None where they would leave it nothing: they are lifted for this one token, for a request must
    go on, and `allowed_token_ids` is the stronger promise.
    """
    banned = set(seq.banned_ids())
    allowed = seq.params.allowed_token_ids
    choices = vocab_size if allowed is None else len(set(allowed))
    if len(banned) >= choices and not (
        set(range(vocab_size) if allowed is None else allowed) - banned
    ):
        return set()
    return banned
