"""Overlap: steps are planned and launched before the tokens of the step before are known.

The CPU's runner computes when a plan is launched; `LateDevice` lets it compute when the result is
waited for, as a device does that is behind. Tokens must be those of synchronous steps (I4).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llm_support import GREEDY, assert_drained
from overlap_support import LateDevice, open_llm, serve
from test_matrix import COMMON, crowd, run

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.events import EventKind
from octavo.lab.replay import replay
from octavo.lab.replay_workload import RecordedWorkload
from octavo.plan import StepPlan
from octavo.record import CacheReset, RecordReader, Retold, Scheduled, Updated

pytestmark = pytest.mark.usefixtures("one_torch_thread")


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
