"""The step loop alone, over a runner that is made up: interrupts at every line, and times."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from octavo.engine import pipeline, steps
from octavo.engine.core import EngineCore
from octavo.errors import CapacityError, EngineDeadError, StepFailedError
from octavo.events import EventKind
from octavo.kv import KVCacheManager
from octavo.plan import SeqResult, StepPlan, StepResult
from octavo.request import Request, SamplerParams
from octavo.sched import Scheduler


class Runner:
    """Answers when it is waited for, once and in order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.under_way: list[int] = []
        self.on_wait: Callable[[], None] = lambda: None

    def clock(self) -> float:
        return self.now_s

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.under_way.append(plan.step_id)

        def wait() -> StepResult:
            assert self.under_way[0] == plan.step_id, "out of turn, or twice"
            del self.under_way[0]
            self.now_s += 1.0
            self.on_wait()
            sampled = [SeqResult(share.seq_id, 5, None) for share in plan.seqs if share.sample]
            return StepResult(plan.step_id, sampled, compute_s=1.0)

        return wait


def make(overlap: bool = True, resize: Callable[[int], None] | None = None) -> Any:
    """(Core, runner) of a pool of 24 blocks of 4."""
    kv = KVCacheManager(24, 4, enable_prefix_caching=True)
    scheduler = Scheduler(
        kv, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=90, plan_ahead=overlap
    )
    runner = Runner()
    core = EngineCore(scheduler, kv, runner.launch, resize, clock=runner.clock, overlap=overlap)
    return core, runner


def request(request_id: str, max_tokens: int = 6) -> Request:
    prompt = [1, 2, 3, 4, 5, ord(request_id[-1])]
    return Request(
        request_id=request_id, prompt_token_ids=prompt, sampler=SamplerParams(),
        max_tokens=max_tokens,
    )  # fmt: skip


class Interrupt:
    """Raises at the n-th line, or return, of the step loop's files."""

    files = (str(Path(steps.__file__)), str(Path(pipeline.__file__)))

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        if event in ("line", "return"):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def interrupted(act: Callable[[], object], at: int) -> bool:
    """Interrupt at that place of what is done; False if it has fewer."""
    interrupt, before = Interrupt(at), sys.gettrace()
    sys.settrace(interrupt)
    try:
        act()
    except (KeyboardInterrupt, StepFailedError):
        pass
    finally:
        sys.settrace(before)
    return interrupt.left <= 0


def assert_serves_or_is_dead(core: Any, runner: Runner) -> None:
    runner.on_wait = lambda: None
    try:
        core.add_request(request("new"))
        for _ in range(60):
            if not core.has_unfinished():
                break
            try:
                updates = core.step()
            except StepFailedError as error:
                assert "no answer" in str(error) and "new" not in error.request_ids
                continue
            for news in updates:
                if news.finish_reason is not None:
                    core.forget(news.request_id)
        assert not core.has_unfinished() and not core.live_request_ids
        assert core.kv.num_free_blocks == core.kv.num_blocks and not runner.under_way
        core.kv.check_integrity()
    except EngineDeadError:
        pass
    core.close()
    assert not runner.under_way, "nobody waited for a step"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("what", ["step", "reset", "resize", "close"])
def test_an_interrupt_at_any_line_leaves_an_engine_that_serves_or_is_dead(
    what: str, fails: bool
) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        core, runner = make()
        for name in "abc":
            core.add_request(request(name))
        core.step()
        core.step()
        assert len(runner.under_way) == 1

        def fail(runner: Runner = runner) -> None:
            runner.on_wait = lambda: None
            raise RuntimeError("no answer")

        if fails:
            runner.on_wait = fail
        act = {
            "step": core.step,
            "reset": core.reset_prefix_cache,
            "resize": lambda core=core: core.resize(20),
            "close": core.close,
        }[what]
        goes_on = interrupted(act, at)
        if what == "close":
            core.close()
            assert not runner.under_way
            continue
        assert_serves_or_is_dead(core, runner)
    assert at > 30


def test_a_decision_that_never_ended_is_the_engines_end() -> None:
    """As when interrupts come so thick that even the first is not worked off."""
    core, runner = make()
    core.add_request(request("a"))
    core.step()
    deciding = core._deciding()
    deciding.__enter__()
    for call in (core.step, core.become_quiet, lambda: core.add_request(request("b"))):
        with pytest.raises(EngineDeadError, match="interrupted while it decided"):
            call()
    core.close()
    assert not runner.under_way


@pytest.mark.parametrize("overlap", [False, True])
def test_what_the_caller_does_between_steps_is_no_steps_time(overlap: bool) -> None:
    core, runner = make(overlap)
    core.add_request(request("a", max_tokens=8))
    while core.has_unfinished():
        core.step()
        runner.now_s += 100.0
    core.become_quiet()
    summary = core.history.summary()
    assert summary.num_steps == 8
    assert core.history._busy_s == 8.0


def test_steps_without_tokens_to_run_ahead_are_planned_once() -> None:
    core, _ = make()
    core.add_request(
        Request(
            request_id="a", prompt_token_ids=[1, 2, 3], max_tokens=9,
            sampler=SamplerParams(repetition_penalty=1.5),
        )
    )  # fmt: skip
    times: list[float] = []
    schedule = core.scheduler.schedule

    def counted(now_s: float) -> StepPlan | None:
        times.append(now_s)
        plan: StepPlan | None = schedule(now_s)
        return plan

    core.scheduler.schedule = counted
    while core.has_unfinished():
        core.step()
    assert len(times) == 9


# -- resizing


def test_a_shrink_without_moves_is_carried_out_though_its_step_fails() -> None:
    sizes: list[int] = []
    core, runner = make(resize=sizes.append)

    def fail() -> None:
        runner.on_wait = lambda: None
        raise RuntimeError("no answer")

    runner.on_wait = fail
    core.resize(10)
    assert core.kv.num_blocks == 10 and sizes == [10]
    (failed,) = [event for event in core.events() if event.kind is EventKind.FAILED]
    assert failed.why.endswith("; no request was in it") and failed.request_id is None
    assert not core.has_unfinished()
    assert_serves_or_is_dead(core, runner)


@pytest.mark.parametrize("num_blocks", [10, 40])
def test_a_pool_that_cannot_be_resized_is_as_it_was(num_blocks: int) -> None:
    def resize(wanted: int) -> None:
        if wanted == num_blocks:
            raise MemoryError("none")

    core, runner = make(resize=resize)
    core.add_request(request("a"))
    core.step()
    with pytest.raises(CapacityError, match="no memory for a KV pool"):
        core.resize(num_blocks)
    assert core.kv.num_blocks == 24
    assert_serves_or_is_dead(core, runner)
