"""What an engine tells of itself while it runs: plain numbers, for metrics and readiness."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. What is called total has been counted since the engine's process started."""

    time_s: float = 0.0
    """When it was taken, in the engine's clock."""
    num_running: int = 0
    """Sequences that hold blocks."""
    num_waiting: int = 0
    """Sequences in line, preempted ones included."""
    ledger: dict[str, int] = field(default_factory=dict)
    """The pool in slots, by kind (`kv.ledger.TERMS`); they add up to it."""
    shared_saved_blocks: int = 0
    """Blocks saved by sharing now: table entries less blocks referenced."""
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Blocks that somebody references."""
    num_cached_blocks: int = 0
    pinned_slots: int = 0
    host_blocks: dict[str, int] = field(default_factory=dict)
    """The host tier by kind: held, cached, free."""
    disk_blocks: dict[str, int] = field(default_factory=dict)
    steps_total: int = 0
    prompt_tokens_total: int = 0
    """Prompt tokens computed or found of requests that have started."""
    generation_tokens_total: int = 0
    preemptions_total: dict[str, int] = field(default_factory=dict)
    """By mode: recompute, swap."""
    storms_total: int = 0
    prefix_query_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    miss_blocks_total: dict[str, int] = field(default_factory=dict)
    """Prompt blocks that had to be computed, by `outputs.MissReason`."""
    evictions_total: int = 0
    tier_blocks_total: dict[str, int] = field(default_factory=dict)
    """Blocks moved: to_host, from_host, to_disk, from_disk."""
    step_seconds_total: float = 0.0
    """Time in steps."""
    client_tokens_total: dict[str, float] = field(default_factory=dict)
    """By client: service in weighted tokens, as the fair queue counts it."""
    client_blocks: dict[str, int] = field(default_factory=dict)
    """By client: blocks that its sequences hold now."""
    process_bytes: int = 0
    """Resident memory of the engine's process."""

    @property
    def num_slots(self) -> int:
        """Slots of the pool."""
        return sum(self.ledger.values())
