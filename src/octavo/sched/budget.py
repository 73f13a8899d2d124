"""What one step may spend."""

from __future__ import annotations


class StepBudget:
    """Tokens and seats that one step still has room for."""

    __slots__ = ("num_seats_left", "num_tokens_left")

    def __init__(self, num_tokens: int, num_seats: int) -> None:
        self.num_tokens_left = num_tokens
        self.num_seats_left = num_seats

    def take(self, num_tokens: int, num_seats: int = 1) -> None:
        """Spend a sequence's seat and its tokens; 0 tokens: it runs, but not in this step."""
        self.num_tokens_left -= num_tokens
        self.num_seats_left -= num_seats

    def check(self) -> None:
        """Nothing was overspent. Asked once a step, not by every sequence."""
        assert self.num_tokens_left >= 0 and self.num_seats_left >= 0, "step budget overspent"
