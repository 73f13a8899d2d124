"""What the documentation says is true: every file is in the tree, and the README's example runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import flags
from octavo.cli import main as cli

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def commands(text: str) -> Iterator[list[str]]:
    """The words of every octavo command in the blocks of a page."""
    for block in re.findall(r"```\w+\n(.*?)```", text, re.S):
        for line in re.findall(r"^(?:\$ )?(octavo .*)", block.replace("\\\n", " "), re.M):
            words: list[str] = []
            for word in [*shlex.split(line.partition(" #")[0]), "&"]:
                if word not in ("&", "&&", "|", ">"):
                    words.append(word)
                    continue
                if words[:1] == ["octavo"] and words[1] != "--help":
                    yield words[1:]
                words = []


def test_commands_have_the_flags_that_pages_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    known: set[str] = set()

    def stop(kind: type[Any], prog: str, argv: Sequence[str]) -> None:
        known.update(flags._flag_names(kind))
        raise KeyboardInterrupt

    found = 0
    for page in PAGES:
        for words in commands(page.read_text("utf-8")):
            known.clear()
            where = f"{page.name}: octavo {shlex.join(words)}"
            for command in cli.COMMANDS:
                monkeypatch.setattr(f"{command.module}.parse", stop)
            assert cli.main(words) == 130, where
            for flag in (word.partition("=")[0] for word in words if re.match("--?[a-z]", word)):
                assert flag in known or flag.replace("--no-", "--", 1) in known, f"{where}: {flag}"
            found += 1
    assert found > 40  # not that none is found any more


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
