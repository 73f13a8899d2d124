"""How many blocks: from a model's shape and the memory at hand to the pool and the host tier."""

from __future__ import annotations

from dataclasses import asdict, replace

from octavo.errors import CapacityError
from octavo.kv.memory_plan import GPUTerms, MemoryPlan
from octavo.kv.no_room import left_for_kv, less, no_block, no_max_model_len, or_larger_share
from octavo.kv.shape import KVShape
from octavo.util import human_bytes

DEFAULT_HOST_SHARE = 0.25
"""Of what is left beside the pool, where `--swap-space` does not say."""
MAX_DEFAULT_HOST_BYTES = 4 * 2**30
MAX_DEFAULT_HOST_POOLS = 4
"""The default host tier is at most this many times as large as the pool."""
_GIB = 2**30


def plan_memory(
    *,
    available_bytes: int,
    weights_bytes: int,
    activation_bytes: int,
    logits_bytes: int,
    shape: KVShape,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_chunk_tokens: int = 1,
    gpu: GPUTerms | None = None,
    kv_cache_memory_bytes: int | None = None,
    num_blocks: int | None = None,
    kv_share: float = 0.5,
    require_max_model_len: bool = True,
    swap_space: float | None = 0,
    need_host: str | None = None,
) -> MemoryPlan:
    """Size the pool and the host tier. Raises `CapacityError`, with the arithmetic, when it cannot.

    `num_blocks` and `kv_cache_memory_bytes` are taken as they are, the first before the second, and
    must fit into what the other terms leave. Without either the pool gets, on a GPU, all of that;
    on a CPU `kv_share` of it, but never more than `max_num_seqs` sequences of `max_model_len`
    tokens can use.
    `require_max_model_len` refuses a pool in which one such sequence does not fit: for a length
    that was asked for, not for one that is only the model's limit. `max_chunk_tokens` are the most
    that are computed in a step.
    `swap_space` is the host tier in GiB; None: a quarter of what is left beside the pool (on a GPU:
    of free host memory), at most 4 GiB and four times the pool. `need_host` names the flag that
    cannot do without a host tier.
    """
    base = MemoryPlan(
        available_bytes=available_bytes,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        logits_bytes=logits_bytes,
        shape=shape,
        block_size=block_size,
        num_blocks=0,
        max_model_len=max_model_len,
        max_chunk_tokens=max_chunk_tokens,
        chosen_by="",
    )
    if gpu is not None:
        base, kv_share = replace(base, **asdict(gpu)), 1.0
    left, asked = base.left_bytes, num_blocks
    if left < 0:
        raise CapacityError(f"nothing is left for the KV pool: {left_for_kv(base)}; {less(base)}")
    if num_blocks is not None or kv_cache_memory_bytes is not None:
        num_blocks, chosen_by = _as_asked(base, num_blocks, kv_cache_memory_bytes)
    elif gpu is not None:
        chosen_by = "all that --gpu-memory-utilization leaves"
        num_blocks = left // base.bytes_per_block
    else:
        chosen_by = f"{kv_share:.0%} of what the rest leaves"
        most = base.needs.of_all(max_num_seqs, max_model_len)
        num_blocks = int(left * kv_share) // base.bytes_per_block
        if num_blocks > most:
            num_blocks = most
            chosen_by = f"all that {max_num_seqs} sequences of {max_model_len:,} tokens can use"
    if num_blocks < len(shape.windows):
        raise CapacityError(no_block(base, asked, kv_cache_memory_bytes, kv_share))
    if require_max_model_len and base.needs.most_tokens(num_blocks) < max_model_len:
        raise CapacityError(no_max_model_len(base, num_blocks, chosen_by))
    sized = replace(base, num_blocks=num_blocks, chosen_by=chosen_by)
    return _with_host_tier(sized, swap_space, need_host)


