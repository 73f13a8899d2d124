"""From an `EngineConfig` to a running engine: the one place where all rooms meet."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.arch import ModelArch
from octavo.attention.select import select_attention
from octavo.config import DType, EngineConfig
from octavo.engine.built import BuiltEngine
from octavo.engine.core import EngineCore
from octavo.engine.engine import Engine
from octavo.engine.input import InputProcessor
from octavo.engine.output import OutputProcessor
from octavo.engine.recorder import Recorder, RecordingDisk, RecordingManager, RecordingScheduler
from octavo.engine.tiers import check_disk_folder, open_disk, why_prefixes_are_not_shared
from octavo.errors import CapacityError, ConfigError
from octavo.kv import KVCacheManager
from octavo.kv.policies import make_policy
from octavo.kv.policy import AllocationPolicy
from octavo.kv.pool import BlockPool
from octavo.kv.sizing import KVShape, MemoryPlan, plan_memory
from octavo.layers.workspace import Workspace, workspace_bytes
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.ops.cpu import gemm
from octavo.record.file import check_writable
from octavo.runner import memory
from octavo.runner.disk_store import DiskStore
from octavo.runner.kv_store import KVStore
from octavo.runner.runner import Runner
from octavo.sampling import sampling_bytes
from octavo.sched import Scheduler
from octavo.sched.costs import CostModel
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.weights.load import load_weights, open_model
from octavo.weights.locate import ModelFiles, locate, locate_tokenizer
from octavo.weights.progress import Progress

_PROMPT_LOGPROB_ROWS = 64
"""Fewest rows that prompt logprobs are computed at once: fewer would reread the head too often."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_engine(config: EngineConfig, progress: Progress | None = None) -> BuiltEngine:
    """Locate, load, size and join. Raises `ConfigError`, `ModelError` or `CapacityError`."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    check_disk_folder(config)
    if config.record is not None:
        check_writable(config.record)
    available = memory.available_bytes()
    files = locate(config.model, config.revision, config.load_format, progress)
    model = _load(files, config, progress)
    tokenizer = _tokenizer(config, files)
    plan = _plan_memory(config, model, available)
    workspace = Workspace(
        model.arch,
        config.max_num_batched_tokens,
        _num_logit_rows(config),
        model.dtype,
        model.device,
    )
    not_shared = why_prefixes_are_not_shared(config, model)
    resolved = config.replace(
        dtype=_name_of(model.dtype),
        max_model_len=plan.max_seq_len,
        max_num_seqs=min(config.max_num_seqs, plan.num_blocks),
        kv_cache_memory_bytes=plan.kv_bytes,
        num_gpu_blocks_override=plan.num_blocks,
        enable_prefix_caching=not_shared is None,
        swap_space=plan.host_bytes / 2**30,
        num_threads=torch.get_num_threads(),
    )
    disk = open_disk(config, files, model, plan.bytes_per_block)
    try:
        core = _core(resolved, plan, model, workspace, disk)
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
        capped_by=_capped_by(config, plan, model.rotary.max_position),
    )
    engine = Engine(core, inputs, OutputProcessor(tokenizer))
    return BuiltEngine(resolved, model.arch, engine, tokenizer, plan, not_shared)


def load_model(
    model: str,
    *,
    dtype: DType = "auto",
    max_model_len: int | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """Only the model with its weights, for tools and tests."""
    config = EngineConfig(model=model, dtype=dtype, max_model_len=max_model_len)
    return _load(locate(model, progress=progress), config, progress)


def _load(files: ModelFiles, config: EngineConfig, progress: Progress | None) -> Decoder:
    opened = open_model(files)
    arch, dtype = opened.arch, _resolve_dtype(config.dtype)
    longest = arch.max_position_embeddings
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ConfigError(
            f"max_model_len={max_model_len} is beyond the {longest} positions of {config.model}; "
            f"lower --max-model-len to at most {longest}"
        )
    device = torch.device("cpu")
    model = build_model(arch, select_attention(), dtype, max_model_len, device)
    source = opened.weight_source(model, config.seed)
    load_weights(model, source, arch, dtype=dtype, progress=progress)
    return model


def _resolve_dtype(name: DType) -> torch.dtype:
    """auto: bfloat16 where a kernel multiplies it natively; emulated it is slower than float32."""
    if name == "auto":
        return torch.bfloat16 if gemm.is_available() else torch.float32
    return _DTYPES[name]


def _name_of(dtype: torch.dtype) -> str:
    return next(name for name, value in _DTYPES.items() if value == dtype)


def _tokenizer(config: EngineConfig, files: ModelFiles) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is not None:
        return load_tokenizer(locate_tokenizer(config.tokenizer))
    return load_tokenizer(files.tokenizer)


def _eos_token_ids(arch: ModelArch, tokenizer: Tokenizer | None) -> frozenset[int]:
    found = set(arch.eos_token_ids)
    if tokenizer is not None:
        found |= set(tokenizer.eos_token_ids)
    return frozenset(found)


def _num_logit_rows(config: EngineConfig) -> int:
    return max(config.max_num_seqs, min(_PROMPT_LOGPROB_ROWS, config.max_num_batched_tokens))


def _plan_memory(config: EngineConfig, model: Decoder, available: int) -> MemoryPlan:
    arch, element_bytes = model.arch, model.dtype.itemsize
    num_rows = _num_logit_rows(config)
    activations, logits = workspace_bytes(
        arch, config.max_num_batched_tokens, num_rows, element_bytes
    )
    plan = plan_memory(
        available_bytes=available,
        weights_bytes=model.weight_bytes,
        activation_bytes=activations + model.transient_bytes(config.max_num_batched_tokens),
        logits_bytes=logits + sampling_bytes(num_rows, arch.vocab_size),
        shape=KVShape(arch.num_layers, arch.num_kv_heads, arch.head_dim, element_bytes),
        block_size=config.block_size,
        max_model_len=config.max_model_len or model.rotary.max_position,
        max_num_seqs=config.max_num_seqs,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        num_blocks=config.num_gpu_blocks_override,
        require_max_model_len=config.max_model_len is not None,
        swap_space=config.swap_space if config.kv_policy == "paged" else 0,
        need_host=_needs_host(config),
    )
    return _with_regions(config, plan)


def _with_regions(config: EngineConfig, plan: MemoryPlan) -> MemoryPlan:
    """The plan, with sequences no longer than a region of the pool can be under the policy.

    Raises `CapacityError` if a length that was asked for does not fit.
    """
    policy = _policy(config, plan)
    if policy.shares_blocks:  # all blocks may be one sequence's: the plan has seen to that
        return plan
    policy.attach(BlockPool(plan.num_blocks, plan.block_size))
    longest = policy.max_tokens_of_one_sequence
    if longest >= plan.max_seq_len:
        return plan
    if config.max_model_len is not None:
        raise CapacityError(
            f"under --kv-policy {config.kv_policy} the longest region in a pool of "
            f"{plan.num_blocks:,} blocks ({plan.chosen_by}) holds {longest:,} tokens, and "
            f"max_model_len is {plan.max_model_len:,}: lower --max-model-len to at most "
            f"{longest:,}, enlarge the pool, or use --kv-policy paged"
        )
    return replace(plan, max_model_len=longest)


def _policy(config: EngineConfig, plan: MemoryPlan) -> AllocationPolicy:
    return make_policy(config.kv_policy, max_seq_tokens=plan.max_seq_len)


def _capped_by(config: EngineConfig, plan: MemoryPlan, longest: int) -> str | None:
    """The flag of the pool that made contexts shorter than the model's `longest`, unasked."""
    if config.max_model_len is not None or plan.max_seq_len == longest:
        return None
    if config.num_gpu_blocks_override is not None:
        return "--num-gpu-blocks-override"
    return "--kv-cache-memory-bytes"


