"""Steps of an engine, and what becomes of one that fails or is interrupted.

What is told to the scheduler, the pool and the runner is told to all three, or the engine ends:
an engine that goes on with half a decision would answer wrongly, or never.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from octavo.engine.history import PoolHistory
from octavo.engine.pipeline import Launch, Pipeline
from octavo.errors import CapacityError, DeviceLostError, EngineDeadError, StepFailedError
from octavo.events import EngineEvent, EventKind
from octavo.kv import KVCacheManager
from octavo.plan import StepPlan
from octavo.request import FinishReason
from octavo.sched import RequestStats, Scheduler, SeqUpdate

if TYPE_CHECKING:
    from octavo.engine.recorder import Recorder
    from octavo.runner.disk_store import DiskStore

_MAX_EVENTS = 1000
_LAST_STEP = -1
"""Number of the plan that empties the pool to disk: nobody waits for its result."""


class StepLoop:
    """Schedules, launches and updates, until it is closed or dead.

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
        self.history = PoolHistory(kv)
        self._launch: Launch | None = launch
        self._is_deciding = False
        """Also after an interrupt has torn a decision apart."""
        self._why_dead = "the engine is closed, or was interrupted while it decided"
        self._pipeline = Pipeline(clock, overlap=overlap)
        self._failures: list[StepFailedError] = []
        """Of steps that failed while somebody waited for a quiet runner: `step` tells."""
        self._resize_pool = resize_pool
        self._disk = disk
        self._recorder = recorder
        self._stats: dict[str, RequestStats] = {}
        self._kinds_told: set[str] = set()
        """Of requests that cannot be planned ahead, those that were told of."""
        self._events: deque[EngineEvent] = deque(maxlen=_MAX_EVENTS)
        self._num_noted = 0
        """Of them, those that were forgotten included."""
        self._updates: list[SeqUpdate] = []
        """News that came about between two steps."""

    def check_open(self) -> Launch:
        """The runner's door. Raises `EngineDeadError` once the engine is closed or dead."""
        if self._launch is None or self._is_deciding:
            raise EngineDeadError(self._why_dead)
        return self._launch

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """Drop a request, or one of its samples, wherever it is; its blocks are given back at once.
        False if it is not here."""
        if index is None:
            self._updates = [news for news in self._updates if news.request_id != request_id]
            self._stats.pop(request_id, None)
            had_failed = self.has_failed(request_id)
            for failure in self._failures:
                failure.request_ids = [i for i in failure.request_ids if i != request_id]
            self._failures = [failure for failure in self._failures if failure.request_ids]
            return self.scheduler.abort(request_id) or had_failed
        seq_ids = self.scheduler.seq_ids(request_id)
        if not 0 <= index < len(seq_ids):
            return False
        return self.scheduler.finish(seq_ids[index], FinishReason.ABORT)

    def has_failed(self, request_id: str) -> bool:
        """Whether a request was aborted by a failure that `step` has not told yet."""
        return any(request_id in failure.request_ids for failure in self._failures)

    def has_unfinished(self) -> bool:
        """Whether any request still waits or runs, or has news, or a step is under way."""
        return bool(
            self._updates or self._failures or self._pipeline or self.scheduler.has_unfinished()
        )

    # -- steps

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
        launch, since_s = self.check_open(), self.clock()
        while self._pipeline.has_room and (not self._pipeline or self.scheduler.has_more):
            if not self._plan_one(launch):
                break
        return self._take_oldest(since_s) if self._pipeline else self.scheduler.take_updates()

    def _plan_one(self, launch: Launch) -> bool:
        """Plan a step and launch it; False if nothing can run."""
        self._pipeline.settle()
        failure: BaseException | None = None
        begun_s = self.clock()
        with self._deciding():
            plan = self.scheduler.schedule(begun_s)
            if plan is None:
                return False
            place = self._pipeline.reserve(plan, begun_s)
            try:
                place.launch(launch)
            except BaseException as error:
                failure = error  # an interrupt that comes too late hits nobody's step
                if not place.is_launched:
                    self._pipeline.withdraw()
                    failure = self._give_up([plan], error)
        if failure is not None:
            raise failure
        return True

    def _take_oldest(self, since_s: float) -> list[SeqUpdate]:
        """Wait for the oldest plan under way, and take in what it yields."""
        with self._deciding():
            try:
                end = self._pipeline.wait(since_s)
            except BaseException as error:
                failure = self._give_up(self._pipeline.drop(), error)
            else:
                self._pipeline.pop()
                if end.plan.seqs:
                    self.history.record(end.plan, end.seconds)
                return self.scheduler.update(end.result, self.clock())
        self._pipeline.settle()
        raise failure

    def become_quiet(self) -> Launch:
        """Wait for all plans under way; what they yield, or who failed, comes with the next steps.
        Returns the runner's door. Raises `EngineDeadError` if the engine is closed or dead."""
        self.check_open()
        since_s = self.clock()
        while self._pipeline:
            try:
                self._updates += self._take_oldest(since_s)
            except StepFailedError as error:
                self._tell_later(error)
        self._pipeline.settle()
        return self.check_open()

    def _tell_later(self, error: StepFailedError) -> None:
        if error.request_ids:
            self._failures.append(error)

    # -- the pool's size

    def resize(self, num_blocks: int) -> None:
        """Make the pool so large, while requests run. Raises `CapacityError` if it cannot be, of
        which the caller makes an event; `EngineDeadError` if nobody knows what became of it."""
        launch = self.become_quiet()
        before = self.kv.num_blocks
        refusal: CapacityError | None = None
        with self._deciding():
            try:
                if num_blocks > before:
                    self._resize_memory(num_blocks)
                self.scheduler.resize(num_blocks, self.clock())
            except CapacityError as error:
                refusal = error
                if num_blocks > before:
                    self._resize_memory(before)
            else:
                if num_blocks < before:
                    refusal = self._shrink(launch, before)
        if refusal is not None:
            raise refusal
        self.check_open()

    def _shrink(self, launch: Launch, before: int) -> CapacityError | None:
        """Empty what is behind the new end and give its memory up; why that could not be. A step
        that fails without having moved blocks changes nothing about it."""
        try:
            self._plan_one(launch)  # moves what is behind the new end, and nothing else
            while self._pipeline:
                self._updates += self._take_oldest(self.clock())
        except StepFailedError as error:
            self._tell_later(error)
        if self._launch is None:
            return None
        try:
            self._resize_memory(self.kv.num_blocks)
        except CapacityError as error:
            self.scheduler.resize(before, self.clock())
            return error
        return None

    def _resize_memory(self, num_blocks: int) -> None:
        if self._resize_pool is None:
            return
        try:
            self._resize_pool(num_blocks)
        except (MemoryError, RuntimeError) as error:
            # torch's is a RuntimeError; deciding needs no torch, so it goes by its name
            if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
                raise
            raise CapacityError(
                f"the system has no memory for a KV pool of {num_blocks:,} blocks: {error}"
            ) from error

    # -- the end

    def close(self) -> None:
        """Abort everything, write cached blocks to disk if there is one, and let go of the runner,
        with it weights and pool."""
        is_torn, launch = self._is_deciding, self._launch
        self._launch = self._resize_pool = None
        disk, self._disk = self._disk, None
        try:
            num_void, interrupt = self._pipeline.discard()
            for request_id in list(self._stats):
                self.abort(request_id)
            if num_void:  # what they should have computed or copied must not be found again
                with contextlib.suppress(*((Exception,) if is_torn else ())):
                    self.kv.reset_cache(num_void)
            elif disk is not None and launch is not None and not is_torn:
                disk.wait_when_full = True
                self.kv.flush_to_disk()
                launch(StepPlan(_LAST_STEP, copies=self.kv.take_copies()))()
            if interrupt is not None:
                raise interrupt
        finally:
            try:
                if disk is not None:
                    disk.close()
            finally:
                self._end_record("closed")

    def _end_record(self, why: str) -> None:
        if self._recorder is not None:
            self._recorder.end(why, self.scheduler, self.kv)

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Half a decision leaves tables and counts that nobody can trust: the engine ends there,
        also if the interrupt comes before this has noticed."""
        outer, self._is_deciding = self._is_deciding, True
        try:
            yield
        except BaseException as error:
            self._launch = None
            self._end_record(f"died of {type(error).__name__}")
            raise
        self._is_deciding = outer

    def _give_up(self, plans: list[StepPlan], error: BaseException) -> BaseException:
        """The first of these plans has failed. The others, which were launched after it, are given
        up too: they go on where it would have ended. Returns what is to be raised of it."""
        # Of who ended while one of them was planned nothing is left but news: `abort` must find it.
        self._updates += self.scheduler.take_updates()
        is_lost = isinstance(error, DeviceLostError)
        is_dead = is_lost or any(plan.moved for plan in plans)
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
        if not request_ids:
            why = why.removesuffix("aborted 0 requests: ") + "no request was in it"
        # Nobody knows which of the plans' blocks were written.
        self.kv.reset_cache(len(plans))
        if is_dead:
            # Of a resize, nor where the blocks are.
            gone = "the device is lost" if is_lost else "the pool was being resized"
            self._launch = None
            self._why_dead = f"the engine has ended: {gone} (step {plans[0].step_id})"
            why += f"; {gone}: the engine has ended"
            self._pipeline.drop()
        else:
            for plan in reversed(plans):
                self.scheduler.retell(plan)
        for hit_id in request_ids or (None,):
            self.note(EventKind.FAILED, hit_id, why)
        if not isinstance(error, Exception):
            return error
        failure = StepFailedError(why, request_ids=request_ids)
        failure.__cause__ = error
        return failure

    def note(self, kind: EventKind, request_id: str | None, why: str) -> None:
        """Make an event of something that happened now."""
        event = EngineEvent(kind=kind, time_s=self.clock(), request_id=request_id, why=why)
        self._events.append(event)
        self._num_noted += 1
