"""The engines' processes find octavo, the null engine and the faulty ones wherever tests run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PATHS = [str(ROOT / "benchmarks"), str(ROOT / "src"), str(HERE)]

sys.path.insert(0, str(HERE))  # the tests import `remote_support` from here


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(PATHS))
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
