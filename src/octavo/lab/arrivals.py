"""When requests come: arrival processes, as lazy streams of requests with times.

All are seeded, and give the same times everywhere: random streams are those that Python and numpy
keep from version to version.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from octavo.errors import ConfigError
from octavo.lab.trace import TraceRequest
from octavo.util import flag_name

_STEP_S = 0.01
"""Of the artifact's recipe."""
_MANY = 4096
PAPER_TOKENS = 2048
"""Requests of so many tokens or more are no part of the paper's workloads."""


def at_trace_times(requests: Iterable[TraceRequest], scale: float = 1.0) -> Iterator[TraceRequest]:
    """As the trace says; `scale` multiplies the times (and the pauses of sessions)."""
    _check("time_scale", scale)
    if scale == 1.0:
        yield from requests
        return
    for request in requests:
        yield dataclasses.replace(
            request,
            arrival_s=None if request.arrival_s is None else request.arrival_s * scale,
            think_s=None if request.think_s is None else request.think_s * scale,
        )


def all_at_once(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """All are there at the start."""
    return _timed(requests, itertools.repeat(0.0))


def untimed(requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
    """Without times, for a closed loop: `simulate(..., concurrency=)` says when each comes."""
    return _timed(requests, itertools.repeat(None))


def poisson(requests: Iterable[TraceRequest], rate: float, seed: int = 0) -> Iterator[TraceRequest]:
    """Independent of each other: exponential gaps of mean 1 / `rate` seconds."""
    return gamma(requests, rate, cv=1.0, seed=seed)


def gamma(
    requests: Iterable[TraceRequest], rate: float, cv: float, seed: int = 0
) -> Iterator[TraceRequest]:
    """Gamma-distributed gaps of mean 1 / `rate` seconds and coefficient of variation `cv`: 1 is
    Poisson, more comes in bursts, less is steadier. The first request comes after one gap."""
    _check("rate", rate)
    _check("cv", cv)
    return _timed(requests, _gamma_times(rate, cv, seed))


def paper_trace(
    lengths: Sequence[TraceRequest],
    rate: float,
    duration_s: float,
    *,
    seed: int = 0,
    max_tokens: int = PAPER_TOKENS,
) -> list[TraceRequest]:
    """The recipe of the PagedAttention paper's artifact, exactly.

    A Poisson number of arrivals in each step of 10 ms; the lengths that are below `max_tokens`
    together, in their order, repeated as often as needed, cut to the number of arrivals, shuffled.
    Raises `ConfigError` when no length is left.
    """
    _check("rate", rate)
    _check("duration", duration_s)
    num_steps = int(duration_s * (1 / _STEP_S))
    counts = np.random.RandomState(seed).poisson(lam=rate * _STEP_S, size=num_steps)
    times = [i * _STEP_S for i in np.repeat(np.arange(num_steps), counts).tolist()]
    kept = [request for request in lengths if request.num_tokens < max_tokens]
    if not kept:
        raise ConfigError(f"no request of the trace is below {max_tokens} tokens")
    drawn = list(repeat(kept, len(times)))
    random.Random(seed).shuffle(drawn)
    return list(_timed(drawn, times))


def until(requests: Iterable[TraceRequest], duration_s: float) -> Iterator[TraceRequest]:
    """Those that come before `duration_s`; they must come in order."""
    return itertools.takewhile(lambda request: (request.arrival_s or 0.0) < duration_s, requests)


def repeat(requests: Sequence[TraceRequest], num: int | None = None) -> Iterator[TraceRequest]:
    """The first `num` of the requests over and over, one at a time; None: endlessly. Lengths and
    named prefixes repeat, and times do not make sense any more. Each round has hash ids of its own:
    prompts are as alike as in the trace, not the same ones over again."""
    num_ids = 1 + max((max(r.hash_ids) for r in requests if r.hash_ids), default=-1)
    return itertools.islice(_rounds(requests, num_ids), num)


def _rounds(requests: Sequence[TraceRequest], num_ids: int) -> Iterator[TraceRequest]:
    yield from requests
    for first_id in itertools.count(num_ids, num_ids):
        if not num_ids:
            yield from requests
            continue
        for request in requests:
            ids = tuple(first_id + block for block in request.hash_ids)
            yield dataclasses.replace(request, hash_ids=ids)


def _gamma_times(rate: float, cv: float, seed: int) -> Iterator[float]:
    rng, shape, now_s = np.random.RandomState(seed), 1 / cv**2, 0.0
    while True:
        for gap_s in rng.gamma(shape, 1 / (shape * rate), size=_MANY).tolist():
            now_s += gap_s
            yield now_s


def _timed(
    requests: Iterable[TraceRequest], times: Iterable[float | None]
) -> Iterator[TraceRequest]:
    """With these times, and no others: sessions go, an arrival process decides alone."""
    for request, arrival_s in zip(requests, times, strict=False):
        if request.arrival_s != arrival_s or request.session:
            request = dataclasses.replace(request, arrival_s=arrival_s, session="", think_s=None)
        yield request


def _check(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{flag_name(name)} must be a number above 0, got {value:g}")
