"""Latency: a few requests at a time, alone in the engine; how soon and how evenly tokens come."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from octavo.bench.report import Percentiles, times_table
from octavo.bench.workload import Workload
from octavo.request import SamplingParams

if TYPE_CHECKING:
    from octavo import LLM


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """What the runs measured; times are as a reader of the stream sees them."""

    workload: str
    batch_size: int
    num_iters: int
    ttft_s: Percentiles | None
    """From the request to its first token."""
    tpot_s: Percentiles | None
    """Per request: from first to last token, divided by the tokens after the first."""
    itl_s: Percentiles | None
    """Between one token and the next, over all tokens."""
    e2e_s: Percentiles | None
    decode_tokens_per_s: float
    """Of the whole batch while it decodes: from the mean time per output token."""
    prefix_caching: bool
    """Whether the prefix cache was on; the runs have nothing in common that it could find."""

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        times = {
            "time to first token": self.ttft_s,
            "time per output token": self.tpot_s,
            "between tokens": self.itl_s,
            "whole request": self.e2e_s,
        }
        return "\n".join(
            (
                f"{self.workload}; {self.num_iters} runs of {self.batch_size} at a time",
                "",
                times_table(times),
                "",
                f"{'decode tokens/s':24}{self.decode_tokens_per_s:>10,.1f}",
                f"{'prefix cache':24}{'on' if self.prefix_caching else 'off':>10}",
            )
        )


def run_latency(
    llm: LLM, workloads: Sequence[Workload], params: SamplingParams, *, num_warmup: int = 1
) -> LatencyResult:
    """Run each workload alone: all its requests at once, then the next workload.

    workloads: of one size, with prompts of their own, so that no cache helps the later ones.
    params: sampling; lengths are the workloads', exactly (end-of-sequence is ignored).
    num_warmup: how many of the first workloads are run but not measured; fewer than there are.
    """
    assert 0 <= num_warmup < len(workloads)
    for workload in workloads[:num_warmup]:
        _token_times(llm, workload, params)
    ttft, tpot, itl, e2e = [], [], [], []
    for workload in workloads[num_warmup:]:
        for times in _token_times(llm, workload, params):
            ttft.append(times[0])
            e2e.append(times[-1])
            itl += [late - early for early, late in itertools.pairwise(times)]
            if len(times) > 1:
                tpot.append((times[-1] - times[0]) / (len(times) - 1))
    batch_size = len(workloads[0].samples)
    return LatencyResult(
        workload=workloads[0].description,
        batch_size=batch_size,
        num_iters=len(workloads) - num_warmup,
        ttft_s=Percentiles.of(ttft),
        tpot_s=Percentiles.of(tpot),
        itl_s=Percentiles.of(itl),
        e2e_s=Percentiles.of(e2e),
        decode_tokens_per_s=batch_size * len(tpot) / sum(tpot) if tpot else 0.0,
        prefix_caching=llm.config.enable_prefix_caching,
    )


def _token_times(llm: LLM, workload: Workload, params: SamplingParams) -> list[list[float]]:
    """Per request the seconds from the start to each of its tokens."""
    start = time.perf_counter()
    streams = {}
    for index, sample in enumerate(workload.samples):
        exact = dataclasses.replace(params, ignore_eos=True, max_tokens=sample.output_len)
        streams[index] = llm.stream(sample.prompt_token_ids, exact)
    times: list[list[float]] = [[] for _ in workload.samples]
    while streams:
        for index, stream in list(streams.items()):
            output = next(stream)
            times[index].append(time.perf_counter() - start)
            if output.finished:
                del streams[index]
    return times
