"""The step loop: schedule, launch, update. Token ids in, token ids out; no text.

This is the part that can live in its own process: everything that crosses its border is plain data.
With overlap a step is planned and launched before the result of the one before is waited for, so
that the device never waits for decisions.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from octavo.engine.history import PoolHistory
from octavo.engine.pipeline import Launch, Pipeline, Wait, wait_for
from octavo.errors import CapacityError, DeviceLostError, EngineDeadError, StepFailedError
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

logger = logging.getLogger("octavo")
_MAX_EVENTS = 1000
_LAST_STEP = -1
"""Number of the plan that empties the pool to disk: nobody waits for its result."""


class EngineCore:
    """Joins the scheduler's decisions and the runner's work.

    scheduler, kv: decisions and memory; launch, resize_pool: the runner's; disk: the last tier;
    clock: seconds, monotonic; recorder: to be ended with the engine; overlap: whether a step is
    launched before the result of the one before is here.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCacheManager,
        launch: Launch,
        resize_pool: Callable[[int], None] | None = None,
        disk: DiskStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        recorder: Recorder | None = None,
        overlap: bool = False,
    ) -> None:
        self.scheduler, self.kv, self.clock = scheduler, kv, clock
        self._launch: Launch | None = launch
        self._pipeline = Pipeline(clock, overlap=overlap)
        self._failures: list[StepFailedError] = []
        """Of steps that failed while somebody waited for a quiet runner: `step` tells."""
        self._kinds_told: set[str] = set()
        """Of requests that cannot be planned ahead."""
        self._resize_pool = resize_pool
        self._disk = disk
        self._recorder = recorder
        self._stats: dict[str, RequestStats] = {}
        self._events: deque[EngineEvent] = deque(maxlen=_MAX_EVENTS)
        self._num_noted = 0
        """Of them, those that were forgotten included."""
        self._updates: list[SeqUpdate] = []
        """News that came about between two steps."""
        self._why_dead = "the engine is closed, or was interrupted while it decided"
        self.history = PoolHistory(kv)

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `RequestCapacityError` for one that can never fit."""
        self._check_open()
        if self._pipeline and not self.scheduler.has_unfinished():
            self._pipeline.rest()
        try:
            self._stats[request.request_id] = self.scheduler.add(request)
        except CapacityError as error:
            self.note_refusal(request.request_id, error)
            raise
        if self._pipeline.overlap:
            self._tell_if_in_turns(request)

    def _tell_if_in_turns(self, request: Request) -> None:
        """Say once for each kind of request that cannot be planned ahead what that means."""
        if request.beam is not None:
            kind = "beam search"
        elif request.sampler.needs_past:
            kind = "sampling with penalties or bad words of several tokens"
        else:
            return
        if kind not in self._kinds_told:
            self._kinds_told.add(kind)
            why = (
                f"{kind} has to know a step's tokens before the next is planned: such requests run "
                "in every second step, or without overlap if there are no others"
            )
            logger.info("request %s: %s", request.request_id, why)
            self._note(EventKind.NO_OVERLAP, request.request_id, why)

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """Drop a request, or one of its samples, wherever it is; its blocks are given back at once.
        False if it is not here."""
        if index is None:
            self._updates = [news for news in self._updates if news.request_id != request_id]
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
        self._check_quiet()
        return self.kv.reset_prefix_cache()

    def cache_stats(self) -> PrefixCacheStats:
        """What the prefix cache found since the start."""
        return self.kv.cache_stats()

    def resize(self, num_blocks: int) -> None:
        """Make the pool so large, while requests run. Raises `CapacityError` if it cannot be, of
        which the caller makes an event."""
        launch = self._check_quiet()
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
            self._plan_one(launch)  # moves what is behind the new end, and nothing else
            while self._pipeline:
                self._updates += self._take_oldest()
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
        return self._check_quiet()(plan)()

    def has_unfinished(self) -> bool:
        """Whether any request still waits or runs, or has news, or a step is under way."""
        return bool(
            self._updates or self._failures or self._pipeline or self.scheduler.has_unfinished()
        )

    def step(self) -> list[SeqUpdate]:
        """Run one iteration; what each sequence gained. Empty when there is nothing to run.

        With overlap it launches a step and waits for the one before. Raises `StepFailedError` when
        the runner failed: the requests of that step, and of the one launched after it, are aborted
        and named, the others go on. An interrupt aborts them too: half a step cannot be taken back.
        """
        if self._failures:
            raise self._failures.pop(0)
        updates = self._step()
        updates[:0], self._updates = self._updates, []
        return updates

    def _step(self) -> list[SeqUpdate]:
        launch = self._check_open()
        while self._pipeline.has_room and self._plan_one(launch):
            pass
        return self._take_oldest() if self._pipeline else self.scheduler.take_updates()

    def _plan_one(self, launch: Launch) -> bool:
        """Plan a step and launch it; False if nothing can run."""
        begun_s = self.clock()
        with self._deciding():
            plan = self.scheduler.schedule(begun_s)
        if plan is None:
            return False
        try:
            self._pipeline.put(plan, launch(plan), begun_s)
        except BaseException as error:
            self._fail([plan], [], error)
        return True

    def _take_oldest(self) -> list[SeqUpdate]:
        """Wait for the oldest plan under way, and take in what it yields."""
        try:
            plan, result, seconds = self._pipeline.wait()
        except BaseException as error:
            self._fail(*self._pipeline.drop(), error)
        with self._deciding():
            self._pipeline.pop()
            if plan.seqs:
                self.history.record(plan, seconds)
            return self.scheduler.update(result, self.clock())

    def _check_quiet(self) -> Launch:
        """Wait for all plans under way; what they yield comes with the next step. Raises
        `EngineDeadError` if the engine is closed or dead."""
        self._check_open()
        while self._pipeline:
            try:
                self._updates += self._take_oldest()
            except StepFailedError as error:
                self._failures.append(error)
        return self._check_open()

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
        launch, self._launch, self._resize_pool = self._launch, None, None
        try:
            self._pipeline.discard()
        finally:
            try:
                if disk is not None:
                    self._empty_to_disk(disk, launch)
            finally:
                self._end_record("closed")

    def _empty_to_disk(self, disk: DiskStore, launch: Launch | None) -> None:
        try:
            if launch is not None:
                disk.wait_when_full = True
                self.kv.flush_to_disk()
                launch(StepPlan(_LAST_STEP, copies=self.kv.take_copies()))()
        finally:
            disk.close()

    def _end_record(self, why: str) -> None:
        if self._recorder is not None:
            self._recorder.end(why, self.scheduler, self.kv)

    def check_open(self) -> None:
        """Raise `EngineDeadError` once the engine is closed or dead."""
        self._check_open()

    def _check_open(self) -> Launch:
        if self._launch is None:
            raise EngineDeadError(self._why_dead)
        return self._launch

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Half a decision leaves tables and counts that nobody can trust: the engine ends there."""
        try:
            yield
        except BaseException as error:
            self._launch = None
            self._end_record(f"died of {type(error).__name__}")
            raise

    def _fail(self, plans: list[StepPlan], waits: list[Wait], error: BaseException) -> NoReturn:
        """The first of these plans has failed. The others, which were launched after it, are given
        up too: they go on where it would have ended."""
        is_dead = isinstance(error, DeviceLostError) or any(plan.moved for plan in plans)
        if is_dead:
            request_ids = list(self._stats)
        else:
            hit = {i for plan in plans for i in self.scheduler.request_ids_in(plan)}
            request_ids = [request_id for request_id in self._stats if request_id in hit]
        for request_id in request_ids:
            self.abort(request_id)
        why = f"step {plans[0].step_id} failed with {type(error).__name__}: {error}; "
        if len(plans) > 1:
            why += f"step {plans[-1].step_id}, which had been launched after it, is void; "
        why += f"aborted {len(request_ids)} requests: {', '.join(request_ids)}"
        if is_dead:
            gone = "the device is lost"
            if not isinstance(error, DeviceLostError):
                gone = "the pool was being resized"  # nobody knows where the blocks are
            self._launch = None
            self._why_dead = f"the engine has ended: {gone} (step {plans[0].step_id})"
            why += f"; {gone}: the engine has ended"
            self._pipeline.drop()
        else:
            # Nor which of the plans' blocks were written.
            self.kv.reset_cache()
            for plan in reversed(plans):
                self.scheduler.retell(plan)
        for request_id in request_ids:
            self._note(EventKind.FAILED, request_id, why)
        if not request_ids:
            self._note(EventKind.FAILED, None, why)
        if not is_dead:
            wait_for(waits)
        if not isinstance(error, Exception):
            raise error
        raise StepFailedError(why, request_ids=request_ids) from error
