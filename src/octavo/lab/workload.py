"""From a name or a file to a workload: requests with times, ready to be simulated."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.errors import ConfigError, TraceError
from octavo.lab import arrivals
from octavo.lab.changes import Changes
from octavo.lab.lengths import NAMES, built_in_trace, length_set
from octavo.lab.readers import read_trace
from octavo.lab.rows import MAX_TOKENS
from octavo.lab.sources import Tokenize, TraceFormat
from octavo.lab.trace import Trace, TraceRequest
from octavo.util import flag_name

Arrival = Literal["trace", "poisson", "gamma", "closed", "paper", "all-at-once"]

_DEFAULT_CV = 2.0
_NEEDS: dict[Arrival, tuple[str, ...]] = {
    "poisson": ("rate",),
    "gamma": ("rate",),
    "closed": ("concurrency",),
    "paper": ("rate", "duration"),
}
_TAKES: dict[Arrival, tuple[str, ...]] = {
    "trace": ("duration", "time_scale"),
    "poisson": ("rate", "duration"),
    "gamma": ("rate", "cv", "duration"),
    "closed": ("concurrency",),
    "paper": ("rate", "duration"),
    "all-at-once": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a simulation is fed."""

    about: str
    """For people: the trace, and how its requests come."""
    arrival: Arrival
    requests: Iterable[TraceRequest]
    """In the order of their arrival; each time from the start where it is iterated again."""
    block_tokens: int
    """Tokens that a hash id stands for; `simulate(..., block_tokens=)`."""
    concurrency: int | None
    """Of a closed loop; `simulate(..., concurrency=)`."""
    num_requests: int | None
    """How many they are; None where only their end in time is known."""


