"""What `LLM` survives: failed and interrupted steps; and that it gives back what it took."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from llm_support import GREEDY, OPTIONS, assert_drained, tokens

from octavo import LLM, SamplingParams
from octavo.errors import EngineDeadError, InvalidRequestError, StepFailedError


def test_a_failed_step_names_its_requests_and_the_engine_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(llm, "good")
    core = llm._engine.engine.core
    execute = core._launch

    def fail(plan: Any) -> Any:
        execute(plan)  # type: ignore[misc]
        raise RuntimeError("a device was lost")

    monkeypatch.setattr(core, "_launch", fail)
    with pytest.raises(StepFailedError, match="a device was lost") as caught:
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert len(caught.value.request_ids) == 2
    monkeypatch.setattr(core, "_launch", execute)
    assert tokens(llm, "good") == expected


def test_a_failed_step_is_nobody_elses_error(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has the only seat and the other waits; steps are made for whoever asks."""
    with LLM(str(tiny_model_path), **(OPTIONS | {"max_num_seqs": 1})) as llm:
        expected = tokens(llm, "waits")
        core = llm._engine.engine.core
        execute = core._launch
        assert execute is not None
        num_failures = 0

        def fail_once(plan: Any) -> Any:
            nonlocal num_failures
            num_failures += 1
            if num_failures == 1:
                raise RuntimeError("a device was lost")
            return execute(plan)

        runs, waits = llm.stream("runs", GREEDY), llm.stream("waits", GREEDY)
        next(runs)
        monkeypatch.setattr(core, "_launch", fail_once)
        *_, last = waits
        assert last.outputs[0].token_ids == expected
        with pytest.raises(StepFailedError, match="a device was lost") as caught:
            next(runs)
        assert caught.value.request_ids == [runs.request_id]
        assert isinstance(caught.value.__cause__, RuntimeError)
        num_failures, runs = 0, llm.stream("runs", GREEDY)
        monkeypatch.setattr(core, "_launch", execute)
        next(runs)
        monkeypatch.setattr(core, "_launch", fail_once)
        assert tokens(llm, "waits") == expected
        with pytest.raises(StepFailedError, match="a device was lost"):
            next(runs)
        assert not len(llm._driver) and not llm._driver._failures
        assert_drained(llm)


