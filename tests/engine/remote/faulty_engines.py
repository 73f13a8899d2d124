"""Null engines that go wrong, each in its own way: `EngineOptions.build` names them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import null_engine

from octavo.config import EngineConfig
from octavo.engine.built import BuiltEngine
from octavo.engine.remote import wire
from octavo.errors import DeviceLostError
from octavo.plan import StepPlan, StepResult
from octavo.weights.progress import Progress


def build(config: EngineConfig, progress: Progress | None = None) -> BuiltEngine:
    """Nothing is wrong with it; each step takes 10 ms."""
    os.environ["OCTAVO_NULL_STEP_S"] = "0.01"
    if progress is not None:
        progress.start("reading nothing", 3)
        progress.update(2)
        progress.finish()
    return null_engine.build(config, progress)


def build_once(config: EngineConfig, progress: Progress | None = None) -> BuiltEngine:
    """It cannot be built a second time."""
    if os.path.exists(os.environ["ONCE"]):
        raise RuntimeError("no second time")
    Path(os.environ["ONCE"]).touch()
    return build(config, progress)


def _with_launch(
    config: EngineConfig, before: Callable[[StepPlan], None], step_s: str = "0.01"
) -> BuiltEngine:
    class Runner(null_engine.NullRunner):
        def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
            before(plan)
            return super().launch(plan)

    null_engine.NullRunner = Runner  # type: ignore[misc]
    os.environ["OCTAVO_NULL_STEP_S"] = step_s
    return null_engine.build(config)


def build_hanging(config: EngineConfig, progress: Progress | None = None) -> BuiltEngine:
    """Its third step never ends."""

    def hang_in_launch(plan: StepPlan) -> None:
        if plan.step_id == 2:
            time.sleep(1000)

    return _with_launch(config, hang_in_launch)


def build_failing(config: EngineConfig, progress: Progress | None = None) -> BuiltEngine:
    """Its third step fails."""

    def fail(plan: StepPlan) -> None:
        if plan.step_id == 2:
            raise RuntimeError("a bad kernel")

    return _with_launch(config, fail)


def build_lost(config: EngineConfig, progress: Progress | None = None) -> BuiltEngine:
    """It loses its device in its third step, the first time."""
    has_lost = os.path.exists(os.environ["ONCE"])
    Path(os.environ["ONCE"]).touch()

    def lose(plan: StepPlan) -> None:
        if plan.step_id == 2 and not has_lost:
            raise DeviceLostError("it fell off the bus")

    return _with_launch(config, lose)


def build_forgetful(config: EngineConfig, progress: Progress | None = None) -> BuiltEngine:
    """In its fifth step it forgets a running sequence without giving its blocks back."""
    built: BuiltEngine | None = None

    def forget(plan: StepPlan) -> None:
        assert built is not None
        running = built.engine.core.scheduler.roster.running
        if plan.step_id == 4:
            running.remove(next(s for s in running if s.group.request.request_id == "lost"))

    built = _with_launch(config, forget)
    return built


def build_deaf(config: EngineConfig, progress: Progress | None = None) -> BuiltEngine:
    """It does not hear the first thing it is told to abort."""
    worker = sys.modules["__main__"].Worker  # type: ignore[attr-defined]
    hear = worker._abort
    num_told = 0

    def abort(self: Any, message: wire.Abort) -> None:
        nonlocal num_told
        num_told += 1
        if num_told > 1:
            hear(self, message)
        else:
            self._news.aborted.extend(message.request_ids)

    worker._abort = abort
    return build(config, progress)
