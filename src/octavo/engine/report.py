"""The memory report: where every byte is, planned, now, and over the run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from octavo.engine.history import PoolSummary
from octavo.events import EngineEvent, EventKind
from octavo.kv import MemoryPlan, PoolLedger, PrefixCacheStats, TierLedger
from octavo.util import human_bytes


@dataclass(frozen=True, slots=True)
class Preempted:
    """What preemptions of one mode did, as far as their events are remembered."""

    num_seqs: int
    tokens_moved: int
    """Token states that went to host memory."""
    tokens_lost: int
    """Token states that were given up; found again or computed again."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """What happened for lack of memory."""

    num_preemptions: int
    """Sequences preempted since the start."""
    by_mode: dict[str, Preempted]
    num_storms: int
    """How often the admission watermark was raised, as far as remembered."""
    storm: str | None
    """Why it is above normal now; None: it is not."""

    @classmethod
    def of(cls, num_preemptions: int, events: Iterable[EngineEvent]) -> Pressure:
        """Summed up from the events."""
        by_mode: dict[str, Preempted] = {}
        storms: list[EngineEvent] = []
        for event in events:
            if event.kind is EventKind.STORM:
                storms.append(event)
            if event.kind is EventKind.PREEMPTED and event.mode is not None:
                sums = by_mode.get(event.mode, Preempted(0, 0, 0))
                by_mode[event.mode] = Preempted(
                    sums.num_seqs + event.num_seqs,
                    sums.tokens_moved + event.tokens_moved,
                    sums.tokens_lost + event.tokens_lost,
                )
        now = [event.why for event in storms if event.until_s is None]
        return cls(num_preemptions, by_mode, len(storms), now[-1] if now else None)

    def lines(self) -> list[str]:
        """For people; empty when nothing happened."""
        lines = []
        known = sum(sums.num_seqs for sums in self.by_mode.values())
        for mode, sums in sorted(self.by_mode.items()):
            of_last = f", of the last {known:,}" if known < self.num_preemptions else ""
            lines.append(
                f"    by {mode:<9} {sums.num_seqs:,}: {sums.tokens_moved:,} tokens moved to the "
                f"host, {sums.tokens_lost:,} lost{of_last}"
            )
        if self.num_storms:
            now = "back to normal" if self.storm is None else self.storm
            lines.append(f"    storms: {self.num_storms}; {now}")
        return lines


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """A snapshot; `str()` is for people, `as_dict()` for programs."""

    model: str
    dtype: str
    kv_policy: str
    plan: MemoryPlan
    """How the budget was split when the engine started."""
    ledger: PoolLedger
    """The pool now; its terms add up to the pool."""
    history: PoolSummary
    """The pool over the run."""
    prefix_caching: bool
    cache: PrefixCacheStats
    """What was found again, evicted and moved between tiers, since the start."""
    host: TierLedger
    """Host memory behind the pool now; without blocks where there is none."""
    disk: TierLedger
    """The disk behind that; without blocks where there is none."""
    pressure: Pressure
    num_running: int
    num_waiting: int
    process_bytes: int
    """Resident memory of the process now."""

    @property
    def num_preemptions(self) -> int:
        """Sequences preempted since the start."""
        return self.pressure.num_preemptions

    def as_dict(self) -> dict[str, Any]:
        """Nested plain values, bytes and slots as whole numbers."""
        values = asdict(self)
        values["plan"]["budget_bytes"] = self.plan.budget_bytes
        values["plan"]["kv_bytes"] = self.plan.kv_bytes
        values["history"]["used_ratio"] = self.history.used_ratio
        values["history"]["peak_blocks"] = self.history.peak_blocks
        values["cache"]["hit_rate"] = self.cache.hit_rate
        values["num_preemptions"] = self.num_preemptions
        return values

    def __str__(self) -> str:
        past, pool = self.history, self.ledger
        # Between requests nobody uses the pool; then its fullest moment tells more.
        shown = pool if self.num_running or past.peak is None else past.peak
        when = "now"
        if shown is not pool:
            when = "at its fullest; now all of it is free"
            if pool.cached:
                cached = pool.cached // pool.block_size
                when = f"at its fullest; now {cached:,} of its blocks are cached, the rest is free"
        title, *table = str(shown).splitlines()
        lines = [
            f"Memory of {self.model} ({self.dtype}, {self.kv_policy} KV)",
            str(self.plan),
            "",
            f"{title}, {when}",
            *table,
            "",
            f"Over {past.num_steps:,} steps: {past.num_tokens_computed:,} tokens computed, "
            f"{past.mean_seqs:.1f} sequences a step (at most {past.peak_seqs})",
            f"  slots of allocated blocks that held a token {past.used_ratio:>8.1%}",
            f"  most blocks at one time                     {past.peak_blocks:>8,} "
            f"= {human_bytes(past.peak_blocks * pool.bytes_per_block)}",
            f"  blocks saved by sharing, mean over steps    {past.mean_shared_ratio:>8.1%}",
            f"  preemptions                                 {self.num_preemptions:>8,}",
            *self.pressure.lines(),
            *self._cache_lines(),
            f"Running {self.num_running}, waiting {self.num_waiting}; "
            f"the process has {human_bytes(self.process_bytes)} resident",
        ]
        return "\n".join(lines)

    def _cache_lines(self) -> list[str]:
        stats, lines = self.cache, []
        if self.prefix_caching:
            lines = [
                f"Prefix cache: {stats.hit_tokens:,} of {stats.query_tokens:,} prompt tokens found "
                f"({stats.hit_rate:.1%}), {stats.partial_hit_tokens:,} of them inside a block",
            ]
        else:
            lines = ["Prefix cache: off"]
        lines.append(
            f"  found again after preemptions {stats.resumed_tokens:,}, taken over by forks "
            f"{stats.forked_tokens:,} tokens; {stats.evictions:,} blocks evicted"
        )
        for name, tier, out, back in (
            ("host", self.host, stats.offloads_to_host, stats.promotions_from_host),
            ("disk", self.disk, stats.offloads_to_disk, stats.promotions_from_disk),
        ):
            if not tier.num_blocks:
                continue
            swapped = f", {stats.swapped_out:,} swapped out" if name == "host" else ""
            lines.append(f"  {name} tier: {tier}; {out:,} offloaded{swapped}, {back:,} came back")
        return lines
