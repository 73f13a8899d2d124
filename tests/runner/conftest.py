"""A tiny model with random weights behind a runner, for tests with hand-written plans."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.attention.select import select_attention
from octavo.layers.workspace import Workspace
from octavo.models.decoder import Decoder
from octavo.runner.kv_store import KVStore
from octavo.runner.runner import Runner

sys.path.insert(0, str(Path(__file__).parent))  # the tests import `runner_support` from here

from runner_support import ARCH

CPU = torch.device("cpu")


def _make_runner(dtype: torch.dtype, seed: int = 0, **store_options: Any) -> Runner:
    model = Decoder(ARCH, select_attention(), dtype, 64, CPU)
    generator = torch.Generator().manual_seed(seed)
    for name, shape in model.parameters_spec().items():
        model.load(name, torch.randn(shape, generator=generator) * 0.2)
    shape = (ARCH.num_layers, ARCH.num_kv_heads, 4, ARCH.head_dim)
    store = KVStore(16, *shape, dtype, CPU, **store_options)
    work = Workspace(ARCH, 32, 8, dtype, CPU)
    return Runner(model, store, work, max_num_seqs=8, max_num_tokens=32, max_blocks_per_seq=8)


@pytest.fixture
def make_runner() -> Callable[..., Runner]:
    """(dtype, seed=0, **options of KVStore) -> a runner with 16 blocks of 4 tokens, 8 seats."""
    return _make_runner
