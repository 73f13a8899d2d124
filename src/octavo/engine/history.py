"""What the pool looked like over a run: peaks and means, kept in constant memory."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kv import KVCacheManager
from octavo.kv.ledger import TERMS, GroupHeld, PoolLedger
from octavo.kv.needs import is_plain
from octavo.plan import StepPlan

_SPACING_S = 0.05
"""Of the samples of the pool that are settled later, in time that steps took."""


@dataclass(frozen=True, slots=True)
class SettledMeans:
    """Mean slots of each kind while steps ran; all but `undecided` add up to the pool."""

    tokens: float
    reserved: float
    """Unfilled slots that were filled later."""
    internal: float
    """Unfilled slots that never were: known when their sequence has ended."""
    external: float
    cached: float
    free: float
    undecided: float
    """Of the reserved ones those whose sequences still run: they may turn out internal."""

    def __str__(self) -> str:
        slots = {name: getattr(self, name) for name in TERMS}
        pool = sum(slots.values())
        terms = ", ".join(f"{name} {num / pool:.1%}" for name, num in slots.items())
        if not self.undecided:
            return terms
        return f"{terms} ({self.undecided / pool:.1%} of the reserved not decided yet)"


@dataclass(frozen=True, slots=True)
class PoolSummary:
    """The pool over all steps so far; means are over steps that held blocks."""

    num_steps: int
    num_tokens_computed: int
    peak: PoolLedger | None
    """The pool when most blocks were referenced; None before the first step."""
    peak_groups: list[GroupHeld]
    """What each group of layers held then; empty where there is one that keeps all."""
    peak_seqs: int
    """Most sequences in one step."""
    mean_seqs: float
    mean_used_slots: float
    """Mean number of slots that held a token."""
    mean_allocated_slots: float
    """Mean number of slots in referenced blocks."""
    mean_saved_slots: float
    """Mean number of slots that sharing saved: logical less physical."""
    mean_shared_ratio: float
    """Mean over the steps that held blocks of 1 - physical / logical blocks (paper, Fig. 15)."""

    settled: SettledMeans | None
    """Where the slots of the pool were, in hindsight; None before the first step."""

    @property
    def peak_blocks(self) -> int:
        """Most blocks referenced at one time."""
        return 0 if self.peak is None else self.peak.num_physical_blocks

    @property
    def used_ratio(self) -> float:
        """Share of the slots in referenced blocks that held tokens; 1 before the first step."""
        if not self.mean_allocated_slots:
            return 1.0
        return self.mean_used_slots / self.mean_allocated_slots


class PoolHistory:
    """Looks at the ledger once a step, when its result has come."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._samples = kv.keep_history(spacing_s=_SPACING_S)
        self._busy_s = 0.0
        """Time that steps took: the clock of the samples, which stands still between requests."""
        self._num_steps = self._num_tokens = self._num_seqs = 0
        self._peak_seqs = 0
        self._peak: PoolLedger | None = None
        self._peak_groups: list[GroupHeld] = []
        self._used = self._allocated = self._saved = 0
        self._num_steps_with_blocks = 0
        self._shared_ratios = 0.0

    def record(self, plan: StepPlan, step_s: float) -> None:
        """Take in the pool when a step's result is here, before its sequences end; the step took so
        long, of the time in which somebody drove the engine. With overlap the next plan was made
        by then, and its blocks are in the pool too."""
        ledger = self._kv.ledger()
        if self._samples.is_due(self._busy_s):
            self._samples.sample(self._busy_s, ledger=ledger)
        self._busy_s += step_s
        self._num_steps += 1
        self._num_tokens += plan.num_tokens
        self._num_seqs += len(plan.seqs)
        self._used += ledger.tokens
        self._allocated += ledger.num_allocated_slots
        self._saved += ledger.shared_saved
        if ledger.num_logical_blocks:
            self._num_steps_with_blocks += 1
            self._shared_ratios += ledger.shared_saved_ratio
        if self._peak is None or ledger.num_physical_blocks > self._peak.num_physical_blocks:
            self._peak = ledger
            if not is_plain(self._kv.windows):
                self._peak_groups = self._kv.held_by_group()
        self._peak_seqs = max(self._peak_seqs, len(plan.seqs))

    @property
    def num_steps(self) -> int:
        """Steps whose results have come."""
        return self._num_steps

    @property
    def step_seconds(self) -> float:
        """Time that they took."""
        return self._busy_s

    def summary(self) -> PoolSummary:
        """Everything so far."""
        steps = max(1, self._num_steps)
        return PoolSummary(
            num_steps=self._num_steps,
            num_tokens_computed=self._num_tokens,
            peak=self._peak,
            peak_groups=self._peak_groups,
            peak_seqs=self._peak_seqs,
            mean_seqs=self._num_seqs / steps,
            mean_used_slots=self._used / steps,
            mean_allocated_slots=self._allocated / steps,
            mean_saved_slots=self._saved / steps,
            mean_shared_ratio=self._shared_ratios / max(1, self._num_steps_with_blocks),
            settled=self._settled(),
        )

    def _settled(self) -> SettledMeans | None:
        """Means over the time that steps took."""
        mean = self._samples.mean(until_s=self._busy_s)
        if mean is None:
            return None
        return SettledMeans(**{name: getattr(mean, name) for name in (*TERMS, "undecided")})
