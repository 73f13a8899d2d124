"""Beam search: which continuations finish, which go on, and when it is over.

The rules are those of transformers' `GenerationMixin._beam_search`, for the criteria
end-of-sequence and length; sums and penalised scores are rounded to float32 where it keeps float32
tensors. Beams that are not there yet score -1e9 there and are simply absent here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float
from typing import NamedTuple

from octavo.plan import BeamCandidate
from octavo.request import BeamSearchParams, FinishReason


class FinishedBeam(NamedTuple):
    """A hypothesis that is complete."""

    token_ids: tuple[int, ...]
    """The generated tokens; end-of-sequence is among them."""
    cum_logprob: float
    """Sum of their logprobs, a float32 value."""
    score: float
    """`cum_logprob / len(token_ids) ** length_penalty`, a float32 value: finished beams are ranked
    by it."""
    finish_reason: FinishReason


class BeamState:
    """One request's search: its running beams' scores and its best finished beams.

    The running beams' tokens are the caller's: `advance` says how to make the next beams of them.
    """

    def __init__(
        self, params: BeamSearchParams, eos_token_ids: frozenset[int], max_tokens: int
    ) -> None:
        """`max_tokens`: a beam of this many generated tokens is finished."""
        self._width = params.beam_width
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._max_tokens = max_tokens
        self.scores: tuple[float, ...] = (0.0,)
        """Sum of logprobs of each running beam, best first; before the first token there is one."""
        self.num_tokens = 0
        """Tokens that each running beam has generated."""
        self.finished: list[FinishedBeam] = []
        """At most `beam_width`, best first; among equals the earlier."""
        self.is_done = False

    @property
    def num_candidates(self) -> int:
        """How many of the best continuations `advance` looks at: enough to go on with
        `beam_width` beams even if every beam's end-of-sequence tokens are among them."""
        return max(2, 1 + len(self._eos_token_ids)) * self._width

    def advance(
        self, candidates: Sequence[BeamCandidate], outputs: Sequence[Sequence[int]]
    ) -> list[BeamCandidate]:
        """Take in a step's candidates; returns the next beams, best first.

        candidates: the best `num_candidates` continuations over all beams and tokens, best first.
        outputs: by beam, the tokens generated so far. A beam of the answer is its parent
        (`.beam`) and one token more; one parent may have several children or none. Empty when the
        search is over (`is_done`).
        """
        assert not self.is_done and len(outputs) == len(self.scores)
        self.num_tokens += 1
        at_length = self.num_tokens >= self._max_tokens
        going_on = []
        for rank, candidate in enumerate(candidates):
            is_eos = candidate.token_id in self._eos_token_ids
            if not is_eos and not at_length:
                going_on.append(candidate)
            elif rank < self._width:  # those beyond are only there to go on
                reason = FinishReason.STOP if is_eos else FinishReason.LENGTH
                token_ids = (*outputs[candidate.beam], candidate.token_id)
                self._finish(token_ids, candidate.score, reason)
        beams = going_on[: self._width]
        self.is_done = not beams or not self._can_improve(beams[0].score)
        if self.is_done:
            return []
        self.scores = tuple(beam.score for beam in beams)
        return beams

    def cut_short(self, outputs: Sequence[Sequence[int]]) -> None:
        """It cannot go on: the running beams finish as they are, as at the greatest length."""
        self.is_done = True
        if not self.num_tokens:
            return
        for token_ids, score in zip(outputs, self.scores, strict=True):
            self._finish(tuple(token_ids), score, FinishReason.LENGTH)

    def _finish(self, token_ids: tuple[int, ...], cum_logprob: float, reason: FinishReason) -> None:
        score = self._penalised(cum_logprob, len(token_ids))
        self.finished.append(FinishedBeam(token_ids, cum_logprob, score, reason))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[self._width :]

    def _can_improve(self, best_running: float) -> bool:
        """Whether a running beam may come to be among the best: by transformers' estimate of its
        final length (longer is better only if the penalty is positive), which "never" makes
        safe."""
        if len(self.finished) < self._width:
            return True
        if self._early_stopping is True:
            return False
        to_the_end = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_tokens if to_the_end else self.num_tokens
        return self._penalised(best_running, length) > self.finished[-1].score

    def _penalised(self, score: float, length: int) -> float:
        """`score / length ** length_penalty` in float32; never NaN."""
        try:
            divisor = c_float(length**self._length_penalty).value
        except OverflowError:
            divisor = math.inf
        if divisor == 0:
            return -math.inf if score < 0 else 0.0
        # A quotient of float32 values, rounded twice (float64, float32), is rounded correctly.
        quotient = c_float(score / divisor).value
        return -math.inf if math.isnan(quotient) else quotient
