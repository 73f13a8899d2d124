"""The memory report: where every byte is, planned, now, and over the run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from octavo.engine.history import PoolSummary
from octavo.events import EngineEvent, EventKind
from octavo.kv import MemoryPlan, PoolLedger, PrefixCacheStats, TierLedger
from octavo.kv.ledger import GroupHeld
from octavo.kv.needs import is_plain
from octavo.sched.pressure import ModeTotals, PressureTotals
from octavo.util import human_bytes


@dataclass(frozen=True, slots=True)
class Pressure:
    """What happened for lack of memory."""

    num_preemptions: int
    """Sequences preempted since the start."""
    by_mode: dict[str, ModeTotals]
    num_storms: int
    """How often the admission watermark was raised."""
    num_events_forgotten: int
    """Events that `LLM.events` does not tell any more: later ones took their place."""
    storm: str | None
    """Why it is above normal now; None: it is not."""

    @classmethod
    def of(
        cls,
        num_preemptions: int,
        totals: PressureTotals,
        num_events_forgotten: int,
        events: Iterable[EngineEvent],
    ) -> Pressure:
        """Joined from the scheduler's counts and what goes on by its events."""
        storms = [e.why for e in events if e.kind is EventKind.STORM and e.until_s is None]
        return cls(
            num_preemptions,
            totals.by_mode,
            totals.num_storms,
            num_events_forgotten,
            storms[-1] if storms else None,
        )

    def lines(self) -> list[str]:
        """For people; empty when nothing happened."""
        lines = []
        for mode, sums in sorted(self.by_mode.items()):
            lines.append(
                f"    by {mode:<9} {sums.num_seqs:,}: {sums.tokens_moved:,} tokens moved to the "
                f"host, {sums.tokens_lost:,} lost"
            )
        if self.num_storms:
            now = "back to normal" if self.storm is None else self.storm
            lines.append(f"    storms: {self.num_storms:,}; {now}")
        if self.num_events_forgotten:
            lines.append(f"    events: {self.num_events_forgotten:,} older ones are forgotten")
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
    groups: list[GroupHeld]
    """What each group of layers holds now of those who run."""
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
            when = "at its fullest"
            whose = "its"
            if shown.num_blocks != pool.num_blocks:
                when += f", when it had {shown.num_blocks:,} blocks"
                whose = f"{pool.num_blocks:,}"
            when += f"; now {_idle(pool, whose)}"
        title, *table = str(shown).splitlines()
        lines = [
            f"Memory of {self.model} ({self.dtype}, {self.kv_policy} KV)",
            str(self.plan),
            "",
            f"{title}, {when}",
            *table,
            *self._group_lines(self.groups if shown is pool else past.peak_groups),
            "",
            f"Over {past.num_steps:,} steps: {past.num_tokens_computed:,} tokens computed, "
            f"{past.mean_seqs:.1f} sequences a step (at most {past.peak_seqs})",
            *([f"  the pool, as it turned out: {past.settled}"] if past.settled else []),
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

    def _group_lines(self, groups: list[GroupHeld]) -> list[str]:
        """Where layers differ in how long their KV is kept."""
        shape, size = self.plan.shape, self.plan.block_size
        if is_plain(shape.windows):
            return []
        lines = [
            f"  by group of {shape.layers_per_block} layers, {shape.bytes_per_slot:,} B a token:"
        ]
        for number, group in enumerate(groups):
            keeps = f"{number} keeps " + (f"{group.window:,} tokens" if group.window else "all")
            num_bytes = group.num_blocks * shape.bytes_per_block(size)
            lines.append(
                f"    {keeps:<20} {group.num_tokens:>12,} tokens {group.num_blocks:>10,} blocks "
                f"{human_bytes(num_bytes):>12}, {group.num_behind:,} tokens given back"
            )
        return lines

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


def _idle(pool: PoolLedger, whose: str) -> str:
    """A pool that no sequence uses. whose: how many blocks, or "its"."""
    cached, pinned = pool.cached // pool.block_size, pool.pinned // pool.block_size
    if not cached:
        return "all of it is free" if whose == "its" else f"all of {whose} are free"
    text = f"{cached:,} of {whose} blocks are cached"
    if pinned:
        text += f" ({pinned:,} of them pinned)"
    return f"{text}, the rest is free"
