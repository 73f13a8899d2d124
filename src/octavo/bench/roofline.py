"""What a machine can do at most, measured: copying and multiplying; and how calls are timed.

The roofline of a piece of work is the larger of two times: its bytes at the rate of a large copy,
and its arithmetic at the rate of a large matrix product.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], object]

_GPU_COPY_BYTES, _CPU_COPY_BYTES = 2**32, 2**28
_GPU_MATRIX, _CPU_MATRIX = 8192, 1024
_GPU_ROUNDS = 12
_CPU_ROUNDS, _CPU_S = 5, 0.2
"""Rounds at least; and seconds in which further rounds are begun."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The two ceilings of a device, as measured."""

    device: str
    dtype: str
    copy_bytes_per_s: float
    """Of a large copy in its memory: bytes read and bytes written."""
    matrix_flops_per_s: float
    """Of a large matrix product in `dtype`, on random data."""

    def floor_s(self, num_bytes: float, num_flops: float) -> float:
        """Seconds that moving so many bytes and so much arithmetic take at least."""
        return max(num_bytes / self.copy_bytes_per_s, num_flops / self.matrix_flops_per_s)

    def __str__(self) -> str:
        return (
            f"{self.device}: copies {tera(self.copy_bytes_per_s)}B/s (read and written), "
            f"multiplies {tera(self.matrix_flops_per_s)}FLOP/s ({self.dtype}); measured just now"
        )


def tera(value: float) -> str:
    """`4.2e12` -> `4.20 T`; in G below a hundredth of that."""
    return f"{value / 1e12:,.2f} T" if value >= 1e11 else f"{value / 1e9:,.2f} G"


def measure_rates(device: torch.device, name: str, dtype: torch.dtype) -> Rates:
    """The two ceilings. `name`: of the device, for people."""
    gpu = device.type == "cuda"
    num_bytes = _GPU_COPY_BYTES if gpu else _CPU_COPY_BYTES
    copied_s = _copy_s(num_bytes, device)
    size = _GPU_MATRIX if gpu else _CPU_MATRIX
    a, b = (torch.randn((size, size), device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    product_s = time_calls([lambda: torch.mm(a, b, out=out)], device)
    return Rates(
        device=name,
        dtype=str(dtype).removeprefix("torch."),
        copy_bytes_per_s=2 * num_bytes / copied_s,
        matrix_flops_per_s=2 * size**3 / product_s,
    )


def _copy_s(num_bytes: int, device: torch.device) -> float:
    source = torch.randint(0, 1 << 30, (num_bytes // 8,), dtype=torch.int64, device=device)
    target = torch.empty_like(source)
    if device.type != "cuda":
        return time_calls([lambda: target.copy_(source)], device)
    # A kernel: a copy that a CUDA graph records goes another way, at two thirds of the rate (H200).
    return time_calls([lambda: torch.bitwise_not(source, out=target)], device)


def time_calls(calls: Sequence[Call], device: torch.device) -> float:
    """Seconds of one call: the median over rounds, each of which makes all of them once.

    Several calls that do the same on data of their own keep each other's data out of the caches. On
    a GPU a round is the replay of a CUDA graph, so that launching costs nothing; calls that cannot
    be recorded are launched one by one.
    """
    return time_in_turns([calls], device)[0]


def time_in_turns(groups: Sequence[Sequence[Call]], device: torch.device) -> list[float]:
    """`time_calls` of each group, their rounds in turns: what the machine does meanwhile hits all
    alike."""
    gpu = device.type == "cuda"
    runs = [_recorded(calls) if gpu else _one_by_one(calls) for calls in groups]
    if not gpu:
        for run in runs:
            run()
    timed = _gpu_s if gpu else _cpu_s
    least, end = (_GPU_ROUNDS, 0.0) if gpu else (_CPU_ROUNDS, time.perf_counter() + _CPU_S)
    rounds: list[list[float]] = []
    while len(rounds) < least or time.perf_counter() < end:
        rounds.append([timed(run) for run in runs])
    medians = map(statistics.median, zip(*rounds, strict=True))
    return [seconds / len(calls) for seconds, calls in zip(medians, groups, strict=True)]


def _cpu_s(run: Call) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _gpu_s(run: Call) -> float:
    cuda: Any = torch.cuda  # whose classes are not annotated
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _one_by_one(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run


def _recorded(calls: Sequence[Call]) -> Call:
    """All calls as one graph; as they are where they cannot be recorded."""
    run = _one_by_one(calls)
    run()  # compiles
    torch.cuda.synchronize()
    cuda: Any = torch.cuda
    with cuda.stream(cuda.Stream()):  # what a side stream needs, before recording
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return run
    return graph.replay
