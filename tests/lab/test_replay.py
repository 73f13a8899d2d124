"""Record and replay: a live engine's decisions, made again from its record; and what would have
been with other limits, against a live engine that has them."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.errors import CapacityError, ConfigError
from octavo.lab.costs import FixedCosts, StepShape
from octavo.lab.replay import Replay, replay
from octavo.lab.replay_costs import FittedCosts
from octavo.lab.replay_meter import Meter
from octavo.lab.replay_report import ReplayReport, first_difference
from octavo.lab.replay_run import Run
from octavo.lab.replay_whatif import WhatIf, changed_limits, what_if
from octavo.lab.replay_workload import RecordedWorkload, TimedStep
from octavo.plan import SeqPlan, StepPlan
from octavo.record import EngineLimits, RecordReader, Scheduled
from octavo.request import Request

NUM_BLOCKS = 36
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "max_model_len": 64,
    "block_size": 4,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "num_threads": 1,
    "swap_space": 0.0005,
}
EXACT = {"ignore_eos": True, "temperature": 1.0}


def mixed_requests(num: int = 16) -> tuple[list[Any], list[Any]]:
    """Greedy, several samples, best of several, beams; prompts that begin alike. Seeded."""
    rng = random.Random(5)
    common = [rng.randrange(250) for _ in range(20)]
    prompts, params = [], []
    for i in range(num):
        own = [rng.randrange(250) for _ in range(rng.randrange(1, 16))]
        prompts.append({"prompt_token_ids": common[: rng.randrange(2, 20)] + own})
        max_tokens = rng.randrange(4, 20)
        params.append(
            (
                SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
                SamplingParams(n=3, max_tokens=max_tokens, seed=i, **EXACT),
                SamplingParams(n=1, best_of=4, max_tokens=max_tokens, seed=i, **EXACT),
                BeamSearchParams(beam_width=3, max_tokens=max_tokens),
            )[i % 4]
        )
    return prompts, params


def live(folder: Path, file: Path | None, act: Callable[[LLM], None], **options: Any) -> Any:
    """Run an engine; its memory report."""
    with LLM(str(folder), record=None if file is None else str(file), **OPTIONS | options) as llm:
        act(llm)
        return llm.memory_report()


def everything(llm: LLM) -> None:
    """All that can be asked of an engine, some of it in the middle of a run."""
    prompts, params = mixed_requests()
    engine, block_bytes = llm._engine.engine, llm.memory_report().plan.bytes_per_block
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        kind = engine_kind(one)
        engine.add(str(i), prompt, one, kind=kind, priority=i % 3)
    for step in range(400):
        if step == 5:
            engine.abort("4")
            engine.abort("1", 1)
        if step == 9:
            pin = llm.pin_prefix(prompts[0])
        if step == 12:
            llm.resize_kv_cache(block_bytes * (NUM_BLOCKS - 6))
        if step == 20:
            llm.reset_prefix_cache()
            llm.resize_kv_cache(block_bytes * (NUM_BLOCKS + 4))
        if step == 25:
            llm.unpin_prefix(pin.pin_id)
            with pytest.raises(CapacityError):
                llm.resize_kv_cache(block_bytes * 10**9)
        if not engine.has_unfinished() and step > 25:
            break
        engine.step()
    stopping = SamplingParams(temperature=0, max_tokens=12, stop=[chr(c) for c in range(97, 123)])
    llm.generate(["a stop string", "another"], stopping, use_tqdm=False)
    llm.generate(prompts[:6], params[:6], use_tqdm=False)


def engine_kind(params: Any) -> Any:
    from octavo.engine.output import OutputKind

    return OutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def recorded(
    tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Any]]:
    """Makes each record once: (its file, the live engine's memory report)."""
    folder = tmp_path_factory.mktemp("records")
    made: dict[str, tuple[Path, Any]] = {}

    def make(act: Callable[[LLM], None], **options: Any) -> tuple[Path, Any]:
        name = f"{act.__name__}-{'-'.join(map(str, options.values()))}"
        if name not in made:
            file = folder / f"{name}.jsonl"
            made[name] = file, live(tiny_model_path, file, act, **options)
        return made[name]

    return make


# -- the same again


@pytest.mark.parametrize(
    "options",
    [
        {"preemption_mode": "recompute"},
        {"preemption_mode": "swap"},
        {"preemption_mode": "auto", "preemption_victim": "lowest-cost"},
        {"preemption_victim": "priority", "scheduling_policy": "priority"},
        {"enable_prefix_caching": False, "swap_space": 0, "preemption_mode": "recompute"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_replay_is_identical_plan_by_plan(
    recorded: Callable[..., tuple[Path, Any]], options: dict[str, Any]
) -> None:
    act = everything if options.get("enable_prefix_caching", True) else only_requests
    file, report = recorded(act, **options)
    found = replay(RecordReader(file))
    assert found.is_identical, str(found.difference)
    assert (found.damage, found.ended) == (None, "closed")
    plans = plans_of(file)
    assert found.num_steps == len(plans) > 50
    assert found.num_preemptions == report.pressure.num_preemptions > 0
    assert found.num_evictions == report.cache.evictions
    assert found.num_copies == Counter(c.kind.name.lower() for p in plans for c in p.copies)
    if act is everything:
        assert found.num_evictions > 0 and found.num_copies["within"] > 0
        assert any(plan.moved for plan in plans) and any(plan.beams for plan in plans)
    if options.get("preemption_mode") == "swap":
        assert report.cache.swapped_out > 0


@pytest.mark.parametrize("policy", ["contiguous", "orca-max", "orca-pow2", "orca-oracle"])
def test_other_policies_are_replayed_too(
    recorded: Callable[..., tuple[Path, Any]], policy: str
) -> None:
    file, _ = recorded(greedy_only, kv_policy=policy, swap_space=None)
    found = replay(RecordReader(file))
    assert found.is_identical, str(found.difference)
    assert found.header.limits.kv_policy == policy and found.num_steps > 10
    paged, _, _ = simulated(file, kv_policy="paged")
    assert paged.after.num_steps <= paged.before.num_steps == paged.recorded.num_steps


def only_requests(llm: LLM) -> None:
    prompts, params = mixed_requests()
    llm.generate(prompts, params, use_tqdm=False)


def plans_of(file: Path) -> list[StepPlan]:
    calls = RecordReader(file).calls()
    return [call.plan for call in calls if isinstance(call, Scheduled) and call.plan is not None]


def test_a_replay_leaves_a_sound_pool(recorded: Callable[..., tuple[Path, Any]]) -> None:
    file, _ = recorded(everything, preemption_mode="swap")
    reader = RecordReader(file)
    run = Replay(reader.header)
    for call in reader.calls():
        assert run.make(call) is None
        run.kv.check_integrity()
    assert run.kv.num_free_blocks == run.kv.num_blocks
    assert not run.scheduler.has_unfinished()


# -- not the same again


def tampered(file: Path, tmp_path: Path, change: Callable[[list[Any]], None]) -> ReplayReport:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines)
    changed = tmp_path / "tampered.jsonl"
    changed.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return replay(RecordReader(changed))


def schedule_of(lines: list[Any], step: int) -> tuple[int, Any]:
    for number, line in enumerate(lines, 1):
        if line.get("call") == "schedule" and (line["plan"] or {}).get("step_id") == step:
            return number, line
    raise AssertionError(step)


def test_a_changed_plan_is_found_at_its_step(
    recorded: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    file, _ = recorded(everything, preemption_mode="swap")
    where = 0

    def change(lines: list[Any]) -> None:
        nonlocal where
        where, line = schedule_of(lines, 40)
        line["plan"]["seqs"]["starts"][1] += 1

    found = tampered(file, tmp_path, change).difference
    assert found is not None
    assert (found.step_id, found.line, found.field) == (40, where, "seqs[1].start")
    assert found.recorded == found.replayed + 1
    assert f"step 40, seqs[1].start: recorded {found.recorded}" in str(found)


def test_a_changed_token_is_found_where_it_is_told_on(
    recorded: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    """Nobody sees a token until it is put into a block that others find, or told to a runner: so
    here a stop token that was drawn is taken back, and the step after differs."""
    file, _ = recorded(only_requests)

    def change(lines: list[Any]) -> None:
        added = next(line for line in lines if line.get("call") == "add")
        added["request"]["max_tokens"] += 1

    report = tampered(file, tmp_path, change)
    assert report.difference is not None and report.difference.step_id is not None
    before = plans_of(file)
    first_end = next(plan.step_id for plan in before if 0 in plan.finished)
    assert report.difference.step_id == first_end
    assert report.num_steps == first_end + 1


@pytest.mark.parametrize(
    ("change", "field", "values"),
    [
        (lambda lines: lines[0]["limits"].update(num_blocks=NUM_BLOCKS - 1), "num_free", None),
        (lambda lines: schedule_of(lines, 3)[1].update(plan=None), "plan", None),
        (lambda lines: schedule_of(lines, 3)[1].update(num_evicted=9), "num_evicted", (9, 0)),
        (lambda lines: lines[1].update(error="ValueError"), "error", ("ValueError", None)),
        (lambda lines: lines[-1]["totals"].update(queries=-1), "queries", (-1, 22)),
    ],
)
def test_whatever_differs_is_named(
    recorded: Callable[..., tuple[Path, Any]],
    tmp_path: Path,
    change: Callable[[list[Any]], None],
    field: str,
    values: tuple[Any, Any] | None,
) -> None:
    file, _ = recorded(twice)
    found = tampered(file, tmp_path, change).difference
    assert found is not None and found.field == field
    if values is not None:
        assert (found.recorded, found.replayed) == values


def twice(llm: LLM) -> None:
    prompts, params = mixed_requests()
    llm.generate(prompts, params, use_tqdm=False)
    llm.generate(prompts[:6], params[:6], use_tqdm=False)


def test_what_the_scheduler_cannot_take_is_a_difference(
    recorded: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    """Not an error of the replay."""

    def lose_a_result(lines: list[Any]) -> None:
        lines[:] = [
            line for line in lines if line.get("call") != "update" or line["result"]["step_id"] != 7
        ]

    def time_runs_backwards(lines: list[Any]) -> None:
        schedule_of(lines, 7)[1]["now_s"] = 0.0

    file, _ = recorded(twice)
    lost = tampered(file, tmp_path, lose_a_result).difference
    assert lost is not None and lost.step_id == 8
    back = tampered(file, tmp_path, time_runs_backwards).difference
    assert back is not None and back.field == "error" and "backwards" in back.replayed


def test_a_record_that_breaks_off_is_replayed_up_to_there(
    recorded: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    file, _ = recorded(twice)
    content = file.read_bytes()
    short = tmp_path / "short.jsonl"
    short.write_bytes(content[: len(content) // 2])
    report = replay(RecordReader(short))
    num_lines = content[: len(content) // 2].count(b"\n")
    assert report.difference is None and report.num_calls == num_lines - 1
    assert not report.is_identical and not report.is_complete
    assert report.damage is not None and f"line {num_lines + 1}, where" in report.damage
    assert report.ended is None and 0 < report.num_steps < len(plans_of(file))


def test_the_first_difference_is_the_innermost() -> None:
    one = StepPlan(3, seqs=[SeqPlan(1, 2, 1, (5, 6), None, True)], finished=[1, 2])
    other = dataclasses.replace(one, seqs=[SeqPlan(1, 2, 1, (5, 7), None, True)])
    assert first_difference(one, one) is None
    assert first_difference(one, other) == ("seqs[0].new_block_ids[1]", 6, 7)
    assert first_difference(one, dataclasses.replace(one, finished=[1])) == ("len(finished)", 2, 1)
    new = StepPlan(3, extra_draws={1: (2,)})
    assert first_difference(StepPlan(3), new) == ("extra_draws", {}, {1: (2,)})


# -- what if


def simulated(file: Path, **changes: Any) -> tuple[WhatIf, RecordedWorkload, EngineLimits]:
    reader = RecordReader(file)
    workload, meter = RecordedWorkload(), Meter()
    assert replay(reader, (workload, meter)).is_identical
    limits = reader.header.limits
    changed = changed_limits(limits, changes)
    costs = FittedCosts(workload.steps)
    return what_if(workload, meter.figures(), limits, changed, costs), workload, changed


@pytest.mark.parametrize("num_blocks", [28, 48, 200])
def test_another_pool_preempts_as_a_live_engine_of_that_size_does(
    recorded: Callable[..., tuple[Path, Any]],
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
    recorded: Callable[..., tuple[Path, Any]], tiny_model_path: Path, tmp_path: Path
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
    recorded: Callable[..., tuple[Path, Any]],
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


def greedy_only(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    prompts = [{"prompt_token_ids": [i] * 20} for i in range(12)]
    llm.generate(prompts, params, use_tqdm=False)


def test_prefixes_that_are_not_kept_are_not_found(
    recorded: Callable[..., tuple[Path, Any]],
) -> None:
    file, _ = recorded(twice)
    found, _, _ = simulated(file, enable_prefix_caching=False)
    assert found.before.hit_rate > 0.2 and found.after.hit_rate == 0
    assert found.after.computed_tokens > found.before.computed_tokens


def test_a_run_of_everything_can_be_changed(recorded: Callable[..., tuple[Path, Any]]) -> None:
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


def test_who_waited_for_answers_is_noted(recorded: Callable[..., tuple[Path, Any]]) -> None:
    """The second round came when the first was over; on a slower machine it comes all the same."""
    file, _ = recorded(twice)
    reader = RecordReader(file)
    workload, meter = RecordedWorkload(), Meter()
    replay(reader, (workload, meter))
    limits = reader.header.limits
    changed = changed_limits(limits, {"num_blocks": 50})
    slow = what_if(workload, meter.figures(), limits, changed, FixedCosts(step_s=1.0))
    assert [note.split(" that")[0] for note in slow.notes] == ["6 requests"] * 2


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


# -- step times


def test_costs_are_found_again() -> None:
    """Steps whose times are made of known terms."""
    rng = random.Random(0)
    steps = []
    for _ in range(400):
        prefill = rng.choice([0, 0, rng.randrange(1, 500)])
        decodes = rng.randrange(1, 200)
        context = decodes * rng.randrange(1, 1000)
        shape = StepShape(prefill, 0, decodes, context, decodes, rng.randrange(3) * 4, 0, 0)
        copy_s = 1e-4 * shape.num_host_blocks
        seconds = 0.01 + 2e-5 * prefill + 1e-6 * context + copy_s
        steps.append(TimedStep(shape, seconds, copy_s, 0.002))
    costs = FittedCosts(steps)
    for step in steps:
        assert costs.step_s(step.shape) == pytest.approx(step.seconds + 0.002, rel=0.02)
    assert costs.copy_s(10) == pytest.approx(1e-3, rel=1e-6)
    assert costs.terms["a step"] == pytest.approx(0.012, rel=0.05)
    assert costs.error < 0.01 and "400 recorded steps" in costs.name
    assert min(costs.terms.values()) >= 0


def test_pauses_are_not_the_engines() -> None:
    shape = StepShape(0, 0, 1, 10, 1)
    steps = [TimedStep(shape, 0.01, 0.0, 0.001) for _ in range(20)]
    steps += [TimedStep(shape, 0.01, 0.0, 100.0), TimedStep(shape, 0.01, 0.0, None)]
    costs = FittedCosts(steps)
    assert 0.01 < costs.step_s(shape) < 0.013


def test_expected_lengths_are_those_of_a_live_engine(
    recorded: Callable[..., tuple[Path, Any]],
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
