"""Calibration: what is counted, what becomes a row, and the command end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo import LLM
from octavo.bench.calibrate import Calibration, calibrate, engine_config, measure_round, waves
from octavo.bench.measured_steps import Counts, Times, counts_of, median_row, wave_rows
from octavo.bench.step_grid import Probe, grid
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.errors import InvalidRequestError
from octavo.lab.calibrated import CalibratedCosts
from octavo.lab.costs import StepShape
from octavo.plan import SeqPlan, StepPlan

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
    assert median_row("swap", [Counts()], [times], num_blocks=8).num_host_blocks == 8
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
    # a run that took other steps is not mixed with them
    assert wave_rows([*runs, runs[0][1:]]) == rows


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


def test_waves_fit_a_short_context(tiny_model_path: Path) -> None:
    found = waves(config(tiny_model_path, max_model_len=32), 0)
    assert max(i + o for wave in found for i, o in wave.lengths) <= 32
    assert max(len(wave.lengths) for wave in found[:-1]) <= 8


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
        "prefill", "decode", "mixed", "live", "pool copy", "swap",
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
