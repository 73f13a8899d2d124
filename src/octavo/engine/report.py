"""The memory report: where every byte is, planned, now, and over the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from octavo.engine.history import PoolSummary
from octavo.kv.ledger import PoolLedger
from octavo.kv.sizing import MemoryPlan
from octavo.util import human_bytes


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
    num_preemptions: int
    num_running: int
    num_waiting: int
    process_bytes: int
    """Resident memory of the process now."""

    def as_dict(self) -> dict[str, Any]:
        """Nested plain values, bytes and slots as whole numbers."""
        values = asdict(self)
        values["plan"]["budget_bytes"] = self.plan.budget_bytes
        values["plan"]["kv_bytes"] = self.plan.kv_bytes
        values["history"]["used_ratio"] = self.history.used_ratio
        values["history"]["peak_blocks"] = self.history.peak_blocks
        return values

    def __str__(self) -> str:
        past, pool = self.history, self.ledger
        # Between requests the pool is empty; then its fullest moment tells more.
        shown = pool if self.num_running or past.peak is None else past.peak
        when = "now" if shown is pool else "at its fullest; now all of it is free"
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
            f"  preemptions                                 {self.num_preemptions:>8,}",
            f"Running {self.num_running}, waiting {self.num_waiting}; "
            f"the process has {human_bytes(self.process_bytes)} resident",
        ]
        return "\n".join(lines)
