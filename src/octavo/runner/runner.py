"""The runner: executes one `StepPlan` on one device and answers with a `StepResult`.

It is given blocks and never asks why they are where they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.attention.base import ForwardContext
from octavo.models.decoder import Decoder
from octavo.plan import SeqPlan, SeqResult, StepPlan, StepResult, TokenLogprobs
from octavo.runner.input_batch import Batch, InputBatch
from octavo.runner.kv_store import KVStore
from octavo.sampling.batch import SamplingState
from octavo.sampling.logprobs import prompt_logprobs
from octavo.sampling.sampler import sample

LOGIT_ROWS_AT_ONCE = 64
"""Prompt logprobs are computed this many rows at a time, which bounds their memory."""


class Runner:
    """Model, KV pool and per-sequence device state.

    model: weights loaded; kv_store: the pool; max_num_seqs: most sequences with blocks at one
    time; max_blocks_per_seq: longest block table.
    """

    def __init__(
        self, model: Decoder, kv_store: KVStore, max_num_seqs: int, max_blocks_per_seq: int
    ) -> None:
        self.model, self.kv_store = model, kv_store
        block_size = kv_store.data.shape[4]
        self.inputs = InputBatch(block_size, max_num_seqs, max_blocks_per_seq)
        self.sampling = SamplingState(model.arch.vocab_size)
        self._num_prompt_logprobs: dict[int, int] = {}
        self._prompt_logprobs_done: dict[int, int] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan: copies first, then the forward pass, then sampling."""
        batch, hidden = self.forward(plan)
        prompt = self._prompt_logprobs(plan.seqs, hidden) if self._num_prompt_logprobs else {}
        return StepResult(plan.step_id, self._sample(plan.seqs, batch, hidden), prompt)

    def forward(self, plan: StepPlan) -> tuple[Batch, Tensor]:
        """All of a plan but the sampling: its batch, and hidden states [num_tokens, hidden]."""
        self._apply(plan)
        batch = self.inputs.build(plan.seqs)
        return batch, self.model.forward(batch.token_ids, self._context(batch))

    def _apply(self, plan: StepPlan) -> None:
        for seq_id in plan.finished:
            self.sampling.forget(seq_id)
            self._num_prompt_logprobs.pop(seq_id, None)
            self._prompt_logprobs_done.pop(seq_id, None)
        for new in plan.new_seqs:
            self.sampling.add(new.seq_id, new.sampler, new.token_ids, new.sample_index)
            if new.sampler.num_prompt_logprobs is not None:
                self._num_prompt_logprobs[new.seq_id] = new.sampler.num_prompt_logprobs
                self._prompt_logprobs_done[new.seq_id] = 0
        self.inputs.apply(plan)
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
        )

    def _sample(self, seqs: list[SeqPlan], batch: Batch, hidden: Tensor) -> list[SeqResult]:
        seq_ids = [seq.seq_id for seq in seqs if seq.sample]
        if not seq_ids:
            return []
        logits = self.model.logits(hidden[batch.last_rows])
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
        found: list[TokenLogprobs] = []
        for i in range(0, len(hidden), LOGIT_ROWS_AT_ONCE):
            logits = self.model.logits(hidden[i : i + LOGIT_ROWS_AT_ONCE])
            found += prompt_logprobs(logits, targets[i : i + LOGIT_ROWS_AT_ONCE], num_top)
        return found
