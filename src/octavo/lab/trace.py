"""What a workload is made of: requests with lengths and, where known, times and prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace. Lengths in tokens; times in seconds since the trace began."""

    num_input: int
    """Prompt tokens, at least 1."""
    num_output: int
    """Tokens that each of its sequences generates, at least 1."""
    arrival_s: float | None = None
    """When it comes; None where the trace has no times (an arrival process gives them)."""
    hash_ids: tuple[int, ...] = ()
    """Ids of the prompt's blocks of `Trace.block_tokens` tokens, chained: equal ids mean the same
    tokens and the same tokens before them. Tokens behind the last whole id are nobody else's."""
    n: int = 1
    """Samples of the prompt."""
    beam_width: int = 0
    """Decoded by beam search of that width; 0: sampled."""
    priority: int = 0
    """Smaller runs earlier, where the scheduler looks at it."""
    prefix: str = ""
    """Name of a text that its first `prefix_tokens` tokens are taken from, shared by all that name
    it (a system prompt); empty: none."""
    prefix_tokens: int = 0
    session: str = ""
    """Conversation that it belongs to: its requests come one after another."""
    think_s: float | None = None
    """Seconds between the end of the session's request before and this one's arrival; None: it
    comes at `arrival_s` whatever became of the others."""
    client: str = ""
    """Who sent it."""

    @property
    def num_seqs(self) -> int:
        """Sequences that it runs: samples or beams."""
        return self.beam_width or self.n

    @property
    def num_tokens(self) -> int:
        """Prompt and output of one sequence."""
        return self.num_input + self.num_output


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A workload that was read from a file."""

    name: str
    """Of the file, for people."""
    requests: Sequence[TraceRequest]
    """In the order of the file, which is the order of arrival where there are times."""
    block_tokens: int = 0
    """Tokens that one of the `hash_ids` stands for; 0 where there are none."""
    num_skipped: int = 0
    """Lines that could not be read, or requests that a filter left out."""

    @property
    def has_arrivals(self) -> bool:
        """Whether every request says when it comes."""
        return all(request.arrival_s is not None for request in self.requests)

    @property
    def mean_input(self) -> float:
        """Mean prompt length."""
        return sum(r.num_input for r in self.requests) / max(1, len(self.requests))

    @property
    def mean_output(self) -> float:
        """Mean output length."""
        return sum(r.num_output for r in self.requests) / max(1, len(self.requests))
