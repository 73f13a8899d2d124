"""An engine's part on an NVIDIA GPU, in the order in which its memory becomes known.

Weights are loaded, the largest step is run once, steps are recorded; only then is what is
left known, and the pool gets it. Its addresses were reserved before, so that nothing recorded has
to be made again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from octavo.config import EngineConfig
from octavo.engine.sizing import (
    StepMemory,
    kv_dtype,
    kv_shape,
    longest_table,
    make_plan,
    num_logit_rows,
)
from octavo.errors import CapacityError, ConfigError
from octavo.kv.sizing import GPUTerms, MemoryPlan
from octavo.layers.workspace import Workspace
from octavo.models.decoder import Decoder
from octavo.runner import memory
from octavo.runner.base import RunnerBase
from octavo.runner.gpu_memory import GPUMemory, gpu_memory
from octavo.runner.kv_store import KVStore
from octavo.util import human_bytes
from octavo.weights.progress import Progress

logger = logging.getLogger("octavo")


def for_this_machine(config: EngineConfig) -> EngineConfig:
    """The configuration with its device chosen. Raises `ConfigError` for a GPU that is not here,
    and for what needs one on a CPU."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError(
            "device 'cuda' needs an NVIDIA GPU that torch can use, and it sees none (nvidia-smi "
            "shows the driver's view; torch.version.cuda must not be None): use --device cpu"
        )
    return config.for_device("cuda" if has_gpu and config.device != "cpu" else "cpu")


@dataclass(frozen=True, slots=True)
class OnGPU:
    """What was made on the GPU, and the plan that came out of measuring it."""

    plan: MemoryPlan
    store: KVStore
    runner: RunnerBase


def prepare(
    config: EngineConfig, model: Decoder, before: GPUMemory, progress: Progress | None
) -> OnGPU:
    """Make buffers, runner and pool; run and record steps; size the pool from what is left.

    before: the GPU's memory before the engine took any. Raises `CapacityError`.
    """
    from octavo.attention.work import max_decode_items
    from octavo.runner.gpu.runner import GpuRunner
    from octavo.sampling.device import device_sampling_bytes

    arch, limits, device = model.arch, config.limits(), model.device
    shape, num_rows = kv_shape(config, model), num_logit_rows(config)
    available = int(before.total_bytes * config.gpu_memory_utilization) - before.others_bytes
    _check_weights(available, model, before)
    store = KVStore(
        1, arch.num_layers, arch.num_kv_heads, config.block_size, arch.head_dim,
        kv_dtype(config, model), device,
        max_blocks=max(1, before.total_bytes // shape.bytes_per_block(config.block_size)),
    )  # fmt: skip
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    workspace = Workspace(
        arch, limits.max_num_batched_tokens, num_rows, model.dtype, device,
        num_decode_items=max_decode_items(limits.max_num_seqs, arch.num_kv_heads, num_sms),
    )  # fmt: skip
    runner = GpuRunner(
        model,
        store,
        workspace,
        max_num_seqs=limits.max_num_seqs,
        max_num_tokens=limits.max_num_batched_tokens,
        max_blocks_per_seq=longest_table(config, config.max_model_len or model.rotary.max_position),
        graphs=not config.enforce_eager,
    )
    transient = runner.profile_run()
    captured = runner.capture(progress)
    runner.warm_up()
    # Sampling takes its memory when the forward pass has given its own back.
    further = max(0, transient.sampling_bytes - transient.forward_bytes)
    sampling = device_sampling_bytes(num_rows, arch.vocab_size)
    step = StepMemory(
        workspace.num_bytes + transient.forward_bytes,
        workspace.logits.nbytes + sampling + further,
    )
    torch.cuda.empty_cache()
    own = gpu_memory(device).total_bytes - gpu_memory(device).free_bytes - before.others_bytes
    buffers = workspace.num_bytes + workspace.logits.nbytes + sampling
    named = model.weight_bytes + buffers + captured.num_bytes
    terms = GPUTerms(
        graph_bytes=captured.num_bytes,
        runtime_bytes=max(0, own - named - store.mapped_bytes),
        total_bytes=before.total_bytes,
        others_bytes=before.others_bytes,
        host_available_bytes=memory.available_bytes(),
    )
    plan = make_plan(config, model, available, step, terms)
    try:
        runner.resize_pool(plan.num_blocks)
    except MemoryError as error:
        raise CapacityError(
            f"the GPU has no memory for a KV pool of {plan.num_blocks:,} blocks "
            f"({human_bytes(plan.kv_bytes)}) although {human_bytes(plan.left_bytes)} should be "
            "left: another process may have taken it; lower --gpu-memory-utilization"
        ) from error
    num_recorded = len(captured.sizes) + len(captured.mixed_sizes)
    logger.info("recorded %d steps in %.1f s", num_recorded, captured.seconds)
    return OnGPU(plan, store, runner)


def _check_weights(available: int, model: Decoder, before: GPUMemory) -> None:
    if model.weight_bytes < available:
        return
    raise CapacityError(
        f"the weights take {human_bytes(model.weight_bytes)}, and --gpu-memory-utilization of the "
        f"GPU's {human_bytes(before.total_bytes)}, less {human_bytes(before.others_bytes)} held by "
        f"other processes, is {human_bytes(available)}: raise it, end the others, or take a "
        "smaller --model"
    )
