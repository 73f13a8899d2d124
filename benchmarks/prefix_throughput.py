"""What the prefix cache costs where nothing is shared, and what it gives where much is.

    python benchmarks/prefix_throughput.py [--shares 0 0.25 0.5 0.75] [--rounds 20]

Two engines in one process, one with the prefix cache and one without. In each round both get the
same requests, all at once, one engine after the other, in turns the one or the other first; the
ratio of their times is taken within the round. A share is the part of each prompt that all prompts
of a round begin with; prompts of different rounds share nothing. Before the first round the pool of
the engine with the cache is filled with others' blocks, so that it has to evict in every round.

By default 64 prompts of 512 tokens and 32 tokens of output, 0 / 25 / 50 / 75 % shared: the 16 to 1
of the figures that vLLM publishes for its V1 engine (2,048 / 128; 1.0 / 1.23 / 1.70 / 2.89 times),
in a size for CPUs. Prompts are random token ids; lengths are exact. The pool holds two rounds.

Printed: the median of the ratios of throughput with its 95 % interval (sign test: it assumes
nothing about their distribution), and the share of prompt tokens found. Such a ratio tells 1 % only
after very many rounds, so the time outside the runner (scheduler, memory manager, texts: all that a
cache can make dearer where it finds nothing) is also taken by itself: `cost` is what the cache adds
to it, as a share of the whole time without. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from octavo import LLM, SamplingParams
from octavo.plan import StepPlan, StepResult
from octavo.util import cdiv

FIRST_ID = 17
_WARM_UP_PROMPTS, _WARM_UP_TOKENS = 4, 8


class Run(NamedTuple):
    """One engine's answer to the requests of a round."""

    seconds: float
    deciding_s: float
    found: float
    """Share of the prompt tokens."""


