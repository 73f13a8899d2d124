"""What an engine tells of itself: once when it is built, and while it runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from octavo.kv.tiers import TierLedger
from octavo.runner.memory import process_bytes
from octavo.stats import EngineStats

if TYPE_CHECKING:
    from octavo.engine.built import BuiltEngine


def about(built: BuiltEngine) -> dict[str, Any]:
    """Plain data from which `EngineInfo` and an `InputProcessor` are made."""
    plan = built.plan
    return {
        "config": dataclasses.asdict(built.config),
        "arch": dataclasses.asdict(built.arch),
        "plan": dataclasses.asdict(plan) | {"kv_bytes": plan.kv_bytes},
        "num_blocks": plan.num_blocks,
        "block_size": built.config.block_size,
        "bytes_per_block": plan.bytes_per_block,
        "no_prefix_caching": built.no_prefix_caching,
        "inputs": built.engine.inputs.limits(),
    }


def stats_of(built: BuiltEngine) -> EngineStats:
    """The engine's numbers now."""
    core = built.engine.core
    kv, scheduler = core.kv, core.scheduler
    ledger, cache, pressure = kv.ledger(), kv.cache_stats(), scheduler.pressure_totals
    return EngineStats(
        time_s=core.clock(),
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        ledger=ledger.terms(),
        shared_saved_blocks=ledger.shared_saved_blocks,
        num_blocks=ledger.num_blocks,
        num_used_blocks=ledger.num_physical_blocks,
        num_cached_blocks=ledger.cached // ledger.block_size,
        pinned_slots=ledger.pinned,
        host_blocks=_tier(kv.host_ledger()),
        disk_blocks=_tier(kv.disk_ledger()),
        steps_total=core.history.num_steps,
        prompt_tokens_total=scheduler.roster.num_prompt_tokens,
        generation_tokens_total=scheduler.roster.num_output_tokens,
        preemptions_total={mode: sums.num_seqs for mode, sums in pressure.by_mode.items()},
        storms_total=pressure.num_storms,
        prefix_query_tokens_total=cache.query_tokens,
        prefix_hit_tokens_total=cache.hit_tokens,
        miss_blocks_total=dict(cache.miss_blocks),
        evictions_total=cache.evictions,
        tier_blocks_total={
            "to_host": cache.offloads_to_host + cache.swapped_out,
            "from_host": cache.promotions_from_host,
            "to_disk": cache.offloads_to_disk,
            "from_disk": cache.promotions_from_disk,
        },
        step_seconds_total=core.history.step_seconds,
        client_tokens_total=scheduler.roster.clients.service(),
        client_blocks=scheduler.roster.clients.blocks(),
        process_bytes=process_bytes(),
    )


def _tier(ledger: TierLedger) -> dict[str, int]:
    return {"held": ledger.held, "cached": ledger.cached, "free": ledger.free}
