"""What every runner does the same way: acting on a plan's news, and drawing from logits.

Drawing here waits for the device, and serves all there is: beams, further samples, logprobs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.layers.workspace import Workspace
from octavo.models.decoder import Decoder
from octavo.plan import (
    BeamCandidate,
    SeqPlan,
    SeqResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from octavo.runner.input_batch import Sequences
from octavo.runner.kv_store import HostTraffic, KVStore
from octavo.sampling.batch import SamplingState
from octavo.sampling.beams import BeamRows, beam_candidates
from octavo.sampling.draw import rows_per_chunk
from octavo.sampling.logprobs import prompt_logprobs
from octavo.sampling.sampler import Sampled, not_finite, sample

Drawn = tuple[list[SeqResult], list[list[BeamCandidate]]]
"""What sequences drew, and the candidates of the beams."""


class RunnerBase(ABC):
    """Model, pool, buffers, and what is remembered of each sequence.

    model: weights loaded; kv_store: the pool; workspace: buffers for the largest step; inputs:
    sequences and their block tables.
    """

    def __init__(
        self, model: Decoder, kv_store: KVStore, workspace: Workspace, inputs: Sequences
    ) -> None:
        self.model, self.kv_store, self.workspace = model, kv_store, workspace
        self._known = inputs
        self.sampling = SamplingState(model.arch.vocab_size)
        self._num_prompt_logprobs: dict[int, int] = {}
        self._prompt_logprobs_done: dict[int, int] = {}

    @abstractmethod
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin to carry out a plan; what is returned waits for its result. It is called once, in
        the order of the plans, of which at most two are under way. Both raise what goes wrong."""

    @abstractmethod
    def resize_pool(self, num_blocks: int) -> None:
        """Change the number of blocks: after the plan that empties those behind the new end, or
        before the first plan that uses new ones. Raises `MemoryError`."""

    def _apply(self, plan: StepPlan) -> HostTraffic:
        """All of a plan that comes before computing."""
        self._known.apply(plan)
        for new in plan.new_seqs:
            self.sampling.add(new.seq_id, new.sampler, new.token_ids, new.sample_index)
            if new.sampler.num_prompt_logprobs is not None:
                self._num_prompt_logprobs[new.seq_id] = new.sampler.num_prompt_logprobs
                self._prompt_logprobs_done[new.seq_id] = 0
        for fork in plan.forks:
            child = self._known.seqs.get(fork.child_id)
            if child is not None:  # it did not end within this plan
                num_prompt = min(child.num_prompt_tokens, fork.num_tokens)
                prompt = child.tokens(0, num_prompt)
                output = child.tokens(num_prompt, fork.num_tokens).tolist()
                self.sampling.add(fork.child_id, fork.sampler, prompt, fork.sample_index, output)
        for seq_id, token_id in plan.appends:
            if seq_id in self._known.seqs:
                self.sampling.append(seq_id, token_id)
        for seq_id in plan.finished:
            self.sampling.forget(seq_id)
            self._num_prompt_logprobs.pop(seq_id, None)
            self._prompt_logprobs_done.pop(seq_id, None)
        return self.kv_store.copy(plan.copies)

    def _draw(self, plan: StepPlan, logits: Tensor) -> Drawn:
        """All that a plan wants from [num sampled, vocab_size].

        The logits are used up: whatever needs them as they are comes first.
        """
        seq_ids = [seq.seq_id for seq in plan.seqs if seq.sample]
        check_finite(logits, seq_ids)
        candidates, seq_ids, logits = self._draw_beams(plan, seq_ids, logits)
        if not plan.extra_draws:
            return self._sample(logits, seq_ids), candidates
        further = self._draw_further(plan.extra_draws, seq_ids, logits)
        results: list[SeqResult] = []
        for result in self._sample(logits, seq_ids):
            results += (result, *further.get(result.seq_id, ()))
        return results, candidates

    def _draw_beams(
        self, plan: StepPlan, seq_ids: list[int], logits: Tensor
    ) -> tuple[list[list[BeamCandidate]], list[int], Tensor]:
        """(The beams' candidates, the sequences that are no beams, their rows of the logits)."""
        if not plan.beams:
            return [], seq_ids, logits
        rows = {seq_id: row for row, seq_id in enumerate(seq_ids)}
        draws = [
            BeamRows(
                tuple(rows[seq_id] for seq_id in beam.seq_ids),
                beam.scores,
                beam.num_candidates,
                self.sampling.params(beam.seq_ids[0]).temperature,
            )
            for beam in plan.beams
        ]
        candidates = beam_candidates(logits, draws)
        beam_ids = {seq_id for beam in plan.beams for seq_id in beam.seq_ids}
        kept = [row for row, seq_id in enumerate(seq_ids) if seq_id not in beam_ids]
        return candidates, [seq_ids[row] for row in kept], compact(logits, kept)

    def _sample(self, logits: Tensor, seq_ids: list[int]) -> list[SeqResult]:
        """One token for each row of the logits, which are used up."""
        if not seq_ids:
            return []
        sampled = self._drawn_now(logits, seq_ids)
        results = []
        for seq_id, token_id, logprobs in zip(
            seq_ids, sampled.token_ids, sampled.logprobs, strict=True
        ):
            self._known.seqs[seq_id].append(token_id)
            self.sampling.append(seq_id, token_id)
            results.append(SeqResult(seq_id, token_id, logprobs))
        return results

    def _drawn_now(self, logits: Tensor, seq_ids: list[int]) -> Sampled:
        """One token for each row, waited for; the logits are used up."""
        return sample(logits, seq_ids, self.sampling)

    def _draw_further(
        self, extra_draws: dict[int, tuple[int, ...]], seq_ids: list[int], logits: Tensor
    ) -> dict[int, list[SeqResult]]:
        """Tokens of the further samples, by the sequence whose row they draw from.

        There may be more of them than the workspace has rows: a few copies of rows at a time.
        """
        found: dict[int, list[SeqResult]] = {seq_id: [] for seq_id in extra_draws}
        draws = [
            (row, seq_id, further_id)
            for row, seq_id in enumerate(seq_ids)
            for further_id in extra_draws.get(seq_id, ())
        ]
        at_once = min(rows_per_chunk(logits.shape[1]), len(self.workspace.logits))
        for first in range(0, len(draws), at_once):
            rows, of, further_ids = zip(*draws[first : first + at_once], strict=True)
            copied = logits[torch.tensor(rows, device=logits.device)]
            for seq_id, result in zip(of, self._sample(copied, list(further_ids)), strict=True):
                found[seq_id].append(result)
        return found

    def _prompt_logprobs(
        self, seqs: list[SeqPlan], hidden: Tensor
    ) -> dict[int, list[TokenLogprobs]]:
        """Logprobs of prompt tokens whose predecessors this step computed, each once.

        After a preemption the prompt is computed again; what was already answered is skipped.
        """
        found: dict[int, list[TokenLogprobs]] = {}
        first = 0
        for seq in seqs:
            num_top = self._num_prompt_logprobs.get(seq.seq_id)
            if num_top is not None:
                state = self._known.seqs[seq.seq_id]
                done = self._prompt_logprobs_done[seq.seq_id]
                start = max(seq.start, done)
                stop = min(seq.start + seq.num_tokens, state.num_prompt_tokens - 1)
                if start < stop:
                    rows = hidden[first + start - seq.start : first + stop - seq.start]
                    targets = torch.from_numpy(state.tokens(start + 1, stop + 1))
                    found[seq.seq_id] = self._logprobs_of(rows, targets, num_top)
                    self._prompt_logprobs_done[seq.seq_id] = stop
            first += seq.num_tokens
        return found

    def _logprobs_of(self, hidden: Tensor, targets: Tensor, num_top: int) -> list[TokenLogprobs]:
        at_once = len(self.workspace.logits)
        found: list[TokenLogprobs] = []
        for i in range(0, len(hidden), at_once):
            logits = self.model.logits(hidden[i : i + at_once], self.workspace)
            found += prompt_logprobs(logits, targets[i : i + at_once], num_top)
        return found


def check_finite(logits: Tensor, seq_ids: list[int]) -> None:
    """One column tells: what is not finite in a hidden state reaches every logit of its row."""
    finite = logits[:, 0].isfinite()
    if not finite.all():
        bad = [seq_ids[row] for row in (~finite).nonzero()[:, 0].tolist()]
        raise not_finite(bad)


def compact(logits: Tensor, rows: list[int]) -> Tensor:
    """[len(rows), vocab_size]: the given rows, ascending, moved to the front; the rest is lost."""
    at_once = rows_per_chunk(logits.shape[1])
    start = next((place for place, row in enumerate(rows) if place != row), len(rows))
    for first in range(start, len(rows), at_once):
        some = rows[first : first + at_once]
        # Rows move forward only, so those still to be moved are not overwritten.
        logits[first : first + len(some)] = logits[torch.tensor(some, device=logits.device)]
    return logits[: len(rows)]
