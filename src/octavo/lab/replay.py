"""Replay: a recorded engine's calls, made again on a fresh scheduler and memory manager.

Decisions depend on nothing but the header and the calls, so every plan must come out as it was
recorded, bit for bit. Where one does not, the record was tampered with, or the code that decides is
not the code that was recorded.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

from octavo.errors import OctavoError, RecordError
from octavo.kv.manager import KVCacheManager
from octavo.kv.policies import make_policy
from octavo.kv.tiers import ColdStore
from octavo.lab.replay_report import Difference, ReplayReport, first_difference
from octavo.plan import BlockCopy, BlockLabel, StepPlan, StepResult
from octavo.record import (
    Aborted,
    Added,
    CacheReset,
    Call,
    Ended,
    EngineLimits,
    Finished,
    Flushed,
    Pinned,
    PrefixCacheReset,
    RecordHeader,
    RecordReader,
    Resized,
    Retold,
    Scheduled,
    Unpinned,
    Updated,
    totals_of,
)
from octavo.request import Request
from octavo.sched import RequestStats, Scheduler, SeqUpdate
from octavo.sched.costs import CostModel

Progress = Callable[[int], None]
"""Told now and then: calls made so far."""
_PROGRESS_EVERY = 500
_INTERRUPTS = {"KeyboardInterrupt", "SystemExit", "MemoryError"}
"""What ends a call for reasons that lie outside of it."""


class Watcher:
    """Looks on while a scheduler decides, in a replay or a simulation; does nothing by itself."""

    def begun(self, kv: KVCacheManager, scheduler: Scheduler) -> None:
        """Before anything: who decides."""

    def added(self, request: Request, stats: RequestStats) -> None:
        """A request was accepted."""

    def refused(self, request: Request, error: OctavoError) -> None:
        """It can never fit, say."""

    def called(self, call: Call) -> None:
        """A call is about to be made that is none of the others."""

    def scheduled(self, plan: StepPlan | None, now_s: float) -> None:
        """A step was planned, or found to have nothing to do."""

    def updated(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """A step's result is about to be taken in."""

    def news(self, updates: list[SeqUpdate]) -> None:
        """What sequences gained, and who ended."""


def build(limits: EngineLimits, disk: ColdStore | None = None) -> tuple[KVCacheManager, Scheduler]:
    """A fresh memory manager and scheduler."""
    kv = KVCacheManager(
        limits.num_blocks,
        limits.block_size,
        make_policy(
            limits.kv_policy,
            max_seq_tokens=limits.max_model_len,
            windows=limits.windows,
            max_chunk_tokens=limits.max_num_batched_tokens,
        ),
        limits.bytes_per_block,
        enable_prefix_caching=limits.enable_prefix_caching,
        num_host_blocks=limits.num_host_blocks,
        disk=disk,
        max_disk_blocks=limits.max_disk_blocks,
    )
    scheduler = Scheduler(
        kv,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        policy=limits.scheduling_policy,
        watermark=limits.watermark,
        max_watermark=limits.max_watermark,
        preemption_mode=limits.preemption_mode,
        preemption_victim=limits.preemption_victim,
        costs=CostModel(token_s=limits.token_s, block_s=limits.block_s),
        plan_ahead=limits.plan_ahead,
    )
    return kv, scheduler


def replay(
    reader: RecordReader, watchers: tuple[Watcher, ...] = (), progress: Progress | None = None
) -> ReplayReport:
    """Make the recorded calls again, and compare, up to the first difference or the end.

    A record that is damaged or breaks off is replayed up to there, and one with an interrupted call
    up to that: what it left half done nobody knows. Raises `RecordError` for limits that no engine
    can have.
    """
    run = Replay(reader.header, watchers)
    report = run.report
    damages, last_line, num_left = [], 0, 0
    try:
        for call in reader.calls():
            if report.ended is not None:
                num_left += not (run.is_interrupted and isinstance(call, Ended))
                continue
            report.num_calls += 1
            if progress is not None and report.num_calls % _PROGRESS_EVERY == 0:
                progress(report.num_calls)
            found, last_line = run.make(call), reader.num_lines
            if found is not None:
                report.difference = dataclasses.replace(found, line=last_line)
                break
    except RecordError as error:
        damages.append(str(error))
    if num_left:
        calls = f"{num_left:,} call{'s' * (num_left != 1)} after it "
        was = "was" if num_left == 1 else "were"
        why = report.ended if run.is_interrupted else "the end"
        damages.insert(0, f"line {last_line}: {why}; the {calls}{was} not replayed")
    report.damage = "; ".join(damages) or None
    run.count()
    return report


