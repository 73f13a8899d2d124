"""What is refused, and how, before and while an engine takes a GPU's memory; without one."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo import EngineConfig
from octavo.attention import select
from octavo.engine import gpu
from octavo.engine.sizing import capped_by
from octavo.errors import CapacityError, ConfigError
from octavo.runner.gpu_memory import GPUMemory

GIB = 1 << 30
MEMORY = GPUMemory(140 * GIB, 128 * GIB, 10 * GIB, 0)
"""Of 140 GiB 10 are others', 2 this process's own."""


@pytest.mark.parametrize(
    ("weights_gib", "share", "says"),
    [
        (31, 0.3, "of the GPU's 140.0 GiB, less 10.0 GiB held by other processes, leaves 32.0 GiB"),
        (40, 0.3, "raise --gpu-memory-utilization: they alone need 0.36; or end other processes"),
        (40, 0.05, "leaves 0 B; raise --gpu-memory-utilization: they alone need 0.36;"),
        (131, 0.92, "leaves 118.8 GiB; end other processes on the GPU, or take a smaller --model"),
    ],
)
def test_weights_are_compared_with_the_share_before_they_are_loaded(
    weights_gib: int, share: float, says: str
) -> None:
    config = EngineConfig(gpu_memory_utilization=share)
    shapes = {"a": (weights_gib << 10, 1 << 10, 256), "b": (weights_gib << 10, 1 << 8, 1 << 10)}
    assert 2 * sum(map(math.prod, shapes.values())) == weights_gib * GIB
    if weights_gib == 31:
        gpu.check_weights(config, shapes, torch.bfloat16, MEMORY)
        weights_gib *= 2
        dtype = torch.float32
    else:
        dtype = torch.bfloat16
    with pytest.raises(CapacityError) as error:
        gpu.check_weights(config, shapes, dtype, MEMORY)
    assert f"take {weights_gib}.0 GiB, and --gpu-memory-utilization {share} of" in str(error.value)
    assert says in str(error.value)


def test_memory_that_runs_out_is_refused_with_what_is_known() -> None:
    config = EngineConfig(gpu_memory_utilization=0.5)
    with (
        pytest.raises(CapacityError) as error,
        gpu.running_out("making its buffers", config, MEMORY, weights=15 * GIB),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")
    for part in (
        "out of memory while making its buffers", "--gpu-memory-utilization 0.5 of the GPU's 140.0",
        "leaves 60.0 GiB, of which weights 15.0 GiB", "Tried to allocate 9 GiB. End other",
        "lower --max-num-batched-tokens (activations) or --max-num-seqs (logits, graphs)",
    ):  # fmt: skip
        assert part in str(error.value)
    with pytest.raises(RuntimeError, match="else"), gpu.running_out("x", config, MEMORY):
        raise RuntimeError("else")


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"kv_cache_memory_bytes": None}, "--gpu-memory-utilization"),
        ({"kv_cache_memory_bytes": 1}, "--kv-cache-memory-bytes"),
        ({"num_gpu_blocks_override": 1}, "--num-gpu-blocks-override"),
        ({"max_model_len": 10}, None),
        ({"device": "cpu"}, "--kv-cache-memory-bytes"),
    ],
)
def test_who_makes_contexts_short(options: dict[str, Any], flag: str | None) -> None:
    config = EngineConfig(**({"device": "cuda"} | options))
    plan: Any = SimpleNamespace(max_seq_len=10)
    assert capped_by(config, plan, 100) == flag
    assert capped_by(config, plan, 10) is None


@pytest.mark.parametrize("name", ["auto", "gather", "fa3"])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_gpu_without_triton_is_refused(
    name: str, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "T4")
    device = torch.device("cuda")
    with pytest.raises(
        ConfigError, match=r"cuda \(T4\).* capability 8.0, and this one has 7.5; or"
    ):
        select.select_attention(name, device, fp8=fp8)
    monkeypatch.setattr(select, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install triton; or use --device cpu"):
        select.select_attention(name, device, fp8=fp8)
