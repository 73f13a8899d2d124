"""Which part of a workload is simulated, and what one of several replicas sees of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.errors import ConfigError, TraceError
from octavo.lab.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive requests of a workload, from time 0 on; each comes at a known time."""

    requests: Sequence[TraceRequest]
    first: int
    """Index of its first request in the workload."""
    num_all: int
    """Requests of the workload."""
    rate: float
    """Requests a second in the slice."""
    rate_all: float
    """Requests a second in the workload."""
    block_tokens: int = 0
    """See `Trace.block_tokens`."""

    @property
    def span_s(self) -> float:
        """Seconds in which its requests come."""
        return len(self.requests) / self.rate

    @property
    def mean_input(self) -> float:
        """Mean prompt, in tokens."""
        return sum(r.num_input for r in self.requests) / len(self.requests)

    @property
    def mean_output(self) -> float:
        """Mean output of a request, over all its sequences, in tokens."""
        return sum(r.num_output * r.num_seqs for r in self.requests) / len(self.requests)

    @property
    def max_tokens(self) -> int:
        """Longest prompt and output together."""
        return max(r.num_tokens for r in self.requests)

    @property
    def has_prefixes(self) -> bool:
        """Whether the trace says which prompts begin alike."""
        return any(r.hash_ids or r.prefix_tokens for r in self.requests)

    def new_tokens(self) -> list[int]:
        """Prompt tokens of each request that no request before it had: what one replica computes
        if it keeps everything."""
        seen, found = set[object](), []
        for request in self.requests:
            num = 0
            if request.prefix_tokens:
                key = (request.prefix, request.prefix_tokens)
                num = request.prefix_tokens if key in seen else 0
                seen.add(key)
            known = num == request.prefix_tokens
            for block in request.hash_ids:
                known = known and block in seen
                num += self.block_tokens * known
                seen.add(block)
            found.append(max(1, request.num_input - num))
        return found

    def __str__(self) -> str:
        if len(self.requests) == self.num_all:
            return f"all {self.num_all:,} requests at {self.rate:.4g} a second"
        last = self.first + len(self.requests)
        text = f"requests {self.first + 1:,}-{last:,} of {self.num_all:,}, the busiest stretch: "
        text += f"{self.rate:.4g} a second"
        if abs(self.rate_all / self.rate - 1) > 0.01:
            text += f" (all of it: {self.rate_all:.4g})"
        return text

    def of_replicas(self, num: int, num_replicas: int) -> Slice:
        """What the first `num` of `num_replicas` get from a round-robin router."""
        chosen = [r for i, r in enumerate(self.requests) if i % num_replicas < num]
        return replace(self, requests=chosen, rate=self.rate * num / num_replicas)

    def first_of(self, num_requests: int) -> Slice:
        """The first so many; their rhythm stays."""
        return replace(self, requests=self.requests[:num_requests])

    def at_rate(self, rate: float) -> Slice:
        """The same requests in the same rhythm, faster or slower."""
        scale = self.rate / rate
        requests = [replace(r, arrival_s=(r.arrival_s or 0.0) * scale) for r in self.requests]
        return replace(self, requests=requests, rate=rate)

    def evenly(self) -> Slice:
        """The same requests at even distances."""
        requests = [replace(r, arrival_s=i / self.rate) for i, r in enumerate(self.requests)]
        return replace(self, requests=requests)


def busiest(
    requests: Sequence[TraceRequest],
    num_requests: int | None,
    *,
    rate: float | None = None,
    block_tokens: int = 0,
) -> Slice:
    """The `num_requests` (None: all) consecutive requests that come within the shortest time.

    `rate` stretches their times to that mean. Requests of a session come at their `arrival_s`,
    whatever becomes of those before. Raises `ConfigError` where no rate is known, `TraceError` for
    an empty workload.
    """
    if not requests:
        raise TraceError("the trace has no requests: nothing to plan for")
    times = [r.arrival_s for r in requests]
    known = [t for t in times if t is not None]
    if len(known) < len(times):
        raise ConfigError(
            f"{len(times) - len(known):,} of {len(times):,} requests say no time of arrival, so no "
            "rate is known: say --rate (requests a second)"
        )
    num = len(requests) if num_requests is None else min(num_requests, len(requests))
    first = 0
    if 1 < num < len(known):
        spans = [known[i + num - 1] - known[i] for i in range(len(known) - num + 1)]
        first = min(range(len(spans)), key=spans.__getitem__)
    mean = _rate(known)
    slice_rate = _rate(known[first : first + num])
    if slice_rate is None or mean is None:
        raise ConfigError(
            f"{num:,} requests that come at one time have no rate: say --rate (requests a second)"
        )
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(f"--rate must be above 0 requests a second, got {rate:g}")
    began = known[first]
    chosen = [
        replace(r, arrival_s=t - began, think_s=None)
        for r, t in zip(requests[first : first + num], known[first : first + num], strict=True)
    ]
    found = Slice(chosen, first, len(requests), slice_rate, mean, block_tokens)
    if rate is None:
        return found
    return replace(found.at_rate(rate), rate_all=rate)


def _rate(times: Sequence[float]) -> float | None:
    """Requests a second; None of requests that come at once."""
    span = times[-1] - times[0]
    return (len(times) - 1) / span if span > 0 else None
