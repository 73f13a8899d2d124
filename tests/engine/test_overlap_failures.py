"""Overlap: what fails takes along the steps that were launched after it, and nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llm_support import GREEDY, assert_drained, tokens
from overlap_support import LateDevice, open_llm, serve

from octavo import SamplingParams
from octavo.errors import DeviceLostError, EngineDeadError, StepFailedError
from octavo.events import EventKind
from octavo.outputs import OutputKind
from octavo.plan import StepPlan

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("where", ["on_launch", "on_wait"])
def test_a_failed_step_takes_along_what_was_launched_after_it(
    tiny_weights_path: Path, where: str
) -> None:
    """Three are served at a time: those in line go on, as if nothing had been."""
    prompts = [[i, *range(1, 8 + i)] for i in range(9)]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    requests: list[tuple[Any, Any]] = [(prompt, params) for prompt in prompts]
    options = {"max_num_seqs": 3, "skip_tokenizer_init": True, "load_format": "auto"}
    with open_llm(tiny_weights_path, async_scheduling=False, **options) as llm:
        expected = serve(llm, requests)
    with open_llm(tiny_weights_path, **options) as llm:
        device = LateDevice(llm)

        def fail(plan: StepPlan) -> None:
            if plan.step_id in (4, 17):
                raise RuntimeError("no answer")

        setattr(device, where, fail)
        found = serve(llm, requests)
        failed = [e for e in llm.events() if e.kind is EventKind.FAILED]
        assert_drained(llm)
        assert not device.under_way
    assert len(failed) == 6 and len(found) == 3
    assert ("launched after it, is void" in failed[0].why) == (where == "on_wait")
    assert found == {name: expected[name] for name in found}


def test_the_step_before_a_failed_launch_is_answered(tiny_model_path: Path) -> None:
    with open_llm(tiny_model_path) as llm:
        device = LateDevice(llm)

        def fail(plan: StepPlan) -> None:
            if any(share.start == 6 for share in plan.seqs):
                raise RuntimeError("no answer")

        device.on_launch = fail
        engine = llm._engine.engine
        engine.add("ends", [1, 2, 3], SamplingParams(max_tokens=1), kind=OutputKind.FINAL_ONLY)
        engine.add("fails", [4, 5, 6, 7, 8], GREEDY, kind=OutputKind.FINAL_ONLY)
        found, errors = [], []
        while engine.has_unfinished():
            try:
                found += engine.step()
            except StepFailedError as error:
                errors.append(error.request_ids)
        assert errors == [["fails"]]
        assert [(o.request_id, len(o.outputs[0].token_ids)) for o in found] == [("ends", 1)]
        assert_drained(llm)


def test_who_ended_while_the_next_step_was_planned(tiny_model_path: Path) -> None:
    """The step before fails, so that the news is not handed out yet: it is too late to abort a
    sample, and who takes the id of a request that was aborted does not get the end of that."""
    with open_llm(tiny_model_path) as llm:
        device, engine = LateDevice(llm), llm._engine.engine
        scheduler = engine.core.scheduler
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        ended = {}
        for name in "ab":
            engine.add(name, [1, 2, 3], params, kind=OutputKind.FINAL_ONLY)
        for _ in range(4):
            engine.step()

        def fail(plan: StepPlan) -> None:
            device.on_wait = lambda plan: None
            for name in "ab":
                (seq,) = scheduler.roster.groups[name].sequences
                ended[name] = seq.output_ids
                scheduler._pressure.end_full(seq)
            raise RuntimeError("no answer")

        device.on_wait = fail
        with pytest.raises(StepFailedError):
            engine.step()
        assert not engine.abort("a", 0)
        engine.abort("b")
        engine.add("b", [5, 6], params, kind=OutputKind.FINAL_ONLY)
        found = {}
        while engine.has_unfinished():
            found |= {output.request_id: output.outputs[0] for output in engine.step()}
        assert found["a"].token_ids == ended["a"] and len(ended["a"]) > 2
        assert found["b"].finish_reason == "length" and len(found["b"].token_ids) == 20
        assert_drained(llm)


@pytest.mark.parametrize("where", ["on_launch", "on_wait"])
def test_a_lost_device_ends_the_engine_and_names_everybody(
    tiny_model_path: Path, where: str
) -> None:
    with open_llm(tiny_model_path, max_num_seqs=2) as llm:
        device = LateDevice(llm)

        def lose(plan: StepPlan) -> None:
            if plan.step_id == 3:
                raise DeviceLostError("an illegal address")

        setattr(device, where, lose)
        engine = llm._engine.engine
        for i in range(5):
            engine.add(f"r{i}", [1, 2, 3 + i], GREEDY, kind=OutputKind.FINAL_ONLY)
        with pytest.raises(StepFailedError, match="the device is lost") as caught:
            while True:
                engine.step()
        assert caught.value.request_ids == [f"r{i}" for i in range(5)]
        for call in (engine.step, lambda: llm.generate("a", GREEDY), llm.reset_prefix_cache):
            with pytest.raises(EngineDeadError, match="the device is lost"):
                call()
        assert_drained(llm)


def test_an_interrupt_while_waiting(tiny_model_path: Path) -> None:
    with open_llm(tiny_model_path) as llm:
        expected = tokens(llm, "good")
        device = LateDevice(llm)
        stream = llm.stream("streaming", GREEDY)
        next(stream)

        def interrupt(plan: StepPlan) -> None:
            device.on_wait = lambda plan: None
            raise KeyboardInterrupt

        device.on_wait = interrupt
        with pytest.raises(KeyboardInterrupt):
            llm.generate("a", GREEDY, use_tqdm=False)
        assert not device.under_way
        with pytest.raises(StepFailedError, match="aborted"):
            next(stream)
        assert tokens(llm, "good") == expected
        assert_drained(llm)
