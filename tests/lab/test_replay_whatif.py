"""What would have been with other limits, against a live engine that has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_records import plans_of
from replay_support import (
    NUM_BLOCKS,
    OPTIONS,
    Recorded,
    everything,
    greedy_only,
    live,
    mixed_requests,
    only_requests,
    simulated,
    twice,
)

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.lab.costs import FixedCosts
from octavo.lab.replay import replay
from octavo.lab.replay_meter import Meter
from octavo.lab.replay_run import Run
from octavo.lab.replay_whatif import changed_limits, what_if
from octavo.lab.replay_workload import RecordedWorkload
from octavo.plan import StepPlan
from octavo.record import EngineLimits, RecordReader
from octavo.request import Request


@pytest.mark.parametrize("num_blocks", [28, 48, 200])
def test_another_pool_preempts_as_a_live_engine_of_that_size_does(
    recorded: Recorded,
    tiny_model_path: Path,
    tmp_path: Path,
    num_blocks: int,
) -> None:
    """All requests are there from the start, so that no decision depends on times."""
    fixed = {"preemption_mode": "recompute", "max_num_seqs": 15}
    file, report = recorded(only_requests, **fixed)
    other = tmp_path / "other.jsonl"
    live(tiny_model_path, other, only_requests, **fixed, num_gpu_blocks_override=num_blocks)
    expected = replay(RecordReader(other))
    found, _, _ = simulated(file, num_blocks=num_blocks)
    assert found.before.num_preemptions == found.recorded.num_preemptions
    assert found.recorded.num_preemptions == report.pressure.num_preemptions
    assert found.before.num_steps == found.recorded.num_steps
    assert found.after.num_preemptions == expected.num_preemptions
    assert found.after.num_evictions == expected.num_evictions
    assert found.after.computed_tokens == expected.num_tokens
    assert found.after.num_steps == expected.num_steps
    assert found.after.output_tokens == found.recorded.output_tokens
    if num_blocks > NUM_BLOCKS:
        assert found.after.num_preemptions < found.before.num_preemptions
    assert (found.after.num_preemptions == 0) == (num_blocks == 200)


def test_the_plans_of_what_if_are_those_of_a_live_engine(
    recorded: Recorded, tiny_model_path: Path, tmp_path: Path
) -> None:
    fixed = {"preemption_mode": "recompute", "max_num_seqs": 15}
    file, _ = recorded(only_requests, **fixed)
    other = tmp_path / "other.jsonl"
    live(tiny_model_path, other, only_requests, **fixed, num_gpu_blocks_override=44)
    _, workload, changed = simulated(file, num_blocks=44)
    watched = Plans()
    Run(workload, changed, FixedCosts(), watchers=(watched,)).run()
    assert watched.plans == plans_of(other)


class Plans(Meter):
    """Keeps all plans."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[StepPlan] = []

    def scheduled(self, plan: StepPlan | None, now_s: float) -> None:
        super().scheduled(plan, now_s)
        if plan is not None:
            self.plans.append(plan)


def test_other_policies_serve_the_same_requests(
    recorded: Recorded,
) -> None:
    file, _ = recorded(greedy_only, swap_space=0, num_gpu_blocks_override=64)
    for policy in ("orca-max", "orca-oracle", "contiguous"):
        found, _, _ = simulated(file, kv_policy=policy)
        assert found.after.output_tokens == found.before.output_tokens == 12 * 10
        assert found.after.num_refused == found.after.num_preemptions == 0
        assert found.after.mean_seqs < found.before.mean_seqs
        assert sum(found.after.memory.values()) == pytest.approx(1)
        assert found.after.memory["tokens"] < found.before.memory["tokens"]
    assert found.changes == {"kv_policy": ("paged", "contiguous")}


def test_prefixes_that_are_not_kept_are_not_found(
    recorded: Recorded,
) -> None:
    file, _ = recorded(twice)
    found, _, _ = simulated(file, enable_prefix_caching=False)
    assert found.before.hit_rate > 0.2 and found.after.hit_rate == 0
    assert found.after.computed_tokens > found.before.computed_tokens


def test_a_run_of_everything_can_be_changed(recorded: Recorded) -> None:
    """Aborts, pins, resizes: what was aborted ends with the tokens that it had."""
    file, _ = recorded(everything, preemption_mode="swap")
    found, workload, _ = simulated(file, preemption_mode="recompute", num_blocks=50)
    assert found.after.num_preemptions < found.recorded.num_preemptions
    assert found.after.num_requests == found.recorded.num_requests == len(workload.requests)
    assert any("resizes" in note for note in found.notes)
    assert json.loads(json.dumps(found.as_dict()))["changes"]["num_blocks"] == [36, 50]