def _needs_host(config: EngineConfig) -> str | None:
    """The flag that asks for a host tier."""
    if config.kv_disk_dir is not None:
        return "--kv-disk-dir"
    return "--preemption-mode swap" if config.preemption_mode == "swap" else None


def _core(
    config: EngineConfig,
    plan: MemoryPlan,
    model: Decoder,
    workspace: Workspace,
    disk: DiskStore | None,
) -> EngineCore:
    arch, block_size = model.arch, config.block_size
    most = plan.num_blocks + max(0, plan.left_bytes // plan.bytes_per_block)
    store = KVStore(
        plan.num_blocks, arch.num_layers, arch.num_kv_heads, block_size, arch.head_dim,
        model.dtype, model.device,
        max_blocks=most, num_host_blocks=plan.num_host_blocks, disk=disk,
    )  # fmt: skip
    recorder = None if config.record is None else Recorder(config.record)
    manager: type[KVCacheManager] = KVCacheManager if recorder is None else RecordingManager
    max_disk_blocks = 0 if disk is None else config.kv_disk_bytes // plan.bytes_per_block
    kv = manager(
        plan.num_blocks,
        block_size,
        _policy(config, plan),
        bytes_per_block=plan.bytes_per_block,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_blocks=plan.num_host_blocks,
        disk=disk if disk is None or recorder is None else RecordingDisk(disk, recorder),
        max_disk_blocks=max_disk_blocks,
    )
    runner = Runner(
        model,
        store,
        workspace,
        max_num_seqs=config.max_num_seqs,
        max_num_tokens=config.max_num_batched_tokens,
        max_blocks_per_seq=kv.policy.most_blocks(plan.max_seq_len),
    )
    decides: type[Scheduler] = Scheduler if recorder is None else RecordingScheduler
    costs = _cost_priors(store)
    scheduler = decides(
        kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_seq_len,
        policy=config.scheduling_policy,
        preemption_mode=config.preemption_mode,
        preemption_victim=config.preemption_victim,
        costs=costs,
    )
    core = EngineCore(scheduler, kv, runner.execute, runner.resize_pool, disk, recorder=recorder)
    if recorder is not None:
        recorder.attach(kv, scheduler)
        recorder.begin(config, plan, costs, max_disk_blocks, core.clock())
    return core


def _cost_priors(store: KVStore) -> CostModel:
    """Copying is measured now, before the first swap is decided; computing, by the first steps."""
    speed = store.host_copy_speed()
    return CostModel(block_s=store.block_bytes / speed) if speed else CostModel()
