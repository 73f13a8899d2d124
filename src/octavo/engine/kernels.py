"""What measurements of kernels and steps need to know of models and devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from octavo.config import Device, DType, EngineConfig
from octavo.weights.load import open_model
from octavo.weights.locate import locate


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What an attention kernel knows of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of_model(cls, model: str, revision: str | None = None) -> HeadShape:
        """Of a model, whose weights are not read. Raises as `LLM` does."""
        arch = open_model(locate(model, revision, "dummy")).arch
        return cls(arch.num_heads, arch.num_kv_heads, arch.head_dim)

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Equal sequences: `query` last tokens of a context each; one token is a decode."""

    batch: int
    context: int
    query: int = 1

    def num_bytes(self, shape: HeadShape, element_bytes: int, scaled: bool) -> int:
        """Of K and V that it reads, each once; with their scales if they have some."""
        token = 2 * shape.num_kv_heads * (shape.head_dim * element_bytes + 2 * scaled)
        return self.batch * self.context * token

    def num_flops(self, shape: HeadShape) -> int:
        """Multiplications and additions of both products, where the mask leaves something."""
        pairs = sum(self.context - self.query + row + 1 for row in range(self.query))
        return 4 * self.batch * shape.num_heads * shape.head_dim * pairs


@dataclass(frozen=True, slots=True)
class KernelCalls:
    """A kernel ready to be timed: each call does the same with K and V of its own."""

    calls: list[Callable[[], object]]
    num_bytes: int
    num_flops: int
    error: float
    """Relative distance of its output from the dense reference's."""


def pick_device(name: Device, **options: Any) -> torch.device:
    """The device that `EngineConfig.device` names. Raises `ConfigError` if there is none, or if it
    cannot have the other options of an engine."""
    from octavo.engine.gpu import for_this_machine

    return torch.device(for_this_machine(EngineConfig(device=name, **options)).device)


def device_name(device: torch.device) -> str:
    """For people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    from octavo.engine.environment import cpu_name

    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; elsewhere those of a small one, so that the same code runs."""
    if device.type != "cuda":
        return 8
    from octavo.ops.gpu import pdl

    return pdl.num_sms(device)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    from octavo.runner.memory import available_bytes

    return available_bytes()


def pick_dtype(name: DType, device: torch.device) -> torch.dtype:
    """The computation type of a checkpoint in bfloat16 there. Raises `ConfigError` for one that the
    device does not compute in."""
    from octavo.engine.build import resolve_dtype

    return resolve_dtype(name, device, "bfloat16")
