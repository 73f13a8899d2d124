"""Flags that commands of the lab share: the machine, and the engine's limits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.flags import Bytes, Hidden, flags
from octavo.config import KVPolicy, PreemptionMode, PreemptionVictim, SchedulingPolicy
from octavo.errors import ConfigError
from octavo.lab.config import Router, SimConfig
from octavo.util import flag_name

if TYPE_CHECKING:
    from octavo.lab.calibrated import CalibratedCosts
    from octavo.lab.costs import StepCosts
    from octavo.lab.gpus import Gpu, PoolSize
    from octavo.lab.model_shape import ModelShape

DEFAULT_MAX_MODEL_LEN = 2048
_MOST = 10**7
"""Of anything that is counted: what would not fit into this machine's memory is a slip."""


@flags
@dataclass(frozen=True, kw_only=True)
class MachineFlags:
    """The machine: how large the pool is, and how long steps take."""

    model: str | None = None
    """Shape of the model: a name that octavo knows (opt-13b, llama-3.1-8b, ...), a config.json, or
    its folder."""
    gpu: str | None = None
    """h200, h100, a100-80gb, a100-40gb, ...: its memory and its speed."""
    tensor_parallel_size: int = 1
    """GPUs that share the model, of each replica."""
    gpu_memory: Bytes = None
    """Memory of each GPU, such as 40GiB, where it is not the --gpu's own."""
    gpu_memory_utilization: float = 0.9
    """Share of it that is used."""
    costs: str | None = None
    """How long steps take: a file written by 'octavo lab calibrate'; fixed:STEP,TOKEN for so many
    seconds a step and so many for each of its tokens (fixed is fixed:0.04,0.0002); or the name of a
    GPU. By default that of --gpu, else fixed."""
    software: str = "2026"
    """Efficiency of the engine and its kernels on a GPU: 2026, or 2023 as in the PagedAttention
    paper."""

    def shape(self) -> ModelShape:
        """The model's. Raises `ConfigError` where there is none, `ModelNotFoundError`."""
        from octavo.lab.shapes import find_shape, shape_names

        if self.model is None:
            known = ", ".join(shape_names())
            raise ConfigError(f"--model is missing: a shape ({known}), or a config.json")
        return find_shape(self.model)

    def found_gpu(self) -> Gpu:
        """The GPU, with the memory that was asked for; of a memory alone, one that is only good for
        sizing a pool. Raises `ConfigError`."""
        from octavo.lab.gpus import Gpu, find_gpu, gpu_names

        if self.gpu is not None:
            gpu = find_gpu(self.gpu)
        elif self.gpu_memory is not None:
            gpu = Gpu(
                name="GPU", memory_bytes=self.gpu_memory, hbm_bytes_s=0, flops=0, pcie_bytes_s=0,
                nvlink_bytes_s=0, source="", date="",
            )  # fmt: skip
        else:
            raise ConfigError(f"--gpu is missing: one of {', '.join(gpu_names())}")
        if self.gpu_memory is None:
            return gpu
        return dataclasses.replace(gpu, memory_bytes=self.gpu_memory)

    def pool(self, limits: SimFlags) -> PoolSize:
        """What model and GPU leave for KV. Raises `ConfigError`, `CapacityError`."""
        from octavo.lab.gpus import pool_blocks

        self._check_numbers()
        return pool_blocks(
            self.shape(),
            self.found_gpu(),
            num_gpus=self.tensor_parallel_size,
            block_size=limits.block_size,
            utilization=self.gpu_memory_utilization,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
        )

    def check_no_memory(self, why: str) -> None:
        """Refuse the flags of a GPU's memory where they would do nothing (invariant I6)."""
        for name in ("gpu_memory", "gpu_memory_utilization"):
            if getattr(self, name) != getattr(MachineFlags, name):
                raise ConfigError(
                    f"{flag_name(name)} has no effect here, {why}: drop one of the two"
                )

    def check_split(self) -> None:
        """Refuse several GPUs where no model is put on any."""
        if self.tensor_parallel_size <= 1:
            return
        names_gpu = self.gpu is not None or self.gpu_memory is not None or self.costs is not None
        if self.model is None or not names_gpu:
            raise ConfigError(
                "--tensor-parallel-size has no effect without --model and a GPU (--gpu): add them, "
                "or drop it"
            )

    def calibration(self) -> CalibratedCosts | None:
        """What --costs names a file of, if any. `ConfigError` if it is of another --model too."""
        from octavo.lab.calibrated import CalibratedCosts

        name = self.costs or ""
        if not (Path(name).is_file() or Path(name).name != name or name.endswith(".json")):
            return None
        costs = CalibratedCosts.load(name)
        if self.model is not None:
            costs.check_model(self.shape())
        return costs

    def step_costs(
        self, block_size: int, *, in_one_piece: bool = False, max_model_len: int | None = None
    ) -> StepCosts:
        """The cost model for blocks of a size. in_one_piece: K and V are read so, as before paging.
        max_model_len: longest sequence; None: the model's.

        Raises `ConfigError` and what else is wrong with a model, a GPU or a file."""
        from octavo.lab.costs import FixedCosts

        self._check_numbers()
        name = self.gpu if self.costs is None else self.costs
        if name is None or name.partition(":")[0] == "fixed":
            self._check_software("fixed costs have none")
            return FixedCosts() if name in (None, "fixed") else FixedCosts.parse(name)
        measured = self.calibration()
        if measured is not None:
            from octavo.lab.tuner import ResizedCosts

            self._check_software("what was measured has its own")
            base = measured.block_size
            if self.model is not None and not in_one_piece:  # it was measured in one group
                base *= len(self.shape().kv_shape(1, max_model_len).windows)
            return measured if base == block_size else ResizedCosts(measured, block_size, base=base)
        from octavo.lab.gpus import find_gpu, find_software
        from octavo.lab.roofline import RooflineCosts

        gpu = find_gpu(name)
        return RooflineCosts(
            self.shape(),
            gpu,
            num_gpus=self.tensor_parallel_size,
            block_size=None if in_one_piece else block_size,
            copied_tokens=block_size,
            max_model_len=max_model_len,
            in_groups=not in_one_piece,
            software=find_software(self.software),
        )

    def _check_numbers(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ConfigError(
                f"--tensor-parallel-size must be at least 1, got {self.tensor_parallel_size}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                "--gpu-memory-utilization must be above 0 and at most 1, got "
                f"{self.gpu_memory_utilization:g}"
            )

    def _check_software(self, why: str) -> None:
        if self.software != MachineFlags.software:
            raise ConfigError(f"--software {self.software} has no effect here, {why}: drop it")


@flags
@dataclass(frozen=True, kw_only=True)
class SimFlags(SimConfig):
    """The engine: its limits. Names are those of the live engine."""

    num_blocks: int | None = None  # type: ignore[assignment]
    """KV blocks of each replica. By default what --model leaves of --gpu."""
    block_size: int = 16
    """Tokens in a KV block."""
    kv_policy: KVPolicy = "paged"
    """How sequences get KV memory."""
    max_model_len: int | None = None  # type: ignore[assignment]
    """Longest sequence (prompt and output), and what orca-max and contiguous reserve. By default
    the --model's own, else 2048."""
    max_num_seqs: int = 256
    """Most sequences in one step."""
    max_num_batched_tokens: int = 2048
    """Most tokens computed in one step."""
    enable_prefix_caching: bool = False
    """Keep the KV of finished requests while there is room, and reuse it where prompts begin
    alike."""
    num_host_blocks: int = 0
    """Blocks in host memory, for preempted sequences and evicted cached blocks."""
    preemption_mode: PreemptionMode = "recompute"
    """What becomes of a preempted sequence's KV: recompute it later, swap it to host memory, or
    whichever is cheaper."""
    preemption_victim: PreemptionVictim = "last-come"
    """Who is preempted when the pool is full."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """Order in which waiting requests are admitted; priority: smaller numbers first."""
    watermark: float = 0.01
    """Share of the pool that admission keeps free."""
    max_watermark: float = 0.125
    """The watermark goes up to it while preemptions come too thick; at or below --watermark: it
    stays."""
    max_batch: int | None = None
    """Most requests of a batch, of contiguous."""
    region_tokens: int | None = None
    """Tokens of a region of contiguous; by default --max-model-len."""
    max_padded_tokens: int | None = None
    """Most tokens that the longest prompt and the longest output of a batch of contiguous have
    together."""
    windows: Hidden[tuple[int, ...]] = (0,)
    layer_windows: Hidden[tuple[int, ...]] = (0,)
    num_replicas: int = 1
    """Engines of that size."""
    router: Router = "round-robin"
    """Which replica a request goes to: the next, the least loaded, or the one that holds most of
    its prompt."""
    stride: bool = True
    """Take stretches of steps in which nothing can change in one go: faster, with the same
    decisions."""

    def config(self, machine: MachineFlags) -> SimConfig:
        """The checked configuration. Raises `ConfigError`, `CapacityError` and what else is wrong
        with a model or a GPU."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(SimConfig)}
        self._check()
        machine.check_split()
        if self.num_blocks is None:
            if machine.model is None or (machine.gpu is None and machine.gpu_memory is None):
                raise ConfigError(
                    "how large is the pool? Say --num-blocks, or --model and --gpu or --gpu-memory "
                    "(as in --model opt-13b --gpu a100-40gb)"
                )
            values["num_blocks"] = machine.pool(self).num_blocks
        else:
            machine.check_no_memory("--num-blocks says how large the pool is")
        shape = None if machine.model is None else machine.shape()
        if self.max_model_len is None:
            longest = DEFAULT_MAX_MODEL_LEN if shape is None else shape.max_position_embeddings
            values["max_model_len"] = longest
        if shape is not None:
            values["windows"] = shape.kv_shape(1, values["max_model_len"]).windows
            values["layer_windows"] = shape.layer_windows
        return SimConfig(**values)

    def _check(self) -> None:
        """Refuse what no engine is, and limits of one policy under another (invariant I6)."""
        for name, least in (
            ("num_blocks", 1), ("block_size", 1), ("max_model_len", 1), ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1), ("num_host_blocks", 0), ("max_batch", 1),
            ("region_tokens", 1), ("max_padded_tokens", 1), ("num_replicas", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not least <= value <= _MOST:
                limit = f"at least {least}" if value < least else f"at most {_MOST:,}"
                raise ConfigError(f"{flag_name(name)} must be {limit}, got {value:,}")
        for name in ("watermark", "max_watermark"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"{flag_name(name)} must be at least 0 and below 1, got {getattr(self, name):g}"
                )
        for name in ("max_batch", "region_tokens", "max_padded_tokens"):
            if getattr(self, name) is not None and self.kv_policy != "contiguous":
                raise ConfigError(
                    f"{flag_name(name)} is for --kv-policy contiguous, not {self.kv_policy}: "
                    "drop it"
                )
        if self.num_replicas == 1 and self.router != "round-robin":
            raise ConfigError("--router needs --num-replicas of at least 2")
