"""Preemption storms: the watermark goes up when admission is in vain, and comes back."""

from __future__ import annotations

import heapq
import random

import pytest

from octavo.errors import ConfigError
from octavo.kv import KVCacheManager
from octavo.sched import Scheduler
from octavo.sched.storm import StormWatch
from octavo.util import cdiv

BLOCK_SIZE = 4


class SimulatedPool:
    """On-demand blocks, strictly in order, the last come gives way and is computed again."""

    def __init__(self, num_blocks: int, requests: list[tuple[int, int]], watch: StormWatch) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.watch = watch
        self.lengths = [prompt for prompt, _ in requests]
        self.final = [prompt + output for prompt, output in requests]
        self.line = list(range(len(requests)))
        self.running: dict[int, int] = {}
        """Blocks by request."""
        self.num_steps = self.num_preemptions = self.num_tokens = self.num_ended = 0
        self.watermarks = [watch.watermark]

    def step(self) -> None:
        """Everyone who runs gets a token, who fits comes in, and the watch is told."""
        self.num_steps += 1
        num_preempted = self._serve()
        self._admit()
        assert self.running, "nobody advances"
        ended = [i for i in self.running if self.lengths[i] == self.final[i]]
        for i in ended:
            self.num_free += self.running.pop(i)
        self.num_preemptions += num_preempted
        self.num_ended += len(ended)
        if self.watch.step(num_preempted, len(ended)):
            self.watermarks.append(self.watch.watermark)

    def _serve(self) -> int:
        num_preempted = 0
        for i in sorted(self.running):
            while i in self.running:
                need = cdiv(self.lengths[i] + 1, BLOCK_SIZE) - self.running[i]
                if need <= self.num_free:
                    self.num_free -= need
                    self.running[i] += need
                    self.lengths[i] += 1
                    self.num_tokens += 1
                    break
                last = max(self.running)
                self.num_free += self.running.pop(last)
                heapq.heappush(self.line, last)
                num_preempted += 1
        return num_preempted

    def _admit(self) -> None:
        while self.line:
            i = self.line[0]
            need = cdiv(self.lengths[i] + 1, BLOCK_SIZE)
            keep = int(self.num_blocks * self.watch.watermark) if self.running else 0
            if need > self.num_free - keep:
                return
            heapq.heappop(self.line)
            self.num_free -= need
            self.running[i] = need
            self.lengths[i] += 1
            self.num_tokens += self.lengths[i]

    def drain(self) -> None:
        while self.line or self.running:
            self.step()


class Never(StormWatch):
    """Does not look."""

    def step(self, num_preempted: int, num_ended: int) -> None:
        return None


def thrash(seed: int = 1) -> list[tuple[int, int]]:
    """Short prompts with long outputs: far more are admitted than can stay."""
    rng = random.Random(seed)
    return [(8, rng.randint(20, 120)) for _ in range(300)]


def test_a_thrashing_pool_is_calmed_and_pays_for_it_with_few_steps() -> None:
    without = SimulatedPool(100, thrash(), Never(0.01))
    without.drain()
    watched = SimulatedPool(100, thrash(), StormWatch(0.01))
    watched.drain()
    assert without.num_preemptions > 2 * without.num_ended
    assert watched.num_preemptions < 0.6 * without.num_preemptions
    assert watched.num_tokens < 0.9 * without.num_tokens
    assert watched.num_steps < 1.05 * without.num_steps
    assert max(watched.watermarks) == 0.125


def test_after_the_storm_the_watermark_comes_back_to_normal() -> None:
    requests = thrash() + [(8, 4) for _ in range(200)]
    pool = SimulatedPool(100, requests, StormWatch(0.01))
    pool.drain()
    assert pool.watermarks[:4] == [0.01, 1 / 32, 1 / 16, 1 / 8]
    assert pool.watermarks[-4:] == [1 / 8, 1 / 16, 1 / 32, 0.01]
    for before, after in zip(pool.watermarks, pool.watermarks[1:], strict=False):
        levels = [0.01, 1 / 32, 1 / 16, 1 / 8]
        assert abs(levels.index(before) - levels.index(after)) == 1  # one level at a time


def test_a_pool_that_is_large_enough_never_sees_it_raised() -> None:
    pool = SimulatedPool(3000, thrash()[:60], StormWatch(0.01))
    pool.drain()
    assert (pool.num_preemptions, pool.watermarks) == (0, [0.01])


def test_a_few_preemptions_are_no_storm() -> None:
    watch = StormWatch(0.01)
    for step in range(2000):
        assert watch.step(int(step % 3 == 0), 1) is None
    assert watch.watermark == 0.01


