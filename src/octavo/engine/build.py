"""From an `EngineConfig` to a running engine: the one place where all rooms meet."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.arch import ModelArch
from octavo.attention.select import select_attention
from octavo.config import DType, EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.engine import Engine
from octavo.engine.input import InputProcessor, Prompt
from octavo.engine.output import OutputProcessor
from octavo.engine.report import MemoryReport
from octavo.errors import ConfigError, InvalidRequestError
from octavo.kv import KVCacheManager
from octavo.kv.sizing import KVShape, MemoryPlan, plan_memory
from octavo.layers.workspace import Workspace, workspace_bytes
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.ops.cpu import gemm
from octavo.runner import memory
from octavo.runner.kv_store import KVStore
from octavo.runner.runner import Runner
from octavo.sampling import sampling_bytes
from octavo.sched import Scheduler
from octavo.text.chat import chat_template as find_template
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.util import cdiv
from octavo.weights.load import load_weights, open_model
from octavo.weights.locate import ModelFiles, locate, locate_tokenizer
from octavo.weights.progress import Progress

_PROMPT_LOGPROB_ROWS = 64
"""Fewest rows that prompt logprobs are computed at once: fewer would reread the head too often."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True)
class BuiltEngine:
    """An engine with everything that was decided for it."""

    config: EngineConfig
    """Resolved: nothing is left to be chosen."""
    arch: ModelArch
    engine: Engine
    tokenizer: Tokenizer | None
    plan: MemoryPlan

    @property
    def _core(self) -> EngineCore:
        return self.engine.core

    def memory_report(self) -> MemoryReport:
        """Where every byte is now."""
        scheduler = self._core.scheduler
        return MemoryReport(
            model=self.config.model,
            dtype=self.config.dtype,
            kv_policy=self.config.kv_policy,
            plan=self.plan,
            ledger=self._core.kv.ledger(),
            history=self._core.history.summary(),
            num_preemptions=scheduler.num_preemptions,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            process_bytes=memory.process_bytes(),
        )

    def chat_prompt(
        self, messages: Sequence[Any], *, chat_template: str | None, add_generation_prompt: bool
    ) -> Prompt:
        """A conversation as token ids, through the model's template or the given one."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                "chat needs a tokenizer, and skip_tokenizer_init left it out", parameter="messages"
            )
        template = find_template(self.tokenizer, chat_template)
        text = template.render(messages, add_generation_prompt=add_generation_prompt)
        # The template writes the special tokens itself; adding them again would double them.
        return self.tokenizer.encode(text, add_special_tokens=False)

    def close(self) -> None:
        """End every request and let go of weights and pool; memory returns to the system."""
        self._core.close()
        gc.collect()


def build_engine(config: EngineConfig, progress: Progress | None = None) -> BuiltEngine:
    """Locate, load, size and join. Raises `ConfigError`, `ModelError` or `CapacityError`."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
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
    resolved = config.replace(
        dtype=_name_of(model.dtype),
        max_model_len=plan.max_seq_len,
        max_num_seqs=min(config.max_num_seqs, plan.num_blocks),
        kv_cache_memory_bytes=plan.kv_bytes,
        num_gpu_blocks_override=plan.num_blocks,
        num_threads=torch.get_num_threads(),
    )
    core = _core(resolved, plan, model, workspace)
    inputs = InputProcessor(
        tokenizer,
        vocab_size=model.arch.vocab_size,
        max_model_len=plan.max_seq_len,
        eos_token_ids=_eos_token_ids(model.arch, tokenizer),
        seed=config.seed,
    )
    engine = Engine(core, inputs, OutputProcessor(tokenizer))
    return BuiltEngine(resolved, model.arch, engine, tokenizer, plan)


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
    )


def _core(
    config: EngineConfig, plan: MemoryPlan, model: Decoder, workspace: Workspace
) -> EngineCore:
    arch, block_size = model.arch, config.block_size
    kv = KVCacheManager(plan.num_blocks, block_size, bytes_per_block=plan.bytes_per_block)
    store = KVStore(
        plan.num_blocks, arch.num_layers, arch.num_kv_heads, block_size, arch.head_dim,
        model.dtype, model.device,
    )  # fmt: skip
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
    )
    return EngineCore(scheduler, kv, runner.execute)
