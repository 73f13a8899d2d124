"""What every request of a workload is asked to be, beside what its trace says."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.lab.trace import TraceRequest
from octavo.util import flag_name


@dataclass(frozen=True, slots=True)
class Changes:
    """What is asked of every request. Raises `ConfigError` for values out of range."""

    n: int | None
    """Samples; None: as the trace says."""
    beam_width: int | None
    """Beams; None: as the trace says."""
    shared_prefix_tokens: int
    """Of a text in front of every prompt."""
    priorities: tuple[int, ...]
    """Each request gets one of them; empty: as the trace says."""
    seed: int
    """By which they are drawn."""

    def __post_init__(self) -> None:
        for name, least in (("n", 1), ("beam_width", 1), ("shared_prefix_tokens", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{flag_name(name)} must be at least {least}, got {value}")
        if self.beam_width is not None and (self.n or 1) > 1:
            raise ConfigError("--n and --beam-width exclude each other: drop one of the two")

    def made(self, requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
        """The requests, changed, one at a time."""
        rng, fixed = random.Random(self.seed), self._fixed()
        if not (fixed or self.priorities or self.shared_prefix_tokens):
            yield from requests
            return
        for request in requests:
            values: dict[str, object] = dict(fixed)
            if self.priorities:
                values["priority"] = rng.choice(self.priorities)
            if self.shared_prefix_tokens:
                values["num_input"] = request.num_input + self.shared_prefix_tokens
                values["prefix"] = f"shared/{request.prefix}"
                values["prefix_tokens"] = request.prefix_tokens + self.shared_prefix_tokens
            yield dataclasses.replace(request, **values)  # type: ignore[arg-type]

    def _fixed(self) -> dict[str, object]:
        if self.beam_width is not None:
            return {"beam_width": self.beam_width, "n": 1}
        return {} if self.n is None else {"n": self.n, "beam_width": 0}
