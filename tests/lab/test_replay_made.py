"""Replay of records that are made by hand, without a model: what is damaged, aborted, refused, or
comes from an engine that reserves."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from made_records import COSTS, LIMITS, POLICIES, STEP_S, Made, plans_of

from octavo.config import KVPolicy
from octavo.errors import ConfigError, OctavoError, RecordError
from octavo.lab.replay import Watcher, build, replay
from octavo.lab.replay_meter import Meter
from octavo.lab.replay_report import ReplayReport
from octavo.lab.replay_run import Run
from octavo.lab.replay_whatif import WhatIf, changed_limits, what_if
from octavo.lab.replay_workload import RecordedWorkload
from octavo.plan import StepPlan
from octavo.record import RecordReader
from octavo.request import BeamSearchParams, FinishReason, Request


class Watched(Watcher):
    """Keeps plans, requests and tokens."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.requests: list[Request] = []

    def added(self, request: Request, stats: Any) -> None:
        self.requests.append(request)

    def scheduled(self, plan: StepPlan | None, now_s: float) -> None:
        if plan is not None:
            self.plans.append(plan)


def again(file: Path, **changes: Any) -> Watched:
    """The recorded requests, served with the recorded limits or changed ones."""
    reader, workload, watched = RecordReader(file), RecordedWorkload(), Watched()
    assert replay(reader, (workload,)).is_identical
    limits = dataclasses.replace(reader.header.limits, **changes)
    Run(workload, limits, COSTS, watchers=(watched,)).run()
    return watched


def simulated(file: Path, **changes: Any) -> WhatIf:
    reader, workload, meter = RecordReader(file), RecordedWorkload(), Meter()
    assert replay(reader, (workload, meter)).is_identical
    limits = reader.header.limits
    return what_if(workload, meter.figures(), limits, changed_limits(limits, changes), COSTS)


# -- engines that reserve


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_limits_make_the_same_plans(tmp_path: Path, policy: KVPolicy) -> None:
    """Answers end long before max_tokens: a live engine that reserves did not know that."""
    made = Made(tmp_path / "a", lambda seq_id: 3 + seq_id % 5, kv_policy=policy)
    for name in "abcdefghijkl":
        made.add(name, num_prompt=4 + ord(name) % 3, max_tokens=50, n=1 + (name in "cf"))
    file = made.steps().close()
    assert again(file).plans == plans_of(file)


def test_true_lengths_are_known_to_a_policy_that_is_changed_to(tmp_path: Path) -> None:
    made = Made(tmp_path / "a", lambda seq_id: 4, num_blocks=32)
    for name in "abcdefgh":
        made.add(name, num_prompt=4)
    file = made.steps().close()
    oracle, pow2 = (simulated(file, kv_policy=f"orca-{name}") for name in ("oracle", "pow2"))
    most = simulated(file, kv_policy="orca-max")
    # 8 tokens: two blocks of 32; 64 tokens: 16 of them
    assert oracle.after.peak_seqs == pow2.after.peak_seqs == 8 and most.after.peak_seqs == 2
    for found, name in ((oracle, "orca-oracle"), (pow2, "orca-pow2")):
        (note,) = found.notes
        assert note.startswith(f"{name} goes by the recorded lengths; a live engine")
    assert not most.notes


def test_an_oracle_that_stays_one_goes_by_max_tokens(tmp_path: Path) -> None:
    made = Made(tmp_path / "a", lambda seq_id: 4, kv_policy="orca-oracle")
    for name in "abcdefgh":
        made.add(name, num_prompt=4, max_tokens=28)  # 32 tokens, 8 of 64 blocks
    file = made.steps().close()
    found = simulated(file, num_blocks=32)
    assert (found.before.peak_seqs, found.after.peak_seqs) == (8, 4)
    assert found.recorded.num_steps == found.before.num_steps and not found.notes


def test_swapping_ends_where_nobody_is_preempted(tmp_path: Path) -> None:
    made = Made(tmp_path / "a", preemption_mode="swap", num_host_blocks=16)
    made.add("a", max_tokens=8)
    found = simulated(made.steps().close(), kv_policy="orca-max")
    assert found.changes == {
        "kv_policy": ("paged", "orca-max"),
        "num_host_blocks": (16, 0),
        "preemption_mode": ("swap", "recompute"),
    }
    assert found.notes == ("orca-max preempts nobody: nothing is swapped",)


