"""A tiny model behind both runners: on a GPU where there is one, else on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_support import ARCH

from octavo.arch import RopeConfig
from octavo.attention.base import AttentionBackend
from octavo.attention.gather import GatherAttention
from octavo.kv_groups import KVGroups, one_group
from octavo.layers.workspace import Workspace
from octavo.models.decoder import Decoder
from octavo.runner.gpu.runner import GpuRunner
from octavo.runner.kv_store import KVStore
from octavo.runner.runner import Runner

sys.path.insert(0, str(Path(__file__).parent))  # the tests import `gpu_traffic` from here

CPU = torch.device("cpu")


class Capturable(GatherAttention):
    """Lets steps be filled up to recorded sizes, which on a CPU are not recorded."""

    capturable = True


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module", autouse=True)
def few_threads(one_torch_thread: None) -> Iterator[None]:
    yield


def _attention(device: torch.device) -> AttentionBackend:
    if device.type == "cpu":
        return Capturable()
    from octavo.attention.triton import TritonAttention

    return TritonAttention()


def _parts(
    device: torch.device,
    attention: AttentionBackend,
    rope: RopeConfig,
    windows: tuple[int, ...] = (),
    groups: KVGroups | None = None,
    num_blocks: int = 32,
    **store_options: Any,
) -> tuple[Decoder, KVStore, Workspace]:
    arch = replace(ARCH, rope=rope)
    if windows:
        arch = replace(arch, num_layers=len(windows), sliding_windows=windows)
    groups = groups or one_group(arch)
    model = Decoder(arch, attention, torch.float32, 64, device)
    generator = torch.Generator().manual_seed(0)
    for name, shape in model.parameters_spec().items():
        model.load(name, torch.randn(shape, generator=generator) * 0.2)
    model.place_kv([group.layers for group in groups.groups])
    shape = (groups.layers_per_block, arch.num_kv_heads, 4, arch.head_dim)
    store = KVStore(num_blocks, *shape, torch.float32, device, **store_options)
    store.data[:num_blocks].fill_(float("nan"))  # what no step wrote is never read
    work = Workspace(arch, 32, 16, torch.float32, device, num_decode_items=1024)
    return model, store, work


@pytest.fixture
def make_gpu_runner(device: torch.device) -> Callable[..., GpuRunner]:
    """(graphs=False, rope=, max_num_seqs=8, attention=, windows= of the layers, groups=,
    num_blocks=32, **options of KVStore) -> a runner with blocks of 4 tokens, 32 tokens a step."""

    def make(
        graphs: bool = False,
        rope: RopeConfig = ARCH.rope,
        max_num_seqs: int = 8,
        attention: AttentionBackend | None = None,
        groups: KVGroups | None = None,
        **options: Any,
    ) -> GpuRunner:
        attention = attention or _attention(device)
        model, store, work = _parts(device, attention, rope, groups=groups, **options)
        runner = GpuRunner(
            model, store, work, max_num_seqs=max_num_seqs, max_num_tokens=32,
            max_blocks_per_seq=16, graphs=graphs,
            num_groups=1 if groups is None else len(groups.groups),
        )  # fmt: skip
        if graphs:
            runner.capture()
        return runner

    return make


@pytest.fixture
def make_cpu_runner() -> Callable[..., Runner]:
    """The CPU's runner with the same weights, as an oracle."""

    def make(rope: RopeConfig = ARCH.rope, max_num_seqs: int = 8, **options: Any) -> Runner:
        model, store, work = _parts(CPU, GatherAttention(), rope, **options)
        return Runner(
            model, store, work, max_num_seqs=max_num_seqs, max_num_tokens=32, max_blocks_per_seq=16
        )

    return make
