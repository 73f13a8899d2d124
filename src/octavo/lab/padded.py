"""Request-level batches as FasterTransformer computes them: padded, until the longest has ended."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.attended import attended, attended_pairs
from octavo.lab.costs import StepCosts, StepShape
from octavo.plan import StepPlan


class PaddedBatch:
    """The time that one batch takes (the baseline of the paper's section 6.1).

    All prompts are computed in one go, padded to the longest; then every round computes a token of
    every row, those that have ended included, over a context as long as the longest prompt and
    what was generated. The scheduler's steps, in which prompts may come in chunks and who has
    ended is left out, are charged with the rounds that their furthest sequence has reached.
    """

    def __init__(
        self, costs: StepCosts, rows: list[tuple[int, int]], windows: Sequence[int] = (0,)
    ) -> None:
        """`rows`: of each request, how many sequences and prompt tokens. windows: see
        `attended`."""
        self._costs, self._windows = costs, windows
        self._num_rows = sum(num for num, _ in rows)
        self._max_input = max(num_input for _, num_input in rows)
        self._num_rounds = 0
        """Those that were charged."""
        self._num_prompt: dict[int, int] = {}
        self._num_output: dict[int, int] = {}
        """By sequence that has not ended, its tokens so far."""

    def step_s(self, plan: StepPlan) -> float:
        """What a planned step costs."""
        for seq_id in plan.finished:
            self.forget(seq_id)
        for new in plan.new_seqs:
            self._num_prompt[new.seq_id] = len(new.token_ids)
        for fork in plan.forks:
            self._num_prompt[fork.child_id] = self._num_prompt[fork.parent_id]
        for seq_id, start, num_tokens, _, _, sample, _, _ in plan.seqs:
            if sample:
                num_output = start + num_tokens - self._num_prompt[seq_id] + 1
                for drawing in (seq_id, *plan.extra_draws.get(seq_id, ())):
                    self._num_output[drawing] = num_output
        return self._reach(max(self._num_output.values(), default=0))

    def quiet_s(self) -> float:
        """What a step costs in which each sequence that has not ended computes a token."""
        for seq_id in self._num_output:
            self._num_output[seq_id] += 1
        return self._reach(max(self._num_output.values(), default=0))

    def forget(self, seq_id: int) -> None:
        """A sequence has ended."""
        self._num_output.pop(seq_id, None)

    def _reach(self, num_rounds: int) -> float:
        seconds = 0.0
        while self._num_rounds < num_rounds:
            self._num_rounds += 1
            seconds += self._costs.step_s(self._shape(self._num_rounds))
        return seconds

    def _shape(self, index: int) -> StepShape:
        rows, longest = self._num_rows, self._max_input
        if index == 1:
            pairs = rows * round(attended_pairs(0, longest, self._windows))
            return StepShape(rows * longest, pairs, 0, 0, rows, num_prompts=rows)
        return StepShape(
            0, 0, rows, round(rows * attended(longest + index - 1, self._windows)), rows
        )