@pytest.mark.parametrize(
    "change",
    [
        {"enable_prefix_caching": False},
        {"num_host_blocks": 3},
        {"preemption_mode": "auto"},
        {"preemption_victim": "priority"},
        {"watermark": 0.1},
    ],
)
@pytest.mark.parametrize("recorded", ["paged", "orca-max"])
def test_what_has_no_effect_is_refused(change: dict[str, Any], recorded: KVPolicy) -> None:
    limits = dataclasses.replace(LIMITS, kv_policy=recorded)
    policy = {"kv_policy": "orca-max"} if recorded == "paged" else {}
    with pytest.raises(ConfigError, match=r"--\S+ has no effect under --kv-policy orca-max"):
        changed_limits(limits, change | policy)
    assert changed_limits(
        dataclasses.replace(limits, kv_policy="contiguous"), {"kv_policy": "paged"} | change
    )


def test_a_block_size_of_a_reserving_engine_can_change() -> None:
    limits = dataclasses.replace(LIMITS, kv_policy="orca-max")
    assert changed_limits(limits, {"block_size": 8}).num_blocks == 32
    with pytest.raises(ConfigError, match="--num-host-blocks has no effect"):
        changed_limits(limits, {"block_size": 8, "num_host_blocks": 3})


@pytest.mark.parametrize("cap", [0.02, 0.25])
def test_the_watermark_is_raised_as_far_as_it_was(cap: float) -> None:
    _, scheduler = build(dataclasses.replace(LIMITS, max_watermark=cap))
    assert scheduler._pressure.max_watermark == cap


# -- requests that were refused


def test_who_was_refused_asks_again(tmp_path: Path) -> None:
    made = Made(tmp_path / "a", num_blocks=8)
    for i, name in enumerate("abcdef"):
        if i % 2:
            made.add(name, max_tokens=8)
        else:
            with pytest.raises(OctavoError, match=r"exceed|blocks"):
                made.add(name, num_prompt=40, max_tokens=8)
    with pytest.raises(OctavoError, match="has not ended"):
        made.add("b")
    file = made.steps().close()
    larger = simulated(file, num_blocks=64)
    runs = (larger.recorded, larger.before, larger.after)
    assert [run.num_refused for run in runs] == [4, 4, 1]
    assert [run.num_requests for run in runs] == [3, 3, 3]
    assert [run.output_tokens for run in runs] == [24, 24, 24]
    assert larger.notes == (
        "accepted when changed, but left out, as nobody knows what they would have generated: "
        "3 of the refused requests",
    )
    smaller = simulated(file, num_blocks=7)
    assert smaller.after.num_refused == 4 and not smaller.notes


# -- requests that were aborted


def test_who_was_aborted_is_so_at_the_same_time(tmp_path: Path) -> None:
    """Five wait for a second and give up: an engine with room for them has answered much by then,
    and nobody's latency is that second."""
    made = Made(tmp_path / "a", max_num_seqs=1)
    for name in "abcdef":
        made.add(name, max_tokens=40)
    made.steps(8)
    for name in "bcdef":
        assert made.scheduler.abort(name)
    file = made.steps().close()
    found = simulated(file, max_num_seqs=8)
    runs = (found.recorded, found.before, found.after)
    assert [run.num_aborted for run in runs] == [5, 5, 5]
    assert [run.output_tokens for run in runs] == [40, 40, 40 + 5 * 8]
    assert [run.latency_mean_s for run in runs] == [40 * STEP_S] * 3
    assert [run.ttft_mean_s for run in runs] == [STEP_S] * 3
    assert runs[0].requests_per_s == pytest.approx(1 / (40 * STEP_S))
    assert found.notes == ("aborted at the recorded times, and in no latency: 5 requests",)


def test_an_aborted_request_that_ends_before_is_over(tmp_path: Path) -> None:
    made = Made(tmp_path / "a", max_num_seqs=1)
    made.add("a", max_tokens=40)
    made.add("b", max_tokens=3)
    made.steps(8)
    made.scheduler.abort("b")
    file = made.steps().close()
    found = simulated(file, max_num_seqs=2)
    assert found.after.output_tokens == 43 and found.after.latency_mean_s == 40 * STEP_S


