"""Lets the tests of this folder import helpers like `sched_support` under any import mode."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("sched_machine", "sched_machine_model", "sched_support")