def _as_asked(base: MemoryPlan, num_blocks: int | None, num_bytes: int | None) -> tuple[int, str]:
    """(Blocks of a pool whose size was given, the flag that gave it)."""
    left, block = base.left_bytes, base.bytes_per_block
    if num_blocks is not None:
        wanted, flag = num_blocks * block, "--num-gpu-blocks-override"
        text = f"{flag} {num_blocks:,} x {block:,} B = {human_bytes(wanted)}"
        most = left // block
    else:
        assert num_bytes is not None
        wanted, flag = num_bytes, "--kv-cache-memory-bytes"
        text, most = f"{flag} {num_bytes:,} ({human_bytes(num_bytes)})", left
    if wanted > left:
        raise CapacityError(
            f"{text} is more than is left for the KV pool: {left_for_kv(base)}; lower it to at "
            f"most {most:,}{or_larger_share(base, wanted)}"
        )
    return wanted // block, flag


def _with_host_tier(plan: MemoryPlan, swap_space: float | None, need: str | None) -> MemoryPlan:
    left, block = plan.host_left_bytes, plan.bytes_per_block
    if swap_space is None:
        most = min(MAX_DEFAULT_HOST_BYTES, MAX_DEFAULT_HOST_POOLS * plan.kv_bytes)
        share = int(left * DEFAULT_HOST_SHARE)
        wanted = min(share, most)
        of = "what the pool leaves" if plan.host_available_bytes is None else "free host memory"
        chosen_by = f"{DEFAULT_HOST_SHARE:.0%} of {of}"
        if share > most == MAX_DEFAULT_HOST_BYTES:
            chosen_by = "the most that is taken by default"
        elif share > most:
            chosen_by = f"{MAX_DEFAULT_HOST_POOLS} x the pool"
    else:
        wanted, chosen_by = int(swap_space * _GIB), "--swap-space"
        if wanted > left:
            limit = int(left / _GIB * 100) / 100
            if plan.host_available_bytes is not None:
                raise CapacityError(
                    f"--swap-space {swap_space:g} GiB is more than the host has free, "
                    f"{human_bytes(left)}; lower it to at most {limit:g}"
                )
            raise CapacityError(
                f"--swap-space {swap_space:g} GiB is more than is left beside the KV pool: "
                f"{left_for_kv(replace(plan, num_blocks=0))} - {human_bytes(plan.kv_bytes)} KV "
                f"pool = {human_bytes(left)}; lower it to at most {limit:g}, "
                "or lower --kv-cache-memory-bytes"
            )
    num_blocks = wanted // block
    if num_blocks == 0 and (swap_space or need is not None):
        what = "--swap-space" if swap_space else f"{need} needs a host tier, which"
        raise CapacityError(
            f"{what} has no room for one KV block: it is {human_bytes(wanted)} and a block "
            f"{human_bytes(block)}; raise --swap-space to at least {block / _GIB:.6g}"
        )
    return replace(plan, num_host_blocks=num_blocks, host_chosen_by=chosen_by)


def resized(plan: MemoryPlan, num_bytes: int) -> MemoryPlan:
    """The plan with a pool of `num_bytes`, whole blocks of it.

    Raises `CapacityError` for more than the rest leaves, or less than a block.
    """
    block, most = plan.bytes_per_block, plan.kv_bytes + plan.left_bytes
    if num_bytes < block:
        raise CapacityError(
            f"{num_bytes:,} B is less than one KV block of {block:,} B: "
            f"{plan.shape.block_terms(plan.block_size)}"
        )
    if num_bytes > most:
        raise CapacityError(
            f"{num_bytes:,} B ({human_bytes(num_bytes)}) is more than is left for the KV pool: "
            f"{left_for_kv(replace(plan, num_blocks=0, num_host_blocks=0))}{_less_host(plan)}; "
            f"ask for at most {most:,}"
        )
    return replace(plan, num_blocks=num_bytes // block, chosen_by="resized while running")


def _less_host(plan: MemoryPlan) -> str:
    if plan.host_available_bytes is not None:
        return ""
    most = plan.kv_bytes + plan.left_bytes
    return f" - {human_bytes(plan.host_bytes)} host tier = {human_bytes(most)}"