def test_a_sample_is_aborted_alone(tmp_path: Path) -> None:
    made = Made(tmp_path / "a")
    made.add("a", max_tokens=20, n=3)
    made.steps(5)
    made.scheduler.finish(made.scheduler.seq_ids("a")[1], FinishReason.ABORT)
    file = made.steps().close()
    assert again(file).plans == plans_of(file)
    found = simulated(file, num_blocks=60)
    assert [run.output_tokens for run in (found.recorded, found.before, found.after)] == [45] * 3
    assert found.recorded.num_aborted == 1 and found.recorded.latency_mean_s == 0


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_an_aborted_beam_search_draws_until_then(tmp_path: Path, num_steps: int) -> None:
    """Also one that is aborted before it was ever seen."""
    made = Made(tmp_path / "a", max_num_seqs=4)
    made.add("a", max_tokens=20)
    made.add("b", max_tokens=20, beam=BeamSearchParams(beam_width=3, max_tokens=20))
    made.steps(num_steps)
    made.scheduler.abort("b")
    file = made.steps().close()
    assert again(file).plans == plans_of(file)
    found = simulated(file, num_blocks=60)
    assert found.after.latency_mean_s == 20 * STEP_S


def test_a_search_that_waited_goes_on_without_recorded_candidates(tmp_path: Path) -> None:
    made = Made(tmp_path / "a", max_num_seqs=3)
    made.add("a", max_tokens=20)
    made.add("b", max_tokens=20, beam=BeamSearchParams(beam_width=3, max_tokens=20))
    made.steps(6)
    made.scheduler.abort("b")
    file = made.steps().close()
    assert len(plans_of(file)[2].seqs) == 1  # no seats for three beams
    found = simulated(file, max_num_seqs=4)
    assert found.before.peak_seqs == 1 and found.after.peak_seqs == 4
    assert found.after.num_steps == 20


# -- damage


def lines_of(made: Made) -> list[Any]:
    return [json.loads(line) for line in made.file.read_text().splitlines()]


def replayed(tmp_path: Path, lines: list[Any]) -> ReplayReport:
    file = tmp_path / "changed"
    file.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return replay(RecordReader(file))


@pytest.fixture
def lines(tmp_path: Path) -> list[Any]:
    """Six requests: a header, 6 adds, 8 steps of two lines, two more, the end."""
    made = Made(tmp_path / "a")
    for name in "abcdef":
        made.add(name, max_tokens=8)
    made.scheduler.abort("f")
    made.scheduler.abort("nobody")
    made.steps().close()
    return lines_of(made)


def test_an_interrupted_call_ends_the_replay_and_says_so(tmp_path: Path, lines: list[Any]) -> None:
    lines[3]["error"] = "MemoryError"
    found = replayed(tmp_path, lines)
    assert not found.is_identical and not found.is_complete and found.difference is None
    left = len(lines) - 5  # the header, three adds, and the end
    assert found.damage == (
        f"line 4: interrupted by MemoryError; the {left} calls after it were not replayed"
    )
    assert found.as_dict()["identical"] is found.as_dict()["complete"] is False


def test_an_interrupt_that_ends_the_engine_is_no_damage(tmp_path: Path, lines: list[Any]) -> None:
    number = [i for i, line in enumerate(lines) if line.get("call") == "schedule"][3]
    interrupted = lines[number] | {"error": "KeyboardInterrupt", "plan": None}
    found = replayed(tmp_path, [*lines[:number], interrupted, lines[-1]])
    assert found.is_complete and found.ended == "interrupted by KeyboardInterrupt"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (['{"call":"retell"}'], "the end; the 1 call after it was not replayed"),
        (['{"call":"retell"}'] * 2, "the end; the 2 calls after it were not replayed"),
        (["garbage"], r"line \d+ cannot be read: JSONDecodeError"),
        (['{"call":"retell"}', "garbage"], r"not replayed; .*cannot be read"),
    ],
)
def test_lines_after_the_end_are_damage(
    tmp_path: Path, lines: list[Any], more: list[str], says: str
) -> None:
    found = replayed(tmp_path, lines + more)
    assert found.damage is not None and found.ended == "closed" and not found.is_identical
    assert re.search(says, found.damage), found.damage


