"""While nothing runs everything must be given back: looks, says who did not, and repairs."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from octavo.errors import IntegrityError
from octavo.events import EventKind
from octavo.kv.leaks import find_leaks, repair

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore

logger = logging.getLogger("octavo")


_MAX_SHARE = 0.01
"""Of the time: a check costs what the pool is large, and who comes meanwhile waits for it."""


class LeakCheck:
    """Of one engine: once each time it has become idle, unless that is too often for its cost."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._is_due = False
        self._not_before_s = 0.0

    def expect_quiet(self) -> None:
        """The engine has become idle."""
        self._is_due = True

    def look(self) -> list[str]:
        """Of an engine that runs nothing, and where nobody waits. What was never given back is told
        as an event and given back. Returns the requests that were lost that way, for which somebody
        may still wait."""
        begun_s = time.monotonic()
        if not self._is_due or begun_s < self._not_before_s:
            return []
        self._is_due = False
        lost = self._look()
        now_s = time.monotonic()
        self._not_before_s = now_s + (now_s - begun_s) / _MAX_SHARE
        return lost

    def _look(self) -> list[str]:
        core = self._core
        lost = sorted(core.live_request_ids.union(core.scheduler.roster.drop_lost()))
        for request_id in lost:
            self._tell(request_id, f"request {request_id} neither runs nor waits, and never ended")
            core.forget(request_id)
        leaks = find_leaks(core.kv)
        for leak in leaks:
            self._tell(leak.request_id, leak.why)
        if leaks:
            repair(core.kv)
        try:
            core.kv.check_integrity()
        except IntegrityError as error:
            why = f"the pool does not add up while idle, and could not be mended: {error}"
            logger.error("leak: %s", why)
            core.note(EventKind.LEAK, None, why)
        return lost

    def _tell(self, request_id: str | None, why: str) -> None:
        logger.error("leak: %s; given back", why)
        self._core.note(EventKind.LEAK, request_id, f"{why}; given back")