def test_requests_come_when_they_came(tiny_model_path: Path, tmp_path: Path) -> None:
    """One that came to an idle engine much later does so again."""
    file = tmp_path / "run.jsonl"
    times = iter(x / 100 for x in range(10**6))
    now_s = 0.0
    with LLM(str(tiny_model_path), record=str(file), **OPTIONS) as llm:
        core = llm._engine.engine.core
        offset = core.clock()
        core.clock = lambda: offset + now_s + next(times)
        greedy_only(llm)
        now_s = 1000.0
        greedy_only(llm)
    found, workload, _ = simulated(file, num_blocks=50)
    seen = {request.seen_s for request in workload.requests}
    assert len(seen) == 2 and max(seen) - min(seen) == pytest.approx(1000, abs=10)
    assert not found.notes
    assert found.before.seconds == pytest.approx(found.recorded.seconds, rel=0.01)
    assert found.before.latency_mean_s == pytest.approx(found.recorded.latency_mean_s, rel=0.1)


def test_who_waited_for_answers_is_noted(recorded: Recorded) -> None:
    """The second round came when the first was over; on a slower machine it comes all the same."""
    file, _ = recorded(twice)
    reader = RecordReader(file)
    workload, meter = RecordedWorkload(), Meter()
    replay(reader, (workload, meter))
    limits = reader.header.limits
    changed = changed_limits(limits, {"num_blocks": 50})
    slow = what_if(workload, meter.figures(), limits, changed, FixedCosts(step_s=1.0))
    assert [note.split(" that")[0] for note in slow.notes] == ["6 requests"] * 2


def test_expected_lengths_are_those_of_a_live_engine(
    recorded: Recorded,
) -> None:
    """Which knows none, unless the policy that it is changed to is about knowing them."""
    file, _ = recorded(only_requests, preemption_mode="recompute", max_num_seqs=15)
    _, workload, changed = simulated(file, num_blocks=50)
    asked: list[Request] = []

    class Requests(Meter):
        def added(self, request: Request, stats: Any) -> None:
            asked.append(request)
            super().added(request, stats)

    Run(workload, changed, FixedCosts(), watchers=(Requests(),)).run()
    assert {r.expected_output_tokens for r in asked} == {None}
    asked.clear()
    Run(workload, changed, FixedCosts(), knows_lengths=True, watchers=(Requests(),)).run()
    assert [r.expected_output_tokens for r in asked] == [r.num_output for r in workload.requests]
    by_prompt = {tuple(r.request.prompt_token_ids): r for r in workload.requests}
    prompts, params = mixed_requests()
    for prompt, one in zip(prompts, params, strict=True):
        if isinstance(one, SamplingParams):
            came = by_prompt[tuple(prompt["prompt_token_ids"])]
            assert came.num_output == one.max_tokens
            assert {len(tokens) for tokens in came.outputs} == {one.max_tokens}


# -- limits that are changed


LIMITS = EngineLimits(
    num_blocks=36, block_size=4, bytes_per_block=2048, kv_policy="paged", max_model_len=64,
    max_num_seqs=8, max_num_batched_tokens=32, enable_prefix_caching=True, num_host_blocks=20,
    max_disk_blocks=0, preemption_mode="swap", preemption_victim="last-come",
    scheduling_policy="fcfs", watermark=0.01, max_watermark=0.125, token_s=1e-3, block_s=1e-4,
)  # fmt: skip


def test_a_block_size_keeps_the_tokens() -> None:
    changed = changed_limits(LIMITS, {"block_size": 16})
    assert (changed.num_blocks, changed.num_host_blocks) == (9, 5)
    assert changed.bytes_per_block == 8192
    both = changed_limits(LIMITS, {"block_size": 16, "num_blocks": 11})
    assert both.num_blocks == 11


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_blocks": 36}, "--num-blocks 36 is what was recorded"),
        ({"num_blocks": 0}, "--num-blocks must be at least 1, got 0"),
        ({"num_host_blocks": 0}, "--num-host-blocks"),
        ({"max_num_seqs": 64}, "--max-num-seqs 64 must be at most --max-num-batched-tokens 32"),
        ({"watermark": 1.0}, "--watermark"),
    ],
)
def test_limits_that_cannot_be_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        changed_limits(LIMITS, changes)
