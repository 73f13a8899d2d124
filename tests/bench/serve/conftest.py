"""The command against the scripted server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main

sys.path.insert(0, str(Path(__file__).parent))  # the tests import `fake_server` from here

from fake_server import FakeServer


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def bench(fake: FakeServer, tiny_model_path: Path, tmp_path: Path, capsys: Any) -> Any:
    """Runs the command, and gives its result."""

    def run(*flags: str, status: int = 0) -> dict[str, Any]:
        words = ["--base-url", fake.url, "--tokenizer", str(tiny_model_path), *flags]
        saved = tmp_path / "saved" / "result.json"
        kept = ["--save-result", "--result-dir", str(saved.parent), "--result-filename", saved.name]
        code = main(["bench", "serve", *words, *kept])
        run.printed = capsys.readouterr().out  # type: ignore[attr-defined]
        assert code == status
        return dict(json.loads(saved.read_text()))

    return run


@pytest.fixture(autouse=True)
def some_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny tokenizer has single bytes only: letters stand for its words."""
    monkeypatch.setattr("octavo.bench.serve.prompts.word_ids", lambda _: list(range(97, 123)))
