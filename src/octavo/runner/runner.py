"""The runner: executes one `StepPlan` on one device and answers with a `StepResult`.

It is given blocks and never asks why they are where they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.attention.base import ForwardContext
from octavo.errors import NumericsError
from octavo.layers.workspace import Workspace
from octavo.models.decoder import Decoder
from octavo.plan import SeqPlan, SeqResult, StepPlan, StepResult, TokenLogprobs
from octavo.runner.input_batch import Batch, InputBatch
from octavo.runner.kv_store import KVStore
from octavo.runner.replay import DecodeReplay
from octavo.sampling.batch import SamplingState
from octavo.sampling.logprobs import prompt_logprobs
from octavo.sampling.sampler import sample


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
        """Carry out one plan: copies first, then the forward pass, then sampling."""
        self._apply(plan)
        batch = self.inputs.build(plan.seqs)
        if self._replay is not None and _only_decodes(plan):
            logits = self._replay.logits(len(plan.seqs), lambda: self._decode(batch))
            return StepResult(plan.step_id, self._sample(plan.seqs, logits))
        hidden = self._hidden(batch)
        prompt = self._prompt_logprobs(plan.seqs, hidden) if self._num_prompt_logprobs else {}
        if not len(batch.last_rows):
            return StepResult(plan.step_id, [], prompt)
        logits = self.model.logits(hidden[batch.last_rows], self.workspace)
        return StepResult(plan.step_id, self._sample(plan.seqs, logits), prompt)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Tensor:
        """All of a plan but the sampling: hidden states [num_tokens, hidden_size]; for tests."""
        self._apply(plan)
        return self._hidden(self.inputs.build(plan.seqs))

    def _hidden(self, batch: Batch) -> Tensor:
        return self.model.forward(batch.token_ids, self._context(batch))

    def _decode(self, batch: Batch) -> Tensor:
        return self.model.logits(self._hidden(batch), self.workspace)

    def _apply(self, plan: StepPlan) -> None:
        self.inputs.apply(plan)
        for seq_id in plan.finished:
            self.sampling.forget(seq_id)
            self._num_prompt_logprobs.pop(seq_id, None)
            self._prompt_logprobs_done.pop(seq_id, None)
        for new in plan.new_seqs:
            self.sampling.add(new.seq_id, new.sampler, new.token_ids, new.sample_index)
            if new.sampler.num_prompt_logprobs is not None:
                self._num_prompt_logprobs[new.seq_id] = new.sampler.num_prompt_logprobs
                self._prompt_logprobs_done[new.seq_id] = 0
        self.kv_store.copy(plan.copies)

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

    def _sample(self, seqs: list[SeqPlan], logits: Tensor) -> list[SeqResult]:
        """Tokens of the sequences that need one, whose logits are [their number, vocab_size]."""
        seq_ids = [seq.seq_id for seq in seqs if seq.sample]
        _check_finite(logits, seq_ids)
        sampled = sample(logits, seq_ids, self.sampling)
        results = []
        for seq_id, token_id, logprobs in zip(
            seq_ids, sampled.token_ids, sampled.logprobs, strict=True
        ):
            self.inputs.seqs[seq_id].append(token_id)
            self.sampling.append(seq_id, token_id)
            results.append(SeqResult(seq_id, token_id, logprobs))
        return results

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


def _only_decodes(plan: StepPlan) -> bool:
    """Whether every sequence computes one token and needs the next: a step that can be replayed."""
    return all(seq.num_tokens == 1 and seq.sample for seq in plan.seqs)
