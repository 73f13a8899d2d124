"""Record and replay: a live engine's decisions, made again from its record, or not the same."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_records import plans_of
from replay_support import (
    NUM_BLOCKS,
    Recorded,
    everything,
    greedy_only,
    only_requests,
    simulated,
    twice,
)

from octavo.lab.replay import Replay, replay
from octavo.lab.replay_report import ReplayReport, first_difference
from octavo.plan import SeqPlan, StepPlan
from octavo.record import RecordReader

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
def test_a_replay_is_identical_plan_by_plan(recorded: Recorded, options: dict[str, Any]) -> None:
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
def test_other_policies_are_replayed_too(recorded: Recorded, policy: str) -> None:
    file, _ = recorded(greedy_only, kv_policy=policy, swap_space=None)
    found = replay(RecordReader(file))
    assert found.is_identical, str(found.difference)
    assert found.header.limits.kv_policy == policy and found.num_steps > 10
    paged, _, _ = simulated(file, kv_policy="paged")
    assert paged.after.num_steps <= paged.before.num_steps == paged.recorded.num_steps


def test_a_replay_leaves_a_sound_pool(recorded: Recorded) -> None:
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


def test_a_changed_plan_is_found_at_its_step(recorded: Recorded, tmp_path: Path) -> None:
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


def test_a_changed_token_is_found_where_it_is_told_on(recorded: Recorded, tmp_path: Path) -> None:
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
    recorded: Recorded,
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


def test_what_the_scheduler_cannot_take_is_a_difference(recorded: Recorded, tmp_path: Path) -> None:
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
    recorded: Recorded, tmp_path: Path
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
