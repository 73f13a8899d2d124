"""`octavo bench throughput`: samples are counted, and the warm-up leaves nothing to be found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def measure(tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    rows = [
        {"prompt_ids": [*range(20 * i, 20 * i + 20)] + [99] * (i > 5), "max_tokens": 4}
        for i in range(8)
    ]
    dataset = tmp_path / "w.jsonl"
    dataset.write_text("\n".join(json.dumps(row) for row in rows))

    def run(*flags: str) -> tuple[str, dict[str, Any]]:
        words = [
            "--dataset", str(dataset), "--json", "--skip-tokenizer-init", "--block-size", "4",
            "--model", str(tiny_model_path), "--load-format", "dummy", "--dtype", "float32",
        ]  # fmt: skip
        assert main(["bench", "throughput", *words, *flags]) == 0
        text = capsys.readouterr().out
        return text, json.loads(text.splitlines()[-1])

    return run


def test_the_prefix_cache_finds_nothing_that_the_warm_up_left(measure: Any) -> None:
    text, result = measure()
    assert result["prefix_caching"] is True and "enable_prefix_caching" not in result
    assert result["num_cached_tokens"] == 0
    assert "prefix cache" in text and "0  prompt tokens found in it" in text


def test_it_says_when_the_prefix_cache_is_off(measure: Any) -> None:
    text, result = measure("--no-enable-prefix-caching")
    assert result["prefix_caching"] is False
    assert text.split("prefix cache")[1].split()[0] == "off"


def test_all_samples_count(measure: Any) -> None:
    _, result = measure("--n", "3", "--temperature", "1")
    assert result["num_requests"] == 8
    assert result["num_output_tokens"] == 8 * 3 * 4
