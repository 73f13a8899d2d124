"""A grid of steps: plans that no scheduler made, carried out on an engine without requests."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.bench.measured_steps import RowKind, Step, Times, counts_of
from octavo.plan import BlockCopy, NewSeq, SeqPlan, StepPlan
from octavo.request import SamplerParams
from octavo.util import cdiv

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.config import EngineConfig

_STEPS = 2
"""Steps of a point that are timed in a round, after one that is not."""
_NOT_FORGOTTEN = 1
"""Sequences that have ended and that the runner will hear of with a later plan."""
_FIRST_SEQ_ID = 1 << 40
"""Far from those that a scheduler gives."""
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (32, 256, 1024, 4096)
_CHUNKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_STARTS = (0, 512, 1536)
_MIXED = ((4, 60), (16, 112), (32, 32), (32, 224))


class Probe:
    """Carries out plans on an engine that has no requests."""

    def __init__(self, llm: LLM) -> None:
        self._execute = llm._engine.engine.core.execute
        self._next_seq_id = _FIRST_SEQ_ID
        self._step_id = 0
        self._rng = random.Random(llm.config.seed)
        self._vocab_size = llm.arch.vocab_size
        self.windows = llm.arch.sliding_windows
        self.block_size = llm.config.block_size
        report = llm.memory_report()
        self.num_blocks = report.ledger.num_blocks
        self.num_host_blocks = 0 if report.host is None else report.host.num_blocks
        self._most_tokens = llm.config.limits().max_num_batched_tokens

    def run(self, **parts: Any) -> Times:
        """Carry out a plan of these parts."""
        self._step_id += 1
        plan = StepPlan(self._step_id, **parts)
        begin = time.perf_counter()
        result = self._execute(plan)
        return Times(time.perf_counter() - begin, result.compute_s, result.copy_s)

    def new(self, length: int) -> NewSeq:
        """A sequence of random tokens."""
        self._next_seq_id += 1
        ids = [self._rng.randrange(self._vocab_size) for _ in range(length)]
        return NewSeq(self._next_seq_id, ids, SamplerParams())

    def touch_pool(self) -> None:
        """Every block gets memory of its own, with the K and V of some tokens in it."""
        new = self.new(min(self.block_size, self._most_tokens))
        share = SeqPlan(new.seq_id, 0, len(new.token_ids), (0,), None, True)
        try:
            self.run(new_seqs=[new], seqs=[share])
        finally:
            self.run(finished=[new.seq_id])
        for first in range(1, self.num_blocks, 256):
            last = min(first + 256, self.num_blocks)
            self.run(copies=[BlockCopy(0, i) for i in range(first, last)])


@dataclass(frozen=True, slots=True)
class Point:
    """A step of the grid: so many decodes of one context, and a chunk of a prompt."""

    kind: RowKind
    num_decodes: int = 0
    context: int = 0
    """Tokens of each that are computed before the first step."""
    chunk: int = 0
    start: int = 0
    """Tokens before the chunk."""

    def _decode_blocks(self, block_size: int) -> int:
        return cdiv(self.context + _STEPS + 1, block_size)

    def num_blocks(self, block_size: int) -> int:
        """Blocks that it takes."""
        chunk_blocks = cdiv(self.start + self.chunk, block_size)
        return self.num_decodes * self._decode_blocks(block_size) + chunk_blocks

    def measure(self, probe: Probe) -> list[Step]:
        """Take the step a few times: the decodes go on, the chunk is another prompt's each time.

        Whatever happens, the runner is told that the sequences have ended."""
        brought: list[int] = []
        try:
            return self._steps(probe, brought)
        finally:
            probe.run(finished=brought)

    def _steps(self, probe: Probe, brought: list[int]) -> list[Step]:
        """`brought` gets the sequences that the runner still knows, or might."""
        decodes = [probe.new(self.context + 1) for _ in range(self.num_decodes)]
        each = self._decode_blocks(probe.block_size)
        first = self.num_decodes * each
        table = tuple(range(first, self.num_blocks(probe.block_size)))
        found: list[Step] = []
        for number in range(_STEPS + 1):
            seqs = [
                SeqPlan(
                    new.seq_id,
                    self.context + number,
                    1,
                    () if number else tuple(range(i * each, (i + 1) * each)),
                    None,
                    True,
                )
                for i, new in enumerate(decodes)
            ]
            fresh = [] if number else list(decodes)
            ended = brought[self.num_decodes :]
            if self.chunk:
                prompt = probe.new(self.start + self.chunk)
                fresh.append(prompt)
                seqs.append(SeqPlan(prompt.seq_id, self.start, self.chunk, table, None, True))
            brought += [new.seq_id for new in fresh]
            times = probe.run(new_seqs=fresh, seqs=seqs, finished=ended)
            del brought[self.num_decodes : self.num_decodes + len(ended)]
            if number:
                counts = counts_of(StepPlan(0, seqs=seqs), probe.windows)
                found.append((counts, times))
        return found


def grid(config: EngineConfig, num_blocks: int) -> list[Point]:
    """Steps that such an engine can take."""
    assert config.max_model_len is not None
    longest, (max_seqs, most) = config.max_model_len, config.limits()
    seqs = max(1, min(max_seqs, most) - _NOT_FORGOTTEN)
    batches = sorted({*(b for b in _BATCHES if b <= seqs), seqs})
    chunks = sorted({*(c for c in _CHUNKS if c <= most), min(most, 2 * _CHUNKS[-1])})
    points = [Point("decode", b, c) for b in batches for c in _CONTEXTS]
    points += [Point("prefill", chunk=c, start=s) for c in chunks for s in _STARTS if c > 1]
    few, many = max(1, seqs // 32), max(1, seqs // 4)
    mixed = {*_MIXED, (few, most - few), (many, most - many), (many, (most - many) // 2)}
    points += [
        Point("mixed", b, min(_CONTEXTS[1] // 2, longest // 2), c)
        for b, c in sorted(mixed)
        if b < seqs and c > 1 and b + c <= most
    ]
    return [
        point
        for point in points
        if point.num_blocks(config.block_size) <= num_blocks
        and max(point.context + _STEPS + 1, point.start + point.chunk) <= longest
    ]
