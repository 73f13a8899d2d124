"""Every metric: its name, what it means, and how it is computed.

Names that begin with `vllm:` are vLLM's and mean the same there, so that its dashboards work; what
only octavo knows begins with `octavo:`. docs/metrics.md is made from this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from octavo.stats import EngineStats

Value = float | Mapping[str, float]
"""One number, or by the value of the one label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. Those with `read` are taken from `EngineStats` when somebody scrapes; the others
    are counted in the server as requests come and go."""

    name: str
    """Without the `_total` that counters get when they are scraped."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    formula: str
    labels: tuple[str, ...] = ()
    """Besides `model_name`."""
    read: Callable[[EngineStats], Value] | None = None
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram."""

    @property
    def scraped_name(self) -> str:
        """As `/metrics` has it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _usage(stats: EngineStats) -> float:
    return stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0


def _waste(stats: EngineStats) -> float:
    """Of the slots that cannot be given to somebody else now, those that hold nothing."""
    held = stats.num_slots - stats.ledger.get("free", 0) - stats.ledger.get("cached", 0)
    return 1 - stats.ledger.get("tokens", 0) / held if held else 0.0


def _shared(stats: EngineStats) -> float:
    logical = stats.num_used_blocks + stats.shared_saved_blocks
    return stats.shared_saved_blocks / logical if logical else 0.0


