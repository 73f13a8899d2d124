"""The step loop: schedule, launch, update. Token ids in, token ids out; no text.

This is the part that can live in its own process: everything that crosses its border is plain data.
With overlap a step is planned and launched before the result of the one before is waited for, so
that the device never waits for decisions.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from octavo.engine.steps import StepLoop
from octavo.errors import CapacityError
from octavo.events import EngineEvent, EventKind
from octavo.outputs import RequestKVUsage, RequestMetrics
from octavo.plan import StepPlan, StepResult
from octavo.request import FinishReason, Request

if TYPE_CHECKING:
    from octavo.kv.pins import Pin
    from octavo.kv.stats import PrefixCacheStats

logger = logging.getLogger("octavo")


class EngineCore(StepLoop):
    """Joins the scheduler's decisions and the runner's work: requests, and what is asked of them.

    Arguments are those of `StepLoop`.
    """

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises `RequestCapacityError` for one that can never fit."""
        self.check_open()
        try:
            self._stats[request.request_id] = self.scheduler.add(request)
        except CapacityError as error:
            self.note_refusal(request.request_id, error)
            raise
        if self._pipeline.overlap:
            self._tell_if_not_ahead(request)

    def _tell_if_not_ahead(self, request: Request) -> None:
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
            self.note(EventKind.NO_OVERLAP, request.request_id, why)

    def finish(self, seq_id: int, stop_reason: str) -> None:
        """End a sequence because a stop string was found in its text."""
        self.scheduler.finish(seq_id, FinishReason.STOP, stop_reason)

    def has_ended(self, request_id: str, index: int) -> bool:
        """Whether a sample has ended between two steps, and the next one tells it."""
        return any(
            (news.request_id, news.sample_index) == (request_id, index)
            for news in self._updates
            if news.finish_reason is not None
        )

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
        self.note(EventKind.REFUSED, request_id, str(error))

    def pin(self, token_ids: list[int], salt: str = "") -> Pin:
        """Keep the KV of the whole blocks of a prefix in the pool, as far as it is there now.

        Raises `CapacityError` when pins would take more than half of the pool, or what a live
        request was promised.
        """
        self.check_open()
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
        self.become_quiet()
        return self.kv.reset_prefix_cache()

    def cache_stats(self) -> PrefixCacheStats:
        """What the prefix cache found since the start."""
        return self.kv.cache_stats()

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a plan that no scheduler made, to measure the runner: only while the engine has
        no requests, and with every sequence that it brings told to be finished again. Raises what
        the runner raises."""
        assert not self._stats, "the engine has requests of its own"
        return self.become_quiet()(plan)()

    @property
    def live_request_ids(self) -> set[str]:
        """Requests that have not ended and been answered."""
        return set(self._stats)
