"""The runner: executes one `StepPlan` on one device and answers with a `StepResult`.

It is given blocks and never asks why they are where they are.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from octavo.attention.base import ForwardContext
from octavo.errors import NumericsError
from octavo.layers.workspace import Workspace
from octavo.models.decoder import Decoder
from octavo.plan import BeamCandidate, SeqPlan, SeqResult, StepPlan, StepResult, TokenLogprobs
from octavo.runner.input_batch import Batch, InputBatch
from octavo.runner.kv_store import HostTraffic, KVStore
from octavo.runner.replay import DecodeReplay
from octavo.sampling.batch import SamplingState
from octavo.sampling.beams import BeamRows, beam_candidates
from octavo.sampling.draw import rows_per_chunk
from octavo.sampling.logprobs import prompt_logprobs
from octavo.sampling.sampler import sample

Drawn = tuple[list[SeqResult], list[list[BeamCandidate]]]


class Runner:
    """Model, KV pool, buffers and per-sequence device state.

    model: weights loaded; kv_store: the pool; workspace: buffers for the largest step;
    max_num_seqs: most sequences with blocks at one time; max_num_tokens: most tokens in a step;
    max_blocks_per_seq: longest block table.
    """

    def __init__(
        self,
        model: Decoder,
        kv_store: KVStore,
        workspace: Workspace,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_blocks_per_seq: int,
    ) -> None:
        self.model, self.kv_store, self.workspace = model, kv_store, workspace
        block_size = kv_store.data.shape[4]
        self.inputs = InputBatch(block_size, max_num_seqs, max_num_tokens, max_blocks_per_seq)
        self.sampling = SamplingState(model.arch.vocab_size)
        self._replay = DecodeReplay() if model.replayable else None
        self._num_prompt_logprobs: dict[int, int] = {}
        self._prompt_logprobs_done: dict[int, int] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan: copies first, then the forward pass, then sampling.

        A plan without `seqs` only brings memory and tables up to date. Times are wall time; on a
        GPU they would need no synchronisation of their own: the drawn tokens are waited for anyway,
        and what lies between is told apart by recorded events.
        """
        moved = self._apply(plan)
        prompt: dict[int, list[TokenLogprobs]] = {}
        drawn: Drawn = [], []
        begun = ended = time.perf_counter()
        if plan.seqs:
            drawn, prompt = self._compute(plan)
            ended = time.perf_counter()
        return StepResult(
            plan.step_id,
            sampled=drawn[0],
            prompt_logprobs=prompt,
            beams=drawn[1],
            copy_s=moved.seconds,
            num_host_copies=moved.num_blocks,
            compute_s=ended - begun,
        )

    def _compute(self, plan: StepPlan) -> tuple[Drawn, dict[int, list[TokenLogprobs]]]:
        batch = self.inputs.build(plan.seqs)
        if self._replay is not None and _only_decodes(plan):
            logits = self._replay.logits(len(plan.seqs), lambda: self._decode(batch))
            return self._draw(plan, logits), {}
        hidden = self._hidden(batch)
        prompt = self._prompt_logprobs(plan.seqs, hidden) if self._num_prompt_logprobs else {}
        if not len(batch.last_rows):
            return ([], []), prompt
        logits = self.model.logits(hidden[batch.last_rows], self.workspace)
        return self._draw(plan, logits), prompt

    def resize_pool(self, num_blocks: int) -> None:
        """Change the number of blocks: after the plan that empties those behind the new end, or
        before the first plan that uses new ones. Raises `MemoryError`."""
        if self.kv_store.resize(num_blocks) and self._replay is not None:
            self._replay = DecodeReplay()  # recorded calls name the pool's address

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Tensor:
        """All of a plan but the sampling: hidden states [num_tokens, hidden_size]; for tests."""
        self._apply(plan)
        return self._hidden(self.inputs.build(plan.seqs))

    def _hidden(self, batch: Batch) -> Tensor:
        return self.model.forward(batch.token_ids, self._context(batch))

    def _decode(self, batch: Batch) -> Tensor:
        return self.model.logits(self._hidden(batch), self.workspace)

    def _apply(self, plan: StepPlan) -> HostTraffic:
        """All of a plan that comes before computing."""
        self.inputs.apply(plan)
        for new in plan.new_seqs:
            self.sampling.add(new.seq_id, new.sampler, new.token_ids, new.sample_index)
            if new.sampler.num_prompt_logprobs is not None:
                self._num_prompt_logprobs[new.seq_id] = new.sampler.num_prompt_logprobs
                self._prompt_logprobs_done[new.seq_id] = 0
        for fork in plan.forks:
            child = self.inputs.seqs.get(fork.child_id)
            if child is not None:  # it did not end within this plan
                num_prompt = min(child.num_prompt_tokens, fork.num_tokens)
                prompt = child.tokens(0, num_prompt)
                output = child.tokens(num_prompt, fork.num_tokens).tolist()
                self.sampling.add(fork.child_id, fork.sampler, prompt, fork.sample_index, output)
        for seq_id, token_id in plan.appends:
            if seq_id in self.inputs.seqs:
                self.sampling.append(seq_id, token_id)
        for seq_id in plan.finished:
            self.sampling.forget(seq_id)
            self._num_prompt_logprobs.pop(seq_id, None)
            self._prompt_logprobs_done.pop(seq_id, None)
        return self.kv_store.copy(plan.copies)

    def _context(self, batch: Batch) -> ForwardContext:
        cos_sin, rope_rows = self.model.rotary.rows(batch.positions, batch.prompt_lens)
        return ForwardContext(
            kv_cache=self.kv_store.data,
            block_tables=batch.block_tables,
            seq_lens=batch.seq_lens,
            query_start_loc=batch.query_start_loc,
            slot_mapping=batch.slot_mapping,
            rope_rows=rope_rows,
            cos_sin=cos_sin,
            workspace=self.workspace,
        )

    def _draw(self, plan: StepPlan, logits: Tensor) -> Drawn:
        """(What sequences drew, the candidates of the beams) from [num sampled, vocab_size].

        The logits are used up: whatever needs them as they are comes first.
        """
        seq_ids = [seq.seq_id for seq in plan.seqs if seq.sample]
        _check_finite(logits, seq_ids)
        candidates: list[list[BeamCandidate]] = []
        if plan.beams:
            rows = {seq_id: row for row, seq_id in enumerate(seq_ids)}
            candidates = beam_candidates(
                logits,
                [
                    BeamRows(
                        tuple(rows[seq_id] for seq_id in beam.seq_ids),
                        beam.scores,
                        beam.num_candidates,
                        self.sampling.params(beam.seq_ids[0]).temperature,
                    )
                    for beam in plan.beams
                ],
            )
            beam_ids = {seq_id for beam in plan.beams for seq_id in beam.seq_ids}
            kept = [row for row, seq_id in enumerate(seq_ids) if seq_id not in beam_ids]
            seq_ids = [seq_ids[row] for row in kept]
            logits = _compact(logits, kept)
        if not plan.extra_draws:
            return self._sample(logits, seq_ids), candidates
        further = self._draw_further(plan.extra_draws, seq_ids, logits)
        results: list[SeqResult] = []
        for result in self._sample(logits, seq_ids):
            results += (result, *further.get(result.seq_id, ()))
        return results, candidates

    def _sample(self, logits: Tensor, seq_ids: list[int]) -> list[SeqResult]:
        """One token for each row of the logits, which are used up."""
        if not seq_ids:
            return []
        sampled = sample(logits, seq_ids, self.sampling)
        results = []
        for seq_id, token_id, logprobs in zip(
            seq_ids, sampled.token_ids, sampled.logprobs, strict=True
        ):
            self.inputs.seqs[seq_id].append(token_id)
            self.sampling.append(seq_id, token_id)
            results.append(SeqResult(seq_id, token_id, logprobs))
        return results

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
        at_once = rows_per_chunk(logits.shape[1])
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
                state = self.inputs.seqs[seq.seq_id]
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


def _check_finite(logits: Tensor, seq_ids: list[int]) -> None:
    """One column tells: what is not finite in a hidden state reaches every logit of its row."""
    finite = logits[:, 0].isfinite()
    if not finite.all():
        bad = [seq_ids[row] for row in (~finite).nonzero()[:, 0].tolist()]
        raise NumericsError(
            f"the model computed NaN or infinity for sequences {bad}: its weights are damaged, or "
            "too large for their type (try --dtype float32)"
        )


def _compact(logits: Tensor, rows: list[int]) -> Tensor:
    """[len(rows), vocab_size]: the given rows, ascending, moved to the front; the rest is lost."""
    at_once = rows_per_chunk(logits.shape[1])
    start = next((place for place, row in enumerate(rows) if place != row), len(rows))
    for first in range(start, len(rows), at_once):
        some = rows[first : first + at_once]
        # Rows move forward only, so those still to be moved are not overwritten.
        logits[first : first + len(some)] = logits[torch.tensor(some, device=logits.device)]
    return logits[: len(rows)]


def _only_decodes(plan: StepPlan) -> bool:
    """Whether every sequence computes one token and needs the next: a step that can be replayed."""
    return all(seq.num_tokens == 1 and seq.sample for seq in plan.seqs)
