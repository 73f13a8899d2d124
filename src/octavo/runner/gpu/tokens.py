"""Tokens that were sampled lately, of all sequences in one array.

A step's tokens go there at once, however many there are; what a sequence has there moves to the
sequence itself when its part of the array is full, or somebody asks for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octavo.runner.input_batch import Ints, SeqState

_WIDTH = 64
"""Tokens of each row: a power of two."""


class Sampled(NamedTuple):
    """Who samples in a step."""

    seq_ids: list[int]
    rows: Ints
    """Their rows of the tables."""
    positions: Ints
    """Of the tokens that they sample."""
    tenures: Ints
    """See `RecentTokens.tenures`."""


_NONE: Ints = np.zeros(0, dtype=np.int64)
NOBODY = Sampled([], _NONE, _NONE, _NONE)


class RecentTokens:
    """By row of the tables the last tokens of the sequence that has it."""

    def __init__(self, max_num_seqs: int) -> None:
        self._tokens = np.zeros((max_num_seqs, _WIDTH), dtype=np.int64)
        # A token's place is its position modulo the width.
        self._num_known = np.zeros(max_num_seqs, dtype=np.int64)
        # Tokens of the sequence, those here and those before.
        self._states: list[SeqState | None] = [None] * max_num_seqs
        self._tenures = np.zeros(max_num_seqs, dtype=np.int64)
        # How often each row has changed hands.

    def tenures(self, rows: Ints) -> Ints:
        """Tells later who had these rows now."""
        return self._tenures[rows]

    def begin(self, state: SeqState) -> None:
        """A sequence has got its row."""
        self._states[state.row] = state
        self._num_known[state.row] = state.num_tokens
        self._tenures[state.row] += 1

    def end(self, state: SeqState) -> None:
        """It gives its row back."""
        self.move(state)
        self._states[state.row] = None
        self._tenures[state.row] += 1

    def take(self, sampled: Sampled, token_ids: Ints) -> Ints:
        """Their tokens are known. Returns the places of those who have given their rows back since,
        and whose tokens are not taken."""
        rows, positions = sampled.rows, sampled.positions
        is_here = self._tenures[rows] == sampled.tenures
        if not is_here.all():
            rows, positions, token_ids = rows[is_here], positions[is_here], token_ids[is_here]
        assert (self._num_known[rows] == positions).all(), "tokens come in the order of positions"
        places = positions % _WIDTH
        self._tokens[rows, places] = token_ids
        self._num_known[rows] = positions + 1
        for row in rows[places == _WIDTH - 1].tolist():
            state = self._states[row]
            assert state is not None, f"nobody has row {row}"
            self.move(state)
        gone: Ints = (~is_here).nonzero()[0]
        return gone

    def move(self, state: SeqState) -> None:
        """All tokens of a sequence that has a row are in the sequence itself."""
        first, end = state.num_tokens, int(self._num_known[state.row])
        if first >= end:  # beams are told their tokens one by one
            return
        place = first % _WIDTH
        state.extend(self._tokens[state.row, place : place + end - first])
