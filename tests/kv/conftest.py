"""Lets the tests of this folder import helpers like `kv_sim` under any import mode."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("kv_machine", "kv_sim")
