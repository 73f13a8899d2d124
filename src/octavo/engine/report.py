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
        return values

    def __str__(self) -> str:
        past, pool = self.history, self.ledger
        peak = past.peak_blocks * pool.bytes_per_block
        lines = [
            f"Memory of {self.model} ({self.dtype}, {self.kv_policy} KV)",
            str(self.plan),
            "",
            str(pool),
            f"  running {self.num_running}, waiting {self.num_waiting}",
            "",
            f"Over {past.num_steps:,} steps ({past.num_tokens_computed:,} tokens computed, "
            f"{past.mean_seqs:.1f} sequences a step, at most {past.peak_seqs})",
            f"  peak             {past.peak_blocks:>12,} blocks = {human_bytes(peak)} "
            f"({past.peak_blocks / pool.num_blocks:.1%} of the pool)",
            f"  tokens held {past.used_ratio:>17.1%} of the slots in allocated blocks",
            f"  preemptions      {self.num_preemptions:>12,}",
            f"Process: {human_bytes(self.process_bytes)} resident",
        ]
        return "\n".join(lines)
