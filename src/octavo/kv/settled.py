"""The ledger over time, with the border between reserved and internal settled in hindsight.

Whether an unfilled slot will be used by its sequence is known for good when the sequence gives its
blocks back: what it had no use for by then was internal fragmentation all along (paper, section
3.1). The slot of its last token, which is sampled and never computed, was reserved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

from octavo.kv.ledger import PoolLedger
from octavo.kv.table import BlockTable


class LedgerSample(NamedTuple):
    """The pool at one time, in slots. tokens to free are the ledger's terms: they add up to it."""

    time_s: float
    num_running: int
    """Sequences with blocks, ended members of a batch included."""
    num_waiting: int
    """As it was told."""
    tokens: int
    reserved: int
    internal: int
    external: int
    cached: int
    free: int
    saved: int
    """Slots that sharing saves: logical less physical; no part of the sum."""
    logical: int
    """Slots in all tables: what it would take without sharing."""
    undecided: int
    """Of the reserved ones those that turn out internal if all that run end now."""


class MeanLedger(NamedTuple):
    """Means of samples over a span of time."""

    seconds: float
    """Length of the span that samples cover; 0: it is one sample."""
    num_running: float
    num_waiting: float
    tokens: float
    reserved: float
    internal: float
    external: float
    cached: float
    free: float
    saved: float
    logical: float
    undecided: float
    """See `LedgerSample`: so much may still go from reserved to internal."""


class _Open(NamedTuple):
    """Unfilled slots of a sequence that were counted as reserved."""

    first: int
    """Index of the first sample in which it was so, up to the next entry or the last sample."""
    end: int
    """Its first so many slots held a token or were reserved."""
    floor: int
    """Those before are not counted here: another owner of the same block does."""


