"""The step loop: schedule, execute, update. Token ids in, token ids out; no text.

This is the part that can live in its own process: everything that crosses its border is plain data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octavo.engine.history import PoolHistory
from octavo.errors import EngineDeadError, StepFailedError
from octavo.kv import KVCacheManager
from octavo.outputs import RequestKVUsage, RequestMetrics
from octavo.plan import StepPlan, StepResult
from octavo.request import FinishReason, Request
from octavo.sched import RequestStats, Scheduler, SeqUpdate

Execute = Callable[[StepPlan], StepResult]


class EngineCore:
    """Joins the scheduler's decisions and the runner's work.

    scheduler, kv: decisions and memory; execute: the runner's; clock: seconds, monotonic.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVCacheManager,
        execute: Execute,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler, self.kv, self.clock = scheduler, kv, clock
        self._execute: Execute | None = execute
        self._stats: dict[str, RequestStats] = {}
        self.history = PoolHistory(kv)

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `RequestCapacityError` for one that can never fit."""
        self._check_open()
        self._stats[request.request_id] = self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is; its blocks are free at once. False if it is not here."""
        self._stats.pop(request_id, None)
        return self.scheduler.abort(request_id)

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

    def has_unfinished(self) -> bool:
        """Whether any request still waits or runs."""
        return self.scheduler.has_unfinished()

    def step(self) -> list[SeqUpdate]:
        """Run one iteration; what each sequence gained. Empty when there is nothing to run.

        Raises `StepFailedError` when the runner failed: the requests of that step are aborted and
        named, the others go on. An interrupt aborts them too: half a step cannot be taken back.
        """
        execute = self._check_open()
        with self._deciding():
            plan = self.scheduler.schedule(self.clock())
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
            self.history.record(plan)
            return self.scheduler.update(result, self.clock())

    @property
    def live_request_ids(self) -> set[str]:
        """Requests that have not ended and been answered."""
        return set(self._stats)

    def close(self) -> None:
        """Abort everything and let go of the runner, with it weights and pool."""
        for request_id in list(self._stats):
            self.abort(request_id)
        self._execute = None

    def _check_open(self) -> Execute:
        if self._execute is None:
            raise EngineDeadError("the engine is closed, or was interrupted while it decided")
        return self._execute

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Half a decision leaves tables and counts that nobody can trust: the engine ends there."""
        try:
            yield
        except BaseException:
            self._execute = None
            raise

    def _failed(self, plan: StepPlan, error: BaseException) -> StepFailedError:
        request_ids = self.scheduler.request_ids_of(seq.seq_id for seq in plan.seqs)
        for request_id in request_ids:
            self.abort(request_id)
        self.scheduler.retell(plan)
        return StepFailedError(
            f"step {plan.step_id} failed with {type(error).__name__}: {error}; aborted "
            f"{len(request_ids)} requests: {', '.join(request_ids)}",
            request_ids=request_ids,
        )