def test_an_interrupted_step_leaves_an_engine_that_serves(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(llm, "good")
    core = llm._engine.engine.core
    execute = core._launch
    stream = llm.stream("streaming", GREEDY)
    next(stream)

    def interrupted(plan: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(core, "_launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", GREEDY, use_tqdm=False)
    monkeypatch.setattr(core, "_launch", execute)
    with pytest.raises(StepFailedError, match="aborted"):
        next(stream)
    assert not len(llm._engine.engine.outputs)
    assert tokens(llm, "good") == expected


def test_an_interrupted_decision_ends_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(now_s: float) -> Any:
        raise KeyboardInterrupt

    stream = llm.stream("streaming", GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.engine.core.scheduler, "schedule", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("a", GREEDY, use_tqdm=False)
    for call in (lambda: next(stream), lambda: llm.generate("a", GREEDY, use_tqdm=False)):
        with pytest.raises(EngineDeadError, match="interrupted"):
            call()


def test_a_failed_step_does_not_lose_who_was_preempted(tiny_model_path: Path) -> None:
    """The runner never hears of a plan: those who live on must not keep their old block tables."""
    options = {**OPTIONS, "num_gpu_blocks_override": 12, "max_model_len": 40}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(str(tiny_model_path), **options) as llm:
        prompts = ["first one", "second one", "third one"]
        expected = {p: tokens(llm, p, params) for p in prompts}
        core = llm._engine.engine.core
        execute = core._launch
        assert execute is not None
        failed: list[int] = []

        def fail_at_preemption(plan: Any) -> Any:
            if plan.preempted and not failed:
                failed.extend(plan.preempted)
                raise RuntimeError("lost")
            result = execute(plan)
            inputs = execute.__self__.inputs  # type: ignore[attr-defined]
            for seq in plan.seqs:
                assert inputs.block_table(seq.seq_id) == list(core.kv.block_table(seq.seq_id))
            return result

        core._launch = fail_at_preemption
        streams = {p: llm.stream(p, params) for p in prompts}
        ends: dict[str, list[int]] = {}
        while streams:
            for prompt, stream in list(streams.items()):
                try:
                    output = next(stream)
                except StepFailedError:
                    del streams[prompt]
                    continue
                if output.finished:
                    ends[prompt] = output.outputs[0].token_ids
                    del streams[prompt]
        assert failed and 0 < len(ends) < len(prompts)
        assert ends == {p: expected[p] for p in ends}
        assert_drained(llm)


def test_a_stream_that_nobody_reads_is_aborted(llm: LLM) -> None:
    stream = llm.stream("never read", GREEDY)
    assert len(llm.block_tables()) == 1
    del stream
    gc.collect()
    assert not llm.block_tables() and not len(llm._driver)


def test_the_same_id_twice_and_again_after_its_abort(llm: LLM) -> None:
    engine = llm._engine.engine
    params = SamplingParams(temperature=1, seed=4, n=2, max_tokens=6, ignore_eos=True)

    def run() -> Any:
        while engine.has_unfinished():
            for output in engine.step():
                if output.finished:
                    return output

    def texts(output: Any) -> list[str]:
        return [sample.text for sample in output.outputs]

    engine.add("same", "prompt", params)
    expected = texts(run())
    engine.add("same", "prompt", params)
    engine.step()
    with pytest.raises(InvalidRequestError, match="'same' belongs to a request"):
        engine.add("same", "prompt", params)
    assert engine.abort("same") and not engine.has("same")
    engine.add("same", "prompt", params)
    assert texts(run()) == expected
    engine.add("same", "prompt", params)
    engine.step()
    assert engine.abort("same", 0) and engine.abort("same", 1) and engine.has("same")
    with pytest.raises(InvalidRequestError, match="not told yet"):
        engine.add("same", "prompt", params)
    (end,) = engine.step()
    assert end.finished and not engine.has("same") and not engine.has_unfinished()
    engine.add("same", "prompt", params)
    assert texts(run()) == expected


def test_damaged_weights_are_said_and_not_sampled_from(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(llm, "good")
    norm = llm._engine.engine.core._launch.__self__.model.final_norm.weight  # type: ignore[union-attr]
    good = norm.clone()
    norm.fill_(float("nan"))
    with pytest.raises(StepFailedError, match="NaN or infinity"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    norm.copy_(good)
    assert tokens(llm, "good") == expected


def test_close_frees(tiny_model_path: Path) -> None:
    options = {**OPTIONS, "num_gpu_blocks_override": 4096, "block_size": 16}

    def cycle() -> int:
        with LLM(str(tiny_model_path), **options) as llm:
            runner = llm._engine.engine.core._launch.__self__  # type: ignore[union-attr]
            pool = weakref.ref(runner.kv_store.data)
            runner.kv_store.data[:4096].zero_()  # touch every page: 64 MiB
            llm.generate("x", GREEDY, use_tqdm=False)
            del runner
        assert pool() is None, "the KV pool outlived close()"
        with pytest.raises(EngineDeadError, match="closed"):
            llm.generate("x", GREEDY, use_tqdm=False)
        llm.close()
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    cycle()
    after = [cycle() for _ in range(4)]
    assert max(after) - min(after) < 24 * 2**20, f"resident memory moves: {after}"


def test_memory_is_flat_over_requests(llm: LLM) -> None:
    def run() -> int:
        llm.generate([[i % 256, 7, 9] for i in range(40)], GREEDY, use_tqdm=False)
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    run()
    after = [run() for _ in range(5)]
    assert after[-1] - after[0] < 4 * 2**20, f"resident memory grows: {after}"
    assert not len(llm._driver) and not len(llm._engine.engine.outputs)


def test_report_adds_up(llm: LLM) -> None:
    stream = llm.stream("some text", GREEDY)
    next(stream)
    report = llm.memory_report()
    assert sum(report.ledger.terms().values()) == report.ledger.num_slots == 256
    overlapped = llm.config.device == "cuda"  # the token under way has its slot
    assert report.ledger.tokens == 9 + overlapped
    assert report.plan.budget_bytes == sum(report.plan.terms().values())
    values = report.as_dict()
    assert values["history"]["peak_blocks"] == 3
    assert "blocks" in str(report)
    list(stream)


def test_threads_are_torchs(tiny_model_path: Path) -> None:
    before = torch.get_num_threads()
    with LLM(str(tiny_model_path), **OPTIONS) as llm:
        assert llm.config.num_threads == 1 == torch.get_num_threads()
    torch.set_num_threads(before)
