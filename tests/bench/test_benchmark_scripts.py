"""The scripts of `benchmarks/` that need no model, on inputs with known answers."""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> Iterator[ModuleType]:
    """A script as a module; dataclasses look their module up by name."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def traces() -> Iterator[ModuleType]:
    yield from load("prefix_traces")


@pytest.fixture(scope="module")
def sharing() -> Iterator[ModuleType]:
    yield from load("sharing")


@pytest.fixture(scope="module")
def throughput() -> Iterator[ModuleType]:
    yield from load("prefix_throughput")


@pytest.fixture(scope="module")
def serving() -> Iterator[ModuleType]:
    yield from load("gpu_serving")


@pytest.fixture(scope="module")
def policies() -> Iterator[ModuleType]:
    yield from load("policies")


def write_trace(path: Path, rows: list[dict[str, Any]], block_tokens: int) -> Path:
    lines = [{"header": {"block_tokens": block_tokens}}, *rows]
    path.write_bytes(gzip.compress("".join(json.dumps(x) + "\n" for x in lines).encode()))
    return path


def request(num_tokens: int, *hash_ids: int) -> dict[str, Any]:
    return {"input_tokens": num_tokens, "output_tokens": 8, "hash_ids": list(hash_ids)}


def test_trace_hits_are_those_of_the_ids(traces: ModuleType, tmp_path: Path) -> None:
    rows = [request(64, 1, 2), request(96, 1, 2, 3), request(70, 1, 4, 5), request(64, 7, 8)]
    path = write_trace(tmp_path / "t.jsonl.gz", rows, block_tokens=32)
    block_tokens, parsed = traces.read_trace(path, 1, None)
    assert block_tokens == 32 and [row.num_input for row in parsed] == [64, 96, 70, 64]
    figures = traces.Figures(1 << 20, 64)
    traces.replay(parsed, block_tokens, 16, figures, outputs=False)
    # 2 ids of the second request, 1 of the third
    assert figures.hits * (64 + 96 + 70 + 64) == pytest.approx(3 * 32)
    assert figures.requests_with_hits == pytest.approx(2 / 4)
    for tail_first in (False, True):
        assert traces.lru_hits(parsed, 32, 100, tail_first=tail_first) == 3 * 32


def test_trace_scaling_keeps_the_structure(traces: ModuleType, tmp_path: Path) -> None:
    rows = [request(1024, 1, 2), request(1100, 1, 2, 3)]
    path = write_trace(tmp_path / "t.jsonl.gz", rows, block_tokens=512)
    block_tokens, parsed = traces.read_trace(path, 8, None)
    assert (block_tokens, [row.num_input for row in parsed]) == (64, [128, 137])
    assert traces.lru_hits(parsed, block_tokens, 100, tail_first=True) == 128


def test_a_list_that_evicts_heads_first_loses_whole_prompts(traces: ModuleType) -> None:
    rows = [traces.Row(64, 1, [1, 2]), traces.Row(32, 1, [3]), traces.Row(64, 1, [1, 2])]
    assert traces.lru_hits(rows, 32, 2, tail_first=False) == 0
    assert traces.lru_hits(rows, 32, 2, tail_first=True) == 32


def test_ids_become_tokens_that_depend_on_them_alone(traces: ModuleType) -> None:
    tokens_of = traces.TokensOf(64)
    both = tokens_of([5, 6])
    assert both == tokens_of([5]) + tokens_of([6])
    assert len(set(both)) > 120 and all(0 <= t < traces.VOCAB_SIZE for t in both)
    assert both[0] != both[64]


def null_args(**changes: Any) -> argparse.Namespace:
    values = {
        "num_blocks": 64, "block_size": 16, "max_num_seqs": 16, "max_model_len": 256, "seed": 0,
        "step_ms": 10.0, "tokens_per_s": 1e4,
    }  # fmt: skip
    return argparse.Namespace(**values | changes)


def test_null_model_shares_whole_prompt_blocks(sharing: ModuleType) -> None:
    rows = [sharing.Row(0.0, 32, 17)]
    alone = sharing.run_null(rows, 1, null_args())
    assert (alone.total_pct, alone.num_steps) == (0, 17)
    both = sharing.run_null(rows, 2, null_args())
    # a step for the prompt (2 blocks of its 2), then 16 in which 2 sequences have 3 blocks each, of
    # which 2 are the same
    assert (both.num_steps, both.physical) == (17, 2 + 16 * 4)
    assert both.logical in (2 + 16 * 6, 4 + 16 * 6)


def test_null_model_waits_for_arrivals(sharing: ModuleType) -> None:
    rows = [sharing.Row(0.0, 5, 2), sharing.Row(100.0, 5, 2)]
    assert sharing.run_null(rows, 1, null_args()).seconds == pytest.approx(100.0, abs=0.1)


def test_the_interval_holds_the_median_as_often_as_it_says(throughput: ModuleType) -> None:
    rng, held = random.Random(0), 0
    for _ in range(400):
        low, high = throughput.median_interval([rng.gauss(1, 0.1) for _ in range(20)])
        held += low <= 1 <= high
    assert 0.95 <= held / 400 <= 0.99
    assert throughput.median_interval([2.0, 1.0]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("num_blocks", "input_len", "expected"), [(4352, 512, 136), (33, 512, 2), (7, 9, 7)]
)
def test_prompts_that_fill_a_pool(
    throughput: ModuleType, num_blocks: int, input_len: int, expected: int
) -> None:
    assert throughput.num_to_fill(num_blocks, input_len, 16) == expected


def test_shared_prompts_share_exactly(throughput: ModuleType) -> None:
    prompts = throughput.make_prompts(3, 40, 0.75, 1000, random.Random(1))
    heads, tails = {tuple(p[:30]) for p in prompts}, {p[30] for p in prompts}
    assert len(heads) == 1 and len(tails) == 3
    assert statistics.fmean(len(p) for p in prompts) == 40


def write_lengths(path: Path, rows: list[tuple[int, int]]) -> Path:
    lines = ["input_tokens,output_tokens", *(f"{i},{o}" for i, o in rows)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_lengths_are_filtered_and_shuffled_as_the_peers_are(
    serving: ModuleType, tmp_path: Path
) -> None:
    rows = [(i, 2 * i) for i in range(3, 40)]
    path = write_lengths(tmp_path / "l.csv.gz", [(3, 9), (9, 3), (50, 50), *rows])
    found = serving.read_trace(path, 8, 7, 100)
    expected = rows[1:31]  # (3, 6) is too short, (34, 68) too long
    random.Random(7).shuffle(expected)
    assert found == expected[:8]


CPU = ["--device", "cpu", "--max-len", "128", "--num-gpu-blocks-override", "64"]


def test_serving_a_dummy_model(
    serving: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lengths(tmp_path / "l.csv.gz", [(5, 6), (9, 4), (4, 12)])
    batches = ["--batches", "1,2", "--batch-input", "8", "--batch-output", "4", "--no-stream"]
    out = tmp_path / "ours.jsonl"
    options = [*CPU, *batches, "--busy", "--out", str(out), "--max-num-seqs", "16"]
    serving.main(["run", "tiny", str(path), *options])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["case"] for line in lines] == [
        "startup", "trace", "trace", "busy", "batch", "batch",
    ]  # fmt: skip
    trace = lines[1]
    assert (trace["requests"], trace["input_tokens"], trace["output_tokens"]) == (3, 18, 22)
    assert trace["steps"] == 12
    assert [json.loads(line) for line in out.read_text().splitlines()] == lines
    assert lines[4]["itl_ms"] * 4 == pytest.approx(
        1e3 * (lines[4]["total_s"] - lines[4]["prefill_s"]), abs=1.5
    )


def test_figures_side_by_side(serving: ModuleType, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "a", tmp_path / "b"
    trace = {"case": "trace", "model": "llama8b", "requests": 2000}
    batch = {"case": "batch", "model": "llama8b", "batch": 8, "input_tokens": 512}
    rows = [trace | {"out_tok_s": x} for x in (19e3, 20e3, 25e3)]
    rows += [batch | {"itl_ms": 4.5, "prefill_s": 0.09}]
    ours.write_text("\n".join(map(json.dumps, rows)))
    other = [trace | {"out_tok_s": 10e3}, batch | {"itl_ms": 9.0}]
    theirs.write_text("INFO: a line of a log\n" + "\n".join(map(json.dumps, other)))
    table = serving.table(ours, theirs, ["octavo", "vLLM"]).splitlines()
    assert table[1].split() == [
        "llama8b", "output", "tokens/s,", "2,000", "requests", "2e+04", "1e+04", "2.00x",
    ]  # fmt: skip
    assert table[2].endswith(
        "decode step, ms, 8 x 512                             4.5           9      2.00x"
    )
    assert table[3].split()[-1] == "0.09"  # the other one has none


def test_policies_one_at_a_time(
    policies: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_lengths(tmp_path / "l.csv.gz", [(4 + i, 3 + i) for i in range(6)])
    words = ["--shape", "tiny", "--num-requests", "4", "--num-low", "2", "--rounds", "1"]
    words += ["--num-blocks", "8", "--max-model-len", "64", "--device", "cpu", "--one-at-a-time"]
    words += ["--policies", "paged", "orca-max"]
    monkeypatch.setattr(sys, "argv", ["policies.py", str(path), *words])
    policies.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [r["policy"] for r in found["rounds"]] == ["paged", "orca-max"]
    assert found["paged_over"]["orca-max"]["batch"]["median"] > 1


@pytest.mark.parametrize("kind", ["final", "stream", "stream+read", "delta"])
def test_host_path_measures_steps_in_which_all_decode(kind: str) -> None:
    for host_path in load("host_path"):
        figures = host_path.measure(kind, 3, 24, None)
        parts = ("schedule", "launch", "collect", "history", "update", "outputs", "rest")
        assert all(figures[part] > 0 for part in parts)
        assert figures["step"] >= max(figures[part] for part in parts)
        assert host_path.measure_adding(4, None)["add_us"] > 0


def test_host_path_runs_a_trace_to_its_end() -> None:
    for host_path in load("host_path"):
        found = host_path.measure_trace([(20, 3), (7, 9), (40, 5)], 2, 64)
        assert found["requests"] == 3 and 9 <= found["steps"] <= 14
        assert found["launch"] > 0
