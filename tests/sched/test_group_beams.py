"""Beams of models with windows come back into exactly the room that admission has counted on."""

from __future__ import annotations

import contextlib
import random

import pytest
from sched_support import assert_drained, make_beams, make_request
from test_group_sched import GroupReplica
from test_sched_beams import assert_found

from octavo.errors import RequestCapacityError
from octavo.events import EventKind
from octavo.kv import KVCacheManager, PagedPolicy
from octavo.sched import Scheduler, SeqUpdate

WINDOWS = ((0, 3), (0, 9), (0, 5, 5), (0, 1), (0, 0, 4))


class Episode:
    """A search in as small a pool as it is admitted to, and others that take its room now and
    then."""

    def __init__(self, seed: int, *, restarts: bool) -> None:
        self.rng = rng = random.Random(seed)
        self.restarts = restarts
        size, windows, width = rng.choice((1, 2, 4)), rng.choice(WINDOWS), rng.randint(2, 4)
        num_prompt, num_new = rng.randint(1, 40), rng.randint(5, 45)
        budget = rng.choice((4, 8, 16))
        has_cache, num_host_blocks = rng.random() < 0.7, rng.choice((0, 0, 20))
        needs = KVCacheManager(1, size, PagedPolicy(windows, budget))
        shared, own = needs.num_needed_by_forks(num_prompt, num_prompt + num_new)
        num_blocks = max(shared + width * own, needs.num_needed(num_prompt + num_new))
        num_blocks += rng.choice((0, 0, 0, 1, 3))
        self.kv = KVCacheManager(
            num_blocks, size, PagedPolicy(windows, budget), enable_prefix_caching=has_cache,
            num_host_blocks=num_host_blocks,
        )  # fmt: skip
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=1000,
            watermark=0.0, preemption_mode=rng.choice(("recompute", "swap", "auto")),
            policy="priority",
        )  # fmt: skip
        self.runner = GroupReplica(num_blocks, size, max_tokens=budget, max_seqs=4)
        self.runner.windows = windows
        self.request = make_beams("a", num_prompt, width, max_tokens=num_new, priority=1)
        self.updates: list[SeqUpdate] = []
        self.num_restarts = 0

    def run(self) -> None:
        scheduler, rng = self.scheduler, self.rng
        scheduler.add(self.request)
        for number in range(rng.randint(1, 4)):
            self.steps(rng.randint(3, 15))
            if rng.random() < 0.6:
                scheduler._pressure.shrink(1, 1)
            if rng.random() < 0.7:
                self.add_other(f"b{number}")
            self.steps(rng.randint(1, 6))
        self.steps(1500)
        assert not scheduler.has_unfinished()
        assert_found(self.request, self.updates)
        assert EventKind.CUT_SHORT not in [event.kind for event in scheduler.events("a")]
        assert_drained(self.kv)

    def add_other(self, name: str) -> None:
        rng = self.rng
        num_prompt, num_new, priority = rng.randint(1, 30), rng.randint(1, 20), rng.choice((0, 2))
        with contextlib.suppress(RequestCapacityError):
            self.scheduler.add(
                make_request(name, num_prompt, max_tokens=num_new, priority=priority)
            )

    def steps(self, num_steps: int) -> None:
        scheduler = self.scheduler
        for _ in range(num_steps):
            if not scheduler.has_unfinished():
                return
            if self.restarts:
                self.restart()
            plan = scheduler.schedule(0.0)
            if plan is None:
                self.updates += scheduler.take_updates()
            else:
                self.updates += scheduler.update(self.runner.execute(plan), 0.0)
            self.kv.check_integrity()

    def restart(self) -> None:
        group = self.scheduler.roster.groups.get("a")
        if group is None or group.search is None or self.rng.random() > 0.12:
            return
        if len(group.search.beams) > 1:
            self.num_restarts += self.scheduler._pressure.restart(group.search.beams[-1])


@pytest.mark.parametrize("seed", [522, 592, 757])
def test_a_search_is_not_cut_short_in_the_room_it_was_promised(seed: int) -> None:
    """When one beam is back, what the next one would share in a window was given back and is gone,
    and with a prefix of its own it does not fit."""
    episode = Episode(seed, restarts=False)
    episode.run()
    events = episode.scheduler.events("a")
    assert any("lacks what its siblings gave back" in event.why for event in events)


@pytest.mark.parametrize("first_seed", [0, 5])
def test_beams_start_again_together_at_any_time(first_seed: int) -> None:
    """Alone or beside others, in the middle of coming back, with and without cache and host."""
    num_restarts = 0
    for seed in range(first_seed, first_seed + 5):
        episode = Episode(seed, restarts=True)
        try:
            episode.run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        num_restarts += episode.num_restarts
    assert num_restarts > 10
