"""GPUs that a model could be put on: what each placement leaves for KV, and how fast it steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from octavo.errors import ConfigError
from octavo.lab.capacity import Placement
from octavo.lab.costs import StepCosts, StepShape
from octavo.lab.gpus import DEFAULT_SOFTWARE, Gpu, find_software, pool_blocks
from octavo.lab.model_shape import ModelShape
from octavo.lab.roofline import RooflineCosts

PLAN_TOKENS, PLAN_SEATS = 8192, 1024
"""The largest step that room is left for: token budget and seats."""


class Machine(Protocol):
    """Hosts of GPUs that a model can be put on."""

    @property
    def name(self) -> str:
        """For people: the model and the GPU."""
        ...

    def degrees(self) -> Sequence[int]:
        """Tensor parallel degrees that a host allows, rising."""
        ...

    def place(self, num_gpus: int, block_size: int, *, half_kv: bool = False) -> Placement:
        """One replica on so many GPUs of a host. Raises `CapacityError`, with the arithmetic, where
        the weights leave no room. half_kv: K and V in half their bytes."""
        ...


class GpuMachine:
    """Hosts of GPUs of one kind, by data sheet and roofline."""

    def __init__(
        self,
        shape: ModelShape,
        gpu: Gpu,
        *,
        host_gpus: int = 8,
        utilization: float = 0.9,
        software: str = DEFAULT_SOFTWARE,
        max_model_len: int | None = None,
    ) -> None:
        """host_gpus: how many GPUs one model may be split over. max_model_len: longest sequence;
        None: the model's."""
        if host_gpus < 1:
            raise ConfigError(f"--host-gpus must be at least 1, got {host_gpus}")
        if not 0 < utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization must be above 0 and at most 1, got {utilization:g}"
            )
        self.shape, self.gpu = shape, gpu
        self._host_gpus, self._utilization = host_gpus, utilization
        self._software, self._max_model_len = find_software(software), max_model_len

    @property
    def name(self) -> str:
        """See `Machine`."""
        return f"{self.shape.name} on {self.gpu.name}"

    def degrees(self) -> list[int]:
        """Powers of two that share the attention heads evenly."""
        found, num = [], 1
        while num <= self._host_gpus:
            if self.shape.num_heads % num == 0:
                found.append(num)
            num *= 2
        return found

    def place(self, num_gpus: int, block_size: int, *, half_kv: bool = False) -> Placement:
        """See `Machine`."""
        pool = pool_blocks(
            self.shape,
            self.gpu,
            num_gpus=num_gpus,
            block_size=block_size,
            utilization=self._utilization,
            max_num_batched_tokens=PLAN_TOKENS,
            max_num_seqs=PLAN_SEATS,
            max_model_len=self._max_model_len,
        )
        costs: StepCosts = RooflineCosts(
            self.shape,
            self.gpu,
            num_gpus=num_gpus,
            block_size=block_size,
            max_model_len=self._max_model_len,
            software=self._software,
        )
        share = 2 if half_kv else 1
        return Placement(
            num_gpus=num_gpus,
            costs=HalfKVCosts(costs) if half_kv else costs,
            pool_bytes=pool.kv_bytes * num_gpus,
            token_bytes=pool.shape.bytes_per_token * num_gpus // share,
            windows=pool.shape.windows,
            layer_windows=self.shape.layer_windows,
            arithmetic=(str(self.shape), *str(pool).splitlines()),
        )


_NOTHING = StepShape(0, 0, 0, 0, 0)


class HalfKVCosts:
    """The same machine with K and V in half the bytes: half as much to read and to copy."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self.name = f"{costs.name}, fp8 KV"

    def step_s(self, shape: StepShape) -> float:
        """See `StepCosts.step_s`."""
        step_s = self._costs.step_s
        halved = shape._replace(
            decode_context=shape.decode_context // 2, num_host_blocks=0, num_copied_blocks=0
        )
        num_copies = shape.num_host_blocks, shape.num_copied_blocks
        if not any(num_copies):
            return step_s(halved)
        copies_s = step_s(StepShape(0, 0, 0, 0, 0, *num_copies)) - step_s(_NOTHING)
        return step_s(halved) + copies_s / 2

    def copy_s(self, num_host_blocks: int) -> float:
        """See `StepCosts.copy_s`."""
        return self._costs.copy_s(num_host_blocks) / 2