class LedgerHistory:
    """Samples of a pool, in bounded memory: when there are too many, every second one goes and
    the spacing of the coming ones doubles.

    Slots that are promised to forks, which get them a few steps later, count as reserved and are
    not settled. Of a shared block that is not full, one owner tells what became of the rest.
    """

    def __init__(
        self,
        ledger: Callable[[], PoolLedger],
        tables: Callable[[], Iterable[BlockTable]],
        *,
        max_samples: int = 4096,
        spacing_s: float = 0.0,
    ) -> None:
        """See `KVState.keep_history`, which makes it: `ledger` and `tables` are of that pool."""
        assert max_samples >= 2, f"max_samples {max_samples}"
        self._ledger = ledger
        self._tables = tables
        self._max_samples = max_samples
        self._spacing_s = spacing_s
        self._samples: list[LedgerSample] = []
        """As they were seen: unfilled slots count as reserved as long as they may be filled."""
        self._moved = [0]
        """Differences from sample to sample of the slots that turned out internal."""
        self._open: dict[BlockTable, list[_Open]] = {}

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def spacing_s(self) -> float:
        """Least seconds from one sample to the next that `is_due`."""
        return self._spacing_s

    def is_due(self, now_s: float) -> bool:
        """Whether the last sample is long enough ago."""
        return not self._samples or now_s >= self._samples[-1].time_s + self._spacing_s

    def sample(self, now_s: float, num_waiting: int = 0, ledger: PoolLedger | None = None) -> None:
        """Look at the pool now; times must not run backwards. O(sequences). `ledger` is the pool's
        of this moment, from somebody who has it already."""
        assert not self._samples or now_s >= self._samples[-1].time_s, "time runs backwards"
        if len(self._samples) == self._max_samples:
            self._thin_out()
        if ledger is None:
            ledger = self._ledger()
        index = len(self._samples)
        num_running = 0
        tails: set[int] = set()
        for table in self._tables():
            num_running += not table.group
            self._note(table, index, tails)
        self._moved.append(0)
        num_logical = ledger.num_logical_blocks * ledger.block_size
        self._samples.append(
            LedgerSample(
                now_s,
                num_running,
                num_waiting,
                **ledger.terms(),
                saved=ledger.shared_saved,
                logical=num_logical,
                undecided=0,
            )
        )

    def _note(self, table: BlockTable, index: int, tails: set[int]) -> None:
        """Remember up to where a table's slots were counted as reserved in a sample. `tails` has
        the shared blocks that an earlier table tells of."""
        committed, end = table.num_committed, table.fillable
        floor = 0
        if table.may_share and committed % table.block_size:
            tail = committed // table.block_size
            if table.block_ids[tail] in tails:
                floor = (tail + 1) * table.block_size
            tails.add(table.block_ids[tail])
        is_open = end > max(committed, floor)
        entries = self._open.get(table)
        if entries is None:
            if is_open:
                self._open[table] = [_Open(index, end, floor)]
            return
        while entries and entries[0].end <= max(committed, entries[0].floor):
            entries.pop(0)  # filled by now: it was reserved indeed
        if not entries and not is_open:
            del self._open[table]
        elif not entries or (entries[-1].end, entries[-1].floor) != (end, floor):
            entries.append(_Open(index, end, floor))

    def settle(self, table: BlockTable, num_wanted: int) -> None:
        """A sequence is over, or preempted: what was behind its first `num_wanted` slots was
        internal."""
        entries = self._open.pop(table, None)
        if entries is not None:
            _add_unwanted(self._moved, entries, num_wanted, len(self._samples))

    def _thin_out(self) -> None:
        """Drop every second sample."""
        samples = self._samples
        kept = samples[::2]
        moved = list(accumulate(self._moved))[: len(samples) : 2]
        seconds = samples[-1].time_s - samples[0].time_s
        self._spacing_s = max(2 * self._spacing_s, seconds / len(kept))
        self._samples = kept
        self._moved = [b - a for a, b in pairwise([0, *moved, 0])]
        for entries in self._open.values():
            entries[:] = [entry._replace(first=(entry.first + 1) // 2) for entry in entries]

    # -- what is known of it

    def samples(self) -> list[LedgerSample]:
        """All samples, settled as far as sequences have given their blocks back."""
        undecided = [0] * len(self._moved)
        for table, entries in self._open.items():
            _add_unwanted(undecided, entries, table.num_wanted, len(self._samples))
        sums = zip(self._samples, accumulate(self._moved), accumulate(undecided), strict=False)
        return [
            sample._replace(
                reserved=sample.reserved - moved,
                internal=sample.internal + moved,
                undecided=open_now,
            )
            for sample, moved, open_now in sums
        ]

    def mean(self, from_s: float = -math.inf, until_s: float = math.inf) -> MeanLedger | None:
        """Means over a span of time, in which each sample holds until the next one, and the last
        as long as the span; without an end, until itself. None when no sample holds in it."""
        parts = list(self._weighted(from_s, until_s))
        if not parts:
            return None
        seconds = sum(weight for weight, _ in parts)
        if not seconds:
            return MeanLedger(0.0, *parts[-1][1][1:])
        columns = zip(*(sample[1:] for _, sample in parts), strict=True)
        weights = [weight / seconds for weight, _ in parts]
        return MeanLedger(seconds, *(_sumprod(weights, column) for column in columns))

    def _weighted(self, from_s: float, until_s: float) -> Iterator[tuple[float, LedgerSample]]:
        """The samples that hold in a span, and for how many seconds."""
        samples = self.samples()
        for index, sample in enumerate(samples):
            is_last = index + 1 == len(samples)
            end_s = until_s if is_last else samples[index + 1].time_s
            if is_last and math.isinf(until_s):
                end_s = sample.time_s
            begin_s, end_s = max(from_s, sample.time_s), min(until_s, end_s)
            if begin_s < end_s or (is_last and begin_s == end_s):
                yield end_s - begin_s, sample


def _sumprod(weights: Iterable[float], values: Iterable[float]) -> float:
    """As `math.sumprod` of Python 3.12."""
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def _add_unwanted(sums: list[int], entries: list[_Open], num_wanted: int, until: int) -> None:
    """Add to differences by sample the slots of a table behind its first `num_wanted`."""
    for first, end, floor in reversed(entries):
        num_unwanted = end - max(num_wanted, floor)
        if num_unwanted > 0:
            sums[first] += num_unwanted
            sums[until] -= num_unwanted
        until = first