def load_trace(
    name: str | Path,
    *,
    format: TraceFormat = "auto",
    skip_bad_lines: bool = False,
    max_tokens: int | None = None,
    limit: int | None = None,
    tokenize: Tokenize | None = None,
    length_scale: float = 1.0,
    seed: int = 0,
) -> Trace:
    """A built-in list of lengths (`lab.lengths.NAMES`), drawn by `seed`, or a file's requests.

    limit: the first so many; of built-in lengths no more than the published list has, so that
    millions of requests (`make_workload(num_requests=)` repeats them) need no more memory.
    length_scale: multiplies lengths and the tokens of hash ids. Others: see `read_trace`.
    Raises `TraceError`, `ConfigError`.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"--num-requests must be at least 1, got {limit}")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"--seed must be from 0 to {2**32 - 1}, got {seed}")
    if not str(name):
        raise TraceError("--trace is empty: name a file, or one of " + ", ".join(NAMES))
    if str(name) in NAMES:
        if format != "auto" or skip_bad_lines or tokenize is not None:
            raise ConfigError(
                f"--trace {name} is no file: --trace-format, --skip-bad-lines and --tokenizer do "
                "nothing to it"
            )
        most = length_set(str(name)).num_requests
        if max_tokens is None:
            trace = built_in_trace(str(name), most if limit is None else min(limit, most), seed)
        else:
            trace = _filtered(built_in_trace(str(name), most, seed), max_tokens, limit)
    elif not Path(name).exists():
        near = difflib.get_close_matches(str(name), NAMES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TraceError(
            f"no trace {str(name)!r}: no such file, and the lengths that octavo brings are "
            f"{', '.join(NAMES)}{hint}"
        )
    else:
        trace = read_trace(
            name,
            format=format,
            skip_bad_lines=skip_bad_lines,
            max_tokens=max_tokens,
            limit=limit,
            tokenize=tokenize,
        )
    return trace if length_scale == 1.0 else _scaled(trace, length_scale)


def make_workload(
    trace: Trace,
    *,
    arrival: Arrival | None = None,
    rate: float | None = None,
    cv: float | None = None,
    concurrency: int | None = None,
    duration: float | None = None,
    time_scale: float = 1.0,
    num_requests: int | None = None,
    seed: int = 0,
    n: int | None = None,
    beam_width: int | None = None,
    shared_prefix_tokens: int = 0,
    priorities: tuple[int, ...] = (),
) -> Workload:
    """The trace's requests under an arrival process; by default the one that the values are of.

    rate: requests a second. duration: seconds in which they come. num_requests: repeat the trace
    until there are so many (not at its own times). n, beam_width: of every request. priorities: one
    of them for each. shared_prefix_tokens: of a text in front of every prompt.
    Raises `ConfigError` for values that are missing, out of range, or of another process.
    """
    kind = arrival or _process(trace, rate, concurrency)
    given = {"rate": rate, "cv": cv, "concurrency": concurrency, "duration": duration}
    _check_process(kind, given | {"time_scale": None if time_scale == 1.0 else time_scale})
    num = _count(trace, kind, num_requests, duration)
    if concurrency is not None and concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {concurrency}")
    changes = Changes(n, beam_width, shared_prefix_tokens, priorities, seed)
    process = _Process(
        trace, kind, num, rate or 0.0, cv or _DEFAULT_CV, concurrency, duration, time_scale, seed
    )
    return Workload(
        about=f"{trace.name}: {process}",
        arrival=kind,
        requests=_Stream(process, changes),
        block_tokens=trace.block_tokens,
        concurrency=concurrency,
        num_requests=num if duration is None else None,
    )


def _count(
    trace: Trace, kind: Arrival, num_requests: int | None, duration: float | None
) -> int | None:
    """How many requests; None: as many as come within the duration."""
    num_all = len(trace.requests)
    if kind == "paper" and num_requests is not None:
        raise ConfigError("--num-requests does nothing to --arrival paper: --duration decides")
    if kind == "trace" and not trace.has_arrivals:
        raise ConfigError(
            f"{trace.name} has no times: say how its requests come, as by --rate or "
            "--arrival all-at-once"
        )
    if kind == "trace" and num_requests is not None and num_requests > num_all:
        raise ConfigError(
            f"--num-requests {num_requests:,} is more than the {num_all:,} of {trace.name}, which "
            "come at its own times: ask for fewer, or add --rate"
        )
    if num_requests is not None:
        return num_requests
    return None if kind in ("poisson", "gamma", "paper") and duration is not None else num_all


def _process(trace: Trace, rate: float | None, concurrency: int | None) -> Arrival:
    if rate is not None:
        return "poisson"
    if concurrency is not None:
        return "closed"
    return "trace" if trace.has_arrivals else "all-at-once"


def _check_process(kind: Arrival, given: dict[str, float | None]) -> None:
    """Refuse a process without its values, and values that would do nothing (invariant I6)."""
    for name, value in given.items():
        flag = flag_name(name)
        if value is None:
            if name in _NEEDS.get(kind, ()):
                raise ConfigError(f"--arrival {kind} needs {flag}")
        elif name not in _TAKES[kind]:
            raise ConfigError(f"{flag} does nothing to --arrival {kind}: drop one of the two")
        elif not 0 < value < float("inf"):
            raise ConfigError(f"{flag} must be a number above 0, got {value:g}")


@dataclass(frozen=True, slots=True)
class _Process:
    """An arrival process over a trace."""

    trace: Trace
    kind: Arrival
    num: int | None
    """None: as many as come within the duration."""
    rate: float
    cv: float
    concurrency: int | None
    duration_s: float | None
    time_scale: float
    seed: int

    def __iter__(self) -> Iterator[TraceRequest]:
        requests = arrivals.repeat(self.trace.requests, self.num)
        if self.kind == "paper":
            assert self.duration_s is not None, "checked before"
            return iter(
                arrivals.paper_trace(
                    self.trace.requests, self.rate, self.duration_s, seed=self.seed
                )
            )
        if self.kind == "closed":
            return arrivals.untimed(requests)
        if self.kind == "all-at-once":
            return arrivals.all_at_once(requests)
        if self.kind == "poisson":
            stream = arrivals.poisson(requests, self.rate, self.seed)
        elif self.kind == "gamma":
            stream = arrivals.gamma(requests, self.rate, self.cv, self.seed)
        else:
            stream = arrivals.at_trace_times(requests, self.time_scale)
        return stream if self.duration_s is None else arrivals.until(stream, self.duration_s)

    def __str__(self) -> str:
        """`100 requests by Poisson, 2 a second`."""
        about = {
            "trace": "at its own times",
            "poisson": f"by Poisson, {self.rate:g} a second",
            "gamma": f"by Gamma of cv {self.cv:g}, {self.rate:g} a second",
            "closed": f"in a closed loop of {self.concurrency}",
            "paper": f"as the paper's artifact draws them, {self.rate:g} a second",
            "all-at-once": "all at once",
        }[self.kind]
        if self.kind == "trace":
            about += self._rhythm()
        if self.kind == "paper":
            long = sum(r.num_tokens >= arrivals.PAPER_TOKENS for r in self.trace.requests)
            if long:
                about += f" (without {long:,} of {arrivals.PAPER_TOKENS:,} tokens or more)"
        if self.num is None:
            return f"{about}, for {self.duration_s:g} s"
        if self.duration_s is None:
            return f"{self.num:,} requests {about}"
        return f"of {self.num:,} requests {about}, those of the first {self.duration_s:g} s"

    def _rhythm(self) -> str:
        """How long the trace takes, and how many a second that makes: times in a wrong unit show
        here."""
        assert self.num is not None, "a trace ends"
        last_s = (self.trace.requests[self.num - 1].arrival_s or 0.0) * self.time_scale
        rate = f" in {last_s:,.1f} s, {self.num / last_s:,.3g} a second" if last_s else ""
        return rate if self.time_scale == 1.0 else f" x {self.time_scale:g}{rate}"


@dataclass(frozen=True, slots=True)
class _Stream:
    """Requests that can be iterated again from the start."""

    process: _Process
    changes: Changes

    def __iter__(self) -> Iterator[TraceRequest]:
        return self.changes.made(iter(self.process))


def _filtered(trace: Trace, max_tokens: int, limit: int | None) -> Trace:
    """The first `limit` of those that are short enough; how many were passed over on the way."""
    places = [i for i, request in enumerate(trace.requests) if request.num_tokens <= max_tokens]
    if not places:
        raise TraceError(f"{trace.name} has no request of at most {max_tokens} tokens")
    is_cut = limit is not None and limit < len(places)
    places = places[:limit]
    num_seen = places[-1] + 1 if is_cut else len(trace.requests)
    kept = [trace.requests[i] for i in places]
    return dataclasses.replace(trace, requests=kept, num_skipped=num_seen - len(kept))


def _scaled(trace: Trace, scale: float) -> Trace:
    if not 0 < scale < float("inf"):
        raise ConfigError(f"--length-scale must be a number above 0, got {scale:g}")
    longest = max(max(request.num_input, request.num_output) for request in trace.requests)
    if longest * scale > MAX_TOKENS:
        raise ConfigError(
            f"--length-scale {scale:g} makes {longest * scale:,.0f} tokens of the longest prompt "
            f"or output: at most {MAX_TOKENS:,}"
        )
    block_tokens = round(trace.block_tokens * scale)
    if trace.block_tokens and (block_tokens < 1 or block_tokens != trace.block_tokens * scale):
        raise ConfigError(
            f"--length-scale {scale:g} makes hash ids of {trace.block_tokens * scale:g} tokens, "
            "which must be a whole number"
        )

    def scaled(num: int, least: int = 1) -> int:
        return max(least, round(num * scale))

    requests = [
        dataclasses.replace(
            request,
            num_input=scaled(request.num_input),
            num_output=scaled(request.num_output),
            prefix_tokens=scaled(request.prefix_tokens, 0),
        )
        for request in trace.requests
    ]
    return dataclasses.replace(trace, requests=requests, block_tokens=block_tokens)