class Bench:
    """An engine, and the time its runner takes."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._executing_s = 0.0
        core = llm._engine.engine.core  # no public interface tells the runner's time
        launch = core._launch
        assert launch is not None

        def timed(plan: StepPlan) -> Callable[[], StepResult]:
            begin = time.perf_counter()
            wait = launch(plan)
            self._executing_s += time.perf_counter() - begin

            def timed_wait() -> StepResult:
                begin = time.perf_counter()
                result = wait()
                self._executing_s += time.perf_counter() - begin
                return result

            return timed_wait

        core._launch = timed

    def run(self, prompts: list[list[int]], num_out: int) -> Run:
        """All prompts at once."""
        params = SamplingParams(
            temperature=0, max_tokens=num_out, ignore_eos=True, detokenize=False
        )
        self._executing_s = 0.0
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert all(len(output.outputs[0].token_ids) == num_out for output in outputs)
        found = sum(output.num_cached_tokens for output in outputs)
        share = found / sum(len(prompt) for prompt in prompts)
        return Run(seconds, seconds - self._executing_s, share)


@dataclass
class Paired:
    """The rounds of one share; lists have one entry a round."""

    share: float
    on_s: list[float] = field(default_factory=list)
    off_s: list[float] = field(default_factory=list)
    on_deciding_s: list[float] = field(default_factory=list)
    """Outside the runner."""
    off_deciding_s: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    """Share of the prompt tokens that the cache had."""

    def add(self, enabled: bool, run: Run) -> None:
        """Take in one engine's half of a round."""
        if enabled:
            self.on_s.append(run.seconds)
            self.on_deciding_s.append(run.deciding_s)
            self.found.append(run.found)
        else:
            assert not run.found, "an engine without a prefix cache found something in it"
            self.off_s.append(run.seconds)
            self.off_deciding_s.append(run.deciding_s)

    @property
    def cost_ratio(self) -> float:
        """Time that the cache adds outside the runner, over all time without it; medians."""
        added = statistics.median(self.on_deciding_s) - statistics.median(self.off_deciding_s)
        return added / statistics.median(self.off_s)

    @property
    def ratios(self) -> list[float]:
        """Throughput with the cache over that without, each round."""
        return [off / on for on, off in zip(self.on_s, self.off_s, strict=True)]

    def figures(self, num_output_tokens: int) -> dict[str, Any]:
        """Everything, and its summary."""
        low, high = median_interval(self.ratios)
        return {
            "median_ratio": round(statistics.median(self.ratios), 4),
            "interval": (round(low, 4), round(high, 4)),
            "on_out_tok_s": round(num_output_tokens / statistics.median(self.on_s), 1),
            "off_out_tok_s": round(num_output_tokens / statistics.median(self.off_s), 1),
            "found_ratio": round(statistics.fmean(self.found), 4),
            "cost_ratio": round(self.cost_ratio, 5),
        } | asdict(self)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The narrowest pair of order statistics that holds the median so often; for few values, their
    extremes."""
    ordered, count = sorted(values), len(values)
    skip, tail = 0, 0.0
    while skip < (count - 1) // 2:
        tail += math.comb(count, skip) / 2**count
        if 2 * tail > 1 - confidence:
            break
        skip += 1
    first = max(0, skip - 1)
    return ordered[first], ordered[count - 1 - first]


def make_prompts(
    num_prompts: int, length: int, share: float, vocab_size: int, rng: random.Random
) -> list[list[int]]:
    """Prompts that begin alike for `share` of their length."""

    def draw(count: int) -> list[int]:
        return [rng.randrange(FIRST_ID, vocab_size) for _ in range(count)]

    shared = draw(round(share * length))
    return [shared + draw(length - len(shared)) for _ in range(num_prompts)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="what octavo loads; by default its own")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--swap-space", type=float, default=0.0, help="GiB of host memory for evicted blocks"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    engines = {enabled: Bench(start_engine(args, enabled)) for enabled in (True, False)}
    llm, rng = engines[True].llm, random.Random(args.seed)
    vocab_size = llm.arch.vocab_size
    for engine in engines.values():
        prompts = make_prompts(_WARM_UP_PROMPTS, args.input_len, 0.0, vocab_size, rng)
        engine.run(prompts, min(args.output_len, _WARM_UP_TOKENS))
    cached = fill(engines[True], args)
    print(f"{cached:.1%} of the pool is cached before the first round", flush=True)
    pairs = [Paired(share) for share in args.shares]
    for number in range(args.rounds):
        for pair in pairs:
            prompts = make_prompts(args.num_prompts, args.input_len, pair.share, vocab_size, rng)
            for enabled in (True, False) if number % 2 else (False, True):
                pair.add(enabled, engines[enabled].run(prompts, args.output_len))
        last = ", ".join(f"{pair.share:.0%}: {pair.ratios[-1]:.3f}" for pair in pairs)
        print(f"round {number + 1} of {args.rounds}: {last}", flush=True)
    found = [pair.figures(args.num_prompts * args.output_len) for pair in pairs]
    print(
        f"\n{args.num_prompts} prompts of {args.input_len} tokens, {args.output_len} out, "
        f"{llm.config.model} {llm.config.dtype}, {args.rounds} rounds\n{table(found)}"
    )
    setup = {name: value for name, value in vars(args).items() if name != "shares"}
    print(json.dumps(setup | {"shares": found}))


def fill(bench: Bench, args: argparse.Namespace) -> float:
    """Leave no block of the pool unused; the share of it that is cached then."""
    rng = random.Random(f"fill {args.seed}")
    ledger = bench.llm.memory_report().ledger
    num_prompts = num_to_fill(ledger.num_blocks, args.input_len, args.block_size)
    vocab_size = bench.llm.arch.vocab_size
    bench.run(make_prompts(num_prompts, args.input_len, 0.0, vocab_size, rng), 1)
    ledger = bench.llm.memory_report().ledger
    return ledger.cached / ledger.num_slots


def num_to_fill(num_blocks: int, input_len: int, block_size: int) -> int:
    """Prompts whose whole blocks are as many as the pool's: no more of each is sure to be kept."""
    return cdiv(num_blocks, max(1, input_len // block_size))


def start_engine(args: argparse.Namespace, enabled: bool) -> LLM:
    """With the prefix cache or without; all else is equal."""
    longest = args.input_len + args.output_len
    options = {} if args.model is None else {"model": args.model}
    return LLM(
        **options,
        dtype=args.dtype,
        block_size=args.block_size,
        num_gpu_blocks_override=2 * args.num_prompts * cdiv(longest, args.block_size),
        max_model_len=longest,
        swap_space=args.swap_space,
        preemption_mode="auto" if args.swap_space else "recompute",
        skip_tokenizer_init=True,
        enable_prefix_caching=enabled,
    )


def table(found: Sequence[dict[str, Any]]) -> str:
    """For people."""
    head = ("shared", "found", "on tok/s", "off tok/s", "on / off")
    lines = ["".join(f"{name:>11}" for name in head) + f"{'95 %':>18}{'cost':>10}"]
    for row in found:
        low, high = row["interval"]
        lines.append(
            f"{row['share']:>11.0%}{row['found_ratio']:>11.1%}{row['on_out_tok_s']:>11,.1f}"
            f"{row['off_out_tok_s']:>11,.1f}{row['median_ratio']:>11.3f}"
            f"{f'{low:.3f} to {high:.3f}':>18}{row['cost_ratio']:>10.2%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
