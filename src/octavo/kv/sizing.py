"""How many blocks: from a model's shape and the memory at hand to the size of the pool."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.errors import CapacityError
from octavo.util import cdiv, human_bytes

_LESS = (
    "free some memory, take a smaller --model, or lower --max-num-batched-tokens (activations) or "
    "--max-num-seqs (logits)"
)


@dataclass(frozen=True, slots=True)
class KVShape:
    """What of a model decides the bytes of a token's KV."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    """Bytes of one number in the KV cache: 2 for bfloat16, 4 for float32."""

    @property
    def bytes_per_token(self) -> int:
        """layers x kv_heads x head_dim x 2 (K and V) x bytes per element (paper section 3)."""
        return self.num_layers * self.num_kv_heads * self.head_dim * 2 * self.element_bytes

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens, over all layers."""
        return block_size * self.bytes_per_token

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers x {self.num_kv_heads} kv heads x {self.head_dim} x "
            f"2 (K, V) x {self.element_bytes} B = {self.bytes_per_token:,} B a token"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory goes: weights + activations + logits + KV = budget. Bytes throughout."""

    available_bytes: int
    """Free on the machine (and under its cgroup limits) before the engine took anything."""
    weights_bytes: int
    activation_bytes: int
    """Largest working set of a step, without the logits."""
    logits_bytes: int
    """Logits and logprobs of a step."""
    shape: KVShape
    block_size: int
    num_blocks: int
    """Blocks in the pool, >= 1."""
    max_model_len: int
    """Longest sequence that is wanted, in tokens; the pool may hold less (`max_seq_len`)."""
    chosen_by: str
    """What decided the size of the pool, in words or as a flag."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.shape.bytes_per_block(self.block_size)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        return self.num_blocks * self.bytes_per_block

    @property
    def num_slots(self) -> int:
        """Tokens the pool can hold."""
        return self.num_blocks * self.block_size

    @property
    def budget_bytes(self) -> int:
        """Everything the engine takes."""
        return self.weights_bytes + self.activation_bytes + self.logits_bytes + self.kv_bytes

    @property
    def left_bytes(self) -> int:
        """What stays free."""
        return self.available_bytes - self.budget_bytes

    @property
    def max_seq_len(self) -> int:
        """Longest sequence that fits, alone, into the paged pool: at most `max_model_len`."""
        return min(self.max_model_len, self.num_slots)

    def terms(self) -> dict[str, int]:
        """The terms that add up to `budget_bytes`."""
        return {
            "weights": self.weights_bytes,
            "activations": self.activation_bytes,
            "logits": self.logits_bytes,
            "KV cache": self.kv_bytes,
        }

    def __str__(self) -> str:
        kv = (
            f"{self.num_blocks:,} blocks x {self.block_size} tokens x "
            f"{self.shape.bytes_per_token:,} B, {self.chosen_by}"
        )
        notes = {"KV cache": kv}
        lines = [
            f"{'+' if i else ' '} {name:<12} {human_bytes(size):>12}  {notes.get(name, '')}"
            for i, (name, size) in enumerate(self.terms().items())
        ]
        lines += [
            f"= {'budget':<12} {human_bytes(self.budget_bytes):>12}  of "
            f"{human_bytes(self.available_bytes)} free, {human_bytes(self.left_bytes)} left",
            f"  {self.shape}; room for {self.num_slots:,} tokens",
        ]
        return "\n".join(line.rstrip() for line in lines)


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
    kv_cache_memory_bytes: int | None = None,
    num_blocks: int | None = None,
    kv_share: float = 0.5,
    require_max_model_len: bool = True,
) -> MemoryPlan:
    """Size the pool. Raises `CapacityError`, with the arithmetic, when it cannot be.

    `num_blocks` and `kv_cache_memory_bytes` are taken as they are, the first before the second, and
    must fit into what weights, activations and logits leave. Without either the pool gets
    `kv_share` of that, but never more than `max_num_seqs` sequences of `max_model_len` tokens can
    use.
    `require_max_model_len` refuses a pool in which one such sequence does not fit: for a length
    that was asked for, not for one that is only the model's limit.
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
        chosen_by="",
    )
    left = base.left_bytes
    if left < 0:
        raise CapacityError(f"nothing is left for the KV pool: {_left_for_kv(base)}; {_LESS}")
    if num_blocks is not None:
        chosen_by = "--num-gpu-blocks-override"
        if num_blocks * base.bytes_per_block > left:
            raise CapacityError(
                f"--num-gpu-blocks-override {num_blocks:,} x {base.bytes_per_block:,} B = "
                f"{human_bytes(num_blocks * base.bytes_per_block)} is more than is left for the KV "
                f"pool: {_left_for_kv(base)}; lower it to at most "
                f"{left // base.bytes_per_block:,}"
            )
    elif kv_cache_memory_bytes is not None:
        chosen_by = "--kv-cache-memory-bytes"
        if kv_cache_memory_bytes > left:
            raise CapacityError(
                f"--kv-cache-memory-bytes {kv_cache_memory_bytes:,} "
                f"({human_bytes(kv_cache_memory_bytes)}) is more than is left for the KV pool: "
                f"{_left_for_kv(base)}; lower it to at most {left:,}"
            )
        num_blocks = kv_cache_memory_bytes // base.bytes_per_block
    else:
        chosen_by = f"{kv_share:.0%} of what the rest leaves"
        most = max_num_seqs * cdiv(max_model_len, block_size)
        num_blocks = int(left * kv_share) // base.bytes_per_block
        if num_blocks > most:
            num_blocks = most
            chosen_by = f"all that {max_num_seqs} sequences of {max_model_len:,} tokens can use"
    if num_blocks < 1:
        raise CapacityError(_no_block(base, kv_cache_memory_bytes, kv_share))
    if require_max_model_len and num_blocks * block_size < max_model_len:
        raise CapacityError(_no_max_model_len(base, num_blocks, chosen_by))
    return replace(base, num_blocks=num_blocks, chosen_by=chosen_by)


