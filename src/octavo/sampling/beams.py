"""Beam search's device work: the best continuations over all beams and the whole vocabulary.

One batched operation over the beam groups of a step. What becomes of the candidates - which end,
which go on - is the scheduler's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.plan import BeamCandidate
from octavo.sampling.draw import rows_per_chunk, rows_per_sort
from octavo.sampling.layout import RowSet
from octavo.sampling.select import looks_at_all, top_candidates

_MIN_TEMPERATURE = 1e-30
"""A smaller one would be 0 in float32, or nearly: it means the same."""


class BeamRows(NamedTuple):
    """The beams of one request as rows of a step's logits."""

    rows: tuple[int, ...]
    """Row of each beam, by beam index."""
    scores: tuple[float, ...]
    """Sum of logprobs of each beam so far (float32 values)."""
    num_candidates: int
    """How many of the best continuations are wanted."""
    temperature: float
    """The logits are divided by it; 0 leaves them as they are."""


def beam_candidates(logits: Tensor, groups: Sequence[BeamRows]) -> list[list[BeamCandidate]]:
    """For each group its best continuations, best first.

    logits: [num_rows, vocab] float32, not changed. A continuation's score is the beam's score plus
    `log_softmax(logits / temperature)` of the token, both float32: the arithmetic of transformers'
    beam search. Among equal scores the lower beam is first, then the lower token id. A group whose
    beams have fewer continuations than it wants gets all of them.
    """
    found: list[list[BeamCandidate]] = [[] for _ in groups]
    alike: dict[tuple[int, int, bool], list[int]] = {}
    for place, group in enumerate(groups):
        kind = (len(group.rows), group.num_candidates, group.temperature > 0)
        alike.setdefault(kind, []).append(place)
    vocab_size = logits.shape[1]
    for (width, num_candidates, _), places in alike.items():
        max_rows = _rows_at_once(min(num_candidates, vocab_size), vocab_size)
        at_once = max(1, max_rows // width)
        for first in range(0, len(places), at_once):
            some = places[first : first + at_once]
            for place, candidates in zip(
                some, _of_alike(logits, [groups[i] for i in some], max_rows), strict=True
            ):
                found[place] = candidates
    return found


def merge_bytes(num_rows: int, vocab_size: int, max_width: int) -> int:
    """Upper bound of what choosing among the candidates of single rows holds.

    max_width: of a group; up to seven end-of-sequence tokens are provided for.
    """
    return min(num_rows, max_width) * min(vocab_size, 8 * max_width) * 96


def _rows_at_once(num: int, vocab_size: int) -> int:
    sorts = looks_at_all(num, vocab_size)
    return rows_per_sort(vocab_size) if sorts else rows_per_chunk(vocab_size)


def _of_alike(logits: Tensor, groups: list[BeamRows], max_rows: int) -> list[list[BeamCandidate]]:
    """Candidates of groups of one width that want equally many, all with temperature or none."""
    width = len(groups[0].rows)
    per_row = min(groups[0].num_candidates, logits.shape[1])
    ids, scores = _of_rows(logits, groups, per_row, max_rows)
    # Side by side in the order (beam, place in the beam's list), which is the order among equals.
    ids, scores = ids.view(len(groups), -1), scores.view(len(groups), -1)
    best = top_candidates(scores, min(groups[0].num_candidates, width * per_row))
    columns = (best // per_row, ids.gather(1, best), scores.gather(1, best))
    return [
        list(map(BeamCandidate, *of_group))
        for of_group in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _of_rows(
    logits: Tensor, groups: list[BeamRows], per_row: int, max_rows: int
) -> tuple[Tensor, Tensor]:
    """([num_rows, per_row] token ids, the same of scores): each beam's best continuations."""
    device = logits.device
    rows = RowSet([row for group in groups for row in group.rows], device)
    before = torch.tensor(
        [score for group in groups for score in group.scores], dtype=torch.float32, device=device
    )[:, None]
    temperatures: Tensor | None = None
    if groups[0].temperature:
        values = [max(group.temperature, _MIN_TEMPERATURE) for group in groups for _ in group.rows]
        temperatures = torch.tensor(values, dtype=torch.float32, device=device)[:, None]
    ids, scores = [], []
    for first in range(0, len(rows), max_rows):
        piece = slice(first, first + max_rows)
        own = rows.take(logits, first, min(first + max_rows, len(rows)))
        if temperatures is not None:
            own = (own - own.amax(dim=-1, keepdim=True)).div_(temperatures[piece])
        # The order is that of the sums: rounding can make equal what the logits tell apart.
        sums = torch.log_softmax(own, dim=-1).add_(before[piece])
        ids.append(top_candidates(sums, per_row))
        scores.append(sums.gather(1, ids[-1]))
    return torch.cat(ids), torch.cat(scores)
