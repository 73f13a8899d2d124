"""`octavo lab compare` at a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main

BASE = ["lab", "compare", "--num-requests", "30", "--num-blocks", "983"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main([*BASE, *words])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_a_table_a_row_for_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys)
    assert (status, err) == (0, "")
    for policy in ("paged", "orca-oracle", "orca-pow2", "orca-max", "contiguous"):
        assert sum(line.startswith(policy) for line in out.splitlines()) >= 2
    assert "sharegpt" in out and "x the tokens/s" in out


def test_json_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys, "--policies", "paged", "orca-max", "--rates", "1", "2", "--json",
        "--model", "opt-13b", "--gpu", "a100-40gb", "--software", "2023",
    )  # fmt: skip
    values: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert status == 0
    assert [(r["policy"], r["rate"]) for r in values["runs"]] == [
        ("paged", 1.0), ("orca-max", 1.0), ("paged", 2.0), ("orca-max", 2.0),
    ]  # fmt: skip
    assert all(run["num_finished"] == 30 for run in values["runs"])
    assert "opt-13b" in values["costs"] and "12.0 GiB" in out


def test_a_csv_with_times_is_stretched_to_rates(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{3 * k},{20 + k},{30 + k}" for k in range(20)]
    trace.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    words = ["lab", "compare", "--num-blocks", "100", "--trace", str(trace), "--json"]
    assert main([*words, "--policies", "paged"]) == 0
    own = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"][0]
    assert own["rate"] is None and 57 < own["simulated_s"] < 65
    assert main([*words, "--policies", "paged", "--arrival", "trace", "--rates", "1"]) == 0
    scaled = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"][0]
    assert 19 < scaled["simulated_s"] < 27, "19 gaps at 1 request a second, and the last one's work"


def test_plots_lie_in_the_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "plots"
    status, out, _ = run(capsys, "--policies", "paged", "contiguous", "--plots", str(folder))
    assert status == 0
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(
        f"{name}.{kind}" for name in ("memory", "batch", "ttft", "tpot") for kind in ("png", "svg")
    )
    assert str(folder / "memory.svg") in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rates", "0"], "--rates must be above 0"),
        (["--rates", "2", "--arrival", "all-at-once"], "--rates does nothing to --arrival"),
        (["--arrival", "poisson"], "--arrival poisson needs --rates"),
        (["--rates", "2", "--arrival", "trace"], "has no times that --arrival trace"),
        (["--policies", "paged", "--max-batch", "3"], "--max-batch is for contiguous"),
        (["--policies", "paged", "paged"], "each once"),
        (["--warm-up", "-1"], "--warm-up must be at least 0"),
        (["--trace", "no-such-file.csv"], "no-such-file.csv"),
        (["--model", "opt-13c"], "opt-13c"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert message in err and len(err.splitlines()) == 1


def test_a_missing_matplotlib_is_told_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run(capsys, "--plots", str(tmp_path / "plots"))
    assert (status, out) == (2, "") and "pip install 'octavo[lab]'" in err
    assert not (tmp_path / "plots").exists()
    assert run(capsys, "--policies", "paged")[0] == 0, "tables do without"
