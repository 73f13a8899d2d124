"""Where the memory goes: the terms that add up to what an engine takes, and what the pool holds."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kv.needs import BlockNeeds, is_plain
from octavo.kv.shape import KVShape
from octavo.util import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUTerms:
    """What a plan for a GPU has besides; fields as in `MemoryPlan`."""

    graph_bytes: int
    runtime_bytes: int
    total_bytes: int
    others_bytes: int
    host_available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory goes, in bytes: what its terms add up to is the budget."""

    available_bytes: int
    """What the engine may take: on a CPU what was free on the machine (and under its cgroup
    limits) before it took anything; on a GPU its share of the whole, less what other processes
    hold."""
    weights_bytes: int
    activation_bytes: int
    """Largest working set of a step, without the logits."""
    logits_bytes: int
    """Logits, logprobs and sampling of a step."""
    graph_bytes: int = 0
    """Recorded steps (CUDA graphs)."""
    runtime_bytes: int = 0
    """What else the process holds on the GPU: the driver's context, kernels and libraries'
    workspaces; inputs, block tables and answers of steps; what torch keeps. Where the driver does
    not tell processes apart the context is in `others_bytes`, and what others took while this
    engine started is in here."""
    total_bytes: int | None = None
    """The GPU's whole memory; None on a CPU."""
    others_bytes: int = 0
    """Of it, what other processes hold."""
    host_available_bytes: int | None = None
    """Host memory for the host tier; None: it comes out of `available_bytes` like the rest."""
    shape: KVShape
    block_size: int
    num_blocks: int
    """Blocks in the pool, >= 1."""
    max_model_len: int
    """Longest sequence that is wanted, in tokens; the pool may hold less (`max_seq_len`)."""
    max_chunk_tokens: int = 1
    """Most tokens that a sequence computes in a step; of no matter without a window."""
    chosen_by: str
    """What decided the size of the pool, in words or as a flag."""
    num_host_blocks: int = 0
    """Blocks in the host tier: preempted sequences and cached blocks that left the pool."""
    host_chosen_by: str = "none"
    """What decided the size of the host tier."""

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
        """Tokens the pool can hold, each for the layers of one group."""
        return self.num_blocks * self.block_size

    @property
    def needs(self) -> BlockNeeds:
        """What sequences need of the paged pool."""
        return BlockNeeds(self.block_size, self.shape.windows, self.max_chunk_tokens)

    @property
    def budget_bytes(self) -> int:
        """Everything the engine takes of `available_bytes`."""
        return sum(self.terms().values())

    @property
    def host_left_bytes(self) -> int:
        """What stays free where the host tier is."""
        if self.host_available_bytes is None:
            return self.left_bytes
        return self.host_available_bytes - self.host_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host tier."""
        return self.num_host_blocks * self.bytes_per_block

    @property
    def left_bytes(self) -> int:
        """What stays free."""
        return self.available_bytes - self.budget_bytes

    @property
    def max_seq_len(self) -> int:
        """Longest sequence that fits, alone, into the paged pool: at most `max_model_len`."""
        return min(self.max_model_len, self.needs.most_tokens(self.num_blocks))

    @property
    def max_concurrency(self) -> int:
        """Sequences of `max_seq_len` tokens that the paged pool has room for at one time."""
        return self.needs.most_seqs(self.num_blocks, self.max_seq_len)

    @property
    def max_num_seqs(self) -> int:
        """Sequences that can hold anything in the paged pool: a block for each group of layers."""
        return self.num_blocks // len(self.shape.windows)

    def terms(self) -> dict[str, int]:
        """The terms that add up to `budget_bytes`."""
        terms = {
            "weights": self.weights_bytes,
            "activations": self.activation_bytes,
            "logits": self.logits_bytes,
        }
        if self.total_bytes is not None:
            terms |= {"graphs": self.graph_bytes, "runtime": self.runtime_bytes}
        terms["KV cache"] = self.kv_bytes
        if self.host_available_bytes is None:
            terms["host tier"] = self.host_bytes
        return terms

    def __str__(self) -> str:
        block = self.shape.block_terms(self.block_size)
        kv = (
            f"{self.num_blocks:,} blocks x {f'({block})' if '+' in block else block}, "
            f"{self.chosen_by}"
        )
        host = f"{self.num_host_blocks:,} blocks, {self.host_chosen_by}"
        notes = {"KV cache": kv, "host tier": host}
        if self.total_bytes is None:
            of = f"{human_bytes(self.available_bytes)} free"
        else:
            of = (
                f"{human_bytes(self.available_bytes)} of the GPU's {human_bytes(self.total_bytes)}"
                f" ({human_bytes(self.others_bytes)} held by others)"
            )
        lines = [
            f"{'+' if i else ' '} {name:<12} {human_bytes(size):>12}  {notes.get(name, '')}"
            for i, (name, size) in enumerate(self.terms().items())
            if size or name != "host tier"
        ]
        lines += [
            f"= {'budget':<12} {human_bytes(self.budget_bytes):>12}  of {of}, "
            f"{human_bytes(self.left_bytes)} left",
        ]
        if self.host_available_bytes is not None and self.num_host_blocks:
            lines.append(f"  {'host tier':<12} {human_bytes(self.host_bytes):>12}  {host}")
        room = f"room for {self.num_slots:,} tokens"
        if not is_plain(self.shape.windows):
            room = (
                f"a sequence may have up to {self.max_seq_len:,} tokens, and of such "
                f"{self.max_concurrency:,} fit at one time"
            )
        lines += [f"  {self.shape}; {room}"]
        return "\n".join(line.rstrip() for line in lines)
