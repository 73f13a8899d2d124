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
        (["--policies", "orca-max", "--num-host-blocks", "9"], "is for the policy paged"),
        (["--preemption-mode", "swap"], "needs --num-host-blocks"),
        (["--priorities", "0", "1"], "--priorities needs --scheduling-policy priority"),
        (["--arrival", "trace"], "as by --rates or"),
        (["--plots", "/dev/null/plots"], "--plots /dev/null/plots: Not a directory"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert message in err and len(err.splitlines()) == 1


def test_simulate_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """One run, two commands: but for what the machine took, all figures are equal."""
    for policy in ("paged", "orca-pow2", "contiguous"):
        for own, others in (
            (["--rates", "2"], ["--rate", "2"]),
            (["--concurrency", "5"], ["--concurrency", "5"]),
            ([], []),
        ):
            main([*BASE, "--policies", policy, "--json", *own])
            compared = json.loads(capsys.readouterr().out.splitlines()[-1])
            main(["lab", "simulate", *BASE[2:], "--kv-policy", policy, "--json", *others])
            simulated = json.loads(capsys.readouterr().out.splitlines()[-1])
            (figures,) = compared["runs"]
            for name in figures.keys() - {"policy", "rate", "max_running", "wall_s"}:
                assert simulated[name] == figures[name], (policy, name)
            assert simulated["workload"] == compared["workload"]
            for name, value in compared["config"].items():
                assert simulated["config"][name] == value


def test_what_only_one_of_them_refused_makes_no_ratio(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    rows = ["input_tokens,output_tokens", *["20,30"] * 5, "300,100"]
    trace.write_text("\n".join(rows))
    words = ["lab", "compare", "--num-blocks", "28", "--trace", str(trace), "--max-model-len"]
    assert main([*words, "512", "--policies", "paged", "orca-oracle"]) == 0
    out = capsys.readouterr().out
    assert "orca-oracle: 1 of 6 requests can never fit" in out
    assert "orca-oracle     no ratio: they did not serve the same requests" in out
    assert "x the tokens/s" not in out


def test_what_was_computed_is_told_though_it_cannot_be_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    from octavo.errors import ConfigError
    from octavo.lab import plots_compare

    def fail(*_: object) -> None:
        raise ConfigError("cannot write the plot")

    monkeypatch.setattr(plots_compare, "draw", fail)
    status, out, err = run(capsys, "--policies", "paged", "--json", "--plots", str(tmp_path))
    assert status == 2 and "cannot write the plot" in err
    assert json.loads(out.splitlines()[-1])["runs"][0]["policy"] == "paged"


def test_shared_prefixes_and_savings_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--enable-prefix-caching", "--shared-prefix-tokens", "160", "--n", "2"]
    _, out, _ = run(capsys, "--policies", "paged", "orca-max", *words)
    (line,) = (line for line in out.splitlines() if line.startswith("paged: "))
    assert "of the prompt tokens found in the cache, sharing saves" in line


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
