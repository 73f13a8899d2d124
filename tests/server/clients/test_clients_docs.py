"""The examples of docs/clients.md run as they stand, but for the address and the model's name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "clients.md"
EXAMPLES = re.findall(r"## (\w+)\n\n```python\n(.*?)```", PAGE.read_text("utf-8"), re.S)


@pytest.mark.parametrize(("name", "example"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_the_example_runs(
    server: Any, name: str, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (card,) = server.call("/v1/models").json["data"]
    example = example.replace("http://127.0.0.1:8000", server.url).replace("MODEL", card["id"])
    exec(compile(example, f"docs/clients.md: {name}", "exec"), {})
    assert capsys.readouterr().out


def test_all_clients_have_one() -> None:
    assert [name for name, _ in EXAMPLES] == ["openai", "anthropic", "langchain"]
