"""What limits an engine: kinds of limits, evidence for them, and changes with what they bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.attended import attended
from octavo.lab.config import SimConfig
from octavo.lab.results import PoolSample

Limit = Literal[
    "memory",
    "queue (seats)",
    "queue (bursts)",
    "compute (prefill)",
    "compute (decode)",
    "nothing",
    "not examined",
]
LOADS = (1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
"""How many times the rate a replica is tried at: what it serves is known this finely."""
FURTHER = 2.0
"""Loads that many times what is served already are not tried: enough is known."""
MATTERS = 0.1
"""Share of the rate that a change must bring for its resource to be what limits."""
NUM_QUESTIONS = 4
BESIDE_COMPUTE = 0.4
"""And share of what twice the compute brings: a batch twice as large is slower, too."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why requests waited: shares of waiting requests x time, by what they waited for."""

    mean: float
    """Waiting requests, mean over time."""
    memory: float
    """The pool had no room for a mean prompt above the watermark."""
    seats: float
    """max_num_seqs were running."""
    compute: float
    """There was room: the token budget was spent on others, or the step before still ran."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing changed, and the load that is served then."""

    name: str
    flags: str
    """What to say to the engine; empty for what is only a question."""
    load: float
    """Times the rate that the objectives are kept at."""
    gain: float
    """By which share that is more than without the change."""
    is_least: bool = False
    """The load was not tried any higher, or there was no time: it is at least that."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What limits an answer."""

    load: float
    """Times its rate that the answer still serves; of `LOADS`."""
    limit: Limit
    why: str
    """The evidence, in a sentence."""
    waiting: Waiting
    """At the load at which it fails, or the highest that was tried."""
    missed_ttft: float
    missed_tpot: float
    """Shares of the requests at that load."""
    num_preemptions: int
    stress: float
    """That load, times the rate."""
    prefill_share: float
    """Of the time of a mean step: what its prompts cost."""
    questions: tuple[Change, ...]
    """Twice the memory, the compute, the seats; even arrivals."""
    changes: tuple[Change, ...]
    """What could be changed, the most helpful first."""
    untried: tuple[str, ...]
    """Changes for which there was no time."""


def waiting_of(
    samples: Sequence[PoolSample],
    config: SimConfig,
    mean_prompt: float,
    watermark: float | None = None,
) -> Waiting:
    """Look at who waited, sample by sample; the samples are evenly spaced, each of one replica.
    watermark: the share of the pool that was kept free, where it was more than the config's."""
    slots, windows = config.num_slots, config.pool_windows
    kept = config.watermark if watermark is None else watermark
    prompt = len(windows) * attended(mean_prompt, windows)
    needed = prompt + len(windows) * config.block_size + kept * slots
    shares = {"memory": 0, "seats": 0, "compute": 0}
    for sample in samples:
        if sample.num_running >= config.max_num_seqs:
            shares["seats"] += sample.num_waiting
        elif sample.free + sample.cached < needed:
            shares["memory"] += sample.num_waiting
        else:
            shares["compute"] += sample.num_waiting
    total = sum(shares.values())
    return Waiting(total / max(1, len(samples)), *(n / max(1, total) for n in shares.values()))


def limit_of(gains: Mapping[str, float], prefill_share: float, late: bool) -> Limit:
    """Twice the compute nearly always helps: batches end sooner, and so do those who wait for
    memory or seats. So it is what limits only where nothing else is."""
    others: dict[Limit, float] = {
        "memory": gains["twice the memory"],
        "queue (seats)": gains["twice the seats"],
        "queue (bursts)": gains["even arrivals"],
    }
    first = max(others, key=lambda name: others[name])
    if others[first] >= max(MATTERS, BESIDE_COMPUTE * gains["twice the compute"]):
        return first
    most = prefill_share > 0.5 or (late and prefill_share > 0.3)
    return "compute (prefill)" if most else "compute (decode)"


def why(limit: Limit, gains: Mapping[str, float], prefill_share: float) -> str:
    if limit == "not examined":
        return "no time was left to ask what would help: --time-limit gives more"
    if limit == "nothing":
        return f"the objectives are kept at {LOADS[-1]:g} times the rate, and more was not tried"
    told = ", ".join(f"{name} {gain:+.0%}" for name, gain in gains.items())
    if limit.startswith("compute"):
        return f"nothing but faster steps helps ({told}); prompts are {prefill_share:.0%} of a step"
    return f"requests a second that are served: {told}"
