"""The beams of a request: sequences that fork and end in every step, and run all or none."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from octavo.plan import BeamCandidate, BeamDraw, SeqFork, StepPlan
from octavo.request import FinishReason
from octavo.sched.beams import BeamState
from octavo.sched.sequence import Sequence, SequenceGroup, SequenceStatus, SeqUpdate

if TYPE_CHECKING:
    from octavo.sched.roster import Roster


@dataclass(slots=True, eq=False)
class BeamSearch:
    """The beams of one request.

    They draw together, so all of them are in a step or none. Before the first token there is one,
    which runs the prompt. Either all run, or all wait (the request was preempted), or some came
    back: those compute all tokens but the last and wait for the others.
    """

    state: BeamState
    width: int
    beams: list[Sequence] = field(default_factory=list)
    """By beam index: best first. Empty once the search is over."""
    forks: list[SeqFork] = field(default_factory=list)
    """Of which the runner was not told."""
    appends: list[tuple[int, int]] = field(default_factory=list)
    """(sequence, token) of which the runner was not told."""
    num_made: int = 0
    """Sequences so far, dead ones included."""
    last_step_id: int = -1
    """The last plan in which one of them runs."""
    rejoin_at: int | None = None
    """Tokens that all beams have in common: one of them computes so many, and the others begin as
    its forks (`Pressure.restart`). None: each comes back by itself."""

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The beams that hold blocks, by place."""
        running = [beam for beam in self.beams if beam.status is SequenceStatus.RUNNING]
        return tuple(sorted(running, key=attrgetter("place")))

    @property
    def num_reserved_seats(self) -> int:
        """A search that runs has `width` seats, however many beams it has just now."""
        num_running = len(self.running)
        return self.width - num_running if num_running else 0

    @property
    def is_drawing(self) -> bool:
        """Whether candidates are being computed."""
        return self.beams[0].num_pending > 0

    @property
    def is_ready(self) -> bool:
        """Whether every beam runs and has only its last token to compute."""
        return all(
            beam.status is SequenceStatus.RUNNING
            and beam.num_computed_tokens == len(beam.token_ids) - 1
            for beam in self.beams
        )

    def num_to_compute(self, beam: Sequence) -> int:
        """Tokens that a beam may compute without the others. An only beam has nobody to wait
        for."""
        end = len(beam.token_ids) - (len(self.beams) > 1)
        if self.rejoin_at is not None:
            end = self.rejoin_at
        return end - beam.num_computed_tokens

    @property
    def num_common_tokens(self) -> int:
        """Tokens with which all beams begin; not the last ones, which they draw from."""
        texts = [beam.token_ids[:-1] for beam in self.beams]
        low, high = min(texts), max(texts)
        pairs = enumerate(zip(low, high, strict=False))
        return next((i for i, (a, b) in pairs if a != b), len(low))

    def tell(self, plan: StepPlan) -> None:
        """Put into a plan what the runner does not know of the beams. To be called with every
        plan in which one of them runs, so that a failed step takes the whole request along."""
        self.last_step_id = plan.step_id
        if not self.appends:
            return
        plan.forks.extend(self.forks)
        plan.appends.extend(self.appends)
        self.forks, self.appends = [], []
        for beam in self.beams:
            beam.known_to_runner = True

    def draw(self) -> BeamDraw:
        """What the runner is asked for."""
        seq_ids = tuple(beam.seq_id for beam in self.beams)
        return BeamDraw(seq_ids, self.state.scores, self.state.num_candidates)


class BeamKeeper:
    """Makes the next beams of what the runner found, and ends searches."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def advance(self, group: SequenceGroup, candidates: list[BeamCandidate]) -> Iterable[SeqUpdate]:
        """Take in a step's candidates; news only when the search is over. Beams that there was no
        room to copy, as some policies must, wait in line: see `Pressure.keep_whole`."""
        search, roster = group.search, self._roster
        assert search is not None
        beams = search.beams
        for beam in beams:
            beam.num_pending = 0
        metrics = group.stats.metrics
        metrics.last_token_s = roster.now_s
        if metrics.first_token_s is None:
            metrics.first_token_s = roster.now_s
        chosen = search.state.advance(candidates, self._outputs(group))
        if search.state.is_done:
            return self._end(group)

        children: list[list[int]] = [[] for _ in beams]
        for rank, continuation in enumerate(chosen):
            children[continuation.beam].append(rank)
        for beam, ranks in zip(beams, children, strict=True):
            if not ranks:
                roster.drop_beam(beam)  # before anyone forks: its blocks are free for them
        search.beams = [beams[continuation.beam] for continuation in chosen]
        for parent, ranks in zip(beams, children, strict=True):
            for rank in ranks[1:]:
                child = roster.fork_beam(parent)
                search.beams[rank] = child
                search.forks.append(_fork(parent, child))
        for beam, continuation in zip(search.beams, chosen, strict=True):
            beam.token_ids.append(continuation.token_id)
            search.appends.append((beam.seq_id, continuation.token_id))
        return ()

    def cut_short(self, group: SequenceGroup) -> Iterable[SeqUpdate]:
        """The pool has no more to give: the search ends with what it has."""
        assert group.search is not None
        group.search.state.cut_short(self._outputs(group))
        return self._end(group)

    def _outputs(self, group: SequenceGroup) -> list[list[int]]:
        assert group.search is not None
        num_prompt = len(group.request.prompt_token_ids)
        return [beam.token_ids[num_prompt:] for beam in group.search.beams]

    def _end(self, group: SequenceGroup) -> list[SeqUpdate]:
        search = group.search
        assert search is not None
        request_id, seq_id = group.request.request_id, group.sequences[0].seq_id
        updates = []
        for rank, beam in enumerate(search.state.finished):
            group.stats.metrics.num_generation_tokens += len(beam.token_ids)
            self._roster.num_output_tokens += len(beam.token_ids)
            updates.append(
                SeqUpdate(
                    request_id, rank, seq_id, beam.token_ids, (), (), beam.finish_reason, None,
                    beam.cum_logprob, beam.score,
                )
            )  # fmt: skip
        for rank in range(len(updates), search.width):
            length = FinishReason.LENGTH
            updates.append(
                SeqUpdate(request_id, rank, seq_id, (), (), (), length, None, -math.inf, -math.inf)
            )
        self._roster.end_search(group)
        return updates


def _fork(parent: Sequence, child: Sequence) -> SeqFork:
    """Before the parent's own next token is appended."""
    sampler = parent.group.request.sampler
    return SeqFork(parent.seq_id, child.seq_id, len(parent.token_ids), sampler, 0)
