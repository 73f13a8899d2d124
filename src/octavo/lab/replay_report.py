"""What a replay says: how much was decided again, and where it first differs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from octavo.plan import StepPlan
from octavo.record import RecordHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a replay first decided otherwise."""

    line: int
    """Of the record."""
    step_id: int | None
    """Step of the plan; None where it is about something else."""
    field: str
    """What differs: a field of the plan, or the answer of a call."""
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        where = f"line {self.line}" if self.step_id is None else f"step {self.step_id}"
        return f"{where}, {self.field}: recorded {self.recorded!r}, replayed {self.replayed!r}"


@dataclass(slots=True, kw_only=True)
class ReplayReport:
    """What a replay made of a record."""

    header: RecordHeader
    num_calls: int = 0
    num_steps: int = 0
    num_requests: int = 0
    """That were accepted."""
    num_refused: int = 0
    num_admissions: int = 0
    """Sequences that the runner was told of, without forks."""
    num_forks: int = 0
    num_tokens: int = 0
    """Computed, in all steps."""
    num_preemptions: int = 0
    num_evictions: int = 0
    num_copies: Counter[str] = field(default_factory=Counter)
    """Blocks copied, by kind."""
    difference: Difference | None = None
    damage: str | None = None
    """Why the record cannot be replayed to its end; what came before is in this report."""
    ended: str | None = None
    """How the engine ended; None: the record does not say."""

    @property
    def is_identical(self) -> bool:
        """Whether all that is in the record was decided again."""
        return self.difference is None and self.damage is None

    @property
    def is_complete(self) -> bool:
        """Whether that is all up to the engine's end."""
        return self.is_identical and self.ended is not None

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        values = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("header", "difference", "num_copies")
        }
        difference = self.difference and {
            f.name: repr(getattr(self.difference, f.name))
            if f.name in ("recorded", "replayed")
            else getattr(self.difference, f.name)
            for f in dataclasses.fields(Difference)
        }
        return {
            "model": self.header.model,
            "octavo": self.header.octavo,
            "limits": dataclasses.asdict(self.header.limits),
            "identical": self.is_identical,
            "complete": self.is_complete,
            "difference": difference,
            **values,
            "num_copies": dict(self.num_copies),
        }


def first_difference(recorded: StepPlan, replayed: StepPlan) -> tuple[str, Any, Any] | None:
    """(field, both values) of the first field that is not the same; of a list, of its first entry
    that is not."""
    for plan_field in dataclasses.fields(StepPlan):
        name = plan_field.name
        ours, theirs = getattr(replayed, name), getattr(recorded, name)
        if ours != theirs:
            return _inside(name, theirs, ours)
    return None


def _inside(name: str, recorded: Any, replayed: Any) -> tuple[str, Any, Any]:
    """The same, of what is inside of lists, tuples and records."""
    for kind in (list, tuple):
        if not (isinstance(recorded, kind) and isinstance(replayed, kind)):
            continue
        names = getattr(type(recorded), "_fields", None)
        for i, (one, other) in enumerate(zip(recorded, replayed, strict=False)):
            if one != other:
                return _inside(f"{name}.{names[i]}" if names else f"{name}[{i}]", one, other)
        return f"len({name})", len(recorded), len(replayed)
    if dataclasses.is_dataclass(recorded) and type(recorded) is type(replayed):
        for inner in dataclasses.fields(recorded):
            one, other = getattr(recorded, inner.name), getattr(replayed, inner.name)
            if one != other:
                return _inside(f"{name}.{inner.name}", one, other)
    return name, recorded, replayed
