"""Records that are made by hand, without a model: an engine that draws as it is told."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from octavo.config import KVPolicy
from octavo.engine.recorder import Recorder, RecordingManager, RecordingScheduler
from octavo.kv.policies import make_policy
from octavo.lab.costs import FixedCosts
from octavo.lab.null_model import BeamModel
from octavo.plan import SeqResult, StepPlan, StepResult
from octavo.record import EngineLimits, RecordHeader, RecordReader, Scheduled
from octavo.request import Request
from octavo.sched.costs import CostModel

STEP_S = 0.125
EOS = 9
COSTS = FixedCosts(step_s=STEP_S, token_s=0.0, block_s=0.0)
POLICIES: tuple[KVPolicy, ...] = ("paged", "contiguous", "orca-max", "orca-pow2", "orca-oracle")
LIMITS = EngineLimits(
    num_blocks=64, block_size=4, bytes_per_block=64, kv_policy="paged", max_model_len=64,
    max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=True, num_host_blocks=0,
    max_disk_blocks=0, preemption_mode="recompute", preemption_victim="last-come",
    scheduling_policy="fcfs", watermark=0.01, max_watermark=0.125,
    token_s=CostModel().token_s, block_s=CostModel().block_s,
)  # fmt: skip


class Made:
    """A recorded engine whose steps take `STEP_S`; sequences draw 5, or EOS as their token number
    `length_of` says."""

    def __init__(self, file: Path, length_of: Callable[[int], int] | None = None, **limits: Any):
        self.limits = dataclasses.replace(LIMITS, **limits)
        self.file, self.now_s = file, 0.0
        self.recorder = Recorder(str(file))
        one = self.limits
        self.kv = RecordingManager(
            one.num_blocks,
            one.block_size,
            make_policy(one.kv_policy, max_seq_tokens=one.max_model_len),
            one.bytes_per_block,
            enable_prefix_caching=one.enable_prefix_caching,
            num_host_blocks=one.num_host_blocks,
        )
        self.scheduler = RecordingScheduler(
            self.kv,
            max_num_seqs=one.max_num_seqs,
            max_num_batched_tokens=one.max_num_batched_tokens,
            max_model_len=one.max_model_len,
            preemption_mode=one.preemption_mode,
        )
        self.recorder.attach(self.kv, self.scheduler)
        header = RecordHeader(octavo="0.0", model="m", began_s=0.0, limits=one)
        self.recorder._writer.write_header(header)
        self._length_of = length_of or (lambda seq_id: 1000)
        self._drawn: Counter[int] = Counter()
        self._beams = BeamModel()

    def add(self, name: str, num_prompt: int = 4, max_tokens: int = 60, **more: Any) -> None:
        self.scheduler.add(
            Request(
                request_id=name,
                prompt_token_ids=[ord(name[0]) + i for i in range(num_prompt)],
                max_tokens=max_tokens,
                eos_token_ids=frozenset([EOS]),
                arrival_s=self.now_s,
                **more,
            )
        )

    def steps(self, num: int = 10_000) -> Made:
        for _ in range(num):
            plan = self.scheduler.schedule(self.now_s)
            self.now_s += STEP_S
            if plan is None:
                self.scheduler.take_updates()
                if not self.scheduler.has_unfinished():
                    break
            else:
                beams = [self._beams.draw(draw) for draw in plan.beams]
                drawn = [SeqResult(i, self._draw(i), None) for i in _drawing(plan)]
                result = StepResult(plan.step_id, drawn, beams=beams, compute_s=STEP_S)
                self.scheduler.update(result, self.now_s)
        return self

    def _draw(self, seq_id: int) -> int:
        self._drawn[seq_id] += 1
        return EOS if self._drawn[seq_id] == self._length_of(seq_id) else 5

    def close(self) -> Path:
        self.recorder.end("closed", self.scheduler, self.kv)
        return self.file


def _drawing(plan: StepPlan) -> Iterable[int]:
    in_search = {seq_id for draw in plan.beams for seq_id in draw.seq_ids}
    for share in plan.seqs:
        if share.sample and share.seq_id not in in_search:
            yield from (share.seq_id, *plan.extra_draws.get(share.seq_id, ()))


def plans_of(file: Path) -> list[StepPlan]:
    calls = RecordReader(file).calls()
    return [call.plan for call in calls if isinstance(call, Scheduled) and call.plan is not None]
