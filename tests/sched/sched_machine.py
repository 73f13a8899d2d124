"""A hypothesis machine over the real scheduler and the real pool, against the runner's replica.

Random requests, samples, beams, priorities, common prefixes, salts, ends and aborts at any moment,
up to three plans under way, with and without planning ahead of tokens that are being sampled,
carried out when they are made or long after, pools of 3 to 200 blocks that change their size, with
and without prefix cache, host memory and disk, pinned prefixes, all ways of preemption, steps that
fail and leave nothing in the blocks they were to write. The replica
rebuilds everything from plans, so that any inconsistency shows; every sequence must generate
exactly what it generates alone, and a search must find what it finds alone (I4); in the end all
of them have ended within bounded steps (I5) and the pool is empty (I3).
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from sched_machine_model import MachineModel, Underway
from sched_support import (
    assert_drained,
    make_beams,
    make_request,
)

from octavo.errors import CapacityError, InvalidRequestError, RequestCapacityError
from octavo.kv import KVCacheManager
from octavo.plan import BlockLabel, StepPlan
from octavo.request import FinishReason

MAX_UNDER_WAY = 3


class Disk:
    """What the replica wrote, but for what was deleted. Nothing is there at the start."""

    def __init__(self) -> None:
        self.files: dict[int, list[int | None]] = {}
        self.deleted: set[int] = set()

    def entries(self) -> list[tuple[int, BlockLabel]]:
        return []

    def fetch(self, disk_id: int) -> bool:
        return disk_id in self.files and disk_id not in self.deleted

    def delete(self, disk_id: int) -> None:
        self.deleted.add(disk_id)


def tight(*, max_num_seqs: int, **_: Any) -> dict[str, Any]:
    """Limits under which preemptions are many, where the pool is small."""
    return {"max_num_seqs": max_num_seqs + 3, "max_model_len": 1000, "watermark": 0.0}


class SchedulerMachine(MachineModel):
    @initialize(
        is_tight=st.booleans(),
        num_blocks=st.integers(3, 200),
        block_size=st.sampled_from([1, 2, 3, 4, 8, 16]),
        max_num_seqs=st.integers(1, 3) | st.integers(4, 12),
        extra_tokens=st.sampled_from([0, 1, 5, 30]),
        max_model_len=st.integers(2, 80),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        watermark=st.sampled_from([0.0, 0.0, 0.01, 0.2, 0.6]),
        prefix_caching=st.sampled_from([True, True, False]),
        num_host_blocks=st.sampled_from([0, 2, 4, 60]),
        max_disk_blocks=st.sampled_from([0, 3, 60]),
        mode=st.sampled_from(["recompute", "swap", "swap", "auto"]),
        victim=st.sampled_from(["last-come", "lowest-cost", "priority"]),
        is_quiet=st.booleans(),
        plan_ahead=st.booleans(),
        is_late=st.booleans(),
    )
    def start(
        self,
        is_tight: bool,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        num_host_blocks: int,
        max_disk_blocks: int,
        **limits: Any,
    ) -> None:
        if is_tight:
            num_blocks = 3 + num_blocks % 8
            limits |= tight(**limits)
        disk = Disk() if prefix_caching and num_host_blocks and max_disk_blocks else None
        kv = KVCacheManager(
            num_blocks,
            block_size,
            enable_prefix_caching=prefix_caching,
            num_host_blocks=num_host_blocks,
            disk=disk,
            max_disk_blocks=max_disk_blocks if disk else 0,
        )
        self.begin(kv, prefix_caching=prefix_caching, is_tight=is_tight, **limits)
        if disk is not None:
            disk.files = self.runner.disk

    @rule(
        name=st.sampled_from("abcdefghij"),
        share=st.floats(0, 1.1) | st.floats(0, 0.2),  # of the longest possible
        max_tokens=st.none() | st.integers(1, 40),
        n=st.sampled_from([1, 1, 2, 5]),
        priority=st.integers(-2, 2),
        eos=st.frozensets(st.integers(0, 39), max_size=2),
        stop=st.frozensets(st.integers(0, 39), max_size=2),
        min_tokens=st.sampled_from([0, 0, 1, 5]),
        like=st.sampled_from("xyz"),
        differs=st.floats(0, 1) | st.just(1.0),
        salt=st.sampled_from(["", "", "s"]),
        num_prompt_logprobs=st.sampled_from([None, None, None, 0]),
    )
    def add(
        self,
        name: str,
        share: float,
        max_tokens: int | None,
        n: int,
        priority: int,
        eos: frozenset[int],
        stop: frozenset[int],
        min_tokens: int,
        like: str,
        differs: float,
        salt: str,
        num_prompt_logprobs: int | None,
    ) -> None:
        num_prompt = 1 + round(share * self.most)
        request = make_request(
            name,
            num_prompt,
            max_tokens=max_tokens,
            n=n,
            priority=priority,
            client_id="ab"[priority % 2],
            max_kv_share=0.5 if priority == 2 else None,
            eos_token_ids=eos,
            stop_token_ids=stop,
            min_tokens=min_tokens,
            like=like,
            differs_at=round(differs * num_prompt),
            cache_salt=salt,
            num_prompt_logprobs=num_prompt_logprobs,
            arrival_s=self.now_s,
        )
        total = num_prompt + (max_tokens or 1)
        most = self.most_for(request)
        request = self.with_expectation(request, most if max_tokens is None else total)
        try:
            stats = self.scheduler.add(request)
        except RequestCapacityError as error:
            if total <= most:
                self.check_refusal(request, error, most if max_tokens is None else total)
                return
            assert error.parameter == ("prompt" if num_prompt >= most else "max_tokens")
            return
        except InvalidRequestError as error:
            assert name in self.live_ids and error.parameter == "request_id"
            return
        assert total <= most and name not in self.live_ids
        self.note(request, stats, most if max_tokens is None else total)

    @rule(
        name=st.sampled_from("abcdefghij"),
        share=st.floats(0, 0.7) | st.floats(0, 0.2),
        max_tokens=st.integers(1, 20),
        width=st.integers(1, 5),
        priority=st.integers(-2, 2),
        eos=st.frozensets(st.integers(0, 39), max_size=3),
        like=st.sampled_from("xyz"),
        differs=st.floats(0, 1) | st.just(1.0),
        early_stopping=st.sampled_from([True, False, "never"]),
        length_penalty=st.sampled_from([1.0, 0.0, -1.0, 2.0]),
    )
    def add_beams(
        self,
        name: str,
        share: float,
        max_tokens: int,
        width: int,
        priority: int,
        eos: frozenset[int],
        like: str,
        differs: float,
        early_stopping: bool | str,
        length_penalty: float,
    ) -> None:
        num_prompt = 1 + round(share * self.most)
        request = make_beams(
            name,
            num_prompt,
            width,
            max_tokens=max_tokens,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
            priority=priority,
            client_id="ab"[priority % 2],
            max_kv_share=0.5 if priority == 2 else None,
            eos_token_ids=eos,
            like=like,
            differs_at=round(differs * num_prompt),
            arrival_s=self.now_s,
        )
        total = num_prompt + max_tokens
        num_blocks = self.blocks_of_beams(num_prompt, total, width)
        try:
            stats = self.scheduler.add(request)
        except RequestCapacityError as error:
            most = self.most_for(request)
            if self.kv.policy.name != "paged" and total <= most and width <= self.max_num_seqs:
                self.check_refusal(request, error, total)
                return
            is_large = total > most or num_blocks + self.num_lost(request) > self.kv.num_blocks
            assert is_large or width > self.max_num_seqs
            return
        except InvalidRequestError as error:
            assert name in self.live_ids and error.parameter == "request_id"
            return
        self.note(request, stats, total)

    @precondition(lambda self: len(self.under_way) < MAX_UNDER_WAY)
    @rule()
    def schedule(self) -> None:
        self.now_s += 1
        plan = self.scheduler.schedule(self.now_s)
        self.kv.check_integrity()
        if plan is None:
            for news in self.scheduler.take_updates():
                assert self.may_cut, "cut short although it was admitted"
                self.receive(news)
            assert self.under_way or not self.live, "nothing runs, but there is work"
            return
        for share in plan.seqs:
            (name,) = self.scheduler.request_ids_of([share.seq_id])
            self.num_computed[name] += share.num_tokens
            seq = self.scheduler.roster.sequences[share.seq_id]
            assert share.start <= len(seq.token_ids), "computed two tokens ahead"
        self.check_pending()
        self.under_way.append(Underway(plan))
        if not self.is_late:
            self.carry_out()
            self.check_tables()

    @precondition(lambda self: self.under_way)
    @rule()
    def update(self) -> None:
        self.now_s += 1
        oldest = self.under_way.popleft()
        result = oldest.result or self.runner.execute(oldest.plan)
        for news in self.scheduler.update(result, self.now_s):
            self.receive(news)
        self.check_pending()
        self.kv.check_integrity()

    @precondition(lambda self: not self.under_way)
    @rule(num_steps=st.integers(1, 15))
    def steps(self, num_steps: int) -> None:
        """Whole steps, as without overlap."""
        for _ in range(num_steps):
            self.schedule()
            if self.under_way:
                self.update()

    @precondition(lambda self: len(self.under_way) < MAX_UNDER_WAY)
    @rule(num_steps=st.integers(1, 15))
    def steps_with_overlap(self, num_steps: int) -> None:
        """A plan is made before the result of the one before is taken in."""
        for _ in range(num_steps):
            before = len(self.under_way)
            self.schedule()
            if len(self.under_way) > 1 or 0 < len(self.under_way) == before:
                self.update()

    @precondition(lambda self: self.live_ids)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live_ids)))
        assert self.scheduler.abort(name)
        assert not self.scheduler.abort(name)
        for key in [key for key in self.live if key[0] == name]:
            self.drop(key)
        self.kv.check_integrity()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name, index = data.draw(st.sampled_from(sorted(self.live)))
        seq_ids = self.scheduler.seq_ids(name)
        if self.live[name, index].request.beam is not None:
            assert not self.scheduler.finish(seq_ids[0], FinishReason.STOP, "END")
            return
        assert self.scheduler.finish(seq_ids[index], FinishReason.STOP, "END")
        assert not self.scheduler.finish(seq_ids[index], FinishReason.STOP, "END")
        self.drop((name, index))
        self.kv.check_integrity()

    @precondition(lambda self: not self.under_way and not self.is_quiet)
    @rule(num_blocks=st.integers(3, 12) | st.integers(3, 200))
    def resize(self, num_blocks: int) -> None:
        old = self.kv.num_blocks
        if self.is_tight:
            num_blocks = 3 + num_blocks % 10
        try:
            self.scheduler.resize(num_blocks, self.now_s)
        except CapacityError:
            assert old == self.kv.num_blocks
            assert num_blocks < old or self.kv.policy.name != "paged"
            return
        assert self.kv.num_blocks == num_blocks
        self.most = min(self.max_model_len, num_blocks * self.kv.block_size)
        """But for what is pinned."""
        if num_blocks > old:
            self.runner.resize(num_blocks)
        elif num_blocks < old:
            self.may_cut = True
            plan = self.scheduler.schedule(self.now_s)
            assert plan is not None and not plan.seqs
            result = self.runner.execute(plan)
            self.runner.resize(num_blocks)
            assert self.scheduler.update(result, self.now_s) == []
            self.check_tables()
        self.kv.check_integrity()

    @precondition(lambda self: self.prompts and not self.is_quiet)
    @rule(data=st.data(), share=st.sampled_from([0.3, 0.6, 1.0, 1.0]))
    def pin(self, data: st.DataObject, share: float) -> None:
        """A part of a prompt that has run."""
        prompt, salt = data.draw(st.sampled_from(self.prompts))
        token_ids = prompt[: math.ceil(share * len(prompt))]
        before = self.kv.num_pinned_blocks
        try:
            pin = self.scheduler.pin(token_ids, salt)
        except CapacityError:
            assert self.kv.num_pinned_blocks == before
            return
        self.kv.check_integrity()
        self.may_cut = self.may_cut or pin.num_blocks > 0
        self.pins.append(pin.pin_id)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin_id = data.draw(st.sampled_from(self.pins))
        self.pins.remove(pin_id)
        self.scheduler.unpin(pin_id)
        self.kv.check_integrity()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.kv.reset_prefix_cache()
        self.kv.check_integrity()

    @precondition(lambda self: len(self.under_way) < MAX_UNDER_WAY and not self.is_quiet)
    @rule(late=st.booleans())
    def fail(self, late: bool) -> None:
        """The runner fails in a step: its requests are aborted, the others go on."""
        plan = self.scheduler.schedule(self.now_s)
        if plan is None:
            return
        self.carry_out()
        self.runner.fail(plan, late=late)
        self.have_failed([plan])

    @precondition(lambda self: self.under_way and not self.is_quiet)
    @rule()
    def fail_all(self) -> None:
        """It fails in the oldest step under way: those after it are void."""
        for one in self.under_way:
            if one.result is None:
                self.runner.fail(one.plan, late=True)
        self.runner.has_failed = True
        plans = [one.plan for one in self.under_way]
        self.under_way.clear()
        self.have_failed(plans)

    def have_failed(self, plans: list[StepPlan]) -> None:
        names = {name for plan in plans for name in self.scheduler.request_ids_in(plan)}
        for name in sorted(names):
            assert self.scheduler.abort(name)
            for key in [key for key in self.live if key[0] == name]:
                self.num_computed.pop(name, None)
                self.drop(key, failed=True)
        for plan in reversed(plans):
            self.scheduler.retell(plan)
        self.kv.reset_cache()
        self.kv.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.pins:
            self.scheduler.unpin(self.pins.pop())
        while self.under_way:
            self.update()
        total = sum(3 * seq.max_total for seq in self.live.values())
        # The first in line advances in every step while it runs; under priority it may have to
        # wait, each time it changes, until those who run are done.
        bound = total if self.policy == "fcfs" else total * (len(self.live) + 1)
        if self.plan_ahead:  # who has to know its last token sits every second step out
            bound *= 2
        num_steps = 0
        while self.live:
            if self.plan_ahead:
                self.steps_with_overlap(1)
            else:
                self.steps(1)
            num_steps += 1
            assert num_steps <= bound, f"not done after {bound} steps"
        while self.under_way:
            self.update()
        assert not self.scheduler.has_unfinished()
        assert self.scheduler.schedule(self.now_s) is None
        assert_drained(self.kv)
