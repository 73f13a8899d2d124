"""From an `EngineConfig` to a running engine: the one place where all rooms meet."""

from __future__ import annotations

from typing import cast

import torch

from octavo.arch import ModelArch
from octavo.attention.select import select_attention
from octavo.config import AttentionName, DType, EngineConfig
from octavo.engine import gpu
from octavo.engine.built import BuiltEngine
from octavo.engine.core import EngineCore
from octavo.engine.engine import Engine
from octavo.engine.garbage import look_at_all_again
from octavo.engine.gpu import OnDevice
from octavo.engine.input import InputProcessor
from octavo.engine.output import OutputProcessor
from octavo.engine.quantize import WeightPlan, plan_weights
from octavo.engine.recorder import Recorder, RecordingDisk, RecordingManager, RecordingScheduler
from octavo.engine.sizing import (
    StepMemory,
    allocation_policy,
    capped_by,
    kv_dtype,
    longest_table,
    make_plan,
    num_logit_rows,
    place_layers,
)
from octavo.engine.tiers import check_disk_folder, open_disk, why_prefixes_are_not_shared
from octavo.engine.tokenizers import tokenizer_of
from octavo.errors import ConfigError
from octavo.kv import KVCacheManager
from octavo.layers.workspace import Workspace, workspace_bytes
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.ops.cpu import gemm
from octavo.record.file import check_writable
from octavo.runner import memory
from octavo.runner.disk_store import DiskStore
from octavo.runner.gpu_memory import GPUMemory
from octavo.runner.kv_store import KVStore
from octavo.runner.runner import Runner
from octavo.sampling import sampling_bytes
from octavo.sched import Scheduler
from octavo.sched.costs import CostModel
from octavo.text.tokenizer import Tokenizer
from octavo.weights.load import load_weights, open_model
from octavo.weights.locate import ModelFiles, locate
from octavo.weights.progress import Progress

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_engine(config: EngineConfig, progress: Progress | None = None) -> BuiltEngine:
    """Locate, load, size and join. Raises `ConfigError`, `ModelError` or `CapacityError`."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    check_disk_folder(config)
    if config.record is not None:
        check_writable(config.record)
    config = gpu.for_this_machine(config)
    try:
        return _build(config, progress)
    except BaseException:
        if config.device != "cpu":  # nobody will close it
            look_at_all_again()
        raise


def _build(config: EngineConfig, progress: Progress | None) -> BuiltEngine:
    before = None if config.device == "cpu" else gpu.before_loading(torch.device(config.device))
    available = memory.available_bytes() if before is None else 0
    files = locate(config.model, config.revision, config.load_format, progress)
    model, weights = load_model_of(files, config, progress, before)
    tokenizer = tokenizer_of(config, files)
    if before is None:
        device = on_cpu(config, model, available)
    else:
        device = gpu.prepare(config, model, before, progress)
    plan = device.plan
    not_shared = why_prefixes_are_not_shared(config, model)
    resolved = config.replace(
        dtype=_name_of(model.dtype),
        quantization=weights.name,
        attention_backend=cast("AttentionName", model.attention.name),
        max_model_len=plan.max_seq_len,
        max_num_seqs=min(config.limits().max_num_seqs, plan.max_num_seqs),
        kv_cache_memory_bytes=plan.kv_bytes,
        num_gpu_blocks_override=plan.num_blocks,
        enable_prefix_caching=not_shared is None,
        swap_space=plan.host_bytes / 2**30,
        num_threads=torch.get_num_threads(),
    )
    disk = open_disk(resolved, files, model.arch, plan)
    try:
        device.store.add_tiers(plan.num_host_blocks, disk)
        core = _core(resolved, device, disk)
    except BaseException:
        if disk is not None:
            disk.close()
        raise
    inputs = InputProcessor(
        tokenizer,
        vocab_size=model.arch.vocab_size,
        max_model_len=plan.max_seq_len,
        eos_token_ids=_eos_token_ids(model.arch, tokenizer),
        seed=config.seed,
        capped_by=capped_by(config, plan, model.rotary.max_position),
    )
    engine = Engine(core, inputs, OutputProcessor(tokenizer))
    return BuiltEngine(resolved, model.arch, engine, tokenizer, plan, not_shared)


def load_model(
    model: str,
    *,
    dtype: DType = "auto",
    max_model_len: int | None = None,
) -> Decoder:
    """Only the model with its weights, on the CPU, for tests."""
    config = EngineConfig(model=model, device="cpu", dtype=dtype, max_model_len=max_model_len)
    return load_model_of(locate(model), config, None)[0]


def load_model_of(
    files: ModelFiles,
    config: EngineConfig,
    progress: Progress | None,
    before: GPUMemory | None = None,
) -> tuple[Decoder, WeightPlan]:
    """The model with its weights; before: of the GPU that they are loaded to."""
    opened = open_model(files)
    arch, device = opened.arch, torch.device(config.device)
    dtype = resolve_dtype(config.dtype, device, arch.dtype)
    longest = arch.max_position_embeddings
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ConfigError(
            f"max_model_len={max_model_len} is beyond the {longest} positions of {config.model}; "
            f"lower --max-model-len to at most {longest}"
        )
    attention = select_attention(
        config.attention_backend,
        device,
        head_dim=arch.head_dim,
        fp8=config.kv_cache_dtype == "fp8",
        alibi=arch.positions == "alibi",
        mla=arch.mla is not None,
    )
    if arch.mla is not None and config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype} is for keys and values, and {config.model} "
            "caches latents (MLA), which keep their type; leave it out"
        )
    plan = plan_weights(config, opened, device)
    with gpu.running_out("loading the weights", config, before):
        model = build_model(
            arch, attention, dtype, max_model_len, device, plan.quantize, plan.quantize_head
        )
        if before is not None:
            gpu.check_weights(config, model.parameters_spec(), dtype, before)
        source = opened.weight_source(model, config.seed, device)
        keep = plan.keep(model)
        load_weights(model, source, arch, dtype=dtype, keep=keep, progress=progress)
    return model, plan


def resolve_dtype(name: DType, device: torch.device, own: str) -> torch.dtype:
    """What a checkpoint of type `own` is computed in. auto: on a GPU its own type (float32 in
    bfloat16); on a CPU bfloat16 where a kernel multiplies it natively, as emulated it is slower
    than float32. Raises `ConfigError` for float16 on a CPU."""
    if device.type == "cuda":
        own = "bfloat16" if own == "float32" else own
        return _DTYPES[own if name == "auto" else name]
    if name == "float16":
        raise ConfigError(
            "dtype 'float16' needs a GPU: no CPU kernel computes in it; use --dtype bfloat16 or "
            "--dtype float32"
        )
    if name == "auto":
        return torch.bfloat16 if gemm.is_available() else torch.float32
    return _DTYPES[name]


def _name_of(dtype: torch.dtype) -> DType:
    return cast("DType", next(name for name, value in _DTYPES.items() if value == dtype))


def _eos_token_ids(arch: ModelArch, tokenizer: Tokenizer | None) -> frozenset[int]:
    found = set(arch.eos_token_ids)
    if tokenizer is not None:
        found |= set(tokenizer.eos_token_ids)
    return frozenset(found)


def on_cpu(config: EngineConfig, model: Decoder, available: int) -> OnDevice:
    """Everything is known before it is made: the plan is arithmetic."""
    arch, limits, num_rows = model.arch, config.limits(), num_logit_rows(config)
    num_tokens = limits.max_num_batched_tokens
    activations, logits = workspace_bytes(arch, num_tokens, num_rows, model.dtype.itemsize)
    step = StepMemory(
        activations + model.transient_bytes(num_tokens),
        logits + sampling_bytes(num_rows, arch.vocab_size),
    )
    plan = make_plan(config, model, available, step)
    place_layers(config, model)
    store = KVStore(
        plan.num_blocks, plan.shape.layers_per_block, arch.kv_num_heads, config.block_size,
        arch.kv_head_dim, kv_dtype(config, model), model.device, planes=arch.kv_planes,
        max_blocks=plan.num_blocks + max(0, plan.left_bytes // plan.bytes_per_block),
    )  # fmt: skip
    assert store.block_bytes == plan.bytes_per_block, (store.block_bytes, plan.bytes_per_block)
    runner = Runner(
        model,
        store,
        Workspace(arch, num_tokens, num_rows, model.dtype, model.device),
        max_num_seqs=min(limits.max_num_seqs, plan.max_num_seqs),
        max_num_tokens=num_tokens,
        max_blocks_per_seq=longest_table(config, plan.max_seq_len),
        num_groups=len(plan.shape.windows),
        replay=not config.enforce_eager,
    )
    return OnDevice(plan, store, runner)


def _core(config: EngineConfig, device: OnDevice, disk: DiskStore | None) -> EngineCore:
    plan, store, runner = device.plan, device.store, device.runner
    recorder = None if config.record is None else Recorder(config.record)
    manager: type[KVCacheManager] = KVCacheManager if recorder is None else RecordingManager
    max_disk_blocks = 0 if disk is None else config.kv_disk_bytes // plan.bytes_per_block
    kv = manager(
        plan.num_blocks,
        config.block_size,
        allocation_policy(config, plan.max_seq_len, plan.shape.windows),
        bytes_per_block=plan.bytes_per_block,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_blocks=plan.num_host_blocks,
        disk=disk if disk is None or recorder is None else RecordingDisk(disk, recorder),
        max_disk_blocks=max_disk_blocks,
    )
    decides: type[Scheduler] = Scheduler if recorder is None else RecordingScheduler
    limits, costs = config.limits(), _cost_priors(store)
    overlap = bool(config.async_scheduling)
    scheduler = decides(
        kv,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=plan.max_seq_len,
        policy=config.scheduling_policy,
        preemption_mode=config.preemption_mode,
        preemption_victim=config.preemption_victim,
        costs=costs,
        plan_ahead=overlap,
    )
    core = EngineCore(
        scheduler, kv, runner.launch, runner.resize_pool, disk, recorder=recorder, overlap=overlap
    )
    if recorder is not None:
        recorder.attach(kv, scheduler)
        recorder.begin(config, plan, costs, max_disk_blocks, core.clock())
    return core


def _cost_priors(store: KVStore) -> CostModel:
    """Copying is measured now, before the first swap is decided; computing, by the first steps."""
    speed = store.host_copy_speed()
    return CostModel(block_s=store.block_bytes / speed) if speed else CostModel()
