"""The runner: executes one `StepPlan` on one device and answers with a `StepResult`.

It is given blocks and never asks why they are where they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.attention.base import ForwardContext
from octavo.layers.workspace import Workspace
from octavo.models.decoder import Decoder
from octavo.plan import StepPlan, StepResult, TokenLogprobs
from octavo.runner.base import Drawn, RunnerBase
from octavo.runner.input_batch import Batch, InputBatch
from octavo.runner.kv_store import KVStore
from octavo.runner.replay import DecodeReplay


class Runner(RunnerBase):
    """Model, KV pool, buffers and per-sequence device state.

    model: weights loaded; kv_store: the pool; workspace: buffers for the largest step;
    max_num_seqs: most sequences with blocks at one time; max_num_tokens: most tokens in a step;
    max_blocks_per_seq: longest block table; num_groups: of layers, with tables of their own.
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
        num_groups: int = 1,
        replay: bool = True,
    ) -> None:
        block_size = kv_store.data.shape[4]
        self.inputs = InputBatch(
            block_size, max_num_seqs, max_num_tokens, max_blocks_per_seq, num_groups
        )
        super().__init__(model, kv_store, workspace, self.inputs)
        self._replay = DecodeReplay() if replay and model.replayable else None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan: copies first, then the forward pass, then sampling.

        A plan without `seqs` only brings memory and tables up to date. Times are wall time.
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

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Carry out a plan, at once: what is returned hands out the result."""
        result = self.execute(plan)
        return lambda: result

    def _compute(self, plan: StepPlan) -> tuple[Drawn, dict[int, list[TokenLogprobs]]]:
        batch = self.inputs.build(plan.seqs)
        if self._replay is not None and _only_decodes(plan):
            return self._draw(plan, self._replayed(self._replay, batch)), {}
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

    def _replayed(self, replay: DecodeReplay, batch: Batch) -> Tensor:
        """Logits of a step of decodes. What of it cannot be recorded is done each time."""
        model, work, num_seqs = self.model, self.workspace, len(batch.token_ids)
        if model.embeds_replayably:
            logits = replay.logits(num_seqs, lambda: model.raw_logits(self._hidden(batch), work))
        else:
            x = model.embedded(batch.token_ids, batch.positions, work)
            logits = replay.logits(
                num_seqs, lambda: model.raw_logits(model.layered(x, self._context(batch)), work)
            )
        return model.scaled_logits(logits)

    def _context(self, batch: Batch) -> ForwardContext:
        cos_sin, rope_rows = self.model.rotary.rows(batch.positions, batch.prompt_lens)
        first = ForwardContext(
            kv_cache=self.kv_store.data,
            block_tables=batch.block_tables[0],
            seq_lens=batch.seq_lens,
            query_start_loc=batch.query_start_loc,
            slot_mapping=batch.slot_mapping[0],
            rope_rows=rope_rows,
            cos_sin=cos_sin,
            workspace=self.workspace,
            local_cos_sin=self.model.local_cos_sin,
            kv_scales=self.kv_store.scales,
        )
        return first.with_groups(batch.block_tables[1:], batch.slot_mapping[1:])


def _only_decodes(plan: StepPlan) -> bool:
    """Whether every sequence computes one token and needs the next: a step that can be replayed."""
    return all(seq.num_tokens == 1 and seq.sample for seq in plan.seqs)
