"""An engine's part on an NVIDIA GPU, in the order in which its memory becomes known.

Weights are loaded, the largest step is run once, steps are recorded; only then is what is
left known, and the pool gets it. Its addresses were reserved before, so that nothing recorded has
to be made again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from octavo.config import EngineConfig
from octavo.engine.garbage import leave_out_what_is_there
from octavo.engine.sizing import (
    StepMemory,
    kv_dtype,
    kv_shape,
    longest,
    longest_table,
    make_plan,
    num_logit_rows,
    place_layers,
)
from octavo.errors import CapacityError, ConfigError
from octavo.kv.memory_plan import GPUTerms, MemoryPlan
from octavo.layers.workspace import Workspace
from octavo.models.decoder import Decoder
from octavo.runner import memory
from octavo.runner.base import RunnerBase
from octavo.runner.gpu_memory import GPUMemory, gpu_memory, own_bytes_by_driver
from octavo.runner.kv_store import KVStore
from octavo.util import flag_name, human_bytes
from octavo.weights.progress import Progress

if TYPE_CHECKING:
    from octavo.runner.gpu.runner import GpuRunner

logger = logging.getLogger("octavo")


def for_this_machine(config: EngineConfig) -> EngineConfig:
    """The configuration with its device chosen. Raises `ConfigError` for a GPU that is not here,
    and for what needs one on a CPU."""
    has_gpu = torch.cuda.is_available()
    field = "device" if config.device == "cuda" else config.needs_gpu
    if field is not None and config.device != "cpu" and not has_gpu:
        instead = "use --device cpu" if field == "device" else f"leave {flag_name(field)} out"
        raise ConfigError(
            f"{field}={getattr(config, field)!r} needs an NVIDIA GPU that torch can use, and it "
            "found none (nvidia-smi shows the driver's view; torch.version.cuda must not be None): "
            f"{instead}"
        )
    return config.for_device("cuda" if has_gpu and config.device != "cpu" else "cpu")


def before_loading(device: torch.device) -> GPUMemory:
    """The GPU's memory before the engine takes any. What is in this process by then, modules above
    all, is left out of garbage collections until an engine is closed."""
    import octavo.runner.gpu.runner  # noqa: F401 - brings triton, which is most of it

    leave_out_what_is_there()
    return gpu_memory(device)


@dataclass(frozen=True, slots=True)
class OnDevice:
    """What was made on the device, and the plan by which it was."""

    plan: MemoryPlan
    store: KVStore
    runner: RunnerBase


def share_of(config: EngineConfig, gpu: GPUMemory) -> int:
    """Bytes of a GPU that the engine may take; negative if others hold more than is not its."""
    return int(gpu.total_bytes * config.gpu_memory_utilization) - gpu.others_bytes


def check_weights(
    config: EngineConfig, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, gpu: GPUMemory
) -> None:
    """Raise `CapacityError` for weights that are more than the engine's share of the GPU, before
    any is loaded."""
    num_bytes = dtype.itemsize * sum(map(math.prod, shapes.values()))
    if num_bytes < share_of(config, gpu):
        return
    text = f"the weights take {human_bytes(num_bytes)}, and {_share(config, gpu)}; "
    least = math.ceil(100 * (num_bytes + gpu.others_bytes + 1) / gpu.total_bytes) / 100
    if least <= 1:
        text += f"raise --gpu-memory-utilization: they alone need {least:g}; or "
    raise CapacityError(text + "end other processes on the GPU, or take a smaller --model")


def _share(config: EngineConfig, gpu: GPUMemory) -> str:
    return (
        f"--gpu-memory-utilization {config.gpu_memory_utilization:g} of the GPU's "
        f"{human_bytes(gpu.total_bytes)}, less {human_bytes(gpu.others_bytes)} held by other "
        f"processes, leaves {human_bytes(max(0, share_of(config, gpu)))}"
    )


@contextmanager
def running_out(
    doing: str, config: EngineConfig, before: GPUMemory | None, **known: int
) -> Iterator[None]:
    """Raise `CapacityError` where the GPU's memory runs out, with what is `known` to be taken."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if before is None:
            raise
        taken = "".join(f", of which {k} {human_bytes(n)}" for k, n in known.items() if n)
        raise CapacityError(
            f"the GPU ran out of memory while {doing}: {_share(config, before)}{taken}, and "
            f"{str(error).splitlines()[0]} End other processes on the GPU, take a smaller --model, "
            "or lower --max-num-batched-tokens (activations) or --max-num-seqs (logits, graphs)"
        ) from error


