"""`octavo lab paper` as a command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import octavo.lab.paper.runner as runner
from octavo.cli.paper import main
from octavo.errors import ConfigError, TraceError
from octavo.lab.paper.figure import FigureResult, Task
from octavo.lab.paper.reference import near
from octavo.lab.paper.workloads import Workloads


class Tiny:
    """A figure that takes no time."""

    def __init__(self, name: str) -> None:
        self.name = name

    def tasks(self, workloads: Workloads) -> list[Task]:
        return [Task(f"{self.name}/0", float, 0.0)]

    def collect(self, results: Mapping[str, Any]) -> FigureResult:
        assert results[f"{self.name}/0"] == 0.0
        rows = [
            near(2.0, 0.5).row(self.name, "one", "value [s]", 2.25),
            near(2.0, 0.5).row(self.name, "two", "value [s]", 3.25),
        ]
        return FigureResult(name=self.name, title=f"Fig. {self.name}", rows=rows, why="No reason.")


@pytest.fixture(autouse=True)
def _tiny_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "all_figures", lambda: {n: Tiny(n) for n in ("2", "13")})
    monkeypatch.setenv("COLUMNS", "120")


def test_json_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("octavo lab paper", ["--json", "--figure", "2", "--processes", "1"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out.splitlines()[-1])
    assert rows == [
        {
            "figure": "2", "series": name, "quantity": "value [s]", "paper": 2.0, "here": here,
            "difference": here - 2.0, "tolerance": 0.5,
        }
        for name, here in (("one", 2.25), ("two", 3.25))
    ]  # fmt: skip
    assert "synthetic" in err and "synthetic" not in out


def test_the_table_marks_what_is_off_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("octavo lab paper", ["--processes", "1"]) == 0
    out = capsys.readouterr().out
    assert "synthetic" in out and "Fig. 2" in out and "Fig. 13" in out
    lines = {line.split()[0]: line for line in out.splitlines() if "value [s]" in line}
    assert "outside" in lines["two"] and "+1.25" in lines["two"]
    assert "outside" not in lines["one"]
    assert out.count("1 outside the tolerance. No reason.") == 2


def test_the_report_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "paper.html"
    assert main("octavo lab paper", ["--processes", "1", "--report", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "Fig. 13" in text and "synthetic" in text


def test_what_cannot_be_done_is_said_first(tmp_path: Path) -> None:
    for argv, error, what in (
        (["--processes", "0"], ConfigError, "--processes must be at least 1"),
        (["--traces", str(tmp_path / "no")], TraceError, "no such folder"),
        (["--traces", str(tmp_path)], TraceError, "sharegpt_opt_lengths"),
        (["--report", str(tmp_path)], ConfigError, "not a file"),
        (["--report", str(tmp_path / "no" / "x.html")], ConfigError, "not a file"),
    ):
        with pytest.raises(error, match=what):
            main("octavo lab paper", argv)


def test_an_unknown_figure_is_refused() -> None:
    with pytest.raises(SystemExit) as ended:
        main("octavo lab paper", ["--figure", "3"])
    assert ended.value.code == 2
