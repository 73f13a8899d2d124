"""Offline throughput: all requests are there at the start; how many tokens a second come out?"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from octavo.bench.report import Percentiles, e2e_s, times_table, tpot_s, ttft_s
from octavo.bench.workload import Workload
from octavo.request import SamplingParams

if TYPE_CHECKING:
    from octavo import LLM

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """What a run measured."""

    workload: str
    num_requests: int
    num_input_tokens: int
    num_output_tokens: int
    elapsed_s: float
    ttft_s: Percentiles | None
    """From the start of the run: most requests wait for others."""
    tpot_s: Percentiles | None
    e2e_s: Percentiles | None
    slots_used_ratio: float
    """Mean share of the slots in allocated blocks that held tokens."""
    peak_blocks: int
    num_blocks: int
    peak_seqs: int
    """Most sequences in one step."""
    num_preemptions: int
    prefix_caching: bool
    """Whether the prefix cache was on."""
    num_cached_tokens: int
    """Prompt tokens that were found in it."""

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.num_output_tokens / self.elapsed_s

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and generated tokens a second."""
        return (self.num_input_tokens + self.num_output_tokens) / self.elapsed_s

    @property
    def requests_per_s(self) -> float:
        """Finished requests a second."""
        return self.num_requests / self.elapsed_s

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        rates = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")
        return asdict(self) | {name: getattr(self, name) for name in rates}

    def __str__(self) -> str:
        times = {
            "time to first token": self.ttft_s,
            "time per output token": self.tpot_s,
            "whole request": self.e2e_s,
        }
        return "\n".join(
            (
                f"{self.workload}: {self.num_input_tokens:,} tokens in, "
                f"{self.num_output_tokens:,} out, {self.elapsed_s:.2f} s",
                "",
                f"{'output tokens/s':24}{self.output_tokens_per_s:>10,.1f}",
                f"{'all tokens/s':24}{self.total_tokens_per_s:>10,.1f}",
                f"{'requests/s':24}{self.requests_per_s:>10,.2f}",
                "",
                times_table(times),
                "",
                f"{'slots holding tokens':24}{self.slots_used_ratio:>10.1%}  of allocated blocks",
                f"{'peak blocks':24}{self.peak_blocks:>10,}  of {self.num_blocks:,}",
                f"{'most sequences a step':24}{self.peak_seqs:>10,}",
                f"{'preemptions':24}{self.num_preemptions:>10,}",
                f"{'prefix cache':24}{self._prefix_cache()}",
            )
        )

    def _prefix_cache(self) -> str:
        if not self.prefix_caching:
            return f"{'off':>10}"
        return f"{self.num_cached_tokens:>10,}  prompt tokens found in it"


def run_throughput(
    llm: LLM, workload: Workload, params: SamplingParams, *, use_tqdm: bool = True
) -> ThroughputResult:
    """Run a workload as one batch after a short warm-up.

    params: sampling; lengths are the workload's, exactly (end-of-sequence is ignored).
    """
    prompts = [sample.prompt_token_ids for sample in workload.samples]
    exact = [_exactly(params, sample.output_len) for sample in workload.samples]
    # backwards, so that the prefix cache does not know them when they are measured
    warm_up = [prompt[::-1] for prompt in prompts[:2]]
    llm.generate(warm_up, [_exactly(params, _WARM_UP_TOKENS)] * len(warm_up), use_tqdm=False)
    before = llm.memory_report().num_preemptions
    start = time.perf_counter()
    outputs = llm.generate(prompts, exact, use_tqdm=use_tqdm)
    elapsed_s = time.perf_counter() - start
    report = llm.memory_report()
    return ThroughputResult(
        workload=workload.description,
        num_requests=len(outputs),
        num_input_tokens=workload.num_input_tokens,
        num_output_tokens=sum(len(s.token_ids) for out in outputs for s in out.outputs),
        elapsed_s=elapsed_s,
        ttft_s=Percentiles.of(ttft_s(outputs)),
        tpot_s=Percentiles.of(tpot_s(outputs)),
        e2e_s=Percentiles.of(e2e_s(outputs)),
        slots_used_ratio=report.history.used_ratio,
        peak_blocks=report.history.peak_blocks,
        num_blocks=report.ledger.num_blocks,
        peak_seqs=report.history.peak_seqs,
        num_preemptions=report.num_preemptions - before,
        prefix_caching=llm.config.enable_prefix_caching,
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
    )


def _exactly(params: SamplingParams, num_tokens: int) -> SamplingParams:
    return dataclasses.replace(params, ignore_eos=True, max_tokens=num_tokens)
