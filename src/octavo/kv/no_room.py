"""Why a KV pool cannot be as large as it should be, in arithmetic, and the ways out.

Of plans that have no blocks yet.
"""

from __future__ import annotations

import math

from octavo.kv.memory_plan import MemoryPlan
from octavo.util import human_bytes


def left_for_kv(plan: MemoryPlan) -> str:
    """The arithmetic; of a plan without blocks."""
    start = f"{human_bytes(plan.available_bytes)} free"
    if plan.total_bytes is not None:
        start = (
            f"{human_bytes(plan.available_bytes)} (--gpu-memory-utilization {_share(plan):.3g} of "
            f"{human_bytes(plan.total_bytes)}, less {human_bytes(plan.others_bytes)} held by "
            "others)"
        )
    taken = "".join(
        f" - {human_bytes(size)} {name}"
        for name, size in plan.terms().items()
        if name not in ("KV cache", "host tier")
    )
    return f"{start}{taken} = {human_bytes(plan.left_bytes)}"


def _share(plan: MemoryPlan) -> float:
    """Of a GPU, with what others hold."""
    assert plan.total_bytes is not None
    return (plan.available_bytes + plan.others_bytes) / plan.total_bytes


def less(plan: MemoryPlan) -> str:
    """What to do if the rest leaves nothing, for a plan without blocks."""
    parts = "(activations) or --max-num-seqs (logits)"
    if plan.total_bytes is None:
        start = "free some memory"
    else:
        parts = "(activations) or --max-num-seqs (logits, graphs)"
        start = "end other processes on the GPU"
        start += or_larger_share(plan, plan.bytes_per_block, ", ")
    return f"{start}, take a smaller --model, or lower --max-num-batched-tokens {parts}"


def or_larger_share(plan: MemoryPlan, kv_bytes: int, joined: str = ", or ") -> str:
    """The way out of a pool that is too small: a share of the GPU in which `kv_bytes` fit. Empty
    where no share is, and on a CPU. For a plan without blocks."""
    if plan.total_bytes is None:
        return ""
    needed = plan.budget_bytes + kv_bytes + plan.others_bytes
    share = math.ceil(1000 * needed / plan.total_bytes) / 1000
    if share > 1:
        return ""
    return f"{joined}raise --gpu-memory-utilization to at least {share:g}"


def _or_codes(plan: MemoryPlan) -> str:
    if plan.shape.scale_bytes:
        return ""
    return f", or use --kv-cache-dtype {'int8' if plan.total_bytes is None else 'fp8'}"


def no_block(
    plan: MemoryPlan, num_blocks: int | None, num_bytes: int | None, kv_share: float
) -> str:
    """Why a pool has no block for each group of layers. num_blocks, num_bytes: as it was asked for;
    the first counts."""
    block, num_groups = plan.bytes_per_block, len(plan.shape.windows)
    needed = num_groups * block
    what = "not one KV block fits"
    if num_groups > 1:
        what = f"not one KV block for each of {num_groups} groups of layers fits"
    text = (
        f"{what}: a block is {plan.shape.block_terms(plan.block_size)} = {human_bytes(block)} "
        f"({plan.shape}), and "
    )
    if num_blocks is not None:
        flag = "--num-gpu-blocks-override"
        return f"{text}{flag} is {num_blocks:,}; raise it to at least {num_groups:,}"
    if num_bytes is not None:
        return text + (
            f"--kv-cache-memory-bytes is {num_bytes:,}; raise it to at least {needed:,}, or lower "
            "--block-size"
        )
    text += f"the KV pool gets {kv_share:.0%} of what is left: {left_for_kv(plan)}; "
    if plan.left_bytes >= needed:
        return text + f"set --kv-cache-memory-bytes to {needed:,} or more, or lower --block-size"
    return text + less(plan)


def no_max_model_len(plan: MemoryPlan, num_blocks: int, chosen_by: str) -> str:
    """Why a pool of so many blocks has no room for one sequence of the length that is wanted."""
    needed = plan.needs.blocks(plan.max_model_len)
    bytes_needed = needed * plan.bytes_per_block
    text = (
        f"one sequence of max_model_len={plan.max_model_len:,} tokens needs "
        f"{needed:,} KV blocks of {plan.block_size} tokens = {human_bytes(bytes_needed)}, and the "
        f"pool has {num_blocks:,} ({chosen_by}); {left_for_kv(plan)}; lower --max-model-len to "
        f"at most {plan.needs.most_tokens(num_blocks):,}"
    )
    if bytes_needed > plan.left_bytes:
        return text + or_larger_share(plan, bytes_needed) + _or_codes(plan)
    if chosen_by == "--num-gpu-blocks-override":
        return text + f" or raise --num-gpu-blocks-override to {needed:,}"
    return text + f" or set --kv-cache-memory-bytes to at least {bytes_needed:,}"
