"""Carrying out plans that no scheduler made, as a serving engine would: what `bench step` times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from octavo.engine.profiling import launcher
from octavo.errors import InvalidRequestError
from octavo.plan import BlockCopy, NewSeq, SeqPlan, StepPlan, StepResult
from octavo.request import SamplerParams
from octavo.util import cdiv

if TYPE_CHECKING:
    from octavo import LLM

Table = tuple[int, ...]
_FIRST_SEQ_ID = 1 << 40
"""Far from those that a scheduler gives."""
_COPIES_AT_ONCE = 1024


class Times:
    """Of steps in a row, in seconds."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.wall_s = 0.0
        self.host_s = 0.0
        """Until all were launched; on a CPU, where launching is computing, all else."""
        self.compute_s = 0.0
        """Of the device."""


class StepRuns:
    """Carries out plans on an engine that has no requests."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._launch = launcher(llm)
        config = llm.config
        self.overlap = bool(config.async_scheduling)
        self._gpu = config.device == "cuda"
        self._size, self._vocab = config.block_size, llm.arch.vocab_size
        self._num_blocks = llm.memory_report().ledger.num_blocks
        self._max_seqs, self._max_tokens = config.limits()
        self._random = random.Random(config.seed)
        self._next_seq = _FIRST_SEQ_ID
        self._step_id = 0

    # -- carrying plans out

    def run(self, plans: Sequence[list[SeqPlan]]) -> Times:
        """One after another; under overlap each is launched before the last one's result."""
        times = Times(len(plans))
        waiting: list[Callable[[], StepResult]] = []
        if self._gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for seqs in plans:
            launching = time.perf_counter()
            waiting.append(self._launch(StepPlan(self._next_step(), seqs=seqs)))
            times.host_s += time.perf_counter() - launching
            if len(waiting) > self.overlap:
                times.compute_s += waiting.pop(0)().compute_s
        for wait in waiting:
            times.compute_s += wait().compute_s
        times.wall_s = time.perf_counter() - begin
        if not self._gpu:
            times.host_s = times.wall_s - times.compute_s
        return times

    @contextmanager
    def known(self, count: int, num_tokens: int) -> Iterator[list[int]]:
        """New sequences of random tokens, which the runner is told to forget at the end."""
        if count > self._max_seqs:
            raise InvalidRequestError(
                f"a batch of {count} is more than the {self._max_seqs} sequences that this engine "
                "takes: raise --max-num-seqs, or lower the batch size",
                parameter="batch_sizes",
            )
        seqs = list(range(self._next_seq, self._next_seq + count))
        self._next_seq += count
        new = [
            NewSeq(seq, self._random.choices(range(self._vocab), k=num_tokens), SamplerParams())
            for seq in seqs
        ]
        try:
            self._launch(StepPlan(self._next_step(), new_seqs=new))()
            yield seqs
        finally:
            self._launch(StepPlan(self._next_step(), finished=seqs))()

    def chunks(
        self, seqs: Sequence[int], tables: Sequence[Table], length: int
    ) -> list[list[SeqPlan]]:
        """Prompts of `length` tokens in as few steps as the engine takes; the last token of each
        samples."""
        plans, room = [list[SeqPlan]()], self._max_tokens
        for seq, table in zip(seqs, tables, strict=True):
            start = 0
            while start < length:
                if not room:
                    plans.append([])
                    room = self._max_tokens
                count = min(room, length - start)
                blocks = () if start else table
                plans[-1].append(SeqPlan(seq, start, count, blocks, None, start + count == length))
                start, room = start + count, room - count
        return plans

    def _next_step(self) -> int:
        self._step_id += 1
        return self._step_id

    # -- memory

    def tables(self, batch: int, num_tokens: int) -> list[Table]:
        """Blocks of each sequence, anywhere in the pool."""
        each = cdiv(num_tokens, self._size)
        if batch * each > self._num_blocks:
            raise InvalidRequestError(
                f"{batch} sequences of {num_tokens} tokens need {batch * each:,} blocks of "
                f"{self._size}, and the pool has {self._num_blocks:,}: enlarge it, or lower the "
                "batch size",
                parameter="batch_sizes",
            )
        chosen = self._random.sample(range(self._num_blocks), batch * each)
        return [tuple(chosen[i * each : (i + 1) * each]) for i in range(batch)]

    def fill(self, tables: Sequence[Table], context: int) -> None:
        """K and V of a real prompt in every block: the first sequence's, copied to the others."""
        first = tables[0]
        with self.known(1, context) as seqs:
            for plan in self.chunks(seqs, [first], context):
                self.run([plan])
            full = max(1, context // self._size)
            copies = [
                BlockCopy(first[j % full], block)
                for table in tables
                for j, block in enumerate(table)
                if block != first[j % full] and (table is not first or j >= full)
            ]
            for i in range(0, len(copies), _COPIES_AT_ONCE):
                some = copies[i : i + _COPIES_AT_ONCE]
                self._launch(StepPlan(self._next_step(), copies=some))()
