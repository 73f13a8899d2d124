"""The step loop: schedule, execute, update. Token ids in, token ids out; no text.

This is the part that can live in its own process: everything that crosses its border is plain data.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from octavo.engine.history import PoolHistory
from octavo.errors import CapacityError, EngineDeadError, StepFailedError
from octavo.events import EngineEvent, EventKind
from octavo.kv import KVCacheManager
from octavo.outputs import RequestKVUsage, RequestMetrics
from octavo.plan import StepPlan, StepResult
from octavo.request import FinishReason, Request
from octavo.sched import RequestStats, Scheduler, SeqUpdate

if TYPE_CHECKING:
    from octavo.engine.recorder import Recorder
    from octavo.kv.pins import Pin
    from octavo.kv.stats import PrefixCacheStats
    from octavo.runner.disk_store import DiskStore

Execute = Callable[[StepPlan], StepResult]
_MAX_EVENTS = 1000
_LAST_STEP = -1
"""Number of the plan that empties the pool to disk: nobody waits for its result."""


class EngineCore:
    """Joins the scheduler's decisions and the runner's work.

    scheduler, kv: decisions and memory; execute, resize_pool: the runner's; disk: the last tier;
    clock: seconds, monotonic; recorder: to be ended with the engine.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCacheManager,
        execute: Execute,
        resize_pool: Callable[[int], None] | None = None,
        disk: DiskStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        recorder: Recorder | None = None,
    ) -> None:
        self.scheduler, self.kv, self.clock = scheduler, kv, clock
        self._execute: Execute | None = execute
        self._resize_pool = resize_pool
        self._disk = disk
        self._recorder = recorder
        self._stats: dict[str, RequestStats] = {}
        self._events: deque[EngineEvent] = deque(maxlen=_MAX_EVENTS)
        self._num_noted = 0
        """Of them, those that were forgotten included."""
        self._updates: list[SeqUpdate] = []
        """News that came about between two steps."""
        self.history = PoolHistory(kv)

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `RequestCapacityError` for one that can never fit."""
        self._check_open()
        try:
            self._stats[request.request_id] = self.scheduler.add(request)
        except CapacityError as error:
            self.note_refusal(request.request_id, error)
            raise

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """Drop a request, or one of its samples, wherever it is; its blocks are given back at once.
        False if it is not here."""
        if index is None:
            self._stats.pop(request_id, None)
            return self.scheduler.abort(request_id)
        seq_ids = self.scheduler.seq_ids(request_id)
        if not 0 <= index < len(seq_ids):
            return False
        return self.scheduler.finish(seq_ids[index], FinishReason.ABORT)

    def finish(self, seq_id: int, stop_reason: str) -> None:
        """End a sequence because a stop string was found in its text."""
        self.scheduler.finish(seq_id, FinishReason.STOP, stop_reason)

    def forget(self, request_id: str) -> None:
        """Drop the record of a request that has ended and been answered."""
        self._stats.pop(request_id, None)

    def stats(self, request_id: str) -> tuple[RequestMetrics, RequestKVUsage] | None:
        """Times and KV usage of a request until now; None if it is not known."""
        stats = self._stats.get(request_id)
        if stats is None:
            return None
        ended = stats.metrics.finished_s is not None
        return stats.metrics, stats.kv if ended else self.kv.request_usage(request_id)

    def block_tables(self) -> dict[str, list[list[int]]]:
        """Request id -> for each of its sequences the physical blocks it holds now."""
        return {
            request_id: [
                list(self.kv.block_table(seq_id)) if self.kv.has(seq_id) else []
                for seq_id in self.scheduler.seq_ids(request_id)
            ]
            for request_id in self._stats
        }

    # -- memory under pressure

    def events(self, request_id: str | None = None) -> list[EngineEvent]:
        """What happened to a request, or to all and the engine itself, oldest first. Of what is
        over the last 1000 are kept, and the last 1000 refusals and failures beside them."""
        own = [e for e in self._events if request_id in (None, e.request_id)]
        return sorted([*self.scheduler.events(request_id), *own], key=lambda e: e.time_s)

    @property
    def num_events_forgotten(self) -> int:
        """Events that `events` would have told, had later ones not taken their place."""
        own = self._num_noted - len(self._events)
        return own + self.scheduler.pressure_totals.num_events_forgotten

    def note_refusal(self, request_id: str | None, error: CapacityError) -> None:
        """Make an event of what can never fit: a request, or a pin or a resize (None)."""
        self._note(EventKind.REFUSED, request_id, str(error))

    def _note(self, kind: EventKind, request_id: str | None, why: str) -> None:
        event = EngineEvent(kind=kind, time_s=self.clock(), request_id=request_id, why=why)
        self._events.append(event)
        self._num_noted += 1

    def pin(self, token_ids: list[int], salt: str = "") -> Pin:
        """Keep the KV of the whole blocks of a prefix in the pool, as far as it is there now.

        Raises `CapacityError` when pins would take more than half of the pool, or what a live
        request was promised.
        """
        self._check_open()
        try:
            return self.scheduler.pin(token_ids, salt)
        except CapacityError as error:
            self.note_refusal(None, error)
            raise

    def unpin(self, pin_id: int) -> None:
        """Let go of a pinned prefix. Raises `InvalidRequestError` for an id that is not pinned."""
        self.scheduler.unpin(pin_id)

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that nobody uses, in all tiers; how many blocks of the pool
        that freed."""
        self._check_open()
        return self.kv.reset_prefix_cache()

    def cache_stats(self) -> PrefixCacheStats:
        """What the prefix cache found since the start."""
        return self.kv.cache_stats()

    def resize(self, num_blocks: int) -> None:
        """Make the pool so large, while requests run. Raises `CapacityError` if it cannot be, of
        which the caller makes an event."""
        self._check_open()
        before = self.kv.num_blocks
        try:
            if num_blocks > before:
                self._resize_memory(num_blocks)
            self.scheduler.resize(num_blocks, self.clock())
        except CapacityError:
            if num_blocks > before:
                self._resize_memory(before)
            raise
        if num_blocks < before:
            self._updates += self._step()  # moves what is behind the new end, and nothing else
            self._resize_memory(num_blocks)

    def _resize_memory(self, num_blocks: int) -> None:
        if self._resize_pool is None:
            return
        try:
            self._resize_pool(num_blocks)
        except MemoryError as error:
            raise CapacityError(
                f"the system has no memory for a KV pool of {num_blocks:,} blocks: {error}"
            ) from error

    # -- steps

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a plan that no scheduler made, to measure the runner: only while the engine has
        no requests, and with every sequence that it brings told to be finished again. Raises what
        the runner raises."""
        assert not self._stats, "the engine has requests of its own"
        return self._check_open()(plan)

    def has_unfinished(self) -> bool:
        """Whether any request still waits or runs, or has news."""
        return bool(self._updates) or self.scheduler.has_unfinished()

    def step(self) -> list[SeqUpdate]:
        """Run one iteration; what each sequence gained. Empty when there is nothing to run.

        Raises `StepFailedError` when the runner failed: the requests of that step are aborted and
        named, the others go on. An interrupt aborts them too: half a step cannot be taken back.
        """
        updates = self._step()
        updates[:0], self._updates = self._updates, []
        return updates

    def _step(self) -> list[SeqUpdate]:
        execute = self._check_open()
        began_s = self.clock()
        with self._deciding():
            plan = self.scheduler.schedule(began_s)
        if plan is None:
            return self.scheduler.take_updates()
        try:
            result = execute(plan)
        except BaseException as error:
            failed = self._failed(plan, error)
            if isinstance(error, Exception):
                raise failed from error
            raise
        with self._deciding():
            if plan.seqs:
                self.history.record(plan, self.clock() - began_s)
            return self.scheduler.update(result, self.clock())

    @property
    def live_request_ids(self) -> set[str]:
        """Requests that have not ended and been answered."""
        return set(self._stats)

    def close(self) -> None:
        """Abort everything, write cached blocks to disk if there is one, and let go of the runner,
        with it weights and pool."""
        for request_id in list(self._stats):
            self.abort(request_id)
        disk, self._disk = self._disk, None
        execute, self._execute, self._resize_pool = self._execute, None, None
        try:
            if disk is not None:
                self._empty_to_disk(disk, execute)
        finally:
            self._end_record("closed")

    def _empty_to_disk(self, disk: DiskStore, execute: Execute | None) -> None:
        try:
            if execute is not None:
                disk.wait_when_full = True
                self.kv.flush_to_disk()
                execute(StepPlan(_LAST_STEP, copies=self.kv.take_copies()))
        finally:
            disk.close()

    def _end_record(self, why: str) -> None:
        if self._recorder is not None:
            self._recorder.end(why, self.scheduler, self.kv)

    def check_open(self) -> None:
        """Raise `EngineDeadError` once the engine is closed or dead."""
        self._check_open()

    def _check_open(self) -> Execute:
        if self._execute is None:
            raise EngineDeadError("the engine is closed, or was interrupted while it decided")
        return self._execute

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Half a decision leaves tables and counts that nobody can trust: the engine ends there."""
        try:
            yield
        except BaseException as error:
            self._execute = None
            self._end_record(f"died of {type(error).__name__}")
            raise

    def _failed(self, plan: StepPlan, error: BaseException) -> StepFailedError:
        moves = bool(plan.moved)
        request_ids = list(self._stats) if moves else self.scheduler.request_ids_in(plan)
        for request_id in request_ids:
            self.abort(request_id)
        why = (
            f"step {plan.step_id} failed with {type(error).__name__}: {error}; aborted "
            f"{len(request_ids)} requests: {', '.join(request_ids)}"
        )
        if moves:  # nobody knows where the blocks are
            self._execute = None
            why += "; the pool was being resized: the engine has ended"
        else:
            # Nor which of the plan's blocks were written.
            self.kv.reset_cache()
            self.scheduler.retell(plan)
        for request_id in request_ids:
            self._note(EventKind.FAILED, request_id, why)
        if not request_ids:
            self._note(EventKind.FAILED, None, why)
        return StepFailedError(why, request_ids=request_ids)
