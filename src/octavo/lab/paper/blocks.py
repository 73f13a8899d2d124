"""Figures of the block size: latency (18b), and what preemption costs (19)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from octavo.config import PreemptionMode
from octavo.lab.costs import StepShape
from octavo.lab.paper import reference
from octavo.lab.paper.figure import FigureResult, Line, LinePlot, Row, Task
from octavo.lab.paper.protocol import Length, measure
from octavo.lab.paper.reference import BLOCK_SIZES, Expected
from octavo.lab.paper.systems import SWAP_BYTES, kv_bytes, paper_costs, system_config
from octavo.lab.paper.workloads import DATASETS, Plain, Source, Workloads

_BLOCK_AXIS = "block size [tokens]"
_LATENCY_AXIS = "normalised latency [s/token]"
_MODES: tuple[PreemptionMode, ...] = ("recompute", "swap")
PREEMPTED_TOKENS = 256


def latency_at_block_size(
    source: Source,
    rate: float,
    block_size: int,
    mode: PreemptionMode = "recompute",
    length: Length | None = None,
) -> float:
    """Normalised latency of OPT-13B, paged, in s/token."""
    host = SWAP_BYTES // (kv_bytes() * block_size) if mode == "swap" else 0
    config = system_config(
        "paged", block_size=block_size, preemption_mode=mode, num_host_blocks=host
    )
    length = length or Length(max_s=600.0, min_s=300.0, num_requests=6000)
    costs = paper_costs("paged", block_size=block_size)
    return measure(source, rate, config, costs, length).latency_s


def preemption_ms(mode: PreemptionMode, block_size: int) -> float:
    """What it takes to bring a sequence of `PREEMPTED_TOKENS` back: to compute it again as a step
    of its own, or to copy its blocks out and in."""
    num_tokens = PREEMPTED_TOKENS
    costs = paper_costs("paged", block_size=block_size)
    if mode == "swap":
        return 1000 * costs.copy_s(2 * math.ceil(num_tokens / block_size))
    pairs = num_tokens * (num_tokens + 1) // 2
    return 1000 * costs.step_s(StepShape(num_tokens, pairs, 0, 0, 1, num_prompts=1))


def best_block(latencies: Sequence[float]) -> int:
    """The block size of the least latency."""
    return min(zip(latencies, BLOCK_SIZES, strict=True))[1]


def crossover(recompute: Sequence[float], swap: Sequence[float]) -> float | None:
    """Where swapping becomes cheaper than computing again: between two block sizes on straight
    lines over the logarithm; None: nowhere."""
    gaps = [s - r for r, s in zip(recompute, swap, strict=True)]
    sizes = [math.log2(size) for size in BLOCK_SIZES]
    for i in range(len(gaps) - 1):
        if gaps[i] > 0 >= gaps[i + 1]:
            part = gaps[i] / (gaps[i] - gaps[i + 1])
            return float(2 ** (sizes[i] + part * (sizes[i + 1] - sizes[i])))
    return None


def _line(name: str, values: Sequence[float], is_paper: bool = False) -> Line:
    points = [(float(b), v) for b, v in zip(BLOCK_SIZES, values, strict=True)]
    return Line(name, points, is_paper)


def _both_modes(
    title: str,
    label: str,
    part: str,
    here: Mapping[tuple[str, PreemptionMode], Sequence[float]],
    paper: Mapping[str, Sequence[float]],
) -> LinePlot:
    lines = []
    for mode in _MODES:
        lines += [_line(mode, here[part, mode]), _line(mode, paper[mode], is_paper=True)]
    return LinePlot(title, lines, _BLOCK_AXIS, label, log_x=True, log_y=part == "b")


class BlockSize:
    """Fig. 18b: latency by block size."""

    name = "18b"

    def tasks(self, workloads: Workloads) -> list[Task]:
        """See `Figure.tasks`."""
        return [
            Task(
                f"blocks/{dataset}/recompute/{size}",
                partial(latency_at_block_size, Plain(workloads.of(dataset)), rate, size),
                weight=rate,
            )
            for dataset, rate in reference.FIG18B_RATES.items()
            for size in BLOCK_SIZES
        ]

    def collect(self, results: Mapping[str, Any]) -> FigureResult:
        """See `Figure.collect`."""
        rows: list[Row] = []
        lines = []
        for dataset, paper in reference.FIG18B.items():
            title = DATASETS[dataset]
            here = [results[f"blocks/{dataset}/recompute/{size}"] for size in BLOCK_SIZES]
            rows.append(
                reference.BEST_BLOCK.row(
                    self.name, title, "best block size [tokens]", best_block(here)
                )
            )
            rows += [
                Expected(value).row(self.name, f"{title}, block {size}", "s/token", latency)
                for size, value, latency in zip(BLOCK_SIZES, paper, here, strict=True)
            ]
            lines += [_line(title, here), _line(title, paper, is_paper=True)]
        plot = LinePlot(
            "OPT-13B: ShareGPT at 2.01, Alpaca at 30.1 requests/s",
            lines, _BLOCK_AXIS, _LATENCY_AXIS, log_x=True, log_y=True,
        )  # fmt: skip
        return FigureResult(
            name=self.name,
            title="Fig. 18b: block size",
            rows=rows,
            plots=[plot],
            protocol="OPT-13B, paged, recompute; traces of 600 s at 2.01 (ShareGPT) and of 300 s "
            "at 30.1 (Alpaca) requests/s.",
            why=_WHY_18B,
        )


class Preemption:
    """Fig. 19: computing again or swapping."""

    name = "19"

    def tasks(self, workloads: Workloads) -> list[Task]:
        """See `Figure.tasks`."""
        found = []
        for mode in _MODES:
            for size in BLOCK_SIZES:
                found.append(Task(f"19a/{mode}/{size}", partial(preemption_ms, mode, size), 0.0))
                run = partial(
                    latency_at_block_size,
                    Plain(workloads.sharegpt),
                    reference.FIG19_RATE,
                    size,
                    mode,
                )
                found.append(Task(f"blocks/sharegpt/{mode}/{size}", run, weight=2.0))
        return found

    def collect(self, results: Mapping[str, Any]) -> FigureResult:
        """See `Figure.collect`."""
        here = {
            (part, mode): [results[f"{name}/{mode}/{size}"] for size in BLOCK_SIZES]
            for part, name in (("a", "19a"), ("b", "blocks/sharegpt"))
            for mode in _MODES
        }
        paper = reference.FIG19A
        at = crossover(paper["recompute"], paper["swap"])
        assert at is not None
        rows = [
            Expected(at, 16, 64).row(
                self.name,
                "a: swapping becomes cheaper",
                "block size [tokens]",
                crossover(here["a", "recompute"], here["a", "swap"]),
            )
        ]
        for mode in _MODES:
            rows += [
                reference.share(value, 0.1).row(
                    self.name, f"a: {mode}, block {size}", "ms for 256 tokens", ms
                )
                for size, value, ms in zip(BLOCK_SIZES, paper[mode], here["a", mode], strict=True)
            ]
        for mode in _MODES:
            rows += [
                Expected(value).row(self.name, f"b: {mode}, block {size}", "s/token", latency)
                for size, value, latency in zip(
                    BLOCK_SIZES, reference.FIG19B[mode], here["b", mode], strict=True
                )
            ]
        plots = [
            _both_modes("Bringing 256 tokens back", "time [ms]", "a", here, paper),
            _both_modes("ShareGPT, 2.01 requests/s", _LATENCY_AXIS, "b", here, reference.FIG19B),
        ]
        return FigureResult(
            name=self.name,
            title="Fig. 19: computing again or swapping",
            rows=rows,
            plots=plots,
            protocol="a: 256 tokens of OPT-13B, computed as a step of their own, or their blocks "
            "copied out and in, by the cost model of the paper's machine. b: ShareGPT at 2.01 "
            "requests/s for 600 s, 20 GiB of host memory.",
            why=_WHY_19,
        )


_WHY_18B = (
    "The shape is predicted, the heights are not: these rates are at the edge of what the system "
    "sustains, where a few per cent of a step's time change the latency tenfold. Small blocks cost "
    "time in the attention kernel (a block costs as much as four of its tokens besides, from "
    "Fig. 18a), large ones waste the end of each sequence's last block. The paper's small blocks "
    "are slower still: its kernel gives a block to a group of threads, and a short one leaves "
    "most of them idle, which a cost for each block does not describe."
)
_WHY_19 = (
    "a: the constants of swapping and of products are derived from this very figure, so that it "
    "fits says only that a start for each piece of a block and bytes over bandwidth describe it. "
    "The artifact multiplies recomputation by 0.9 before it plots. b: at 2.01 requests/s small "
    "differences of a step's time are large ones of latency, see Fig. 18b."
)
