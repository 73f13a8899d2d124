"""The rows of a step grouped by what they need, so that a row pays for its own features only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.sampling.select import rung_of

if TYPE_CHECKING:
    from octavo.sampling.batch import SeqSampling


class RowSet:
    """Some rows of the logits, in ascending order; a run of consecutive ones is never copied."""

    def __init__(self, rows: Sequence[int], device: torch.device) -> None:
        self.rows = list(rows)
        self._consecutive = self.rows == list(
            range(self.rows[0], self.rows[0] + len(self.rows)) if self.rows else ()
        )
        self.index = torch.tensor(self.rows, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, logits: Tensor, first: int, last: int) -> Tensor:
        """Rows `first .. last - 1` of the set: [last - first, vocab], a view where possible."""
        if self._consecutive:
            return logits[self.rows[0] + first : self.rows[0] + last]
        return logits[self.index[first:last]]

    def copy(self, logits: Tensor) -> Tensor:
        """[len(self), vocab]: the set's rows, safe from what happens to `logits`."""
        return logits[self.index]

    def renumbered(self) -> RowSet:
        """The rows of `copy`'s answer."""
        return RowSet(range(len(self.rows)), self.index.device)

    def chunks(self, max_rows: int) -> Iterator[tuple[int, int]]:
        """Bounds that cut the set into pieces of at most `max_rows` rows."""
        for first in range(0, len(self.rows), max_rows):
            yield first, min(first + max_rows, len(self.rows))


@dataclass(frozen=True, slots=True)
class DrawParams:
    """The parameters of rows that draw in the same way, as columns."""

    num_candidates: int
    """How many of the most probable tokens to look at first; 0: draw from the whole row."""
    temperature: Tensor
    """[n, 1] float32."""
    min_p: Tensor | None
    """[n, 1] float32; None if no row has it."""
    top_k: Tensor | None
    """[n, 1] int64; None: no row has it. Else all have, and it is at most `num_candidates`."""
    top_p: Tensor
    """[n, 1] float64."""

    def pick(self, which: slice | Tensor, num_candidates: int | None = None) -> DrawParams:
        """The parameters of some of the rows."""
        return DrawParams(
            num_candidates=self.num_candidates if num_candidates is None else num_candidates,
            temperature=self.temperature[which],
            min_p=None if self.min_p is None else self.min_p[which],
            top_k=None if self.top_k is None else self.top_k[which],
            top_p=self.top_p[which],
        )


@dataclass(frozen=True, slots=True)
class DrawGroup:
    """Rows that draw in the same way."""

    rows: RowSet
    seqs: list[SeqSampling]
    keys: NDArray[np.uint64]
    """[n] stream keys."""
    params: DrawParams


@dataclass(frozen=True, slots=True)
class BiasGroup:
    """All logit biases of a step, flat: `logits.view(-1)[place] += value`."""

    place: Tensor
    """[num biases] int64."""
    value: Tensor
    """[num biases] float32."""


class RowLayout:
    """How a step with these sequences, in this order, is sampled."""

    def __init__(
        self,
        seq_ids: list[int],
        seqs: list[SeqSampling],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.seq_ids, self.seqs, self.device = seq_ids, seqs, device
        self.vocab_size = vocab_size
        self.all_plain = all(seq.plain for seq in seqs)
        """Greedy and nothing else: one argmax answers the step."""
        if self.all_plain:
            return
        rows = range(len(seqs))
        self.greedy = RowSet([r for r in rows if seqs[r].greedy], device)
        self.draws = self._draw_groups([r for r in rows if not seqs[r].greedy])
        self.allowed = [
            (r, torch.tensor(ids, dtype=torch.int64, device=device))
            for r in rows
            if (ids := seqs[r].params.allowed_token_ids) is not None
        ]
        self.bannable = [
            r
            for r in rows
            if seqs[r].params.bad_words
            or (seqs[r].params.min_tokens and seqs[r].params.min_tokens_masked_ids)
        ]
        self.bias = self._bias()
        self.penalised = [r for r in rows if seqs[r].counts is not None]
        self.logprobs = [r for r in rows if seqs[r].params.num_logprobs is not None]
        self.num_top = max((seqs[r].params.num_logprobs or 0 for r in self.logprobs), default=0)
        changed = {r for r, _ in self.allowed} | set(self.bannable) | set(self.penalised)
        changed |= {r for r in rows if seqs[r].params.logit_bias}
        # Logprobs come from the raw logits, and the features above overwrite them.
        self.raw_logprobs = RowSet([r for r in self.logprobs if r in changed], device)
        self.late_logprobs = RowSet([r for r in self.logprobs if r not in changed], device)

    def _draw_groups(self, rows: list[int]) -> list[DrawGroup]:
        groups: dict[tuple[int, bool], list[int]] = {}
        for row in rows:
            params = self.seqs[row].params
            has_top_k = 0 < params.top_k < self.vocab_size
            if has_top_k:
                num_candidates = rung_of(params.top_k, self.vocab_size)
            else:
                num_candidates = rung_of(1, self.vocab_size) if params.top_p < 1.0 else 0
            groups.setdefault((num_candidates, has_top_k), []).append(row)
        return [self._draw_group(key, rows) for key, rows in groups.items()]

    def _draw_group(self, key: tuple[int, bool], rows: list[int]) -> DrawGroup:
        num_candidates, has_top_k = key
        seqs = [self.seqs[row] for row in rows]
        params = [seq.params for seq in seqs]

        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)[:, None]

        has_min_p = any(p.min_p for p in params)
        return DrawGroup(
            rows=RowSet(rows, self.device),
            seqs=seqs,
            keys=np.array([seq.key for seq in seqs], dtype=np.uint64),
            params=DrawParams(
                num_candidates=num_candidates,
                temperature=column([p.temperature for p in params], torch.float32),
                min_p=column([p.min_p for p in params], torch.float32) if has_min_p else None,
                top_k=column([p.top_k for p in params], torch.int64) if has_top_k else None,
                top_p=column([p.top_p for p in params], torch.float64),
            ),
        )

    def _bias(self) -> BiasGroup | None:
        place: list[int] = []
        value: list[float] = []
        for row, seq in enumerate(self.seqs):
            for token_id, bias in seq.params.logit_bias:
                place.append(row * self.vocab_size + token_id)
                value.append(bias)
        if not place:
            return None
        return BiasGroup(
            torch.tensor(place, dtype=torch.int64, device=self.device),
            torch.tensor(value, dtype=torch.float32, device=self.device),
        )
