"""Strides: stretches of steps in which nothing can change, taken in one go.

While nobody comes in, gives way, forks or ends, every step does the same to the same sequences:
one token more for each. A stride leaves all of memory and decisions exactly as those steps would,
one by one: block ids, the prefix tree, accounts, times, events. It makes no plans, so it is for
those who have no device to tell: simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from octavo.kv.manager import KVCacheManager
from octavo.request import FinishReason
from octavo.sched import sequence
from octavo.sched.costs import CostModel
from octavo.sched.planning import Planner
from octavo.sched.pressure import Pressure
from octavo.sched.roster import Roster
from octavo.sched.sequence import SeqUpdate


class QuietSteps(NamedTuple):
    """Steps in which nothing can change: all who run decode one token each."""

    num_steps: int
    """How many; after the last one somebody ends, or something may change."""
    num_seqs: int
    """Who runs: so many tokens are computed in each step."""
    num_tokens: int
    """Their tokens at the first step, those that it computes included; each step after it has
    `num_seqs` more."""
    is_open: bool
    """Whether somebody who came in line might be admitted at once: nobody else waits, or those
    who come may pass him."""


class Stride(NamedTuple):
    """Quiet steps that are taken, and how long they take."""

    times: Sequence[float]
    """When each of them begins."""
    end_s: float
    """When the last one ends."""
    compute_s: Sequence[float]
    """As in `StepResult`, one for each step."""


class Strider:
    """Finds quiet steps and takes them. To be asked only when no plan is under way."""

    def __init__(
        self,
        kv: KVCacheManager,
        roster: Roster,
        planner: Planner,
        pressure: Pressure,
        costs: CostModel,
    ) -> None:
        self._kv = kv
        self._roster = roster
        self._planner = planner
        self._pressure = pressure
        self._costs = costs

    def look(self) -> QuietSteps | None:
        """The quiet steps that come next; None if the next step has to be planned."""
        roster = self._roster
        running = roster.running
        if not running or roster.news or roster.waiting.is_shifting:
            return None
        most = self._pressure.most_quiet_steps()
        num_tokens = 0
        for seq in running:
            num = len(seq.token_ids)
            group = seq.group
            left = group.max_total_tokens - num
            if left < most:
                most = left
            # What an output token is in, nobody who waits can share: so room only shrinks.
            if (
                num - seq.num_computed_tokens != 1
                or seq.num_pending
                or num <= len(group.request.prompt_token_ids)
                or (group.is_family and not _is_plain(seq))
            ):
                return None
            num_tokens += num
        head = roster.waiting.head()
        if most < 1 or (head is not None and self._planner.why_blocked(head) is None):
            return None
        most = min(most, self._kv.most_quiet_steps([seq.seq_id for seq in running]))
        if most < 1:
            return None
        return QuietSteps(most, len(running), num_tokens, head is None or roster.may_pass)

    def take(self, stride: Stride, token_of: Callable[[int], int]) -> list[SeqUpdate]:
        """Take some or all of the quiet steps that `look` has just found.

        A sequence draws the same token, `token_of` its id, in each of them; it must be none that
        ends it, nor one that another sequence has. Returns the news of those that end with the
        last step.
        """
        times, end_s, compute_s = stride
        roster, num_steps = self._roster, len(times)
        running = roster.running
        roster.runner_was_told()
        ending = []
        for seq in running:
            token_ids, group = seq.token_ids, seq.group
            token_ids += [token_of(seq.seq_id)] * num_steps
            seq.num_computed_tokens += num_steps
            stats = group.stats
            stats.num_computed_tokens += num_steps
            metrics = stats.metrics
            metrics.num_generation_tokens += num_steps
            roster.num_output_tokens += num_steps
            assert metrics.first_token_s is not None, "who is quiet has drawn a token"
            metrics.last_token_s = end_s
            if len(token_ids) >= group.max_total_tokens:
                ending.append(seq)
        self._kv.advance([seq.seq_id for seq in running], times)
        roster.now_s = times[-1]
        head = roster.waiting.head()
        if head is not None:
            why = self._planner.why_blocked(head)
            assert why is not None, f"sequence {head.seq_id} came in during a stride"
            self._pressure.line_blocked(head, why)
        self._pressure.quiet_steps(num_steps)
        self._costs.observe_alike(len(running), [one for one in compute_s if one > 0])
        roster.now_s = end_s
        self._kv.set_time(end_s)
        updates = []
        for seq in ending:
            roster.end(seq, FinishReason.LENGTH)
            updates.append(seq.news((token_of(seq.seq_id),)))
        return updates


def _is_plain(seq: sequence.Sequence) -> bool:
    """Whether one of several is on its own: no beam, and nobody is forked from it."""
    group = seq.group
    return seq.search is None and group.carrier is not seq and not group.expected
