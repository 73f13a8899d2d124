"""`octavo bench attention | step | startup` and `octavo profile`, from the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.bench.startup import Startup, StartupResult
from octavo.cli.main import main

Capture = pytest.CaptureFixture[str]
HEADS = ["--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "16"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The machine's rates are measured for a moment only."""
    monkeypatch.setattr("octavo.bench.roofline._CPU_S", 0.0)
    monkeypatch.setattr("octavo.bench.roofline._CPU_COPY_BYTES", 2**20)
    monkeypatch.setattr("octavo.bench.roofline._CPU_MATRIX", 64)
    monkeypatch.setitem(
        __import__("octavo.engine.attention_kernels").engine.attention_kernels._ROTATED_BYTES,
        "cpu",
        1e5,
    )
    yield


def model(path: Path) -> list[str]:
    return ["--model", str(path), "--load-format", "dummy", "--device", "cpu"]


def test_attention_of_a_shape(capsys: Capture) -> None:
    cases = ["--batch-sizes", "1", "2", "--contexts", "24", "--prompts", "2x8", "1x4of16"]
    words = ["bench", "attention", *HEADS, *cases, "--block-sizes", "8", "16", "--device", "cpu"]
    assert main([*words, "--json"]) == 0
    *table, line = capsys.readouterr().out.splitlines()
    assert table[0].startswith("4/2 heads of 16, ") and table[0].endswith("backend cpu")
    found = json.loads(line)
    cases_found = {(r["batch"], r["context"], r["query"], r["block_size"]) for r in found["rows"]}
    expected = [(1, 24, 1), (2, 24, 1), (2, 8, 8), (1, 16, 4)]
    assert cases_found == {(*case, size) for case in expected for size in (8, 16)}
    for row in found["rows"]:
        assert row["error"] < 1e-2
        assert row["paging_cost"] == pytest.approx(row["seconds"] / row["contiguous_s"] - 1)


def test_attention_of_a_model(tiny_model_path: Path, capsys: Capture) -> None:
    words = ["--model", str(tiny_model_path), "--device", "cpu", "--attention-backend", "gather"]
    words += ["--batch-sizes", "1", "--contexts", "16", "--prompts", "--dtype", "float32"]
    assert main(["bench", "attention", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith("4/2 heads of 16, float32; backend gather\n") and "prefill" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-heads", "4"], "a shape without --num-kv-heads and --head-dim is none"),
        ([*HEADS, "--model", "x"], "--model has no effect beside a shape of its own"),
        (["--num-heads", "3", *HEADS[2:]], "--num-heads 3 must be a multiple of --num-kv-heads 2"),
        ([*HEADS, "--prompts", "8"], "--prompts '8' must read as 8x1024"),
        ([*HEADS, "--prompts", "1x8of4"], "--prompts '1x8of4' must read as"),
        ([*HEADS, "--batch-sizes", "0"], "--batch-sizes must be at least 1, got 0"),
        ([*HEADS, "--block-sizes", "0"], "--block-sizes must be at least 1, got 0"),
        ([*HEADS, "--batch-sizes", "--prompts"], "nothing to measure"),
        ([*HEADS, "--dtype", "float16", "--device", "cpu"], "dtype 'float16' needs a GPU"),
        ([*HEADS, "--kv-cache-dtype", "fp8", "--device", "cpu"], "needs a GPU"),
        ([*HEADS, "--attention-backend", "triton", "--device", "cpu"], "runs on NVIDIA GPUs"),
    ],
)
def test_attention_refuses(words: list[str], message: str, capsys: Capture) -> None:
    assert main(["bench", "attention", *words]) == 2
    assert message in capsys.readouterr().err


def test_steps(tiny_model_path: Path, capsys: Capture) -> None:
    words = ["--batch-sizes", "1", "2", "--context", "20", "--prefill-batch", "2", "--json"]
    words += ["--prefill-len", "12", "--num-steps", "2", "--num-iters", "1"]
    assert main(["bench", "step", *model(tiny_model_path), *words]) == 0
    *table, line = capsys.readouterr().out.splitlines()
    assert "steps one after another" in table[0]
    rows = json.loads(line)["rows"]
    assert [(r["kind"], r["batch"], r["tokens"]) for r in rows] == [
        ("decode", 1, 20), ("decode", 2, 20), ("prefill", 2, 12),
    ]  # fmt: skip
    assert all(r["share"] == pytest.approx(r["floor_s"] / r["step_s"]) for r in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-iters", "0"], "--num-iters must be at least 1, got 0"),
        (["--kv-policy", "orca-max"], "--kv-policy has no effect here"),
        (["--max-num-seqs", "4"], "--max-num-seqs 4 is less than the largest batch, 256"),
        (["--record", "x"], "--record has no effect here"),
    ],
)
def test_steps_refuse(
    tiny_model_path: Path, words: list[str], message: str, capsys: Capture
) -> None:
    assert main(["bench", "step", *model(tiny_model_path), *words]) == 2
    assert message in capsys.readouterr().err


def test_startup(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    run = Startup(True, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 3.5, 12, 21.0)
    asked: dict[str, object] = {}

    def run_startup(config: object, **options: object) -> StartupResult:
        asked.update(options)
        return StartupResult("m", "a GPU", [run])

    monkeypatch.setattr("octavo.bench.startup.run_startup", run_startup)
    assert main(["bench", "startup", "--num-cold", "1", "--num-warm", "0", "--json"]) == 0
    assert (asked["num_cold"], asked["num_warm"]) == (1, 0)
    *table, line = capsys.readouterr().out.splitlines()
    assert table[0] == "m on a GPU: 1 cold starts, medians"
    assert "total                     21.00" in table
    assert json.loads(line)["runs"][0]["capture_s"] == 4.0


def test_startup_refuses(capsys: Capture) -> None:
    assert main(["bench", "startup", "--num-cold", "-1"]) == 2
    assert "--num-cold must be at least 0, got -1" in capsys.readouterr().err


def test_profile(tiny_model_path: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "trace.json"
    words = ["--num-prompts", "2", "--input-len", "8", "--output-len", "9", "--out", str(out)]
    words += ["--num-steps", "3", "--num-skipped", "2", "--num-gpu-blocks-override", "32"]
    words += ["--random-range-ratio", "0"]
    assert main(["profile", *model(tiny_model_path), *words, "--json"]) == 0
    *table, line = capsys.readouterr().out.splitlines()
    assert table[1].startswith("steps 3 to 5: ") and table[-1] == f"trace: {out}"
    assert json.loads(line)["seen"]["range_counts"]["schedule"] == 3
    names = {event.get("name") for event in json.loads(out.read_text())["traceEvents"]}
    assert {"schedule", "launch", "wait", "update", "output"} <= names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-steps", "0"], "--num-steps must be at least 1, got 0"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1, got 0"),
        (["--out", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json: no such folder"),
        (["--out", "/dev/null"], "cannot write /dev/null: no regular file"),
        (["--num-skipped", "900"], "the workload has"),
    ],
)
def test_profile_refuses(
    tiny_model_path: Path, words: list[str], message: str, tmp_path: Path, capsys: Capture
) -> None:
    few = ["--input-len", "8", "--output-len", "4", "--num-gpu-blocks-override", "32"]
    few += [] if "--num-prompts" in words else ["--num-prompts", "2"]
    few += [] if "--out" in words else ["--out", str(tmp_path / "t.json")]
    assert main(["profile", *model(tiny_model_path), *few, *words]) == 2
    assert message in capsys.readouterr().err
