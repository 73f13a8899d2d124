"""What the prefix cache and the tiers did since the start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from octavo.outputs import PrefixMiss


@dataclass(slots=True)
class PrefixCacheStats:
    """Counters; what was found is split by whose it was. Tokens are token states."""

    queries: int = 0
    """First starts of requests, which ask for what other requests have left."""
    query_tokens: int = 0
    """Their prompt tokens."""
    hit_tokens: int = 0
    """Tokens that they found, of other requests."""
    resumed_tokens: int = 0
    """Tokens that preempted sequences found again when they started again."""
    forked_tokens: int = 0
    """Tokens that sequences took over from others of their request: by forking, or found by one
    that starts later, such as a sample that begins because the first one has ended."""
    partial_hits: int = 0
    """Starts that found the beginning of a block; all are copies, but for exact ones."""
    partial_hit_tokens: int = 0
    """Their tokens in that block; counted above too."""
    evictions: int = 0
    """Cached blocks of the pool that were used for something else."""
    offloads_to_host: int = 0
    """Evicted blocks that were moved to the host tier."""
    offloads_to_disk: int = 0
    """Blocks that were moved on to the disk tier."""
    swapped_out: int = 0
    """Blocks of preempted sequences that were moved to the host tier for them."""
    promotions_from_host: int = 0
    """Blocks found on the host and moved to the pool, for preempted sequences too."""
    promotions_from_disk: int = 0
    """Blocks found on the disk and moved to the pool."""
    miss_blocks: dict[str, int] = field(default_factory=dict)
    """Prompt blocks of first starts that had to be computed, by `outputs.MissReason`."""

    def copy(self) -> PrefixCacheStats:
        """As it is now."""
        return replace(self, miss_blocks=dict(self.miss_blocks))

    def count_misses(self, misses: Iterable[PrefixMiss]) -> None:
        """Of one more first start."""
        for miss in misses:
            reason = str(miss.reason)
            self.miss_blocks[reason] = self.miss_blocks.get(reason, 0) + miss.num_blocks

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found; 0 without a query."""
        return self.hit_tokens / max(1, self.query_tokens)
