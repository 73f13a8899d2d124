"""What one step may spend, and what of it is set aside for others."""

from __future__ import annotations

from itertools import accumulate

from octavo.sched.roster import Roster


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


class SetAside:
    """Tokens that are not for whoever is being served: those who run behind it get one each."""

    __slots__ = ("_counted_at", "_counts", "_plan_ahead", "_roster")

    def __init__(self, roster: Roster, *, plan_ahead: bool) -> None:
        self._roster = roster
        self._plan_ahead = plan_ahead
        self._counts: list[int] = []
        """By number of the last ones in running: how many of them want a token."""
        self._counted_at = -1
        """When that was counted, see `_num_removed`; -1: not in this round."""

    def begin_round(self) -> None:
        """Those who run are about to be served, none of them is yet."""
        self._counted_at = -1

    def from_place(self, index: int) -> int:
        """How many of the running ones from there on will want a token in this step.

        Counted once for all places, and again after somebody has given way. To be asked of places
        that were not served yet."""
        running, num_removed = self._roster.running, self._num_removed
        if self._counted_at != num_removed:
            self._counted_at = num_removed
            ahead = self._plan_ahead
            wanting = (
                not seq.num_pending or (ahead and seq.may_go_ahead) for seq in reversed(running)
            )
            self._counts = list(accumulate(wanting, initial=0))
        return self._counts[len(running) - index]

    @property
    def _num_removed(self) -> int:
        """Changes whenever somebody runs no more."""
        return self._roster.num_preemptions + self._roster.num_ended
