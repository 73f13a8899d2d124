"""A model that only counts: what a step yields when nobody computes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from ctypes import c_float
from dataclasses import dataclass, field

from octavo.attended import counts_within
from octavo.lab.costs import StepShape
from octavo.plan import BeamCandidate, BeamDraw, SeqResult, StepPlan, StepResult

TokenOf = Callable[[int, int], int]
"""The token that a sequence has at a position: recorded ones, for instance."""

_OUT_OF_REACH = 30.0
"""Of a continuation's logprob, how much lower: it is chosen only if there are too few others."""


def own_token(seq_id: int) -> int:
    """The one token that a sequence draws, always: negative, so that it is in no prompt and ends
    nothing, and no other sequence's, so that nobody shares what follows it by chance."""
    return -1 - seq_id


@dataclass(slots=True)
class BeamModel:
    """Continuations for beam searches, drawn from a seeded generator.

    What beams share is decided by how often one of them has several of the next ones. Here most
    tokens are certain: a beam's next token is open in `open_share` of the steps; then the logprob
    of its best continuation is minus an exponential of mean 1, and each further one's is lower by
    an exponential of mean `gap` times its rank; else the others are out of reach.

    The defaults are set so that blocks saved at lengths like Alpaca's come near the paper's at
    widths 2 / 4 / 6 (Fig. 15: 37.6 / 53.1 / 55.2 %; in `octavo lab paper` 36.6 / 54.4 / 60.1 %).
    More open steps, or nearer continuations, and beams descend from a common one sooner: they share
    more.
    """

    open_share: float = 0.24
    gap: float = 0.5
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    _num_drawn: int = 0

    def draw(self, draw: BeamDraw) -> list[BeamCandidate]:
        """The best continuations, as `StepResult.beams` wants them. All tokens are new ones."""
        exponential = self.rng.expovariate
        found: list[tuple[float, int]] = []
        is_first = len(draw.scores) == 1
        for beam, score in enumerate(draw.scores):
            is_open = is_first or self.rng.random() < self.open_share
            logprob = -exponential(1.0) if is_open else 0.0
            for rank in range(1, draw.num_candidates + 1):
                found.append((c_float(score + logprob).value, beam))
                logprob -= exponential(1 / (self.gap * rank)) if is_open else _OUT_OF_REACH
        found.sort(key=lambda one: (-one[0], one[1]))
        candidates = []
        for score, beam in found[: draw.num_candidates]:
            self._num_drawn += 1
            # Far below those of sequences that draw alone.
            candidates.append(BeamCandidate(beam, -(1 << 62) + self._num_drawn, score))
        return candidates


class NullModel:
    """Answers plans at once."""

    def __init__(self, tokens: TokenOf | None = None, beams: BeamModel | None = None) -> None:
        """`tokens` says what sequences draw; None: each its own token, over and over."""
        self._tokens = tokens
        self._beams = beams or BeamModel()

    @property
    def draws_own_tokens(self) -> bool:
        """Whether every sequence draws `own_token`."""
        return self._tokens is None

    def answer(self, plan: StepPlan, *, copy_s: float, compute_s: float) -> StepResult:
        """What came of a plan whose copies and computing took so long."""
        drawing_beams = {seq_id for draw in plan.beams for seq_id in draw.seq_ids}
        extra_draws, token_of = plan.extra_draws, self._tokens
        sampled: list[SeqResult] = []
        for seq_id, start, num_tokens, _, _, sample, _, _ in plan.seqs:
            if not sample or (drawing_beams and seq_id in drawing_beams):
                continue
            for drawing_id in (seq_id, *extra_draws.get(seq_id, ())) if extra_draws else (seq_id,):
                if token_of is None:
                    token_id = -1 - drawing_id
                else:
                    token_id = token_of(drawing_id, start + num_tokens)
                sampled.append(tuple.__new__(SeqResult, (drawing_id, token_id, None)))
        return StepResult(
            plan.step_id,
            sampled,
            beams=[self._beams.draw(draw) for draw in plan.beams],
            copy_s=copy_s,
            num_host_copies=plan.num_host_copies,
            compute_s=compute_s,
        )


def shape_of(plan: StepPlan, windows: Sequence[int] = (0,)) -> StepShape:
    """What is in a step. windows: see `attended`."""
    counts, num_host = counts_within(plan, windows), plan.num_host_copies
    return StepShape(
        *counts[:5], num_host, len(plan.copies) - num_host, num_prompts=counts.num_prompts
    )
