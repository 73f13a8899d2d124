"""Records of live engines, and a place from which tests import helpers like `replay_support`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from octavo import LLM

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def recorded(
    tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Any]]:
    """Makes each record once: (its file, the live engine's memory report)."""
    from replay_support import live  # which loads torch

    folder = tmp_path_factory.mktemp("records")
    made: dict[str, tuple[Path, Any]] = {}

    def make(act: Callable[[LLM], None], **options: Any) -> tuple[Path, Any]:
        name = f"{act.__name__}-{'-'.join(map(str, options.values()))}"
        if name not in made:
            file = folder / f"{name}.jsonl"
            made[name] = file, live(tiny_model_path, file, act, **options)
        return made[name]

    return make
