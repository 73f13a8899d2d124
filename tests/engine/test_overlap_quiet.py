"""Overlap: resizes, resets and the end wait until nothing is under way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from llm_support import GREEDY, assert_drained, tokens
from overlap_support import LateDevice, open_llm

from octavo import SamplingParams
from octavo.errors import DeviceLostError, EngineDeadError, InvalidRequestError, StepFailedError
from octavo.outputs import OutputKind
from octavo.plan import StepPlan

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_resizes_and_resets_wait_for_what_is_under_way(tiny_model_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = ["first one", "second one", "third one"]
    with open_llm(tiny_model_path, async_scheduling=False) as llm:
        expected = [tokens(llm, prompt, params) for prompt in prompts]
    with open_llm(tiny_model_path) as llm:
        device = LateDevice(llm)
        core = llm._engine.engine.core
        resize_pool = core._resize_pool
        assert resize_pool is not None

        def resize_quiet(num_blocks: int) -> None:
            assert not device.under_way
            resize_pool(num_blocks)

        core._resize_pool = resize_quiet
        streams = [llm.stream(prompt, params) for prompt in prompts]
        ends: list[list[int]] = [[] for _ in prompts]
        per_block = llm.memory_report().plan.bytes_per_block
        sizes, num_waited = [30, 64, 20, 90, 26], 0
        for num in range(40):
            for i, stream in enumerate(streams):
                for output in [next(stream, None)]:
                    if output is not None:
                        ends[i] = output.outputs[0].token_ids
            if num % 3 == 0 and sizes:
                num_waited += bool(device.under_way)
                llm.resize_kv_cache(sizes.pop() * per_block)
            elif num % 3 == 1:
                llm.reset_prefix_cache()
        assert ends == expected and not sizes and num_waited > 2
        assert_drained(llm)


def test_a_failure_while_the_runner_gets_quiet_is_told_by_the_next_step(
    tiny_model_path: Path,
) -> None:
    with open_llm(tiny_model_path) as llm:
        device = LateDevice(llm)
        engine = llm._engine.engine
        engine.add("a", [1, 2, 3], GREEDY, kind=OutputKind.FINAL_ONLY)
        engine.step()

        def fail(plan: StepPlan) -> None:
            device.on_wait = lambda plan: None
            raise RuntimeError("no answer")

        device.on_wait = fail
        llm.reset_prefix_cache()
        assert engine.has_unfinished() and engine.has("a")
        with pytest.raises(InvalidRequestError, match="end was not told yet"):
            engine.add("a", [4, 5, 6], GREEDY)
        with pytest.raises(StepFailedError, match="no answer") as caught:
            engine.step()
        assert caught.value.request_ids == ["a"] and not engine.has("a")
        assert not engine.has_unfinished()
        assert_drained(llm)


def test_an_abort_takes_back_a_failure_that_was_not_told(tiny_model_path: Path) -> None:
    with open_llm(tiny_model_path) as llm:
        expected = tokens(llm, [[4, 5, 6]])
        device = LateDevice(llm)
        engine = llm._engine.engine
        engine.add("a", [1, 2, 3], GREEDY)
        engine.add("b", [2, 2, 3], GREEDY)
        engine.step()

        def fail(plan: StepPlan) -> None:
            device.on_wait = lambda plan: None
            raise RuntimeError("no answer")

        device.on_wait = fail
        llm.reset_prefix_cache()
        assert engine.abort("a") and not engine.has("a") and not engine.abort("a")
        with pytest.raises(StepFailedError) as caught:
            engine.step()
        assert caught.value.request_ids == ["b"]
        assert tokens(llm, [[4, 5, 6]]) == expected
        assert_drained(llm)


def test_a_shrink_whose_step_fails_leaves_one_size(tiny_model_path: Path) -> None:
    with open_llm(tiny_model_path) as llm:
        device = LateDevice(llm)

        def fail(plan: StepPlan) -> None:
            device.on_wait = lambda plan: None
            raise RuntimeError("no answer")

        device.on_wait = fail
        per_block = llm.memory_report().plan.bytes_per_block
        assert llm.resize_kv_cache(30 * per_block) == 30 * per_block
        report = llm.memory_report()
        assert report.plan.num_blocks == report.ledger.num_blocks == 30
        assert llm.config.num_gpu_blocks_override == 30
        assert llm._engine.engine.core._launch is not None
        assert tokens(llm, "goes on")
        assert_drained(llm)


def test_a_second_interrupt_while_the_first_is_worked_off_ends_the_engine(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(tiny_model_path) as llm:
        device = LateDevice(llm)
        stream = llm.stream("streaming", GREEDY)
        next(stream)

        def interrupt(*_: object) -> None:
            device.on_wait = lambda plan: None
            raise KeyboardInterrupt

        device.on_wait = interrupt
        monkeypatch.setattr(llm._engine.engine.core.scheduler, "request_ids_in", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("a", GREEDY, use_tqdm=False)
        for call in (lambda: next(stream), lambda: llm.generate("a", GREEDY, use_tqdm=False)):
            with pytest.raises(EngineDeadError, match="interrupted"):
                call()
    assert not device.under_way


def test_news_of_the_quiet_is_not_the_next_requests_of_that_id(tiny_model_path: Path) -> None:
    with open_llm(tiny_model_path) as llm:
        expected = tokens(llm, [[9, 8, 7]])
        LateDevice(llm)
        engine = llm._engine.engine
        engine.add("a", [1, 2, 3], GREEDY, kind=OutputKind.FINAL_ONLY)
        engine.step()
        llm.reset_prefix_cache()  # waits for a token more
        assert engine.abort("a")
        engine.add("a", [9, 8, 7], GREEDY, kind=OutputKind.FINAL_ONLY)
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
        assert [output.outputs[0].token_ids for output in outputs] == [expected]
        assert_drained(llm)


@pytest.mark.parametrize("kind", [OutputKind.FINAL_ONLY, OutputKind.CUMULATIVE])
def test_a_sample_that_ended_in_the_quiet_has_its_own_end(
    tiny_model_path: Path, kind: OutputKind
) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with open_llm(tiny_model_path) as llm:
        (whole,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        LateDevice(llm)
        engine = llm._engine.engine
        engine.add("a", [1, 2, 3], params, kind=kind)
        engine.step()
        llm.reset_prefix_cache()  # waits for the last token
        assert not engine.abort("a", 0) and engine.has("a")
        (output,) = engine.step()
        assert output.finished and output.outputs == whole.outputs
        assert_drained(llm)


def test_closing_waits_and_writes_to_disk(tiny_model_path: Path, tmp_path: Path) -> None:
    disk = {"kv_disk_dir": str(tmp_path / "kv"), "swap_space": 0.001, "enable_prefix_caching": True}
    prompt = list(range(1, 34))
    with open_llm(tiny_model_path, **disk) as llm:
        expected = tokens(llm, [prompt])
        device = LateDevice(llm)
        stream = llm.stream({"prompt_token_ids": prompt[::-1]}, GREEDY)
        next(stream)
        assert device.under_way
    assert not device.under_way[1:]  # the plan that empties the pool is the last
    with open_llm(tiny_model_path, **disk) as llm:
        output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        assert output.outputs[0].token_ids == expected
        assert output.num_cached_tokens == 32


@pytest.mark.parametrize("error", [RuntimeError("no answer"), DeviceLostError("gone")])
def test_what_fails_while_closing_is_not_found_on_disk(
    tiny_weights_path: Path, tmp_path: Path, error: Exception
) -> None:
    """Its blocks are registered when it is planned, and hold nothing."""
    options: dict[str, Any] = {
        "kv_disk_dir": str(tmp_path / "kv"), "swap_space": 0.001, "enable_prefix_caching": True,
        "skip_tokenizer_init": True, "load_format": "auto", "max_num_batched_tokens": 16,
    }  # fmt: skip
    prompt = list(range(1, 34))
    with open_llm(tiny_weights_path, **options | {"kv_disk_dir": str(tmp_path / "other")}) as llm:
        expected = tokens(llm, [prompt])
    llm = open_llm(tiny_weights_path, **options)
    device = LateDevice(llm)
    llm._engine.engine.add("a", prompt, GREEDY)
    llm._engine.engine.step()
    assert device.under_way

    def fail(plan: StepPlan) -> None:
        raise error

    device.on_wait = fail
    llm.close()
    assert not device.under_way
    with open_llm(tiny_weights_path, **options) as llm:
        output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        assert output.num_cached_tokens == 0
        assert output.outputs[0].token_ids == expected


def test_a_plan_of_nobody_is_carried_out(tiny_model_path: Path) -> None:
    """Benchmarks time the runner through the engine, also when a step for nobody is under way."""
    with open_llm(tiny_model_path) as llm:
        device = LateDevice(llm)
        params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[tokens(llm, "a")[2]])
        tokens(llm, "a", params)
        assert device.under_way, "the stop was noticed late"
        result = llm._engine.engine.core.execute(StepPlan(10_000))
        assert result.step_id == 10_000 and not device.under_way


def test_no_step_takes_the_time_in_which_nobody_asked(tiny_model_path: Path) -> None:
    with open_llm(tiny_model_path) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[tokens(llm, "a")[2]])
        device = LateDevice(llm)
        tokens(llm, "a", params)
        assert device.under_way, "the stop was noticed late"
        busy_s = llm._engine.engine.core.history._busy_s
        time.sleep(0.4)
        began_s = time.monotonic()
        tokens(llm, "b")
        busy_s = llm._engine.engine.core.history._busy_s - busy_s
        assert 0 < busy_s <= time.monotonic() - began_s