def test_a_header_alone_is_not_complete(tmp_path: Path, lines: list[Any]) -> None:
    found = replayed(tmp_path, lines[:1])
    assert found.is_identical and not found.is_complete and found.num_steps == 0
    assert replayed(tmp_path, lines).is_complete


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ({"call": "abort", "request_id": "nobody"}, (True, False)),
        ({"call": "abort", "request_id": "a", "found": False}, (False, True)),
        ({"call": "finish", "seq_id": 999, "reason": "abort"}, (True, False)),
    ],
)
def test_the_answers_of_ends_are_compared(
    tmp_path: Path, lines: list[Any], line: Any, values: tuple[bool, bool]
) -> None:
    assert [x["found"] for x in lines if x.get("request_id") == "nobody"] == [False]
    found = replayed(tmp_path, [*lines[:10], line, *lines[10:]]).difference
    assert found is not None and (found.field, found.line) == ("found", 11)
    assert (found.recorded, found.replayed) == values


def test_totals_that_are_missing_differ(tmp_path: Path, lines: list[Any]) -> None:
    lines[-1]["totals"] = {}
    found = replayed(tmp_path, lines).difference
    assert found is not None and (found.recorded, found.field) == (None, "num_preemptions")
    lines[-1]["totals"] = {"no such thing": 0}
    assert replayed(tmp_path, lines).difference is not None


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"block_size": 0}, "block_size is 0"),
        ({"num_blocks": True}, "num_blocks is True, no int"),
        ({"max_num_seqs": "x"}, "max_num_seqs is 'x', no int"),
        ({"watermark": None}, "watermark is None, no float"),
        ({"kv_policy": "nope"}, "kv_policy is 'nope', none of paged, contiguous"),
        ({"kv_policy": ["paged"]}, "kv_policy"),
        ({"max_num_seqs": 1000}, "no engine has such limits.*max_num_seqs=1000"),
        ({"watermark": math.inf}, "no engine has such limits"),
        ({"max_num_seqs": 0}, "no engine has such limits"),
    ],
)
def test_a_header_that_no_engine_wrote_is_named(
    tmp_path: Path, lines: list[Any], limits: dict[str, Any], says: str
) -> None:
    lines[0]["limits"].update(limits)
    with pytest.raises(RecordError, match=f"line 1.*{says}"):
        replayed(tmp_path, lines)


def test_a_header_field_of_the_wrong_kind_is_named(tmp_path: Path, lines: list[Any]) -> None:
    with pytest.raises(RecordError, match=r"line 1.*model is 3, no str"):
        replayed(tmp_path, [lines[0] | {"model": 3}, *lines[1:]])


# -- the recorder


def test_a_recorded_engine_takes_no_quiet_steps(tmp_path: Path) -> None:
    made = Made(tmp_path / "a")
    made.add("a")
    made.steps(3)
    assert made.scheduler.quiet_steps() is None
    with pytest.raises(AssertionError, match="quiet"):
        made.kv.advance([0], [1.0])
    with pytest.raises(AssertionError, match="quiet"):
        made.scheduler.take_quiet_steps(None, int)  # type: ignore[arg-type]


@pytest.mark.parametrize("act", ["reset_prefix_cache", "reset_cache", "flush_to_disk"])
def test_calls_of_the_manager_that_fail_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    made = Made(tmp_path / "a")

    def fail(self: Any, *_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(f"octavo.kv.KVCacheManager.{act}", fail)
    with pytest.raises(MemoryError):
        getattr(made.kv, act)()
    made.close()
    assert lines_of(made)[1]["error"] == "MemoryError"


def test_a_value_that_has_no_line_ends_the_record_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The request was accepted: who asked must not be told otherwise."""
    made = Made(tmp_path / "a.gz")
    made.add("a", max_tokens=4)
    made.steps(2)
    made.add("b", max_tokens=4, priority=object())  # type: ignore[arg-type]
    assert made.scheduler.has_unfinished() and "the record ends here" in caplog.text
    assert "'object' object cannot be" in caplog.text
    made.steps().close()
    assert not made.scheduler.has_unfinished()
    found = replay(RecordReader(made.file))
    assert found.is_identical and not found.is_complete and found.num_steps == 2
