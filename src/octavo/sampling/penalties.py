"""Token counts for the penalties, kept per sequence as it grows, and applied sparsely."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.request import SamplerParams


class TokenCounts:
    """The distinct tokens of a sequence that a penalty looks at, with their output counts.

    Sparse: a sequence costs memory and time by its distinct tokens, not by the vocabulary.
    """

    __slots__ = ("_counts", "_ids", "_place", "_size")

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        ids = list(dict.fromkeys(prompt_token_ids))
        self._place = {token_id: place for place, token_id in enumerate(ids)}
        self._size = len(ids)
        capacity = max(64, 2 * len(ids))
        self._ids = np.zeros(capacity, dtype=np.int32)
        self._ids[: len(ids)] = ids
        self._counts = np.zeros(capacity, dtype=np.float32)

    @classmethod
    def for_params(
        cls, params: SamplerParams, prompt_token_ids: Iterable[int]
    ) -> TokenCounts | None:
        """Counts if these parameters penalise anything; the prompt matters to repetition only."""
        if params.repetition_penalty != 1.0:
            return cls(prompt_token_ids)
        if params.frequency_penalty or params.presence_penalty:
            return cls(())
        return None

    def count(self, token_id: int) -> None:
        """Count one output token."""
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = self._size
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._size += 1
        self._counts[place] += 1

    def places(self, token_ids: Iterable[int]) -> list[int | None]:
        """Where in `ids` each token is; None where it is not."""
        return [self._place.get(token_id) for token_id in token_ids]

    @property
    def ids(self) -> NDArray[np.int32]:
        """[num distinct] token ids; a view that the next `count` may change."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float32]:
        """[num distinct] times each was output; 0 for tokens of the prompt only."""
        return self._counts[: self._size]


def apply_penalties(
    logits: Tensor,
    rows: Sequence[int],
    params: Sequence[SamplerParams],
    seqs: Sequence[TokenCounts],
) -> None:
    """Penalise in place; `rows[i]` is the row of `logits` [num_rows, vocab] that i stands for.

    Repetition divides positive and multiplies negative logits of tokens in prompt or output
    (Keskar et al., "CTRL", 2019, section 4.1); then frequency is subtracted once a time a token
    was output, and presence once if it was output at all.
    """
    sizes = [len(seq.ids) for seq in seqs]
    if not sum(sizes):
        return
    starts = np.array(rows, dtype=np.int64) * logits.shape[1]
    place = np.repeat(starts, sizes) + np.concatenate([seq.ids for seq in seqs])
    where = torch.from_numpy(place).to(logits.device)
    counts = torch.from_numpy(np.concatenate([seq.counts for seq in seqs])).to(logits.device)

    def per_token(values: list[float]) -> Tensor:
        spread = np.repeat(np.array(values, dtype=np.float32), sizes)
        return torch.from_numpy(spread).to(logits.device)

    flat = logits.view(-1)
    values = flat[where]
    repetition = per_token([p.repetition_penalty for p in params])
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= per_token([p.frequency_penalty for p in params]) * counts
    values -= per_token([p.presence_penalty for p in params]) * (counts > 0)
    flat[where] = values
