"""What one step may spend."""

from __future__ import annotations


class StepBudget:
    """Tokens and sequences that one step still has room for."""

    __slots__ = ("num_seqs_left", "num_tokens_left")

    def __init__(self, num_tokens: int, num_seqs: int) -> None:
        self.num_tokens_left = num_tokens
        self.num_seqs_left = num_seqs

    def take(self, num_tokens: int) -> None:
        """Spend one sequence's place and its tokens; 0 tokens: it runs, but not in this step."""
        self.num_tokens_left -= num_tokens
        self.num_seqs_left -= 1

    @property
    def is_open(self) -> bool:
        """Whether one more sequence can come in with at least one token."""
        return self.num_tokens_left > 0 and self.num_seqs_left > 0

    def check(self) -> None:
        """Nothing was overspent. Asked once a step, not by every sequence."""
        assert self.num_tokens_left >= 0 and self.num_seqs_left >= 0, "step budget overspent"