def _left_for_kv(plan: MemoryPlan) -> str:
    return (
        f"{human_bytes(plan.available_bytes)} free - {human_bytes(plan.weights_bytes)} weights - "
        f"{human_bytes(plan.activation_bytes)} activations - {human_bytes(plan.logits_bytes)} "
        f"logits = {human_bytes(plan.left_bytes)}"
    )


def _no_block(plan: MemoryPlan, kv_cache_memory_bytes: int | None, kv_share: float) -> str:
    block = plan.bytes_per_block
    text = (
        f"not one KV block fits: a block is {plan.block_size} tokens x "
        f"{plan.shape.bytes_per_token:,} B = {human_bytes(block)} ({plan.shape}), and "
    )
    if kv_cache_memory_bytes is not None:
        return text + (
            f"--kv-cache-memory-bytes is {kv_cache_memory_bytes:,}; raise it to at least "
            f"{block:,}, or lower --block-size"
        )
    text += f"the KV pool gets {kv_share:.0%} of what is left: {_left_for_kv(plan)}; "
    if plan.left_bytes >= block:
        return text + f"set --kv-cache-memory-bytes to {block:,} or more, or lower --block-size"
    return text + _LESS


def _no_max_model_len(plan: MemoryPlan, num_blocks: int, chosen_by: str) -> str:
    needed = cdiv(plan.max_model_len, plan.block_size)
    bytes_needed = needed * plan.bytes_per_block
    text = (
        f"one sequence of max_model_len={plan.max_model_len:,} tokens needs "
        f"{needed:,} KV blocks of {plan.block_size} tokens = {human_bytes(bytes_needed)}, and the "
        f"pool has {num_blocks:,} ({chosen_by}); {_left_for_kv(plan)}; lower --max-model-len to "
        f"at most {num_blocks * plan.block_size:,}"
    )
    if chosen_by == "--num-gpu-blocks-override":
        return text + f" or raise --num-gpu-blocks-override to {needed:,}"
    if bytes_needed <= plan.left_bytes:
        return text + f" or set --kv-cache-memory-bytes to at least {bytes_needed:,}"
    return text
