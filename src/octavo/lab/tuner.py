"""Which block size: what each wastes, costs and finds again, and what that adds up to.

A small block wastes little of its sequence's end and finds more of a prefix again, but makes long
tables, and every block that a kernel or a copy touches costs something. The same requests are
served with each size, out of the same bytes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from octavo.errors import CapacityError, ConfigError
from octavo.lab.capacity import Load, Placement
from octavo.lab.config import SimConfig
from octavo.lab.costs import StepCosts, StepShape
from octavo.lab.results import PoolSample, SimResult
from octavo.lab.simulator import simulate
from octavo.lab.slices import Slice
from octavo.lab.trace import TraceRequest

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
USUAL = 16
"""What is recommended where it does not matter."""
ENTRY_BYTES = 4
"""Of a block's number in a table."""
LEAST_NOISE = 0.01
"""Differences below are not told apart, however quiet the simulation."""
_ROTATIONS = 3
_HOST_REQUESTS = 150
REQUESTS, LEAST_REQUESTS = 1000, 40
"""Of a simulation: as many as can be simulated in about `_ALL_US`, within these."""
_ALL_US = 40e6
_BLOCK_US, _OUTPUT_US = 10.0, 4.0
"""Microseconds: a block of a prompt where prompts are found again, and an output token."""
_NUM_SAMPLES = 300