def test_half_preempted_is_a_storm_and_less_is_not() -> None:
    watch = StormWatch(0.01, window=16)
    assert watch.step(0, 9) is None
    assert watch.step(7, 0) is None
    change = watch.step(1, 0)  # the oldest end has left the window: 8 of 16
    assert change is not None and change.is_raise
    assert (change.old, change.new) == (0.01, 1 / 32)
    assert change.why == (
        "8 of the last 16 sequences that stopped running were preempted: "
        "admission keeps 3.1% of the pool free, was 1.0%"
    )
    assert watch.watermark == 1 / 32


def test_a_change_is_seen_to_work_before_the_next_one() -> None:
    watch = StormWatch(0.01, window=16)
    raised = [step for step in range(200) if watch.step(1, 0)]
    assert raised == [15, 31, 47]
    assert watch.watermark == 0.125
    assert watch.step(40, 0) is None  # the cap


def test_calm_is_ends_without_preemptions_or_time_without_any() -> None:
    watch = StormWatch(0.01, window=8, calm_steps=50)
    for _ in range(16):
        watch.step(1, 0)
    assert watch.watermark == 1 / 16
    assert watch.step(2, 6) is None
    assert watch.step(0, 0) is None  # two of eight
    assert watch.step(1, 7) is None  # one of eight, but this very step preempted
    change = watch.step(0, 0)
    assert change is not None and not change.is_raise
    assert change.why == (
        "1 of the last 8 sequences that stopped running were preempted: "
        "admission keeps 3.1% of the pool free, was 6.2%"
    )
    assert [step for step in range(80) if watch.step(int(step == 20), 0)] == [20 + 50]
    assert watch.watermark == 0.01
    assert all(watch.step(0, 0) is None for _ in range(80))


def test_normal_is_back_at_once_when_nobody_is_left() -> None:
    watch = StormWatch(0.02, window=4)
    assert watch.reset() is None
    for _ in range(12):
        watch.step(1, 0)
    assert watch.watermark == 0.125
    change = watch.reset()
    assert change is not None
    assert (change.old, change.new) == (0.125, 0.02)
    assert change.why.startswith("no request is left: ")
    assert watch.reset() is None


@pytest.mark.parametrize("watermark", [0.0, 0.01, 0.1, 0.125, 0.5])
def test_levels_double_from_the_normal_one_to_the_cap(watermark: float) -> None:
    watch = StormWatch(watermark, window=1)
    levels = [watermark]
    while change := watch.step(1, 0):
        assert (change.old, change.new) == (levels[-1], watch.watermark)
        levels.append(change.new)
    expected = {
        0.0: [0.0, 1 / 32, 1 / 16, 1 / 8],
        0.01: [0.01, 1 / 32, 1 / 16, 1 / 8],
        0.1: [0.1, 0.125],
        0.125: [0.125],
        0.5: [0.5],
    }
    assert levels == expected[watermark]


@pytest.mark.parametrize("num_blocks", [3, 8, 20, 33])
def test_a_raised_watermark_never_holds_up_an_idle_pool(num_blocks: int) -> None:
    """Each request fills the pool alone: nobody fits above any watermark, all end (I5)."""
    watch = StormWatch(0.5, cap=0.9, window=1)
    while watch.step(1, 0):
        pass
    assert watch.watermark == 0.9
    most = num_blocks * BLOCK_SIZE
    pool = SimulatedPool(num_blocks, [(most - 4, 4) for _ in range(10)], watch)
    pool.drain()  # asserts that somebody advances in every step
    assert pool.num_ended == 10
    assert pool.num_steps == 10 * 4


def test_the_same_steps_give_the_same_changes() -> None:
    runs = []
    for _ in range(2):
        pool = SimulatedPool(64, thrash(7), StormWatch(0.01))
        pool.drain()
        runs.append((pool.num_steps, pool.num_preemptions, pool.watermarks))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("cap", [-0.1, 1.0, 1.5, float("nan")])
def test_a_cap_that_is_no_share_is_refused(cap: float) -> None:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 16}
    with pytest.raises(ConfigError, match="max_watermark must be at least 0 and below 1, got"):
        Scheduler(KVCacheManager(8, 4), max_watermark=cap, **limits)


def test_a_cap_of_nothing_keeps_the_watermark_down() -> None:
    watch = StormWatch(0.0, cap=0.0)
    for _ in range(100):
        assert watch.step(5, 0) is None
    assert watch.watermark == watch.max_watermark == 0.0
