"""Calibration: what is counted, what becomes a row, and the command end to end."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.bench.calibrate import (
    Calibration,
    calibrate,
    engine_config,
    measure_round,
    plan_of,
    serve,
    waves,
)
from octavo.bench.measured_steps import Counts, Times, counts_of, median_row, wave_rows
from octavo.bench.step_grid import Point, Probe, grid
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.errors import InvalidRequestError
from octavo.lab.calibrated import CalibratedCosts
from octavo.lab.costs import StepShape
from octavo.lab.null_model import shape_of
from octavo.plan import BlockCopy, CopyKind, SeqPlan, StepPlan

Capture = pytest.CaptureFixture[str]


def config(model: Path, **changes: object) -> EngineConfig:
    values = {
        "model": str(model), "load_format": "dummy", "max_num_seqs": 8,
        "max_num_batched_tokens": 32, "num_gpu_blocks_override": 64, "max_model_len": 128,
        "swap_space": 0.01, "num_threads": 1,
    }  # fmt: skip
    return EngineConfig.from_kwargs(**(values | changes))


def test_what_is_in_a_plan() -> None:
    plan = StepPlan(
        0,
        seqs=[
            SeqPlan(1, 9, 1, (), None, True),  # a decode at length 10
            SeqPlan(2, 0, 4, (), None, True),  # a prompt: pairs 1 + 2 + 3 + 4
            SeqPlan(3, 6, 1, (), None, False),  # the last token but one of a prompt: 7 pairs
        ],
        extra_draws={2: (4, 5)},
    )
    assert counts_of(plan) == Counts(
        num_prefill_tokens=5,
        prefill_context=17,
        num_decodes=1,
        decode_context=10,
        num_samples=4,
        num_prompts=2,
    )
    assert set(Counts._fields) <= set(StepShape._fields)


def test_a_row_is_the_median_over_rounds() -> None:
    times = [Times(s, s / 2, 0.0) for s in (1.0, 9.0, 2.0)]
    row = median_row("decode", [Counts(num_decodes=3)], [times])
    assert (row.seconds, row.compute_s, row.num_decodes, row.num_rounds) == (2.0, 1.0, 3, 3)
    assert row.spread > 1
    for kind in ("to host", "from host"):
        assert median_row(kind, [Counts()], [times], num_blocks=8).num_host_blocks == 8
    assert median_row("pool copy", [Counts()], [times], num_blocks=8).num_copied_blocks == 8


def test_served_steps_become_rows_of_a_kind() -> None:
    """Step by step the median over runs, then the mean of neighbours that are alike."""
    prompt, decode = Counts(num_prefill_tokens=8, num_prompts=1), Counts(num_decodes=1)
    plans = [prompt, prompt, *[decode] * 10]
    runs = [
        [(counts, Times(k * (i + 1.0), 0.0, 0.0)) for i, counts in enumerate(plans)]
        for k in (1, 50, 2)
    ]
    rows = wave_rows(runs)
    assert [row.num_steps for row in rows] == [2, 8, 2]
    assert [row.num_prompts for row in rows] == [1, 0, 0]
    assert [row.seconds for row in rows] == [2 * 1.5, 2 * 6.5, 2 * 11.5]
    assert [row.jitter for row in rows] == [1.0] * 3  # the middle run is so in every step
    # each run is held up once, in another step: only all steps together tell
    held_up = [
        [(c, t._replace(seconds=t.seconds + 10 * (i == k))) for i, (c, t) in enumerate(runs[0])]
        for k in range(3)
    ]
    assert [row.jitter for row in wave_rows(held_up)] == [pytest.approx(88 / 78)] * 3
    assert wave_rows(held_up)[1].seconds == rows[1].seconds / 2
    # a run that took other steps is not mixed with them, wherever it comes
    assert wave_rows([*runs, runs[0][1:]]) == rows
    assert wave_rows([runs[0][1:], *runs]) == rows


def test_the_grid_keeps_to_what_the_engine_can_do(tiny_model_path: Path) -> None:
    with LLM(config=engine_config(config(tiny_model_path))) as llm:
        probe = Probe(llm)
        points = grid(llm.config, probe.num_blocks)
        assert {point.kind for point in points} == {"decode", "prefill", "mixed"}
        assert max(point.num_decodes for point in points) == 7
        assert max(point.chunk for point in points) == 32
        for point in points:
            steps = point.measure(probe)
            assert len(steps) == 2
            for counts, times in steps:
                assert 0 < times.compute_s <= times.seconds
                assert counts.num_decodes == point.num_decodes
                assert counts.num_prefill_tokens == point.chunk
                pairs = point.chunk * point.start + point.chunk * (point.chunk + 1) // 2
                assert counts.prefill_context == pairs
        second = points[0].measure(probe)[1][0]
        assert second.decode_context == points[0].num_decodes * (points[0].context + 3)


def test_an_engine_that_was_measured_still_serves(tiny_model_path: Path) -> None:
    with LLM(config=engine_config(config(tiny_model_path))) as llm:
        before = llm.generate([[5, 6, 7] * 9], use_tqdm=False)[0].num_cached_tokens
        measure_round(llm, Calibration(), lambda _: None)
        after = llm.generate([[5, 6, 7] * 9], use_tqdm=False)[0]
        assert (
            before == after.num_cached_tokens == 0
        )  # the cache holds nothing that was overwritten
        assert len(after.outputs[0].token_ids) == 16
        assert llm.after_step is None


@pytest.mark.parametrize("budget", [32, 2048])
def test_every_prompt_that_is_served_is_counted(tiny_model_path: Path, budget: int) -> None:
    """Whatever the token budget: the step that is dropped is that of a request of its own."""
    options = config(tiny_model_path, max_num_batched_tokens=budget, max_num_seqs=32)
    with LLM(config=engine_config(options)) as llm:
        for every, prefix in ((0, 0), (3, 32)):
            wave = waves(llm.config, 0)[0]._replace(
                lengths=((20, 9), (40, 3), (7, 30)), every=every, prefix=prefix
            )
            steps = serve(llm, wave, random.Random(every))
            assert llm.after_step is None
            tokens = sum(c.num_prefill_tokens for c, _ in steps)
            assert tokens == 20 + 40 + 7 + prefix  # the second has it too, the first does not
            shares = [c.num_prompts for c, _ in steps if c.num_prompts]
            assert sum(shares) >= 3
            if budget == 2048:
                assert shares == ([3] if every == 0 else [1, 1, 1])
            outputs = sum(c.num_samples for c, _ in steps)
            assert outputs == 9 + 3 + 30
            assert all(t.seconds > t.compute_s > 0 for _, t in steps)


def test_what_comes_belongs_to_the_step_behind_it(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(config=engine_config(config(tiny_model_path, max_num_batched_tokens=256))) as llm:
        stream, clock, late_s = llm.stream, time.perf_counter, 0.0

        def slow(*args: Any, **options: Any) -> Any:
            nonlocal late_s
            late_s += 1000.0
            return stream(*args, **options)

        monkeypatch.setattr(llm, "stream", slow)
        monkeypatch.setattr(time, "perf_counter", lambda: clock() + late_s)
        wave = waves(llm.config, 0)[0]._replace(lengths=((20, 4),) * 3)
        (counts, first), *others = serve(llm, wave, random.Random(0))
        assert counts.num_prompts == 3
        assert 3000 < first.seconds - first.compute_s < 4000
        assert all(times.seconds < 1000 for _, times in others)


def test_an_interrupted_measurement_leaves_the_engine_as_it_was(
    tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(config=engine_config(config(tiny_model_path))) as llm:
        probe = Probe(llm)
        known = llm._engine.engine.core._launch.__self__.inputs.seqs  # type: ignore[union-attr]
        llm.generate([[5]], use_tqdm=False)
        before = set(known)
        run, countdown = probe.run, 0

        def interrupted(**parts: Any) -> Times:
            nonlocal countdown
            countdown -= 1
            if countdown == 0:
                raise KeyboardInterrupt
            return run(**parts)

        monkeypatch.setattr(probe, "run", interrupted)
        for point in (Point("mixed", 3, 8, 6), Point("decode", 7, 8)):
            for at in (1, 2, 3):
                countdown = at
                with pytest.raises(KeyboardInterrupt):
                    point.measure(probe)
                assert set(known) <= before
        # and in the middle of a round: the cache forgets what was overwritten
        seen: list[object] = []
        llm.after_step = watch = lambda: seen.append(None)
        prompt = [5, 6, 7] * 9
        llm.generate([prompt], use_tqdm=False)
        calls = 0

        def tell(_: str) -> None:
            nonlocal calls
            calls += 1
            if calls == 9:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            measure_round(llm, Calibration(), tell)
        assert llm.after_step is watch
        assert llm.generate([prompt], use_tqdm=False)[0].num_cached_tokens == 0


def test_waves_fit_a_short_context(tiny_model_path: Path) -> None:
    found = waves(config(tiny_model_path, max_model_len=32), 0)
    assert max(i + o + wave.prefix for wave in found for i, o in wave.lengths) <= 32
    assert max(len(wave.lengths) for wave in found[:-2]) <= 8
    assert found[-1].every and found[-1].prefix


def test_how_long_it_will_be_is_said() -> None:
    assert plan_of(10.0, 75.0, 7) == ("a round takes 10 s: everything is measured 6 times, in 60 s")
    assert plan_of(10.0, 75.0, 3).endswith("measured 3 times, in 30 s")
    assert plan_of(100.0, 5.0, 3).endswith("measured once, in 100 s")


def test_a_shape_is_counted_as_the_simulator_counts_it() -> None:
    """One rule in two rooms."""
    plan = StepPlan(
        0,
        seqs=[
            SeqPlan(1, 9, 1, (), None, True),
            SeqPlan(2, 0, 4, (), None, True),
            SeqPlan(3, 6, 1, (), None, False),
            SeqPlan(4, 5, 7, (), None, False),
        ],
        extra_draws={2: (4, 5)},
        copies=[BlockCopy(0, 1), BlockCopy(0, 1, CopyKind.TO_HOST)],
    )
    for own in (plan, StepPlan(1, seqs=plan.seqs[:1]), StepPlan(2, seqs=plan.seqs[2:])):
        counts, shape = counts_of(own)._asdict(), shape_of(own)._asdict()
        assert counts == {name: shape[name] for name in counts}
        counts, shape = counts_of(own, (0, 4))._asdict(), shape_of(own, (0, 4))._asdict()
        assert counts == {name: shape[name] for name in counts}
        assert counts["decode_context"] in (7, 0)  # (10 + 4) / 2


def test_limits_that_leave_nothing_are_refused(tiny_model_path: Path) -> None:
    with LLM(config=engine_config(config(tiny_model_path))) as llm:
        with pytest.raises(InvalidRequestError, match="--rounds must be above 0, got 0"):
            calibrate(llm, max_rounds=0)
        with pytest.raises(InvalidRequestError, match=r"--seconds must be above 0, got 0\.0"):
            calibrate(llm, max_s=0.0)


FLAGS = [
    "--load-format", "dummy", "--max-num-seqs", "8", "--max-num-batched-tokens", "32",
    "--max-model-len", "128", "--num-gpu-blocks-override", "64", "--swap-space", "0.01",
    "--num-threads", "1", "--rounds", "2",
]  # fmt: skip


def test_the_command_writes_what_the_lab_reads(
    tiny_model_path: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "c.json"
    argv = ["lab", "calibrate", "--model", str(tiny_model_path), "--out", str(out), "--json"]
    assert main([*argv, *FLAGS]) == 0
    printed = capsys.readouterr().out
    assert "decode step, ms, by batch and context" in printed
    assert f"--costs {out} reads it" in printed
    values, file = json.loads(printed.splitlines()[-1]), json.loads(out.read_text())
    assert values["constants"] == file["constants"]
    assert "rows" not in values
    assert {row["kind"] for row in file["rows"]} == {
        "prefill", "decode", "mixed", "live", "pool copy", "to host", "from host",
    }  # fmt: skip
    assert all(row["seconds"] > 0 for row in file["rows"])
    # a round is 2 steps of a point
    assert {row["num_rounds"] for row in file["rows"] if row["kind"] == "decode"} == {4}
    costs = CalibratedCosts.load(out)
    assert costs.name.startswith(f"{tiny_model_path} in ")
    one, many = (costs.step_s(StepShape(0, 0, b, 50 * b, b)) for b in (1, 8))
    assert 0 < one <= many < 1
    assert costs.copy_s(1) > 0


def test_what_has_no_effect_is_refused_before_anything_runs(
    tiny_model_path: Path, tmp_path: Path, capsys: Capture
) -> None:
    base = ["lab", "calibrate", "--model", str(tiny_model_path), *FLAGS]
    assert main([*base, "--kv-cache-memory-bytes", "1M"]) == 2
    assert "--kv-cache-memory-bytes has no effect here" in capsys.readouterr().err
    assert main([*base, "--out", str(tmp_path / "none" / "c.json")]) == 2
    assert "name another file with --out" in capsys.readouterr().err
    assert main([*base, "--out", str(tmp_path)]) == 2