Place = Callable[[int], Placement]
"""What a machine has for blocks of a size. Raises `CapacityError` where not one fits."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """The engine around the blocks."""

    config: SimConfig
    """Its limits; block size and number of blocks are those of each trial."""
    sizes: tuple[int, ...] = SIZES
    saturated: bool = False
    """All requests come at once, and what counts is throughput; else they come at their times, and
    what counts is latency."""
    measure_host: bool = True
    """Also time the scheduler and the memory manager, step by step, on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """One block size."""

    block_size: int
    num_blocks: int
    unfilled: float
    """Share of the slots taken by sequences that hold no token, mean over time: the ends of last
    blocks."""
    table_entries: float
    """Blocks of a sequence in the batch."""
    table_bytes: float
    """Of the tables of a mean batch."""
    host_us: float | None
    """Microseconds that scheduler and memory manager take for a step, on this machine."""
    decode_ms: float
    """A step of a mean batch that only decodes."""
    host_block_ms: float
    """Copying one sequence of the batch to or from host memory."""
    hit_rate: float
    """Share of the prompt tokens that was found in the prefix cache."""
    num_preemptions: int
    mean_batch: float
    """Sequences in a step."""
    tokens_per_s: float
    """Output tokens."""
    normalized_s: float
    """Seconds an output token, mean over requests."""
    ttft_p95_s: float
    tpot_p95_s: float
    score: float
    """Of what counts, how many times as good as blocks of 16 (or the first size)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What was found."""

    rows: tuple[SizeRow, ...]
    best: int
    """Block size of the best score."""
    recommended: int
    """The usual size where that is as good within the noise, else the nearest to it that is."""
    as_good: tuple[int, ...]
    """All sizes whose score is the best within the noise."""
    noise: float
    """How far the scores of two sizes differ by chance: relative, over orders of the same
    requests."""
    against_usual: float
    """Score of the recommended size over that of blocks of 16, less 1."""
    against_worst: float
    """The same over the worst size."""
    matters: bool
    """Whether any two sizes differ by more than the noise."""
    saturated: bool
    has_prefixes: bool
    refused: Mapping[int, str]
    """Sizes that cannot serve this workload, and why."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"refused": {str(k): v for k, v in self.refused.items()}}


def tune(part: Slice, place: Place, options: TuneOptions, tell: Tell | None = None) -> Tuning:
    """Serve a slice with each block size. Raises `ConfigError` for sizes that are none, and
    `CapacityError` where no size can serve it."""
    say = tell or (lambda text: None)
    if not options.sizes or min(options.sizes) < 1:
        raise ConfigError(
            f"--block-sizes must be numbers of tokens, at least 1 each, got {options.sizes}"
        )
    runs, refused = list[SizeRow](), dict[int, str]()
    for size in sorted(set(options.sizes)):
        say(f"blocks of {size}")
        try:
            runs.append(_row(part, place(size), size, options))
        except CapacityError as error:
            refused[size] = str(error)
    if not runs:
        raise CapacityError(f"no block size can serve this: {next(iter(refused.values()))}")
    usual = next((row for row in runs if row.block_size == USUAL), runs[0])
    rows = [_scored(row, usual, options.saturated) for row in runs]
    top = max(rows, key=lambda row: row.score)
    say("how far chance goes")
    noise = LEAST_NOISE
    if len(rows) > 1:
        others = (row for row in rows if row.block_size != usual.block_size)
        rival = max(others, key=lambda row: row.score)
        noise = max(noise, _noise(part, place, usual.block_size, rival, options))
    worst = min(row.score for row in rows)
    as_good = [row for row in rows if row.score >= top.score * (1 - noise)]
    chosen = min(as_good, key=lambda row: abs(math.log2(row.block_size / USUAL)))
    return Tuning(
        rows=tuple(rows),
        best=top.block_size,
        recommended=chosen.block_size,
        as_good=tuple(row.block_size for row in as_good),
        noise=noise,
        against_usual=chosen.score - 1,
        against_worst=chosen.score / worst - 1,
        matters=len(as_good) < len(rows) or bool(refused),
        saturated=options.saturated,
        has_prefixes=part.has_prefixes,
        refused=refused,
    )


def affordable(part: Slice, sizes: Sequence[int], prefixes: bool) -> int:
    """Requests of a simulation, so that all of them take less than a minute or so."""
    per_token = _BLOCK_US * sum(1 / size for size in sizes) if prefixes else 0.03 * len(sizes)
    request_us = 1.5 * (per_token * part.mean_input + _OUTPUT_US * len(sizes) * part.mean_output)
    return max(LEAST_REQUESTS, min(REQUESTS, round(_ALL_US / request_us)))


def _config(placement: Placement, size: int, options: TuneOptions) -> SimConfig:
    return options.config.replace(block_size=size, num_blocks=placement.num_blocks(size))


def _simulate(
    requests: Sequence[TraceRequest], part: Slice, config: SimConfig, costs: StepCosts
) -> SimResult:
    sample_s = max(part.span_s / _NUM_SAMPLES, 1e-6)
    return simulate(requests, config, costs, block_tokens=part.block_tokens, sample_s=sample_s)


def _requests(part: Slice, options: TuneOptions) -> list[TraceRequest]:
    if not options.saturated:
        return list(part.requests)
    return [replace(request, arrival_s=0.0) for request in part.requests]


def _row(part: Slice, placement: Placement, size: int, options: TuneOptions) -> SizeRow:
    config = _config(placement, size, options)
    if config.num_blocks < 1:
        raise CapacityError(
            f"a block of {size} tokens is {placement.block_bytes(size):,} B, and the pool "
            f"{placement.pool_bytes:,} B"
        )
    requests = _requests(part, options)
    result = _simulate(requests, part, config, placement.costs)
    if not len(result.times):
        raise CapacityError(f"blocks of {size}: no request fits: {result.refusals[0]}")
    load = Load.of(part, layer_windows=placement.layer_windows)
    entries = load.context / size + 0.5
    batch = result.mean_seqs
    alone = StepShape(0, 0, max(1, round(batch)), round(batch * load.read), round(batch))
    times = result.times
    several = times.tpot_s()  # a single token has nobody behind it: 0
    tpot_s = np.concatenate([several, np.zeros(len(times) - len(several))])
    return SizeRow(
        block_size=size,
        num_blocks=config.num_blocks,
        unfilled=_unfilled(result.samples),
        table_entries=entries,
        table_bytes=entries * ENTRY_BYTES * batch,
        host_us=_host_us(part, config, placement, options),
        decode_ms=1e3 * placement.costs.step_s(alone),
        host_block_ms=1e3 * placement.costs.copy_s(math.ceil(load.context / size)),
        hit_rate=result.num_cached_tokens / max(1, result.num_prompt_tokens),
        num_preemptions=result.num_preemptions,
        mean_batch=batch,
        tokens_per_s=result.num_output_tokens / result.end_s,
        normalized_s=float(np.mean(times.normalized_s())),
        ttft_p95_s=float(np.percentile(times.ttft_s(), 95)),
        tpot_p95_s=float(np.percentile(tpot_s, 95)),
        score=0.0,
    )


def _scored(row: SizeRow, usual: SizeRow, saturated: bool) -> SizeRow:
    return replace(row, score=_value(row, saturated) / _value(usual, saturated))


def _value(row: SizeRow, saturated: bool) -> float:
    return row.tokens_per_s if saturated else 1 / row.normalized_s


def _noise(part: Slice, place: Place, usual: int, rival: SizeRow, options: TuneOptions) -> float:
    """Relative spread of what the best other size scores against the usual one, when the lengths
    come in other orders."""
    num = len(part.requests)
    requests = _requests(part, options)
    times = [request.arrival_s for request in requests]
    scores = [rival.score]
    for turn in range(1, _ROTATIONS):
        first = turn * num // _ROTATIONS
        turned = requests[first:] + requests[:first]
        again = [replace(r, arrival_s=t) for r, t in zip(turned, times, strict=True)]
        values = []
        for size in (rival.block_size, usual):
            placement = place(size)
            result = _simulate(again, part, _config(placement, size, options), placement.costs)
            if options.saturated:
                values.append(result.num_output_tokens / result.end_s)
            else:
                values.append(1 / float(np.mean(result.times.normalized_s())))
        scores.append(values[0] / values[1])
    return statistics.pstdev(scores) / statistics.fmean(scores)


def _unfilled(samples: Sequence[PoolSample]) -> float:
    taken = sum(s.tokens + s.reserved + s.internal for s in samples)
    return sum(s.reserved + s.internal for s in samples) / max(1, taken)


def _host_us(
    part: Slice, config: SimConfig, placement: Placement, options: TuneOptions
) -> float | None:
    """The simulator is the scheduler itself, so the time it takes for a step is the host's."""
    if not options.measure_host:
        return None
    all_requests = _requests(part, options)
    requests = all_requests[: min(_HOST_REQUESTS, max(LEAST_REQUESTS, len(all_requests) // 4))]
    began = time.process_time()
    result = _simulate(requests, part, config.replace(stride=False), placement.costs)
    return 1e6 * (time.process_time() - began) / max(1, result.num_steps)


class ResizedCosts:
    """A cost model that was measured with blocks of one size, for blocks of another."""

    def __init__(
        self, costs: StepCosts, block_size: int, *, base: int, extra_token_s: float = 0.0
    ) -> None:
        """base: the size that `costs` is of; copies take as long for as many bytes.
        extra_token_s: seconds, for each token of context that a decode reads, beyond what it takes
        with blocks of `base`."""
        self._costs, self._extra_token_s = costs, extra_token_s
        self._ratio = block_size / base
        self.name = f"{costs.name}, for blocks of {block_size}"

    def step_s(self, shape: StepShape) -> float:
        """See `StepCosts.step_s`."""
        num_host, num_copied = shape.num_host_blocks, shape.num_copied_blocks
        step_s = self._costs.step_s(shape._replace(num_host_blocks=0, num_copied_blocks=0))
        copied = StepShape(0, 0, 0, 0, 0, num_copied_blocks=1)
        copied_s = self._costs.step_s(copied) - self._costs.step_s(StepShape(0, 0, 0, 0, 0))
        decode_s = max(-0.9 * step_s, self._extra_token_s * shape.decode_context)
        return step_s + decode_s + num_copied * self._ratio * copied_s + self.copy_s(num_host)

    def copy_s(self, num_host_blocks: int) -> float:
        """See `StepCosts.copy_s`."""
        return self._ratio * self._costs.copy_s(num_host_blocks)
