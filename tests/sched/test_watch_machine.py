"""Frames of a watched pool against a picture made the slow way, over random lives of requests.

Requests, samples, beams, common prefixes, aborts, evictions, preemptions, swaps, pins, resets and
resizes, under every policy; a frame is taken after each move, whole or not, or after several.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any

import pytest
from sched_support import make_beams, make_request
from watch_support import Follower, check_frame

from octavo.errors import CapacityError, RequestCapacityError
from octavo.kv import KVCacheManager
from octavo.kv.policies import make_policy
from octavo.lab.null_model import NullModel
from octavo.plan import StepPlan
from octavo.sched import Scheduler
from octavo.sched.watch import PoolWatch

POLICIES = ("paged", "orca-oracle", "orca-pow2", "orca-max", "contiguous")


class Play:
    """Random moves of one scheduler, seeded."""

    def __init__(self, policy: str, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.is_paged = policy == "paged"
        host = rng.choice((0, 0, 6, 40)) if self.is_paged else 0
        self.kv = KVCacheManager(
            rng.choice((9, 24, 60, 150)),
            rng.choice((1, 4, 4, 16)),
            make_policy(policy, max_seq_tokens=rng.choice((40, 100))),  # type: ignore[arg-type]
            enable_prefix_caching=self.is_paged and rng.random() < 0.7,
            num_host_blocks=host,
        )
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=rng.choice((4, 12)),
            max_num_batched_tokens=rng.choice((16, 64)),
            max_model_len=100,
            watermark=0.0,
            preemption_mode="auto" if host else "recompute",
            plan_ahead=rng.random() < 0.5,
        )
        self.model = NullModel(lambda seq_id, position: (seq_id * 7 + position) % 11)
        self.under_way: list[StepPlan] = []
        self.now_s = 0.0
        self.names: list[str] = []
        self.pins: list[int] = []
        self.prompts: list[list[int]] = []

    def move(self) -> None:
        """One of them."""
        moves = [self.add] * 3 + [self.step] * 8 + [self.abort]
        if self.is_paged and not self.under_way:
            moves += [self.pin, self.unpin, self.resize, self.reset]
        self.rng.choice(moves)()

    def add(self) -> None:
        rng, name = self.rng, f"r{len(self.names)}"
        num_prompt = rng.randint(1, 40)
        common: dict[str, Any] = {"like": f"p{rng.randrange(3)}", "arrival_s": self.now_s}
        common["differs_at"] = rng.randint(0, num_prompt)
        if rng.random() < 0.15:
            beam_width = rng.randint(2, 3)
            request = make_beams(name, num_prompt, beam_width, max_tokens=8, **common)
        else:
            common |= {"n": rng.choice((1, 1, 1, 3)), "max_tokens": rng.randint(1, 30)}
            common["expected_output_tokens"] = common["max_tokens"]
            request = make_request(name, num_prompt, **common)
        try:
            self.scheduler.add(request)
        except RequestCapacityError:
            return
        self.names.append(name)
        self.prompts.append(list(request.prompt_token_ids))

    def step(self) -> None:
        for _ in range(self.rng.choice((1, 1, 2, 6))):
            self.now_s += 0.25
            plan = self.scheduler.schedule(self.now_s)
            if plan is None:
                self.scheduler.take_updates()
            else:
                self.under_way.append(plan)
            depth = 2 if self.scheduler.plan_ahead and self.rng.random() < 0.7 else 1
            while len(self.under_way) >= depth or (plan is None and self.under_way):
                answer = self.model.answer(self.under_way.pop(0), copy_s=0.0, compute_s=0.01)
                self.scheduler.update(answer, self.now_s)

    def abort(self) -> None:
        if self.names:
            self.scheduler.abort(self.rng.choice(self.names[-6:]))

    def pin(self) -> None:
        if self.prompts:
            with contextlib.suppress(CapacityError):
                self.pins.append(self.scheduler.pin(self.rng.choice(self.prompts)).pin_id)

    def unpin(self) -> None:
        if self.pins:
            self.scheduler.unpin(self.pins.pop(0))

    def reset(self) -> None:
        self.kv.reset_prefix_cache()

    def resize(self) -> None:
        with contextlib.suppress(CapacityError):
            self.scheduler.resize(self.rng.choice((9, 30, 60, 100)), self.now_s)

    def what_happened(self) -> Counter[str]:
        """So that a play in which nothing happens is noticed."""
        stats = self.kv.cache_stats()
        return Counter(
            preemptions=self.scheduler.num_preemptions,
            hits=stats.hit_tokens,
            evictions=stats.evictions,
            swaps=stats.swapped_out,
            outputs=self.scheduler.roster.num_output_tokens,
        )


@pytest.mark.parametrize("policy", POLICIES)
def test_frames_are_exact(policy: str) -> None:
    happened: Counter[str] = Counter()
    for seed in range(40):
        play = Play(policy, seed)
        watch, follower = PoolWatch(play.kv, play.scheduler), Follower()
        for _ in range(80):
            play.move()
            if play.rng.random() < 0.6:
                is_full = play.rng.random() < 0.1
                frame = watch.frame(play.now_s, is_full)
                check_frame(frame, follower, play.kv)
                assert frame["kind"] == "full" or not is_full
                for row in frame["requests"]:
                    happened[row["state"]] += 1
                    happened["shared"] += row["shared_blocks"]
                happened["set aside"] += sum(
                    block[0] == 2 and not block[2] for block in follower.picture(frame)
                )
                happened["external"] += frame["ledger"]["external"]
            if play.rng.random() < 0.02:
                watch.close()
                assert play.kv.pool.journal is None
        happened["diffs"] += follower.num_diffs
        happened += play.what_happened()
    expected = {"diffs", "running", "waiting", "outputs"}
    if policy == "paged":
        expected |= {"preemptions", "hits", "evictions", "swaps", "shared", "preempted"}
    else:
        expected |= {"set aside"}
    if policy == "contiguous":
        expected |= {"ended"}
    if policy.startswith("orca"):
        expected |= {"external"}
    assert expected <= {name for name, num in happened.items() if num >= 10}, happened
