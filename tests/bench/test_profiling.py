"""Named ranges, how busy a GPU was, and the clock of a start."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.bench.profile import ProfileResult, run_profile
from octavo.bench.startup import Startup, StartupError, StartupResult, _start, run_startup
from octavo.bench.workload import random_workload
from octavo.config import EngineConfig
from octavo.engine import startup_clock
from octavo.engine.profiling import (
    PARTS,
    WITHIN,
    Busy,
    BusyWindows,
    Interval,
    Observed,
    _observed,
    named_ranges,
    union_ns,
)
from octavo.engine.startup_clock import StartupClock
from octavo.errors import InvalidRequestError
from octavo.ops.cpu import native


@pytest.fixture(scope="module")
def llm(tiny_model_path: Path) -> Iterator[LLM]:
    with LLM(
        model=str(tiny_model_path), load_format="dummy", device="cpu", num_gpu_blocks_override=64,
        enforce_eager=True, skip_tokenizer_init=True, max_num_seqs=8, max_num_batched_tokens=64,
    ) as engine:  # fmt: skip
        yield engine


def test_time_in_which_something_ran() -> None:
    ran = [Interval(20, 30), Interval(0, 10), Interval(5, 12), Interval(6, 8), Interval(30, 31)]
    assert union_ns(ran) == 12 + 11
    busy = Busy.of(ran)
    assert (busy.busy_s, busy.wall_s) == pytest.approx((23e-9, 31e-9))
    assert Busy.of([]).share == 0
    assert (busy + busy).share == pytest.approx(23 / 31)


class Event:
    """As the profiler has them."""

    def __init__(self, name: str, device: str, begin: int, end: int, note: bool = False) -> None:
        self._values = name, device, begin, end, note

    def name(self) -> str:
        return self._values[0]

    def device_type(self) -> Any:
        return type("Type", (), {"name": self._values[1]})

    def start_ns(self) -> int:
        return self._values[2]

    def duration_ns(self) -> int:
        return self._values[3] - self._values[2]

    def is_user_annotation(self) -> bool:
        return self._values[4]


def test_ranges_of_the_host_are_no_work_of_the_gpu() -> None:
    seen = _observed(
        [
            Event("launch", "CPU", 0, 100, note=True),
            Event("launch", "CUDA", 0, 1000, note=True),
            Event("aten::mm", "CPU", 0, 50),
            Event("gemm", "CUDA", 10, 20),
            Event("gemm", "CUDA", 15, 40),
            Event("Memcpy DtoH", "CUDA", 90, 110),
        ]
    )
    assert seen.ranges_s == {"launch": pytest.approx(100e-9)}
    assert seen.kernel_counts == {"gemm": 2, "Memcpy DtoH": 1}
    assert seen.kernels_s["gemm"] == pytest.approx(35e-9)
    assert seen.busy.share == pytest.approx((30 + 20) / 100)


def test_ranges_leave_no_trace(llm: LLM) -> None:
    core = llm._engine.engine.core
    runner: Any = core._launch.__self__  # type: ignore[union-attr]
    objects = [core, core.scheduler, llm._engine.engine.outputs, runner, runner.inputs]
    objects += runner.model.layers
    before = [dict(vars(x)) for x in objects]
    with named_ranges(llm):
        assert any(dict(vars(x)) != b for x, b in zip(objects, before, strict=True))
    assert [set(vars(x)) for x in objects] == [set(b) for b in before]
    assert core._launch == runner.launch


def test_the_parts_of_a_gpu_engine_are_where_they_are_looked_for() -> None:
    from octavo.runner.gpu.graphs import StepGraphs
    from octavo.runner.gpu.inputs import GpuInputs
    from octavo.runner.gpu.runner import GpuRunner

    assert all(hasattr(GpuInputs, name) for name in ("apply", "describe", "upload"))
    assert hasattr(GpuRunner, "_choose") and hasattr(StepGraphs, "replay")
    for module, name in (*startup_clock._LOADS, *startup_clock._CAPTURES, *startup_clock._COMPILES):
        startup_clock._find(module, name)


def profiled(llm: LLM, out: Path, num_steps: int, num_skipped: int) -> ProfileResult:
    workload = random_workload(3, 20, 12, 0.0, vocab_size=320, max_model_len=256)
    params = SamplingParams(temperature=0, detokenize=False)
    return run_profile(llm, workload, params, out, num_steps=num_steps, num_skipped=num_skipped)


def test_a_profile_names_every_part(llm: LLM, tmp_path: Path) -> None:
    found = profiled(llm, tmp_path / "t.json.gz", 4, 0)
    assert (found.num_steps, found.num_skipped) == (4, 0)
    parts_seen = set(PARTS) - {"replay"}  # eager
    assert set(found.seen.ranges_s) == parts_seen
    assert {name: found.seen.range_counts[name] for name in ("schedule", "launch", "wait")} == {
        "schedule": 4, "launch": 4, "wait": 4,
    }  # fmt: skip
    assert found.seen.range_counts["attention"] == 2 * 4  # layers, steps
    parts = sum(s for name, s in found.seen.ranges_s.items() if name not in WITHIN)
    assert 0 < parts <= found.wall_s
    events = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
    assert parts_seen <= {event.get("name") for event in events}
    text = str(found)
    assert "steps 1 to 4" in text and "  build inputs" in text and "GPU busy" not in text
    assert found.as_dict()["gpu_busy_share"] is None


def test_a_profile_ends_with_its_workload_and_leaves_the_engine_well(
    llm: LLM, tmp_path: Path
) -> None:
    found = profiled(llm, tmp_path / "t.json", 100, 5)
    assert found.num_steps == 12 - 5  # a step for each of 12 tokens, the prompts within the first
    with pytest.raises(InvalidRequestError, match=r"has 12 steps, and --num-skipped is 30"):
        profiled(llm, tmp_path / "t.json", 1, 30)
    assert llm.after_step is None
    assert llm.memory_report().num_running == 0
    assert llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_the_table_shows_the_longest_kernels(tmp_path: Path) -> None:
    kernels = {f"kernel {i}": 1e-3 * (i + 1) for i in range(15)}
    seen = Observed(
        {"launch": 0.5, "attention": 0.2}, {"launch": 2, "attention": 4}, kernels,
        dict.fromkeys(kernels, 2), Busy(0.12, 0.125),
    )  # fmt: skip
    text = str(ProfileResult("w", 3, 2, 1.0, seen, "t.json"))
    assert "GPU busy 96.0% of the time" in text
    assert "kernel 14 " in text and "kernel 2 " not in text and "3 others" in text
    assert "else" in text and " 50.0%" in text  # attention lies within launch


def test_windows_see_nothing_without_a_gpu(llm: LLM) -> None:
    windows = BusyWindows(llm, every=4, length=2)
    with windows.watching():
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=11, ignore_eos=True), use_tqdm=False)
    assert windows._num_steps == 11
    assert len(windows.found) in (0, 3) and llm.after_step is None


def test_the_clock_of_a_start_knows_its_parts(tiny_model_path: Path, tmp_path: Path) -> None:
    clock = StartupClock(str(tmp_path))
    with clock.running():
        options = {"load_format": "dummy", "device": "cpu", "num_gpu_blocks_override": 16}
        LLM(model=str(tiny_model_path), skip_tokenizer_init=True, **options).close()
    assert clock.load_s > 0 and clock.capture_s == 0
    clock._on_triton(times=type("Times", (), {"total": 2_000_000}), cache_hit=False, src=None)
    assert (clock.compile_s, clock.num_compiled) == (pytest.approx(2.0), 1)


def test_a_start_in_a_process_of_its_own(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model=str(tiny_model_path), load_format="dummy", device="cpu", num_gpu_blocks_override=16,
        skip_tokenizer_init=True,
    )  # fmt: skip
    run, device = _start(config, str(native.cache_dir()), cold=False)  # where it is compiled
    parts = (run.python_s, run.import_s, run.load_s, run.capture_s, run.rest_s, run.first_token_s)
    assert run.total_s == pytest.approx(sum(parts)) and run.import_s > 0
    assert "threads" in device
    monkeypatch.setattr("octavo.bench.startup._SCRIPT", "sys.exit('no such thing')")
    with pytest.raises(StartupError, match=r"a start of .* failed: no such thing"):
        _start(config, "", cold=False)


def test_cold_starts_come_first_and_warm_ones_find_what_they_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caches: list[tuple[str, bool]] = []

    def start(config: EngineConfig, cache: str, *, cold: bool) -> tuple[Startup, str]:
        caches.append((cache.rsplit("/")[-1], cold))
        parts = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0] if cold else [1.0] * 6
        return Startup(cold, *parts, 7.0 if cold else 0.0, 5 if cold else 0, sum(parts)), "a GPU"

    monkeypatch.setattr("octavo.bench.startup._start", start)
    found = run_startup(EngineConfig(), num_cold=2, num_warm=1)
    assert caches == [("cold-0", True), ("cold-1", True), ("cold-1", False)]
    assert isinstance(found, StartupResult)
    assert (found.median("total_s", cold=True), found.median("total_s", cold=False)) == (21, 6)
    assert "2 cold, 1 warm starts" in str(found) and "    21.00     6.00" in str(found)
    caches.clear()
    assert len(run_startup(EngineConfig(), num_cold=0, num_warm=1).runs) == 1
    assert caches == [("cold-0", True), ("cold-0", False)]  # the first is not told
    with pytest.raises(InvalidRequestError, match="both 0"):
        run_startup(EngineConfig(), num_cold=0, num_warm=0)
