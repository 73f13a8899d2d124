"""The part of a run over which the pool is averaged, and its averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.lab.results import PoolSample, SimResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Neither the filling of the pool nor its draining, in seconds of the run."""

    start_s: float
    end_s: float


def window_of(result: SimResult, arrivals: Sequence[float | None]) -> Window:
    """From a third of the time in which requests come to the last arrival (the paper's protocol:
    300 to 900 s of 900). Of requests that come all at once, from the end of the first quarter of
    the work, in tokens, to that of the third: the same share of it under every policy."""
    known = [arrival for arrival in arrivals if arrival is not None]
    first_s, last_s = min(known, default=0.0), max(known, default=0.0)
    if last_s > first_s:
        return Window(start_s=first_s + (last_s - first_s) / 3, end_s=last_s)
    times = result.times
    if not len(times):
        return Window(start_s=first_s, end_s=result.end_s)
    ends = np.asarray(times.finished_s, dtype=np.float64)
    order = np.argsort(ends, kind="stable")
    work = np.cumsum((np.asarray(times.num_input) + np.asarray(times.num_output))[order])
    start_s, end_s = ends[order][np.searchsorted(work, (0.25 * work[-1], 0.75 * work[-1]))]
    if start_s == end_s:  # of a batch that ends as a whole
        start_s = first_s
    return Window(start_s=float(start_s), end_s=float(end_s))


def pool_means(samples: Sequence[PoolSample], window: Window) -> dict[str, float]:
    """Mean over the window of each field, each sample for the seconds in which it stands there;
    over all of the run if none does."""
    if not samples:
        return dict.fromkeys(PoolSample._fields, 0.0)
    table = np.array(samples, dtype=float)
    names = PoolSample._fields
    begin, lasts = table[:, names.index("time_s")], table[:, names.index("lasts_s")]
    end = np.minimum(begin + lasts, window.end_s)
    weights = np.maximum(end - np.maximum(begin, window.start_s), 0.0)
    if not weights.any():
        weights = lasts if lasts.any() else np.ones(len(samples))
    means = weights @ table / weights.sum()
    return dict(zip(names, means.tolist(), strict=True))
