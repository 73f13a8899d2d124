"""Workloads: seeded, within their limits, and refusing what they cannot read by row."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.report import Percentiles, times_table
from octavo.bench.workload import Workload, random_workload, read_workload
from octavo.errors import InvalidRequestError

LIMITS = {"vocab_size": 100, "max_model_len": 64}


def make(num: int = 50, ratio: float = 0.5, seed: int = 0) -> Workload:
    return random_workload(num, 20, 10, ratio, seed=seed, **LIMITS)


def test_random_lengths_stay_in_their_range_and_vary() -> None:
    workload = make()
    inputs = {len(s.prompt_token_ids) for s in workload.samples}
    outputs = {s.output_len for s in workload.samples}
    assert inputs <= set(range(10, 31)) and len(inputs) > 5
    assert outputs <= set(range(5, 16)) and len(outputs) > 3
    assert all(0 <= t < 100 for s in workload.samples for t in s.prompt_token_ids)


def test_random_workload_is_repeatable_and_changes_with_the_seed() -> None:
    assert make(seed=3) == make(seed=3)
    assert make(seed=3).samples != make(seed=4).samples


def test_ratio_zero_is_exact() -> None:
    workload = make(num=3, ratio=0.0)
    assert (workload.num_input_tokens, workload.num_output_tokens) == (60, 30)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"range_ratio": 1.0}, "--random-range-ratio"),
        ({"num_prompts": 0}, "--num-prompts"),
        ({"output_len": 0}, "--output-len"),
        ({"input_len": 60}, "--max-model-len"),
    ],
)
def test_random_workload_refuses(change: dict[str, Any], says: str) -> None:
    values = {"num_prompts": 2, "input_len": 20, "output_len": 10, "range_ratio": 0.5} | change
    with pytest.raises(InvalidRequestError, match=says):
        random_workload(**values, **LIMITS)


def write(path: Path, text: str) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["lengths.csv", "lengths.csv.gz"])
def test_csv_lengths(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "input_tokens,output_tokens\n5,7\n60,60\n3,1\n")
    workload = read_workload(path, None, **LIMITS)
    lengths = [(len(s.prompt_token_ids), s.output_len) for s in workload.samples]
    assert lengths == [(5, 7), (3, 1)]
    assert workload.num_too_long == 1


def test_a_draw_has_the_wanted_size_and_is_seeded(tmp_path: Path) -> None:
    rows = "".join(f"{1 + i % 30},{1 + i % 20}\n" for i in range(200))
    path = write(tmp_path / "l.csv", "input_tokens,output_tokens\n" + rows)
    draws = [read_workload(path, 10, seed=seed, **LIMITS).samples for seed in (0, 0, 1)]
    assert len(draws[0]) == 10
    assert draws[0] == draws[1] != draws[2]


def test_recorded_prompts_keep_their_ids_and_order(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [i, i + 1], "max_tokens": i + 1} for i in range(5)]
    path = write(tmp_path / "w.jsonl", "\n".join(json.dumps(row) for row in rows))
    samples = read_workload(path, 64, **LIMITS).samples
    assert [(s.prompt_token_ids, s.output_len) for s in samples] == [
        (row["prompt_ids"], row["max_tokens"]) for row in rows
    ]


def test_equal_hash_ids_make_equal_prefixes(tmp_path: Path) -> None:
    rows = [
        {"header": {"block_tokens": 8}},
        {"input_tokens": 20, "output_tokens": 2, "hash_ids": [0, 1]},
        {"input_tokens": 19, "output_tokens": 2, "hash_ids": [0, 2]},
    ]
    path = write(tmp_path / "t.jsonl.gz", "\n".join(json.dumps(row) for row in rows))
    first, second = (s.prompt_token_ids for s in read_workload(path, None, **LIMITS).samples)
    assert (len(first), len(second)) == (20, 19)
    assert first[:8] == second[:8]
    assert first[8:16] != second[8:16]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("l.csv", "a,b\n1,2\n", "line 2: needs input_tokens"),
        ("l.csv", "input_tokens,output_tokens\n4,0\n", "line 2"),
        ("l.jsonl", "{}", "line 1"),
        ("l.jsonl", "{", "l.jsonl"),
        ("l.txt", "1 2", ".csv or .jsonl"),
        ("l.csv", "input_tokens,output_tokens\n99,99\n", "no request that fits"),
        ("l.csv.gz", None, "cannot read"),
    ],
)
def test_unusable_files_are_refused_with_the_place(
    tmp_path: Path, name: str, text: str | None, says: str
) -> None:
    path = tmp_path / name
    if text is not None:
        write(path, text)
    with pytest.raises(InvalidRequestError, match=says):
        read_workload(path, None, **LIMITS)


def test_percentiles_interpolate_as_numpy_does() -> None:
    import numpy as np

    values = [0.5, 0.1, 0.9, 0.3, 0.7, 0.2]
    found = Percentiles.of(values)
    assert found is not None
    expected = np.percentile(values, [50, 90, 99])
    assert (found.p50, found.p90, found.p99) == pytest.approx(tuple(expected))
    assert (found.mean, found.max) == pytest.approx((0.45, 0.9))
    assert Percentiles.of([]) is None


def test_times_are_printed_in_milliseconds() -> None:
    table = times_table({"first": Percentiles.of([0.25]), "nothing": None})
    assert "250.0" in table and "nothing" not in table
