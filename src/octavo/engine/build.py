"""From an `EngineConfig` to a running engine: the one place where all rooms meet."""

from __future__ import annotations

import torch

from octavo.arch import ModelArch
from octavo.attention.select import select_attention
from octavo.config import DType, EngineConfig
from octavo.engine.built import BuiltEngine
from octavo.engine.core import EngineCore
from octavo.engine.engine import Engine
from octavo.engine.input import InputProcessor
from octavo.engine.output import OutputProcessor
from octavo.engine.tiers import check_disk_folder, open_disk, why_prefixes_are_not_shared
from octavo.errors import ConfigError
from octavo.kv import KVCacheManager
from octavo.kv.sizing import KVShape, MemoryPlan, plan_memory
from octavo.layers.workspace import Workspace, workspace_bytes
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.ops.cpu import gemm
from octavo.runner import memory
from octavo.runner.disk_store import DiskStore
from octavo.runner.kv_store import KVStore
from octavo.runner.runner import Runner
from octavo.sampling import sampling_bytes
from octavo.sched import Scheduler
from octavo.sched.costs import CostModel
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.util import cdiv
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
        capped_by=_capped_by(config, plan),
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
    return plan_memory(
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
        swap_space=config.swap_space,
        need_host=_needs_host(config),
    )


def _capped_by(config: EngineConfig, plan: MemoryPlan) -> str | None:
    """The flag of the pool that made contexts shorter than the model's, unasked."""
    if config.max_model_len is not None or plan.max_seq_len == plan.max_model_len:
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
    kv = KVCacheManager(
        plan.num_blocks,
        block_size,
        bytes_per_block=plan.bytes_per_block,
        enable_prefix_caching=config.enable_prefix_caching,
        num_host_blocks=plan.num_host_blocks,
        disk=disk,
        max_disk_blocks=0 if disk is None else config.kv_disk_bytes // plan.bytes_per_block,
    )
    runner = Runner(
        model,
        store,
        workspace,
        max_num_seqs=config.max_num_seqs,
        max_num_tokens=config.max_num_batched_tokens,
        max_blocks_per_seq=cdiv(plan.max_seq_len, block_size),
    )
    scheduler = Scheduler(
        kv,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_seq_len,
        policy=config.scheduling_policy,
        preemption_mode=config.preemption_mode,
        preemption_victim=config.preemption_victim,
        costs=_cost_priors(store),
    )
    return EngineCore(scheduler, kv, runner.execute, runner.resize_pool, disk)


def _cost_priors(store: KVStore) -> CostModel:
    """Copying is measured now, before the first swap is decided; computing, by the first steps."""
    speed = store.host_copy_speed()
    return CostModel(block_s=store.block_bytes / speed) if speed else CostModel()