class Replay:
    """An engine's decisions, made again call by call."""

    def __init__(self, header: RecordHeader, watchers: tuple[Watcher, ...] = ()) -> None:
        self._disk = _ReplayedDisk(header)
        has_disk = bool(header.limits.max_disk_blocks)
        try:
            self.kv, self.scheduler = build(header.limits, self._disk if has_disk else None)
        except Exception as error:
            raise RecordError(
                f"line 1 of the record: no engine has such limits: {_name(error)}"
            ) from error
        self.report = ReplayReport(header=header)
        self.is_interrupted = False
        """Whether a call ended, when it was recorded, for reasons outside of it."""
        self._watchers = watchers
        for watcher in watchers:
            watcher.begun(self.kv, self.scheduler)
        self._plans: dict[int, StepPlan] = {}
        """By step, those without a result."""
        self._last_plan: StepPlan | None = None

    def make(self, call: Call) -> Difference | None:
        """One call. What differs, with line 0."""
        self._disk.answers.extend(call.fetched)
        found, error = None, None
        try:
            found = self._make(call)
        except Exception as raised:
            error = type(raised).__name__ if call.error is not None else _name(raised)
        if call.error in _INTERRUPTS and error is None:
            self.report.ended = f"interrupted by {call.error}"
            self.is_interrupted = True
            return None
        if error != call.error:
            return self._differs("error", call.error, error)
        if found is None and self._disk.answers:
            return self._differs("fetched", list(self._disk.answers), [])
        return found

    def count(self) -> None:
        """Bring the report's counters up to date."""
        self.report.num_preemptions = self.scheduler.num_preemptions
        self.report.num_evictions = self.kv.cache_stats().evictions

    def _make(self, call: Call) -> Difference | None:
        match call:
            case Scheduled():
                return self._schedule(call)
            case Updated():
                return self._update(call)
            case Added():
                self._add(call)
                return None
            case Ended():
                return self._end(call)
        for watcher in self._watchers:
            watcher.called(call)
        match call:
            case Aborted():
                found = self.scheduler.abort(call.request_id)
                return self._compare("found", call.found, found)
            case Finished():
                found = self.scheduler.finish(call.seq_id, call.reason, call.stop_reason)
                return self._compare("found", call.found, found)
            case Pinned():
                pin = self.scheduler.pin(call.token_ids, call.salt)
                return self._compare("pin_id", call.pin_id, pin.pin_id)
            case Unpinned():
                self.scheduler.unpin(call.pin_id)
            case Resized():
                self.scheduler.resize(call.num_blocks, call.now_s)
            case PrefixCacheReset():
                num_freed = self.kv.reset_prefix_cache()
                return self._compare("num_freed", call.num_freed, num_freed)
            case CacheReset():
                self.kv.reset_cache(call.num_plans)
            case Retold():
                failed = self._last_plan
                if call.step_id is not None:
                    failed = self._plans.get(call.step_id)
                assert failed is not None, "told again before anything was told"
                self.scheduler.retell(failed)
            case Flushed():
                self.kv.flush_to_disk()
                copies = self.kv.take_copies()
                self._count_copies(copies)
                return self._compare("copies", list(call.copies), copies)
            case _:
                raise AssertionError(f"no such call: {call!r:.200}")
        return None

    def _add(self, call: Added) -> None:
        try:
            stats = self.scheduler.add(call.request)
        except OctavoError as error:
            self.report.num_refused += 1
            for watcher in self._watchers:
                watcher.refused(call.request, error)
            raise
        self.report.num_requests += 1
        for watcher in self._watchers:
            watcher.added(call.request, stats)

    def _schedule(self, call: Scheduled) -> Difference | None:
        plan = self.scheduler.schedule(call.now_s)
        if call.error is not None:
            return None  # what it was supposed to raise is missing
        if plan is None:
            self._tell(self.scheduler.take_updates())
        if plan is None or call.plan is None:
            if plan is not call.plan:
                one = plan or call.plan
                assert one is not None
                return self._differs("plan", call.plan, plan, step_id=one.step_id)
        else:
            self._count(plan)
            found = first_difference(call.plan, plan)
            if found is not None:
                return self._differs(*found, step_id=call.plan.step_id)
        for watcher in self._watchers:
            watcher.scheduled(plan, call.now_s)
        step_id = None if plan is None else plan.step_id
        num_evicted = self.kv.cache_stats().evictions
        return self._compare(
            "num_free", call.num_free, self.kv.num_free_blocks, step_id
        ) or self._compare("num_evicted", call.num_evicted, num_evicted, step_id)

    def _count(self, plan: StepPlan) -> None:
        report = self.report
        self._plans[plan.step_id] = self._last_plan = plan
        report.num_steps += 1
        report.num_tokens += plan.num_tokens
        report.num_admissions += len(plan.new_seqs)
        report.num_forks += len(plan.forks)
        self._count_copies(plan.copies)

    def _count_copies(self, copies: list[BlockCopy]) -> None:
        self.report.num_copies.update(copy.kind.name.lower() for copy in copies)

    def _update(self, call: Updated) -> Difference | None:
        step_id = call.result.step_id
        plan = self._plans.pop(step_id, None)
        if plan is None:
            return self._differs("result", f"of step {step_id}", "no such plan is under way")
        for failed in [i for i in self._plans if i < step_id]:
            del self._plans[failed]
        for watcher in self._watchers:
            watcher.updated(plan, call.result, call.now_s)
        self._tell(self.scheduler.update(call.result, call.now_s))
        return None

    def _end(self, call: Ended) -> Difference | None:
        self.report.ended = call.why
        totals = totals_of(self.scheduler.num_preemptions, self.kv.cache_stats())
        for name in totals | call.totals:
            if totals.get(name) != call.totals.get(name):
                return self._differs(name, call.totals.get(name), totals.get(name))
        return None

    def _tell(self, updates: list[SeqUpdate]) -> None:
        for watcher in self._watchers:
            watcher.news(updates)

    def _compare(
        self, name: str, recorded: Any, replayed: Any, step_id: int | None = None
    ) -> Difference | None:
        if recorded == replayed:
            return None
        return self._differs(name, recorded, replayed, step_id=step_id)

    def _differs(
        self, name: str, recorded: Any, replayed: Any, *, step_id: int | None = None
    ) -> Difference:
        return Difference(line=0, step_id=step_id, field=name, recorded=recorded, replayed=replayed)


def _name(error: Exception) -> str:
    """With what it says, for an error that was not expected."""
    return f"{type(error).__name__}: {error}"


class _ReplayedDisk:
    """A disk tier that answers as it was recorded."""

    def __init__(self, header: RecordHeader) -> None:
        self._left = list(header.disk)
        self.answers: deque[tuple[int, bool]] = deque()

    def fetch(self, disk_id: int) -> bool:
        """See `ColdStore`."""
        recorded_id, is_whole = self.answers.popleft()
        if recorded_id != disk_id:
            raise AssertionError(f"block {disk_id} is read from disk, recorded: {recorded_id}")
        return is_whole

    def delete(self, disk_id: int) -> None:
        """See `ColdStore`."""

    def entries(self) -> list[tuple[int, BlockLabel]]:
        """See `ColdStore`."""
        return self._left
