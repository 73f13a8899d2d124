"""Recording an engine's decisions: a scheduler, a memory manager and a disk that tell a file.

Every call that changes what is decided later is written when it has ended, with its answer or
whatever else it ended with, so that a replay ends the same way. Reading the state is not written,
nor is `take_updates`: what it hands out decides nothing any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from octavo import __version__
from octavo.config import EngineConfig
from octavo.kv import KVCacheManager
from octavo.kv.memory_plan import MemoryPlan
from octavo.kv.pins import Pin
from octavo.kv.tiers import ColdStore
from octavo.plan import BlockLabel, StepPlan, StepResult
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
    RecordWriter,
    Resized,
    Retold,
    Scheduled,
    Unpinned,
    Updated,
    totals_of,
)
from octavo.request import FinishReason, Request
from octavo.sched import RequestStats, Scheduler, SeqUpdate
from octavo.sched.costs import CostModel
from octavo.sched.stride import QuietSteps, Stride


class Recorder:
    """What the parts of a recorded engine have in common: the file."""

    def __init__(self, path: str) -> None:
        """Starts the file anew. Raises `ConfigError` if it cannot be written."""
        self._writer = RecordWriter(path)
        self._watermark = self._max_watermark = 0.0
        self._plan_ahead = False
        self.left_on_disk: tuple[tuple[int, BlockLabel], ...] = ()
        self.fetched: list[tuple[int, bool]] = []
        """Since the last call that was written."""

    def attach(self, kv: KVCacheManager, scheduler: Scheduler) -> None:
        """These two tell it of their calls from now on."""
        assert isinstance(kv, RecordingManager) and isinstance(scheduler, RecordingScheduler)
        kv.recorder = scheduler.recorder = self
        self._watermark, self._max_watermark = scheduler.watermark, scheduler.max_watermark
        self._plan_ahead = scheduler.plan_ahead

    def begin(
        self,
        config: EngineConfig,
        plan: MemoryPlan,
        costs: CostModel,
        max_disk_blocks: int,
        now_s: float,
    ) -> None:
        """The header, with what a replay has to build. `costs` has observed nothing yet."""
        limits = EngineLimits(
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            bytes_per_block=plan.bytes_per_block,
            kv_policy=config.kv_policy,
            max_model_len=plan.max_seq_len,
            max_num_seqs=config.limits().max_num_seqs,
            max_num_batched_tokens=config.limits().max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            num_host_blocks=plan.num_host_blocks,
            max_disk_blocks=max_disk_blocks,
            preemption_mode=config.preemption_mode,
            preemption_victim=config.preemption_victim,
            scheduling_policy=config.scheduling_policy,
            watermark=self._watermark,
            max_watermark=self._max_watermark,
            token_s=costs.token_s,
            block_s=costs.block_s,
            plan_ahead=self._plan_ahead,
            windows=plan.shape.windows,
        )
        header = RecordHeader(
            octavo=__version__,
            model=config.model,
            began_s=now_s,
            limits=limits,
            disk=self.left_on_disk,
        )
        self._writer.write_header(header)

    def took(self) -> tuple[tuple[int, bool], ...]:
        """Disk blocks that were read since the last call."""
        fetched, self.fetched = tuple(self.fetched), []
        return fetched

    def write(self, call: Call) -> None:
        """A call that has ended."""
        self._writer.write(call)

    @contextlib.contextmanager
    def noting(self, kind: type[Call], **values: Any) -> Iterator[dict[str, Any]]:
        """Writes a call when the block under it has ended. The answer is put into the dict."""
        try:
            yield values
        except BaseException as error:
            self.write(kind(error=type(error).__name__, fetched=self.took(), **values))
            raise
        self.write(kind(fetched=self.took(), **values))

    def end(self, why: str, scheduler: Scheduler, kv: KVCacheManager) -> None:
        """The last line, unless there was one; closes the file."""
        if self._writer.is_open:
            totals = totals_of(scheduler.num_preemptions, kv.cache_stats())
            self.write(Ended(why=why, totals=totals))
            self._writer.close()


class RecordingManager(KVCacheManager):
    """Tells of the calls that the scheduler does not make."""

    recorder: Recorder

    def reset_prefix_cache(self) -> int:
        """See `KVCacheManager`."""
        with self.recorder.noting(PrefixCacheReset) as values:
            values["num_freed"] = num_freed = super().reset_prefix_cache()
        return num_freed

    def reset_cache(self, num_plans: int = 1) -> None:
        """See `KVCacheManager`."""
        with self.recorder.noting(CacheReset, num_plans=num_plans):
            super().reset_cache(num_plans)

    def flush_to_disk(self) -> int:
        """See `KVCacheManager`."""
        with self.recorder.noting(Flushed) as values:
            num = super().flush_to_disk()
            values["copies"] = tuple(self._pool.copies)
        return num

    def advance(self, seq_ids: Iterable[int], times: Sequence[float]) -> None:
        """Steps that nobody planned are in no record."""
        raise AssertionError("a recorded engine takes no quiet steps")


class RecordingScheduler(Scheduler):
    """Tells of every call that changes its state."""

    recorder: Recorder

    def add(self, request: Request) -> RequestStats:
        """See `Scheduler`."""
        with self.recorder.noting(Added, request=request):
            return super().add(request)

    def abort(self, request_id: str) -> bool:
        """See `Scheduler`."""
        with self.recorder.noting(Aborted, request_id=request_id) as values:
            values["found"] = found = super().abort(request_id)
        return found

    def finish(
        self, seq_id: int, reason: FinishReason, stop_reason: int | str | None = None
    ) -> bool:
        """See `Scheduler`."""
        with self.recorder.noting(
            Finished, seq_id=seq_id, reason=reason, stop_reason=stop_reason
        ) as values:
            values["found"] = found = super().finish(seq_id, reason, stop_reason)
        return found

    def schedule(self, now_s: float) -> StepPlan | None:
        """See `Scheduler`."""
        with self.recorder.noting(Scheduled, now_s=now_s) as values:
            plan = super().schedule(now_s)
            values["num_free"] = self._kv.num_free_blocks
            values["num_evicted"] = self._kv.cache_stats().evictions
            values["plan"] = plan
        return plan

    def update(self, result: StepResult, now_s: float) -> list[SeqUpdate]:
        """See `Scheduler`."""
        with self.recorder.noting(Updated, now_s=now_s, result=result):
            return super().update(result, now_s)

    def retell(self, plan: StepPlan) -> None:
        """See `Scheduler`."""
        with self.recorder.noting(Retold, step_id=plan.step_id):
            super().retell(plan)

    def pin(self, token_ids: list[int], salt: str = "") -> Pin:
        """See `Scheduler`."""
        with self.recorder.noting(Pinned, token_ids=list(token_ids), salt=salt) as values:
            pin = super().pin(token_ids, salt)
            values["pin_id"] = pin.pin_id
        return pin

    def unpin(self, pin_id: int) -> None:
        """See `Scheduler`."""
        with self.recorder.noting(Unpinned, pin_id=pin_id):
            super().unpin(pin_id)

    def resize(self, num_blocks: int, now_s: float) -> None:
        """See `Scheduler`."""
        with self.recorder.noting(Resized, num_blocks=num_blocks, now_s=now_s):
            super().resize(num_blocks, now_s)

    def quiet_steps(self) -> QuietSteps | None:
        """None: each step is planned, and written."""
        return None

    def take_quiet_steps(self, stride: Stride, token_of: Callable[[int], int]) -> list[SeqUpdate]:
        """Steps that nobody planned are in no record."""
        raise AssertionError("a recorded engine takes no quiet steps")

    @property
    def watermark(self) -> float:
        """The share of the pool that admitting leaves free now."""
        return self.admission.watermark

    @property
    def max_watermark(self) -> float:
        """To which it may be raised."""
        return self._pressure.max_watermark


class RecordingDisk:
    """A disk tier whose answers are written down: no replay can know them otherwise."""

    def __init__(self, disk: ColdStore, recorder: Recorder) -> None:
        self._disk, self._recorder = disk, recorder

    def fetch(self, disk_id: int) -> bool:
        """See `ColdStore`."""
        is_whole = self._disk.fetch(disk_id)
        self._recorder.fetched.append((disk_id, is_whole))
        return is_whole

    def delete(self, disk_id: int) -> None:
        """See `ColdStore`."""
        self._disk.delete(disk_id)

    def entries(self) -> list[tuple[int, BlockLabel]]:
        """See `ColdStore`."""
        entries: Sequence[tuple[int, BlockLabel]] = self._disk.entries()
        self._recorder.left_on_disk = tuple(entries)
        return list(entries)
