"""What can be asked of an engine in another process, and done to it, besides requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequestError
from octavo.kv.needs import is_plain
from octavo.kv_groups import kv_groups

if TYPE_CHECKING:
    from octavo.engine.built import BuiltEngine
    from octavo.sched.watch import PoolWatch


class Questions:
    """Answers calls by name; answers are plain data."""

    def __init__(self, built: BuiltEngine) -> None:
        self._built, self._core = built, built.engine.core
        self.watch: PoolWatch | None = None
        """Who looks at the pool already."""
        self._known: dict[str, Callable[..., Any]] = {
            "memory_report": self._memory_report,
            "events": self._events,
            "resize_kv_cache": built.resize,
            "reset_prefix_cache": self._core.reset_prefix_cache,
            "set_log_level": self._set_log_level,
            "block_info": self._block_info,
        }

    def ask(self, name: str, args: list[Any]) -> Any:
        """Raises what the engine raises (`OctavoError`)."""
        return self._known[name](*args)

    def about_frame(self) -> dict[str, Any]:
        """What a full frame says of the engine, besides the pool."""
        config, windows = self._built.config, self._built.plan.shape.windows
        layers = {}
        if not is_plain(windows):  # a window that no sequence outgrows is none
            groups = kv_groups(self._built.arch, max(windows) + 1).groups
            layers = {"layers": [list(group.layers) for group in groups]}
        return layers | {
            "model": config.model,
            "scheduling_policy": config.scheduling_policy,
            "max_model_len": config.max_model_len,
            "bytes_per_block": self._built.plan.bytes_per_block,
        }

    def _memory_report(self) -> dict[str, Any]:
        report = self._built.memory_report()
        return report.as_dict() | {"text": str(report)}

    def _events(self, request_id: str | None) -> list[dict[str, Any]]:
        return [asdict(event) for event in self._core.events(request_id)]

    def _set_log_level(self, level: str) -> None:
        if level not in logging.getLevelNamesMapping():
            known = ", ".join(logging.getLevelNamesMapping())
            raise InvalidRequestError(
                f"level must be one of {known}, got {level!r}", parameter="level"
            )
        logging.getLogger("octavo").setLevel(level)

    def _block_info(self, block_id: int) -> dict[str, Any]:
        num_blocks = self._core.kv.num_blocks
        if not 0 <= block_id < num_blocks:
            raise InvalidRequestError(
                f"the pool has blocks 0 to {num_blocks - 1}, got {block_id}", parameter="block_id"
            )
        if self.watch is not None:
            return self.watch.block(block_id)
        from octavo.sched.watch import PoolWatch

        watch = PoolWatch(self._core.kv, self._core.scheduler)
        try:
            return watch.block(block_id)
        finally:
            watch.close()
