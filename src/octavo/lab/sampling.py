"""Samples of the pool over simulated time, in bounded memory."""

from __future__ import annotations

import math
from typing import NamedTuple

from octavo.kv.manager import KVCacheManager
from octavo.lab.results import PoolSample

MAX_SAMPLES = 1_000
"""Of a replica at work, where no interval was asked for: it is doubled before there are more."""
_FIRST_INTERVAL_S = 1 / 64
_GOLDEN = (math.sqrt(5) - 1) / 2


class _Seen(NamedTuple):
    sample: PoolSample
    seconds: list[float]
    """One number: for how long it stands."""


class PoolSampler:
    """Looks at one pool: at work, in the first step that begins after so many seconds; and idle.

    A sample at work stands for the time at work until the next one of these, an idle one for the
    idle time until the next idle one. So means over time are right however uneven the load is.
    """

    def __init__(self, sample_s: float | None = None) -> None:
        """`sample_s`: seconds between samples; None: few at first, and more when there would be too
        many samples, which makes `MAX_SAMPLES` / 2 of them or more."""
        self._interval_s = _FIRST_INTERVAL_S if sample_s is None else sample_s
        self._may_thin = sample_s is None
        self._working: list[_Seen] = []
        self._idle: list[_Seen] = []
        self._is_idle = False
        self._since_s = 0.0
        """Up to when time has been accounted for."""
        self._idle_due_s = -math.inf
        self._num_wakes = 0
        self.next_s = -math.inf
        """When the next sample at work is due."""

    def look(self, now_s: float, kv: KVCacheManager, num_waiting: int) -> None:
        """Take a sample, of a replica at work. The lengths of all requests are known in advance, so
        the ledger's border between reserved and internal is the one that will turn out to be true.
        """
        self._account(now_s)
        self._working.append(_Seen(_sample(now_s, kv, num_waiting), [0.0]))
        if self._may_thin and len(self._working) >= MAX_SAMPLES:
            _thin(self._working)
            _thin(self._idle)
            spacing_s = (now_s - self._working[0].sample.time_s) / len(self._working)
            self._interval_s = max(2 * self._interval_s, spacing_s)
        self.next_s = now_s + self._interval_s

    def rest(self, now_s: float, kv: KVCacheManager) -> None:
        """There is nothing to do from now on."""
        if self._is_idle:
            return
        self._account(now_s)
        self._is_idle = True
        if now_s >= self._idle_due_s:
            self._idle.append(_Seen(_sample(now_s, kv, 0), [0.0]))
            self._idle_due_s = now_s + self._interval_s

    def wake(self, now_s: float) -> None:
        """There is work again. Where a sample is long due it is taken somewhere in the next
        interval: always at the start, pools would look emptier than they are."""
        if not self._is_idle:
            return
        self._account(now_s)
        self._is_idle = False
        if self._working and self.next_s <= now_s:
            self._num_wakes += 1
            self.next_s = now_s + self._interval_s * (self._num_wakes * _GOLDEN % 1.0)

    def samples(self, end_s: float) -> list[PoolSample]:
        """All samples in order, each with the seconds for which it stands; those of none are left
        out. end_s: when the simulation stopped."""
        self._account(max(end_s, self._since_s))
        seen = [
            sample._replace(lasts_s=seconds[0])
            for sample, seconds in (*self._working, *self._idle)
            if seconds[0] > 0
        ]
        return sorted(seen, key=lambda sample: sample.time_s)

    def _account(self, now_s: float) -> None:
        seen = self._idle if self._is_idle else self._working
        if seen:
            seen[-1].seconds[0] += now_s - self._since_s
        self._since_s = now_s


def _sample(now_s: float, kv: KVCacheManager, num_waiting: int) -> PoolSample:
    ledger = kv.ledger()
    return PoolSample(
        now_s, kv.num_sequences, num_waiting, ledger.tokens, ledger.reserved, ledger.internal,
        ledger.external, ledger.cached, ledger.free, ledger.shared_saved,
        ledger.num_logical_blocks * ledger.block_size, kv.num_holders,
    )  # fmt: skip


def _thin(seen: list[_Seen]) -> None:
    """Drop every second one; the one before it stands for its time too."""
    for kept, dropped in zip(seen[::2], seen[1::2], strict=False):
        kept.seconds[0] += dropped.seconds[0]
    del seen[1::2]
