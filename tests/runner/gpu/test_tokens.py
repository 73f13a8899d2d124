"""Tokens that were sampled lately, in one array, against a list for each sequence."""

from __future__ import annotations

import random

import numpy as np

from octavo.runner.gpu.tokens import RecentTokens, Sampled
from octavo.runner.input_batch import SeqState


class Rows:
    """Sequences on few rows, and what they should have."""

    def __init__(self, num_rows: int) -> None:
        self.recent = RecentTokens(num_rows)
        self.free = list(range(num_rows))
        self.states: list[SeqState] = []
        self.expected: list[list[int]] = []
        self.on: dict[int, int] = {}
        """Sequence -> row."""

    def begin(self, prompt: list[int]) -> int:
        state = SeqState(prompt)
        self.states.append(state)
        self.expected.append(list(prompt))
        self.take_row(len(self.states) - 1)
        return len(self.states) - 1

    def take_row(self, seq: int) -> None:
        self.states[seq].row = self.on[seq] = self.free.pop()
        self.recent.begin(self.states[seq])

    def give_row(self, seq: int) -> None:
        self.recent.end(self.states[seq])
        self.free.append(self.on.pop(seq))
        self.states[seq].row = -1

    def sample(self, seqs: list[int], ahead: int = 0) -> Sampled:
        rows = np.array([self.on[seq] for seq in seqs], dtype=np.int64)
        positions = [len(self.expected[seq]) + ahead for seq in seqs]
        return Sampled(seqs, rows, np.array(positions), self.recent.tenures(rows))

    def take(self, sampled: Sampled, tokens: list[int]) -> None:
        gone = self.recent.take(sampled, np.array(tokens)).tolist()
        for place in gone:  # as the runner does
            self.states[sampled.seq_ids[place]].append(tokens[place])
        assert gone == [i for i, seq in enumerate(sampled.seq_ids) if seq not in self.on]
        for seq, token in zip(sampled.seq_ids, tokens, strict=True):
            self.expected[seq].append(token)

    def check(self, seq: int) -> None:
        state = self.states[seq]
        if state.row >= 0:
            self.recent.move(state)
        assert state.tokens(0, state.num_tokens).tolist() == self.expected[seq]


def test_any_lengths_come_back_whole() -> None:
    rng, rows = random.Random(0), Rows(4)
    seqs = [rows.begin([rng.randrange(99) for _ in range(num)]) for num in (1, 63, 64, 130)]
    for _ in range(300):
        some = [seq for seq in seqs if rng.random() < 0.7]
        if some:
            rows.take(rows.sample(some), [rng.randrange(99) for _ in some])
        if rng.random() < 0.05:
            rows.check(rng.choice(seqs))
    for seq in seqs:
        rows.check(seq)


def test_a_token_that_comes_after_its_row_was_given_back_goes_to_its_own_sequence() -> None:
    rows = Rows(2)
    first, second = rows.begin([1, 2]), rows.begin([3])
    rows.take(rows.sample([first, second]), [10, 20])
    under_way = rows.sample([first, second])
    rows.give_row(first)
    third = rows.begin([7] * 5)
    assert rows.on[third] == under_way.rows[0]
    rows.take(under_way, [11, 21])
    rows.take(rows.sample([third]), [30])
    rows.give_row(second)
    rows.take_row(first)
    rows.take(rows.sample([third, first]), [31, 12])
    for seq, tokens in ((first, [1, 2, 10, 11, 12]), (second, [3, 20, 21]), (third, [7] * 5)):
        assert rows.expected[seq][: len(tokens)] == tokens
        rows.check(seq)
