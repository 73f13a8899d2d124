"""The memory plan of an engine: from its configuration and model to the numbers of blocks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from octavo.config import EngineConfig
from octavo.errors import CapacityError
from octavo.kv.memory_plan import GPUTerms, MemoryPlan
from octavo.kv.policies import make_policy
from octavo.kv.policy import AllocationPolicy
from octavo.kv.pool import BlockPool
from octavo.kv.shape import KVShape
from octavo.kv.sizing import plan_memory
from octavo.kv_groups import KVGroups, kv_groups, one_group
from octavo.models.decoder import Decoder
from octavo.util import cdiv

logger = logging.getLogger("octavo")

_PROMPT_LOGPROB_ROWS = 64
"""Fewest rows that prompt logprobs are computed at once: fewer would reread the head too often."""
_SCALE_BYTES = 2
"""float16."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What the largest step takes, in bytes."""

    activations: int
    logits: int
    """Logits and sampling."""


def num_logit_rows(config: EngineConfig) -> int:
    """Most rows whose logits are computed at once."""
    limits = config.limits()
    return max(limits.max_num_seqs, min(_PROMPT_LOGPROB_ROWS, limits.max_num_batched_tokens))


def kv_dtype(config: EngineConfig, model: Decoder) -> torch.dtype:
    """What the pool holds."""
    return {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(config.kv_cache_dtype, model.dtype)


def layer_groups(config: EngineConfig, model: Decoder) -> KVGroups:
    """The groups of layers whose KV is kept equally long; one that keeps all, where nothing is to
    be given back."""
    if config.disable_hybrid_kv_cache_manager or _why_all_is_kept(config, model) is not None:
        return one_group(model.arch)
    groups = kv_groups(model.arch, longest(config, model))
    return groups if groups.gives_back else one_group(model.arch)


def _why_all_is_kept(config: EngineConfig, model: Decoder) -> str | None:
    """The flag with which layers with a window cannot give back what is behind it: other policies
    than paged, and kernels that read there."""
    if config.kv_policy != "paged":
        return f"--kv-policy {config.kv_policy}"
    if model.attention.reads_behind_window:
        return f"--attention-backend {model.attention.name}"
    return None


def place_layers(config: EngineConfig, model: Decoder) -> None:
    """Tell the model where in a block each layer has its KV, and the log if more of it is kept
    than layers need."""
    model.place_kv([group.layers for group in layer_groups(config, model).groups])
    groups, why = kv_groups(model.arch, longest(config, model)), _why_all_is_kept(config, model)
    if why is None or config.disable_hybrid_kv_cache_manager or not groups.gives_back:
        return
    token = kv_shape(config, model).bytes_per_token
    num_kept = sum(len(group.layers) for group in groups.groups if not group.window)
    kept = token // model.arch.num_layers * num_kept
    logger.info(
        "layers with a window keep all of their KV, as %s needs it: every token takes %s B, and "
        "not %s B when it is behind the windows", why, f"{token:,}", f"{kept:,}",
    )  # fmt: skip


def kv_shape(config: EngineConfig, model: Decoder) -> KVShape:
    """What a token's KV takes."""
    arch, has_scales = model.arch, config.kv_cache_dtype != "auto"
    groups = layer_groups(config, model)
    return KVShape(
        len(groups.groups) * groups.layers_per_block,
        arch.kv_num_heads,
        arch.kv_head_dim,
        kv_dtype(config, model).itemsize,
        _SCALE_BYTES if has_scales else 0,
        arch.kv_planes,
        groups.windows,
        groups.num_padding,
    )


def longest(config: EngineConfig, model: Decoder) -> int:
    """Most tokens of a sequence, if the pool has room for it."""
    return config.max_model_len or model.rotary.max_position


def make_plan(
    config: EngineConfig,
    model: Decoder,
    available: int,
    step: StepMemory,
    gpu: GPUTerms | None = None,
) -> MemoryPlan:
    """Size pool and host tier. Raises `CapacityError`, with the arithmetic, when they do not fit.

    available: bytes that the engine may take; gpu: what a GPU's plan has besides.
    """
    plan = plan_memory(
        available_bytes=available,
        weights_bytes=model.weight_bytes,
        activation_bytes=step.activations,
        logits_bytes=step.logits,
        shape=kv_shape(config, model),
        block_size=config.block_size,
        max_model_len=longest(config, model),
        max_num_seqs=config.limits().max_num_seqs,
        max_chunk_tokens=config.limits().max_num_batched_tokens,
        gpu=gpu,
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
    policy = allocation_policy(config, plan.max_seq_len)
    if policy.shares_blocks:  # all blocks may be one sequence's: the plan has seen to that
        return plan
    policy.attach(BlockPool(plan.num_blocks, plan.block_size))
    most = policy.max_tokens_of_one_sequence
    if most >= plan.max_seq_len:
        return plan
    if config.max_model_len is not None:
        raise CapacityError(
            f"under --kv-policy {config.kv_policy} the longest region in a pool of "
            f"{plan.num_blocks:,} blocks ({plan.chosen_by}) holds {most:,} tokens, and "
            f"max_model_len is {plan.max_model_len:,}: lower --max-model-len to at most "
            f"{most:,}, enlarge the pool, or use --kv-policy paged"
        )
    return replace(plan, max_model_len=most)


def allocation_policy(
    config: EngineConfig, max_seq_tokens: int, windows: tuple[int, ...] = (0,)
) -> AllocationPolicy:
    """A new policy, for sequences of at most `max_seq_tokens`; windows: of the groups of layers."""
    return make_policy(
        config.kv_policy,
        max_seq_tokens=max_seq_tokens,
        windows=windows,
        max_chunk_tokens=config.limits().max_num_batched_tokens,
    )


def longest_table(config: EngineConfig, max_seq_tokens: int) -> int:
    """Most blocks that a sequence can have, whatever the size of the pool."""
    policy = allocation_policy(config, max_seq_tokens)
    num_blocks = 2 * cdiv(max_seq_tokens, config.block_size)  # room for any power of two
    policy.attach(BlockPool(num_blocks, config.block_size))
    return policy.most_blocks(max_seq_tokens)


def capped_by(config: EngineConfig, plan: MemoryPlan, max_position: int) -> str | None:
    """The flag of the pool that made contexts shorter than the model can have them, unasked."""
    if config.max_model_len is not None or plan.max_seq_len == max_position:
        return None
    if config.num_gpu_blocks_override is not None:
        return "--num-gpu-blocks-override"
    if config.device == "cuda" and config.kv_cache_memory_bytes is None:
        return "--gpu-memory-utilization"  # the pool has all that it leaves
    return "--kv-cache-memory-bytes"


def _needs_host(config: EngineConfig) -> str | None:
    """The flag that asks for a host tier."""
    if config.kv_disk_dir is not None:
        return "--kv-disk-dir"
    return "--preemption-mode swap" if config.preemption_mode == "swap" else None
