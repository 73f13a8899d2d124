"""The shapes of published checkpoints, from what their `config.json` says: parameters and context
as their authors state them, and the KV of a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.inspect import inspect_model

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published_configs.json").read_text("utf-8")
)
"""Model -> its configuration, but for what training and other programs read, and the numbers."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_shape_of_a_published_model(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published["config"]))
    report = inspect_model(str(tmp_path))
    assert report.num_params == published["num_params"]
    per_layer, rest = divmod(published["kv_bytes_per_token"], report.arch.num_layers)
    num_held = sum(group.num_layers + group.num_padding for group in report.groups)
    assert (report.kv_bytes_per_token, rest) == (num_held * per_layer, 0)
    assert report.arch.max_position_embeddings == published["context"]
    windows = {str(group.window): group.num_layers for group in report.groups}
    assert windows == published["windows"]
