"""What the documentation says is true: every file is in the tree, and the README's example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_file_tree_is_up_to_date() -> None:
    check = subprocess.run([sys.executable, ROOT / "docs" / "make_tree.py", "--check"], check=False)
    assert check.returncode == 0, "run: python docs/make_tree.py"


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.model
def test_the_example_of_the_readme_runs(
    default_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Paris" in printed and "RequestKVUsage" in printed and "KV pool" in printed


def test_metrics_and_flags_are_up_to_date() -> None:
    script = ROOT / "docs" / "make_reference.py"
    check = subprocess.run([sys.executable, script, "--check"], check=False)
    assert check.returncode == 0, "run: python docs/make_reference.py"


def test_models_are_up_to_date() -> None:
    script = ROOT / "docs" / "make_models.py"
    check = subprocess.run([sys.executable, script, "--check"], check=False)
    assert check.returncode == 0, "run: python docs/make_models.py"
