"""Which replica a request goes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import get_args

from octavo.errors import ConfigError
from octavo.lab.config import Router
from octavo.lab.trace import TraceRequest

OVERLOAD = 1.5
"""See `PrefixAware`."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._turn = -1

    def pick(self, request: TraceRequest, loads: Sequence[int]) -> int:
        """Number of the replica. `loads`: by replica, tokens outstanding: prompts and outputs of
        all its requests that have not ended."""
        self._turn = (self._turn + 1) % len(loads)
        return self._turn


class LeastLoaded:
    """Where the fewest tokens are outstanding; the first of those that are equal."""

    def pick(self, request: TraceRequest, loads: Sequence[int]) -> int:
        """See `RoundRobin.pick`."""
        return loads.index(min(loads))


class PrefixAware:
    """Where the longest beginning of the prompt was sent before, unless that replica is overloaded.

    The rule: of the replicas that have got the longest beginning of the prompt (named prefix, then
    `hash_ids`), the least loaded one; but if its tokens outstanding are more than `OVERLOAD` times
    those of the least loaded replica plus `spare_tokens`, or nobody knows any of it, the least
    loaded replica of all (of equal ones that which remembers least). What a replica was sent is
    remembered for the last `max_tokens` tokens, as many as its pool holds: what was sent before
    that is likely evicted.
    """

    def __init__(
        self, num_replicas: int, block_tokens: int, max_tokens: int, spare_tokens: int
    ) -> None:
        self._block_tokens = max(1, block_tokens)
        self._max_blocks = max(1, max_tokens // self._block_tokens)
        self._spare_tokens = spare_tokens
        self._known: list[OrderedDict[int | str, None]] = [
            OrderedDict() for _ in range(num_replicas)
        ]
        """By replica, ids and names of prefixes that it was sent, the last used behind."""

    def pick(self, request: TraceRequest, loads: Sequence[int]) -> int:
        """See `RoundRobin.pick`."""
        least = min(range(len(loads)), key=lambda i: (loads[i], len(self._known[i]), i))
        matches = [self._match(request, known) for known in self._known]
        longest = max(matches)
        chosen = least
        if longest:
            best = min(
                (i for i, num in enumerate(matches) if num == longest), key=lambda i: loads[i]
            )
            if loads[best] <= OVERLOAD * loads[least] + self._spare_tokens:
                chosen = best
        self._learn(request, self._known[chosen])
        return chosen

    def _match(self, request: TraceRequest, known: OrderedDict[int | str, None]) -> int:
        """Tokens of the prompt's beginning."""
        num_tokens = 0
        if request.prefix_tokens:
            if request.prefix not in known:
                return 0
            num_tokens = request.prefix_tokens
        for block in request.hash_ids:
            if block not in known:
                break
            num_tokens += self._block_tokens
        return num_tokens

    def _learn(self, request: TraceRequest, known: OrderedDict[int | str, None]) -> None:
        # A prefix outlives what follows it, as in the prefix cache: its beginning is used last.
        for block in reversed(request.hash_ids):
            known[block] = None
            known.move_to_end(block)
        if request.prefix_tokens:
            known[request.prefix] = None
            known.move_to_end(request.prefix)
        while len(known) > self._max_blocks:
            known.popitem(last=False)


AnyRouter = RoundRobin | LeastLoaded | PrefixAware


def make_router(
    name: Router, num_replicas: int, *, block_tokens: int, max_tokens: int, spare_tokens: int
) -> AnyRouter:
    """The router of that name; see `PrefixAware` for the rest. Raises `ConfigError` for a name that
    is none."""
    if name == "round-robin":
        return RoundRobin()
    if name == "least-loaded":
        return LeastLoaded()
    if name == "prefix-aware":
        return PrefixAware(num_replicas, block_tokens, max_tokens, spare_tokens)
    raise ConfigError(f"--router must be one of {', '.join(get_args(Router))}, got {name!r}")
