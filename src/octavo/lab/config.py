"""What is simulated: an engine's limits, and how many of them there are."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from octavo.config import KVPolicy, PreemptionMode, PreemptionVictim, SchedulingPolicy

POLICIES: tuple[KVPolicy, ...] = ("paged", "orca-oracle", "orca-pow2", "orca-max", "contiguous")
"""From the one that makes most of a pool to the one that makes least."""
Router = Literal["round-robin", "least-loaded", "prefix-aware"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """An engine as the scheduler and the memory manager see it. Names are `EngineConfig`'s."""

    num_blocks: int
    """KV blocks of each replica, each of one group of layers."""
    block_size: int = 16
    kv_policy: KVPolicy = "paged"
    max_model_len: int = 2048
    """Longest sequence; what `orca-max` and `contiguous` reserve."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = False
    num_host_blocks: int = 0
    preemption_mode: PreemptionMode = "recompute"
    preemption_victim: PreemptionVictim = "last-come"
    scheduling_policy: SchedulingPolicy = "fcfs"
    watermark: float = 0.01
    max_watermark: float = 0.125
    """The watermark goes up to it while preemptions come too thick; at or below `watermark`: it
    stays."""
    max_batch: int | None = None
    """Of `contiguous`: most requests of a batch."""
    region_tokens: int | None = None
    """Of `contiguous`: tokens of a region; by default max_model_len."""
    max_padded_tokens: int | None = None
    """Of `contiguous`: the longest prompt and the longest output of a batch together."""
    num_replicas: int = 1
    router: Router = "round-robin"
    windows: tuple[int, ...] = (0,)
    """By group of layers the tokens that they look back, 0: all (`octavo.kv_groups`). `paged` gives
    back what lies behind."""
    layer_windows: tuple[int, ...] = (0,)
    """The same of each layer, or of all: what their attention reads, whatever is kept."""
    stride: bool = True
    """Take stretches of steps in which nothing can change in one go; the decisions are the same."""

    @property
    def pool_windows(self) -> tuple[int, ...]:
        """`windows` as the pool has them: policies other than `paged` keep all layers in one group,
        and all of it."""
        return self.windows if self.kv_policy == "paged" else (0,)

    @property
    def pool_blocks(self) -> int:
        """Blocks of the pool: with all layers in one group they are as many times as large."""
        return self.num_blocks * len(self.pool_windows) // len(self.windows)

    @property
    def num_slots(self) -> int:
        """Slots of the pool, each of a token in one group of layers."""
        return self.pool_blocks * self.block_size

    def replace(self, **changes: Any) -> SimConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)