ENGINE_METRICS = (
    Metric(
        name="vllm:num_requests_running",
        kind="gauge",
        help="Sequences that hold KV blocks.",
        formula="sequences with a block table (each of `n` samples and each beam is one)",
        read=lambda s: s.num_running,
    ),
    Metric(
        name="vllm:num_requests_waiting",
        kind="gauge",
        help="Sequences in line, preempted ones included.",
        formula="sequences without blocks that have not ended",
        read=lambda s: s.num_waiting,
    ),
    Metric(
        name="vllm:kv_cache_usage_perc",
        kind="gauge",
        help="Share of the KV pool's blocks that somebody references; 1 means full.",
        formula="referenced blocks / blocks of the pool",
        read=_usage,
    ),
    Metric(
        name="vllm:prefix_cache_queries",
        kind="counter",
        help="Prompt tokens looked up in the prefix cache.",
        formula="sum over requests of the prompt tokens they asked for when they first started",
        read=lambda s: s.prefix_query_tokens_total,
    ),
    Metric(
        name="vllm:prefix_cache_hits",
        kind="counter",
        help="Prompt tokens found in the prefix cache.",
        formula="sum over requests of the prompt tokens whose KV was found and not computed",
        read=lambda s: s.prefix_hit_tokens_total,
    ),
    Metric(
        name="vllm:num_preemptions",
        kind="counter",
        help="Preemptions.",
        formula="sequences preempted, over all modes",
        read=lambda s: sum(s.preemptions_total.values()),
    ),
    Metric(
        name="vllm:prompt_tokens",
        kind="counter",
        help="Prompt tokens of requests that have started.",
        formula="sum of prompt lengths, found in the cache or computed",
        read=lambda s: s.prompt_tokens_total,
    ),
    Metric(
        name="vllm:generation_tokens",
        kind="counter",
        help="Tokens generated.",
        formula="sum of tokens sampled for all sequences",
        read=lambda s: s.generation_tokens_total,
    ),
    Metric(
        name="octavo:kv_slots",
        kind="gauge",
        help="Slots of the KV pool by what is in them; the kinds add up to the pool.",
        formula="the ledger: tokens + reserved + internal + external + cached + free = blocks x "
        "block size",
        labels=("kind",),
        read=lambda s: s.ledger,
    ),
    Metric(
        name="octavo:kv_blocks",
        kind="gauge",
        help="Blocks of the KV pool by state.",
        formula="used: referenced; cached: unreferenced, reusable; free: the rest",
        labels=("state",),
        read=lambda s: {
            "used": s.num_used_blocks,
            "cached": s.num_cached_blocks,
            "free": s.num_blocks - s.num_used_blocks - s.num_cached_blocks,
        },
    ),
    Metric(
        name="octavo:kv_waste_ratio",
        kind="gauge",
        help="Share of the slots held for requests that hold no token.",
        formula="1 - tokens / (slots - free - cached)",
        read=_waste,
    ),
    Metric(
        name="octavo:kv_shared_saved_blocks",
        kind="gauge",
        help="Blocks saved by sharing now.",
        formula="table entries - blocks referenced",
        read=lambda s: s.shared_saved_blocks,
    ),
    Metric(
        name="octavo:kv_shared_saved_ratio",
        kind="gauge",
        help="Share of the blocks that requests see that sharing saves.",
        formula="1 - blocks referenced / table entries (PagedAttention, Fig. 15)",
        read=_shared,
    ),
    Metric(
        name="octavo:kv_pinned_slots",
        kind="gauge",
        help="Slots in blocks of pinned prefixes.",
        formula="pinned blocks x block size",
        read=lambda s: s.pinned_slots,
    ),
    Metric(
        name="octavo:preemptions",
        kind="counter",
        help="Preemptions by what became of the KV.",
        formula="sequences preempted, by mode (recompute, swap)",
        labels=("mode",),
        read=lambda s: s.preemptions_total,
    ),
    Metric(
        name="octavo:preemption_storms",
        kind="counter",
        help="How often the admission watermark was raised because preemptions came too thick.",
        formula="levels raised",
        read=lambda s: s.storms_total,
    ),
    Metric(
        name="octavo:prefix_miss_blocks",
        kind="counter",
        help="Prompt blocks that had to be computed, by the reason why they were not found.",
        formula="blocks by `MissReason` when a request first starts",
        labels=("reason",),
        read=lambda s: s.miss_blocks_total,
    ),
    Metric(
        name="octavo:evictions",
        kind="counter",
        help="Cached blocks of the pool taken for something else.",
        formula="blocks evicted from the pool",
        read=lambda s: s.evictions_total,
    ),
    Metric(
        name="octavo:host_blocks",
        kind="gauge",
        help="Blocks of the host tier by state.",
        formula="held: of preempted sequences; cached; free",
        labels=("state",),
        read=lambda s: s.host_blocks,
    ),
    Metric(
        name="octavo:disk_blocks",
        kind="gauge",
        help="Blocks of the disk tier by state.",
        formula="held; cached; free",
        labels=("state",),
        read=lambda s: s.disk_blocks,
    ),
    Metric(
        name="octavo:tier_blocks_moved",
        kind="counter",
        help="Blocks moved between the tiers.",
        formula="blocks by direction: to_host, from_host, to_disk, from_disk",
        labels=("direction",),
        read=lambda s: s.tier_blocks_total,
    ),
    Metric(
        name="octavo:client_service_tokens",
        kind="counter",
        help="Service that clients got, in the weighted tokens of the fair queue.",
        formula="prompt tokens + 2 x generated tokens, by client (virtual token counter)",
        labels=("client",),
        read=lambda s: s.client_tokens_total,
    ),
    Metric(
        name="octavo:client_kv_blocks",
        kind="gauge",
        help="Blocks that a client's sequences hold now.",
        formula="table entries of the client's sequences",
        labels=("client",),
        read=lambda s: s.client_blocks,
    ),
    Metric(
        name="octavo:engine_steps",
        kind="counter",
        help="Steps of the engine.",
        formula="plans carried out",
        read=lambda s: s.steps_total,
    ),
    Metric(
        name="octavo:engine_step_seconds",
        kind="counter",
        help="Time spent in steps.",
        formula="sum over steps of the seconds from plan to result",
        read=lambda s: s.step_seconds_total,
    ),
    Metric(
        name="octavo:engine_resident_bytes",
        kind="gauge",
        help="Resident memory of the engine's process.",
        formula="as the system reports it",
        read=lambda s: s.process_bytes,
    ),
)
"""Read from the engine's process; its totals begin again when that is restarted."""
