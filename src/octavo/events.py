"""What happened to requests under memory pressure, and why: records for people and programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class EventKind(StrEnum):
    """What kind of thing happened."""

    PREEMPTED = "preempted"
    """A request gave blocks back; `until_s` is when all that stopped ran again, or ended."""
    WAITED = "waited"
    """A request was in line when it could not be admitted, since `time_s`, its arrival; `until_s`
    is when it was, or when it was aborted."""
    REFUSED = "refused"
    """A request, a pin or a resize that can never fit."""
    CUT_SHORT = "cut short"
    """A sequence ended by length because the pool had no more to give."""
    STORM = "storm"
    """Preemptions came so thick that the admission watermark was raised by one level; `until_s` is
    when that was taken back. A storm of several levels is as many events, one inside the other."""
    RESIZED = "resized"
    """The pool grew or shrank."""
    FAILED = "failed"
    """A step failed and its requests were aborted."""
    LEAK = "leak"
    """Something was held that nobody needs any more; it was found while idle, and given back."""
    NO_OVERLAP = "no overlap"
    """A request of a kind that cannot be planned ahead has come; told of the first of its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEvent:
    """One thing that happened. `str()` is one line for people."""

    kind: EventKind
    time_s: float
    """When it began, in the engine's clock."""
    request_id: str | None
    """Whom it happened to; None for the engine as a whole."""
    why: str
    """The reason with its arithmetic: numbers of blocks, limits, who needed them."""
    by: str | None = None
    """The request that it happened for, where there is one."""
    mode: str | None = None
    """How a preempted request's KV is kept: "recompute" or "swap", with the cost comparison in
    `why`."""
    num_seqs: int = 0
    """Sequences concerned."""
    tokens_lost: int = 0
    """Token states that must be computed again unless they are found in a cache."""
    tokens_moved: int = 0
    """Token states that were moved to host memory."""
    num_blocks: int = 0
    """Blocks that changed hands."""
    until_s: float | None = None
    """When it was over; None: it is still so, or it has no duration."""

    def as_dict(self) -> dict[str, str | int | float | None]:
        """All fields by name, as JSON can say them."""
        return asdict(self) | {"kind": str(self.kind)}

    def __str__(self) -> str:
        head = f"{self.time_s:10.3f} s  {self.kind:<9} "
        head += "engine" if self.request_id is None else f"request {self.request_id}"
        if self.num_seqs > 1:
            head += f", {self.num_seqs} sequences"
        if self.mode is not None:
            head += f" ({self.mode})"
        if self.by is not None:
            head += " for itself" if self.by == self.request_id else f" for request {self.by}"
        parts = [f"{head}: {self.why}"]
        if self.tokens_lost or self.tokens_moved:
            parts.append(f"{self.tokens_moved} tokens moved, {self.tokens_lost} lost")
        if self.until_s is not None:
            parts.append(f"until {self.until_s:.3f} s ({self.until_s - self.time_s:.3f} s)")
        return "; ".join(parts)