def prepare(
    config: EngineConfig, model: Decoder, before: GPUMemory, progress: Progress | None
) -> OnDevice:
    """Make buffers, runner and pool; run and record steps; size the pool from what is left.

    before: the GPU's memory before the engine took any. Raises `CapacityError`.
    """
    known = {"weights": model.weight_bytes}
    with running_out("making its buffers", config, before, **known):
        workspace, runner = _make(config, model, before)
    known["buffers"] = workspace.num_bytes + workspace.logits.nbytes
    with running_out("running and recording steps", config, before, **known):
        step, terms, gpu = _measure(runner, workspace, before, progress)
    plan = make_plan(config, model, share_of(config, gpu), step, terms)
    try:
        runner.resize_pool(plan.num_blocks)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise CapacityError(
            f"the GPU has no memory for a KV pool of {plan.num_blocks:,} blocks "
            f"({human_bytes(plan.kv_bytes)}) although {human_bytes(plan.left_bytes)} should be "
            "left: another process may have taken it; lower --gpu-memory-utilization"
        ) from error
    return OnDevice(plan, runner.kv_store, runner)


def _make(config: EngineConfig, model: Decoder, before: GPUMemory) -> tuple[Workspace, GpuRunner]:
    """Buffers for the largest step, and a runner with a pool of one block."""
    from octavo.attention.work import max_decode_items
    from octavo.ops.gpu import pdl
    from octavo.runner.gpu.runner import GpuRunner

    arch, limits, device = model.arch, config.limits(), model.device
    shape = kv_shape(config, model)
    place_layers(config, model)
    block_bytes = shape.bytes_per_block(config.block_size)
    store = KVStore(
        1, shape.layers_per_block, arch.kv_num_heads, config.block_size, arch.kv_head_dim,
        kv_dtype(config, model), device, planes=arch.kv_planes,
        max_blocks=max(1, before.total_bytes // block_bytes),
    )  # fmt: skip
    workspace = Workspace(
        arch, limits.max_num_batched_tokens, num_logit_rows(config), model.dtype, device,
        num_decode_items=max_decode_items(
            limits.max_num_seqs, arch.kv_num_heads, pdl.num_sms(device)
        ),
    )  # fmt: skip
    runner = GpuRunner(
        model,
        store,
        workspace,
        max_num_seqs=limits.max_num_seqs,
        max_num_tokens=limits.max_num_batched_tokens,
        max_blocks_per_seq=longest_table(config, longest(config, model)),
        num_groups=len(shape.windows),
        graphs=not config.enforce_eager,
    )
    return workspace, runner


def _measure(
    runner: GpuRunner, workspace: Workspace, before: GPUMemory, progress: Progress | None
) -> tuple[StepMemory, GPUTerms, GPUMemory]:
    """Run and record steps: what they take, and the GPU's memory after that."""
    from octavo.sampling.device import device_sampling_bytes

    model, device = runner.model, runner.model.device
    runner.compile_kernels()
    transient = runner.profile_run()
    captured = runner.capture(progress)
    runner.warm_up()
    num_recorded = len(captured.sizes) + len(captured.mixed_sizes)
    logger.info("recorded %d steps in %.1f s", num_recorded, captured.seconds)
    torch.cuda.empty_cache()
    now = gpu_memory(device)
    if own_bytes_by_driver(device) is None:  # who took what since then, nobody knows
        now = replace(now, others_bytes=before.others_bytes)
    logits = workspace.logits.nbytes + device_sampling_bytes(*workspace.logits.shape)
    named = model.weight_bytes + workspace.num_bytes + logits + captured.num_bytes
    # Sampling takes its memory when the forward pass has given its own back.
    further = max(0, transient.sampling_bytes - transient.forward_bytes)
    step = StepMemory(workspace.num_bytes + transient.forward_bytes, logits + further)
    terms = GPUTerms(
        graph_bytes=captured.num_bytes,
        # Less than nothing where others gave memory back meanwhile: it stays theirs.
        runtime_bytes=max(0, now.own_bytes - named - runner.kv_store.mapped_bytes),
        total_bytes=now.total_bytes,
        others_bytes=now.others_bytes,
        host_available_bytes=memory.available_bytes(),
    )
    return step, terms, now
