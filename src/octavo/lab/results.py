"""What a simulation, or a live run, tells: every request's times, and the pool over time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
"""One for each request."""


class PoolSample(NamedTuple):
    """One replica's pool at one time. Terms in slots; tokens to free add up to the pool."""

    time_s: float
    num_running: int
    """Sequences in memory that have not ended."""
    num_waiting: int
    tokens: int
    reserved: int
    internal: int
    external: int
    cached: int
    free: int
    saved: int
    """Slots that sharing saves: logical less physical; not part of the sum."""
    logical: int
    """Slots in all tables: what it would take without sharing."""
    num_held: int = 0
    """Sequences with blocks: those that run, and ended members of a batch."""
    lasts_s: float = 0.0
    """Seconds for which it stands: of a replica at work until its next sample, idle time left out;
    of an idle one the idle time until the next such."""


@dataclass(slots=True)
class RequestTimes:
    """By request, in the order of their ends (of several replicas: in that in which the simulation
    came to them); 8 bytes a figure. Times in seconds."""

    arrival_s: array[float] = field(default_factory=lambda: array("d"))
    first_token_s: array[float] = field(default_factory=lambda: array("d"))
    finished_s: array[float] = field(default_factory=lambda: array("d"))
    """Of its last sequence; under `contiguous` of its batch."""
    num_input: array[int] = field(default_factory=lambda: array("l"))
    num_output: array[int] = field(default_factory=lambda: array("l"))
    """Tokens of each of its sequences."""
    num_cached: array[int] = field(default_factory=lambda: array("l"))
    """Prompt tokens that were found in the prefix cache."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    def ttft_s(self) -> Values:
        """Seconds from arrival to the first token."""
        return _array(self.first_token_s) - _array(self.arrival_s)

    def tpot_s(self) -> Values:
        """Seconds between tokens, of those with an output of two or more."""
        num_output = _array(self.num_output)
        several = num_output > 1
        spans = (_array(self.finished_s) - _array(self.first_token_s))[several]
        return np.asarray(spans / (num_output[several] - 1))

    def e2e_s(self) -> Values:
        """Seconds from arrival to the end."""
        return _array(self.finished_s) - _array(self.arrival_s)

    def normalized_s(self) -> Values:
        """Seconds from arrival to the end for each output token (paper, section 6.1)."""
        return np.asarray(self.e2e_s() / _array(self.num_output))

    def since(self, begin_s: float) -> RequestTimes:
        """Those that came at `begin_s` or later."""
        kept = RequestTimes()
        indexes = np.flatnonzero(_array(self.arrival_s) >= begin_s)
        for one in fields(self):
            column = getattr(self, one.name)
            getattr(kept, one.name).extend(column[i] for i in indexes)
        return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """What became of a workload."""

    num_requests: int
    """Requests that came."""
    num_refused: int
    """Requests that can never fit, by the first reason in `refusals`."""
    refusals: tuple[str, ...]
    """A few of the reasons."""
    times: RequestTimes
    """Of those that have ended."""
    samples: list[PoolSample]
    """The pool over time (of all replicas, one after another in time); borders between reserved
    and internal are settled as far as requests have ended."""
    end_s: float
    """When the simulation stopped."""
    num_steps: int
    busy_s: float
    """Seconds in which steps ran, over all replicas."""
    mean_seqs: float
    """Sequences computed in a step, mean over steps."""
    num_preemptions: int
    num_tokens_computed: int
    num_input_tokens: int
    """Of the requests that have ended."""
    num_output_tokens: int
    """The same, over all their sequences."""
    num_cached_tokens: int
    """Prompt tokens that were found instead of computed, over the requests that have ended."""
    num_prompt_tokens: int
    """Prompt tokens of the requests that have ended."""
    wall_s: float
    """What simulating took on this machine."""


def _array(column: Sequence[float]) -> Values:
    return np.asarray(column, dtype=np.float64)
