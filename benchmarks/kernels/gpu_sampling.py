"""What sampling costs a GPU: microseconds a step, beside the time to read the logits once.

    python benchmarks/kernels/gpu_sampling.py [--vocab 128256]

Each way is a CUDA graph over rotating logits that are together larger than the L2 cache. "read" is
the time of reading them at the rate of a large copy, measured first. Logits are normal, of standard
deviation 3; real ones have fewer probable tokens, which costs top_p less.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.bench.roofline import measure_rates, time_calls
from octavo.ops.gpu import sampling as ops
from octavo.ops.gpu.logprobs import token_logprobs
from octavo.ops.gpu.sampling_top import draw_top, top_scratch

DEVICE = torch.device("cuda")


def time_us(calls: list[Callable[[], object]]) -> float:
    """Of one call: the median of replays of a graph that holds all of them."""
    return 1e6 * time_calls(calls, DEVICE)


def copy_rate() -> float:
    """Bytes read and written a microsecond."""
    return 1e-6 * measure_rates(DEVICE, "GPU", torch.bfloat16).copy_bytes_per_s


class Step:
    """The launches of one step of `num_rows` rows that all sample in one way."""

    def __init__(self, num_rows: int, vocab: int, top_k: int, top_p: float, min_p: float) -> None:
        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=DEVICE)

        self.limited = top_k > 0 or top_p < 1 or min_p > 0
        self.modes = full(ops.TOP if self.limited else ops.DRAW, torch.int32)
        self.rates = full(math.log2(math.e), torch.float32)
        self.numbers = torch.rand(num_rows, dtype=torch.float64, device=DEVICE)
        self.top_k, self.top_p = full(top_k, torch.int32), full(top_p, torch.float64)
        self.min_p = full(min_p, torch.float32)
        self.token_ids, self.finite = full(0, torch.int64), full(0, torch.int32)
        self.bests, self.leasts, self.cuts, self.tops, self.log_sums, self.logprobs = (
            full(0, torch.float32) for _ in range(6)
        )
        self.totals, self.ties, self.ranks = (
            full(0, torch.float64), full(0, torch.int32), full(0, torch.int32),
        )  # fmt: skip
        self.rows = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
        self.runs = ops.Runs.of(num_rows, vocab, DEVICE)
        self.argmax_scratch = ops.argmax_scratch(num_rows, DEVICE)
        self.scratch = top_scratch(num_rows, DEVICE)

    def greedy(self, logits: Tensor) -> None:
        ops.argmax_into(logits, self.token_ids, self.finite, self.argmax_scratch)

    def draw(self, logits: Tensor) -> None:
        ops.draw_all(
            logits, self.modes, self.rates, self.numbers, self.runs, self.token_ids, self.finite,
            self.bests, self.leasts, self.totals,
        )  # fmt: skip
        if self.limited:
            draw_top(
                logits, self.rows, self.rates, self.min_p, self.top_k, self.top_p, self.numbers,
                self.bests, self.leasts, self.totals, self.scratch, self.token_ids, self.cuts,
                self.ties,
            )  # fmt: skip

    def look(self, logits: Tensor) -> None:
        token_logprobs(
            logits, self.rows, self.rows, self.token_ids, self.runs, self.logprobs, self.ranks,
            self.tops, self.log_sums,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=128256)
    vocab = parser.parse_args().vocab
    rate = copy_rate()
    ways = {
        "temperature": (0, 1.0, 0.0), "top_k 50": (50, 1.0, 0.0), "top_p 0.9": (0, 0.9, 0.0),
        "both": (50, 0.9, 0.0), "min_p 0.05": (0, 1.0, 0.05),
    }  # fmt: skip
    names = ["read", "greedy", *ways, "logprobs"]
    print(f"vocabulary {vocab}, copy {rate / 1e6:.2f} TB/s; microseconds a step")
    print("  rows" + "".join(f"{name:>13}" for name in names))
    for num_rows in (1, 8, 64, 256):
        num_sets = max(2, min(200, (1 << 28) // (num_rows * vocab * 4)))
        sets = [torch.randn(num_rows, vocab, device=DEVICE) * 3 for _ in range(num_sets)]
        step = Step(num_rows, vocab, 0, 1.0, 0.0)
        times = [
            sets[0].nbytes / rate,
            time_us([lambda x=x, step=step: step.greedy(x) for x in sets]),
        ]
        for way in ways.values():
            own = Step(num_rows, vocab, *way)
            times.append(time_us([lambda x=x, own=own: own.draw(x) for x in sets]))
        times.append(time_us([lambda x=x, step=step: step.look(x) for x in sets]))
        print(f"{num_rows:6}" + "".join(f"{time:13.1f}" for time in times), flush=True)


if __name__ == "__main__":
    main()
