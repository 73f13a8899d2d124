"""Steps that were measured: what is in them, what they took, and medians over rounds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from octavo.attended import counts_within
from octavo.plan import StepPlan

RowKind = Literal["prefill", "decode", "mixed", "live", "pool copy", "to host", "from host"]
Step = tuple["Counts", "Times"]

_GROUP = 8
"""Consecutive steps of a served workload that become one row."""


@dataclass(frozen=True, slots=True)
class Row:
    """What steps of one kind took. The counts are what is in a step, on average where several are
    one row; prompts are shares of more than one token, or that do not sample."""

    kind: RowKind
    num_prefill_tokens: float
    prefill_context: float
    """Pairs of a prompt's token and one before it or itself."""
    num_decodes: float
    decode_context: float
    """Sum of the decodes' lengths."""
    num_samples: float
    num_prompts: float
    num_host_blocks: int
    num_copied_blocks: int
    seconds: float
    """From one step's end to the next one's where requests were served; else of the runner."""
    compute_s: float
    """Of it, computing and sampling."""
    copy_s: float
    """Of it, copies to and from the host."""
    num_steps: int
    """Steps that the row is the mean of."""
    num_rounds: int
    """How often each was measured; medians."""
    spread: float
    """Between the quartiles of `seconds` over rounds, as a share of the median."""
    jitter: float = 1.0
    """Of served requests: the median time of all their steps together over the sum of the steps'
    medians, in which no step is held up."""


class Counts(NamedTuple):
    """What is in a step; names as in `Row`."""

    num_prefill_tokens: float = 0
    prefill_context: float = 0
    num_decodes: float = 0
    decode_context: float = 0
    num_samples: float = 0
    num_prompts: float = 0


class Times(NamedTuple):
    """Of one step, in seconds."""

    seconds: float
    compute_s: float
    copy_s: float


def counts_of(plan: StepPlan, windows: Sequence[int] = (0,)) -> Counts:
    """What is in a plan. windows: see `octavo.attended`."""
    return Counts(*counts_within(plan, windows))


def median_row(
    kind: RowKind,
    counts: Sequence[Counts],
    times: Sequence[Sequence[Times]],
    num_blocks: int = 0,
    jitter: float = 1.0,
) -> Row:
    """The mean of several steps, each the median over its rounds: `times` has one list a step."""
    mean = Counts(*(statistics.fmean(column) for column in zip(*counts, strict=True)))
    middle = [_middle(each) for each in times]
    seconds, compute_s, copy_s = (statistics.fmean(c) for c in zip(*middle, strict=True))
    spreads = [_spread([t.seconds for t in each]) for each in times]
    return Row(
        kind,
        *mean,
        num_host_blocks=num_blocks if kind in ("to host", "from host") else 0,
        num_copied_blocks=num_blocks if kind == "pool copy" else 0,
        seconds=seconds,
        compute_s=compute_s,
        copy_s=copy_s,
        num_steps=len(times),
        num_rounds=len(times[0]),
        spread=statistics.fmean(spreads),
        jitter=jitter,
    )


def _middle(times: Sequence[Times]) -> Times:
    """Medians of the parts, and their sum: of the whole one alone, the parts might be more."""
    compute_s = statistics.median(t.compute_s for t in times)
    copy_s = statistics.median(t.copy_s for t in times)
    rest_s = statistics.median(t.seconds - t.compute_s - t.copy_s for t in times)
    return Times(compute_s + copy_s + rest_s, compute_s, copy_s)


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle


def wave_rows(runs: Sequence[Sequence[Step]]) -> list[Row]:
    """Step by step the median over the runs of equal plans; then a few steps each as one row.

    Runs that took other steps than most did are left out."""
    taken = [tuple(counts for counts, _ in run) for run in runs]
    plans = Counter(taken).most_common(1)[0][0]
    alike = [run for run, counts in zip(runs, taken, strict=True) if counts == plans]
    steps = [[run[index][1] for run in alike] for index in range(len(plans))]
    in_all = statistics.median(sum(run[i][1].seconds for i in range(len(plans))) for run in alike)
    jitter = in_all / sum(_middle(each).seconds for each in steps)
    rows: list[Row] = []
    first = 0
    for index in range(1, len(plans) + 1):
        over = index == len(plans) or index - first == _GROUP
        if over or bool(plans[index].num_prompts) != bool(plans[first].num_prompts):
            rows.append(median_row("live", plans[first:index], steps[first:index], jitter=jitter))
            first = index
    return rows
