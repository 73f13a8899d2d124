"""Overlap: steps are planned and launched before the tokens of the step before are known.

The CPU's runner computes when a plan is launched; `LateDevice` lets it compute when the result is
waited for, as a device does that is behind. Tokens must be those of synchronous steps (I4).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llm_support import GREEDY, OPTIONS, assert_drained, tokens
from test_matrix import COMMON, crowd, run

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.engine.output import OutputKind
from octavo.errors import DeviceLostError, EngineDeadError, InvalidRequestError, StepFailedError
from octavo.events import EventKind
from octavo.lab.replay import replay
from octavo.lab.replay_workload import RecordedWorkload
from octavo.plan import StepPlan, StepResult
from octavo.record import CacheReset, RecordReader, Retold, Scheduled, Updated

pytestmark = pytest.mark.usefixtures("one_torch_thread")


class LateDevice:
    """Between an engine and its runner: carries plans out when they are waited for, and checks that
    the engine keeps to the rules. May be told to fail."""

    def __init__(self, llm: LLM) -> None:
        core = llm._engine.engine.core
        launch = core._launch
        assert launch is not None
        self._run = launch
        self.under_way: list[int] = []
        self.most = 0
        self.num_ahead = 0
        """Shares that were planned while the token was not known."""
        self._sampling: list[set[int]] = []
        self.on_launch: Callable[[StepPlan], None] = lambda plan: None
        self.on_wait: Callable[[StepPlan], None] = lambda plan: None
        core._launch = self.launch

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.on_launch(plan)
        self.under_way.append(plan.step_id)
        self.most = max(self.most, len(self.under_way))
        ids = {share.seq_id for share in plan.seqs if share.sample}
        self.num_ahead += len(ids & set().union(*self._sampling))
        self._sampling.append(ids)

        def wait() -> StepResult:
            assert self.under_way[0] == plan.step_id, "waited for out of turn, or twice"
            del self.under_way[0], self._sampling[0]
            self.on_wait(plan)
            return self._run(plan)()

        return wait


def open_llm(model: Path, **options: Any) -> LLM:
    return LLM(str(model), **(OPTIONS | {"async_scheduling": True} | options))


def serve(
    llm: LLM, requests: list[tuple[Any, Any]], abort_at: dict[int, str] | None = None
) -> dict[str, list[tuple[list[int], str | None, int | str | None]]]:
    """By request that was answered: (tokens, finish reason, stop reason) of its completions."""
    engine = llm._engine.engine
    for i, (prompt, params) in enumerate(requests):
        engine.add(f"r{i}", prompt, params, kind=OutputKind.FINAL_ONLY)
    found: dict[str, list[tuple[list[int], str | None, int | str | None]]] = {}
    num_steps = 0
    while engine.has_unfinished():
        num_steps += 1
        if abort_at and num_steps in abort_at:
            engine.abort(abort_at[num_steps])
        try:
            outputs = engine.step()
        except StepFailedError as error:
            assert not any(engine.has(i) for i in error.request_ids)
            continue
        for output in outputs:
            found[output.request_id] = [
                (c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs
            ]
        engine.core.kv.check_integrity()
    return found


# -- the same tokens


@pytest.fixture(scope="module")
def expected(tiny_weights_path: Path) -> list[list[list[int]]]:
    return run(tiny_weights_path, crowd(), enable_prefix_caching=False, max_num_seqs=24).tokens


@pytest.mark.parametrize(
    ("mode", "caching", "budget", "num_blocks"),
    [
        ("recompute", True, 512, 200),
        ("recompute", True, 24, 44),
        ("recompute", False, 512, 44),
        ("swap", True, 512, 44),
        ("swap", False, 24, 44),
    ],
)
@pytest.mark.parametrize("is_late", [True, False])
def test_a_crowd_gets_the_same_tokens(
    tiny_weights_path: Path,
    expected: list[list[list[int]]],
    mode: str,
    caching: bool,
    budget: int,
    num_blocks: int,
    is_late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices: list[LateDevice] = []
    if is_late:
        enter = LLM.__enter__

        def enter_late(llm: LLM) -> LLM:
            devices.append(LateDevice(llm))
            return enter(llm)

        monkeypatch.setattr(LLM, "__enter__", enter_late)
    found, report, _ = run(
        tiny_weights_path, crowd(), async_scheduling=True, enable_prefix_caching=caching,
        preemption_mode=mode, max_num_batched_tokens=budget, max_num_seqs=24,
        num_gpu_blocks_override=num_blocks,
    )  # fmt: skip
    assert found == expected
    assert bool(report.num_preemptions) == (num_blocks == 44)
    for device in devices:
        assert device.most == 2 and device.num_ahead > 50
        assert not device.under_way


def test_ends_by_token_string_and_length(tiny_model_path: Path) -> None:
    """Stops are noticed one step late: nothing of that step is told, and its block comes back."""
    free: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
    with open_llm(tiny_model_path, async_scheduling=False) as llm:
        (output,) = llm.generate("seven", SamplingParams(**free, ignore_eos=True), use_tqdm=False)
    token_ids, text = output.outputs[0].token_ids, output.outputs[0].text
    requests: list[tuple[Any, Any]] = [
        ("seven", SamplingParams(**free, stop_token_ids=[token_ids[k]])) for k in (3, 4, 5, 6, 7)
    ]
    requests += [("seven", SamplingParams(**free, stop=[text[k : k + 2]])) for k in (4, 9)]
    requests += [("seven", SamplingParams(temperature=0, max_tokens=k)) for k in (1, 2, 3)]
    requests += [("eight", SamplingParams(temperature=1.5, seed=k, max_tokens=40)) for k in (1, 2)]
    requests += [("nine", SamplingParams(temperature=2.0, seed=4, n=3, max_tokens=9, stop=["e"]))]
    found = {}
    for overlap in (False, True):
        with open_llm(tiny_model_path, async_scheduling=overlap) as llm:
            device = LateDevice(llm)
            found[overlap] = serve(llm, requests)
            assert device.most == 1 + overlap and bool(device.num_ahead) == overlap
            assert_drained(llm)
    assert found[True] == found[False]
    assert {reason for ends in found[True].values() for _, reason, _ in ends} == {"stop", "length"}


def test_penalties_logprobs_and_beams(tiny_model_path: Path) -> None:
    hot = {"temperature": 1.2, "max_tokens": 10, "ignore_eos": True}
    requests: list[tuple[Any, Any]] = [
        (COMMON, SamplingParams(**hot, seed=1, repetition_penalty=1.5)),
        (COMMON, SamplingParams(**hot, seed=2, frequency_penalty=1.0, n=2)),
        (COMMON, SamplingParams(**hot, seed=3, logprobs=2, min_tokens=4)),
        (COMMON, BeamSearchParams(beam_width=2, max_tokens=7)),
        (COMMON[:5], SamplingParams(**hot, seed=5)),
    ]
    answers, logprobs = [], []
    for overlap in (False, True):
        with open_llm(tiny_model_path, async_scheduling=overlap) as llm:
            outputs = llm.generate(
                [prompt for prompt, _ in requests], [p for _, p in requests], use_tqdm=False
            )
            answers.append([[c.token_ids for c in o.outputs] for o in outputs])
            logprobs.append(outputs[2].outputs[0].logprobs)
            events = llm.events()
    assert answers[0] == answers[1]
    for one, other in zip(*logprobs, strict=True):  # in other company, other roundings
        assert list(one) == list(other)
        pairs = zip(one.values(), other.values(), strict=True)
        assert all((a.rank, a.logprob) == (b.rank, pytest.approx(b.logprob)) for a, b in pairs)
    assert [e.kind for e in events] == [EventKind.NO_OVERLAP] * 2, "told once for each kind"
    assert "penalties" in events[0].why and "beam search" in events[1].why


def test_aborts_while_steps_are_under_way(tiny_weights_path: Path) -> None:
    requests = crowd()
    options = {"max_model_len": 80, "num_gpu_blocks_override": 60, "max_num_seqs": 24}
    options |= {"skip_tokenizer_init": True, "load_format": "auto"}
    found = {}
    for overlap in (False, True):
        with open_llm(tiny_weights_path, async_scheduling=overlap, **options) as llm:
            LateDevice(llm)
            found[overlap] = serve(llm, requests, {2: "r1", 3: "r3", 5: "r5", 6: "r7"})
            assert_drained(llm)
            assert llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
            assert_drained(llm)
    assert found[True] == found[False] and len(found[True]) == len(requests) - 4


# -- failures


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


# -- a quiet runner


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


# -- records


def test_recorded_steps_take_from_one_result_to_the_next(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.jsonl"
    with open_llm(tiny_model_path, record=str(file)) as llm:
        LateDevice(llm)
        params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
        llm.generate(["one", "two", "three"], params, use_tqdm=False)
    calls = list(RecordReader(file).calls())
    times = [call.now_s for call in calls if isinstance(call, Scheduled | Updated)]
    workload = RecordedWorkload()
    replay(RecordReader(file), (workload,))
    took = sum(step.seconds + (step.gap_s or 0) for step in workload.steps)
    assert 0.6 * (times[-1] - times[0]) < took <= 1.001 * (times[-1] - times[0])
    computed = sum(call.result.compute_s for call in calls if isinstance(call, Updated))
    assert 0 < computed <= 1.001 * (times[-1] - times[0])


def test_a_record_with_overlap_is_replayed(tiny_weights_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl.gz"
    options = {"max_model_len": 80, "num_gpu_blocks_override": 44, "max_num_seqs": 24}
    options |= {"skip_tokenizer_init": True, "load_format": "auto", "preemption_mode": "swap"}
    with open_llm(tiny_weights_path, record=str(file), **options) as llm:
        device = LateDevice(llm)

        def fail(plan: StepPlan) -> None:
            if plan.step_id == 9:
                raise RuntimeError("no answer")

        device.on_wait = fail
        serve(llm, [*crowd(), *crowd()], {5: "r2", 6: "r12"})
    calls = list(RecordReader(file).calls())
    assert RecordReader(file).header.limits.plan_ahead
    steps = [type(call) for call in calls if isinstance(call, Scheduled | Updated)]
    assert steps[:3] == [Scheduled, Scheduled, Updated], "not in the order in which they happened"
    kinds = [type(call) for call in calls]
    (reset,) = (call for call in calls if isinstance(call, CacheReset))
    assert reset.num_plans == kinds.count(Retold) == 2
    report = replay(RecordReader(file))
    assert report.is_identical and report.damage is None, str(report.difference)
    assert report.num_preemptions and report.ended == "closed"
