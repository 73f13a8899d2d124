"""Plans for the GPU's runner, ways to carry them out, and what comes of them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from octavo.arch import RopeConfig
from octavo.plan import BlockCopy, NewSeq, SeqPlan, SeqResult, StepPlan
from octavo.request import SamplerParams
from octavo.runner.gpu.layout import Room
from octavo.runner.gpu.runner import GpuRunner
from octavo.runner.runner import Runner

MakeGpu = Callable[..., GpuRunner]
MakeCpu = Callable[..., Runner]
GREEDY = SamplerParams()
WARM = SamplerParams(temperature=2.0, seed=3)
# top_p and top_k draw in another order on GPUs: the same distribution, other tokens for a seed.
DYNAMIC = RopeConfig(rotary_dim=16, scaling_type="dynamic", factor=2.0, original_max_position=8)
BLOCK = 4


class Traffic:
    """Random plans of sequences that come, are computed in chunks, decode, share a step with
    others, lose their blocks, come back and end. No plan depends on which tokens are drawn, so
    each can be made before the tokens of the one before it are known."""

    def __init__(self, seed: int, params: Sequence[SamplerParams], max_running: int = 7) -> None:
        self.rng, self.params, self.max_running = random.Random(seed), params, max_running
        self.free = list(range(32))
        self.rng.shuffle(self.free)
        self.next_id = 0
        self.lengths: dict[int, int] = {}
        """Tokens that each sequence has, those that are being sampled included."""
        self.done: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}

    def _drop(self, seq_id: int) -> None:
        self.free += self.blocks.pop(seq_id, [])
        self.done[seq_id] = 0

    def plan(self, step_id: int) -> StepPlan:
        rng, plan = self.rng, StepPlan(step_id)
        for seq_id in list(self.lengths):
            if rng.random() < 0.06 or self.lengths[seq_id] > 40:
                self._drop(seq_id)
                del self.lengths[seq_id], self.done[seq_id]
                plan.finished.append(seq_id)
            elif seq_id in self.blocks and rng.random() < 0.06:
                self._drop(seq_id)
                plan.preempted.append(seq_id)
        while len(self.lengths) < self.max_running and rng.random() < 0.6:
            tokens = [rng.randrange(128) for _ in range(rng.randint(1, 14))]
            seq_id, self.next_id = self.next_id, self.next_id + 1
            plan.new_seqs.append(NewSeq(seq_id, tokens, self.params[seq_id % len(self.params)]))
            self.lengths[seq_id], self.done[seq_id] = len(tokens), 0
        budget = 32
        order = [seq_id for seq_id in self.lengths if seq_id not in plan.preempted]
        rng.shuffle(order)
        for seq_id in order:
            missing = self.lengths[seq_id] - self.done[seq_id]
            count = min(missing, rng.choice((1, 3, 8, 20)), budget)
            need = -(-(self.done[seq_id] + count) // BLOCK) - len(self.blocks.get(seq_id, ()))
            if not count or need > len(self.free) or rng.random() < 0.1:
                continue
            budget -= count
            held = self.blocks.setdefault(seq_id, [])
            new = tuple(self.free.pop() for _ in range(need))
            replaced = None
            if held and self.free and self.done[seq_id] % BLOCK and rng.random() < 0.1:
                index = self.done[seq_id] // BLOCK  # copy-on-write
                block = self.free.pop()
                plan.copies.append(BlockCopy(held[index], block))
                self.free.append(held[index])
                held[index], replaced = block, (index, block)
            held += new
            sample = count == missing
            plan.seqs.append(SeqPlan(seq_id, self.done[seq_id], count, new, replaced, sample))
            self.done[seq_id] += count
            self.lengths[seq_id] += sample
        return plan


def one_by_one(runner: Runner, plans: list[StepPlan]) -> list[list[SeqResult]]:
    return [runner.execute(plan).sampled for plan in plans]


def overlapped(runner: GpuRunner, plans: list[StepPlan]) -> list[list[SeqResult]]:
    """Each step is launched before the tokens of the one before it are looked at."""
    under_way: deque[Callable] = deque()
    found = []
    for plan in plans:
        under_way.append(runner.launch(plan))
        if len(under_way) == 2:
            found.append(under_way.popleft()().sampled)
    return [*found, *(wait().sampled for wait in under_way)]


def tokens_of(steps: list[list[SeqResult]]) -> list[list[tuple[int, int]]]:
    return [[(result.seq_id, result.token_id) for result in step] for step in steps]


def watched(runner: GpuRunner) -> list[Room]:
    """The recorded steps that will be used, as they are."""
    rooms: list[Room] = []
    replay = runner.graphs.replay

    def noted(room: Room) -> None:
        rooms.append(room)
        replay(room)

    runner.graphs.replay = noted  # type: ignore[method-assign]
    return rooms
