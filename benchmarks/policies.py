"""What paging buys on the real engine: the same requests under each `--kv-policy`.

    python benchmarks/policies.py LENGTHS.csv
    python benchmarks/policies.py LENGTHS.csv --num-requests 96 --rounds 3
    python benchmarks/policies.py LENGTHS.csv --shape llama2-13b --one-at-a-time   # on a GPU

LENGTHS.csv (.gz or not) has `input_tokens` and `output_tokens`; prompts are random ids, outputs
have exactly the listed lengths. Two things are measured, with one engine a policy in one process:

* under pressure: all requests at once in a pool of `--num-blocks`; output tokens a second,
  sequences in a step, mean latency. Policies take turns; each of `--rounds` tells its ratios.
* at low load: `--num-low` requests one after another, each answered by every engine in turn before
  the next one, so that a change of the machine's speed hits all alike; seconds a request.

With --one-at-a-time there is one engine at a time, for models that do not fit the memory twice: a
policy's rounds and its requests at low load come before the next policy's. --shape takes random
weights of a model's shape; the default pool of 983 blocks of 16 holds 15,728 tokens, as that of the
PagedAttention paper's OPT-13B on an A100 of 40 GB.

`contiguous` does not compute the padding that FasterTransformer computes, and hands tokens out as
they come: what is measured here is its memory, which flatters it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from octavo import LLM, SamplingParams
from octavo.bench.workload import Sample, read_workload
from octavo.config import KVPolicy

sys.path.insert(0, str(Path(__file__).parent))
from dummy_models import MODELS, write_model


@dataclass(frozen=True)
class Round:
    """One policy under pressure, once."""

    policy: str
    output_tokens_per_s: float
    mean_seqs: float
    """Sequences in a step."""
    mean_latency_s: float
    """From the start of the run to a request's end."""
    tokens_pct: float
    """Mean share of the whole pool that held tokens."""
    num_preemptions: int


def params_of(samples: Sequence[Sample]) -> list[SamplingParams]:
    """Exact lengths, greedy."""
    return [
        SamplingParams(temperature=0, max_tokens=s.output_len, ignore_eos=True, detokenize=False)
        for s in samples
    ]


def under_pressure(engine: LLM, policy: str, samples: Sequence[Sample]) -> Round:
    """All requests at once."""
    before = engine.memory_report()
    begin = time.perf_counter()
    outputs = engine.generate(
        [s.prompt_token_ids for s in samples], params_of(samples), use_tqdm=False
    )
    elapsed_s = time.perf_counter() - begin
    after = engine.memory_report()
    past, now = before.history, after.history
    steps = now.num_steps - past.num_steps

    def mean(name: str) -> float:
        total = getattr(now, name) * now.num_steps - getattr(past, name) * past.num_steps
        return float(total) / steps

    num_tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    assert num_tokens == sum(s.output_len for s in samples), "outputs have other lengths than asked"
    ends = [o.metrics.finished_s - o.metrics.arrival_s for o in outputs]  # type: ignore[operator]
    return Round(
        policy=policy,
        output_tokens_per_s=num_tokens / elapsed_s,
        mean_seqs=mean("mean_seqs"),
        mean_latency_s=statistics.fmean(ends),
        tokens_pct=100 * mean("mean_used_slots") / after.ledger.num_slots,
        num_preemptions=after.num_preemptions - before.num_preemptions,
    )


def at_low_load(engines: dict[str, LLM], samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Seconds of each request, alone in each engine."""
    seconds: dict[str, list[float]] = {policy: [] for policy in engines}
    for i, sample in enumerate(samples):
        names = list(engines)
        for policy in names[i % len(names) :] + names[: i % len(names)]:
            begin = time.perf_counter()
            engines[policy].generate([sample.prompt_token_ids], params_of([sample]), use_tqdm=False)
            seconds[policy].append(time.perf_counter() - begin)
    return seconds


def ratio(rounds: Sequence[Round], policy: str, name: str, num_rounds: int) -> dict[str, float]:
    """Paged over another policy, round by round: median, least, most."""
    by = {p: [float(getattr(r, name)) for r in rounds if r.policy == p] for p in ("paged", policy)}
    ratios = [a / b for a, b in zip(by["paged"], by[policy], strict=True)]
    assert len(ratios) == num_rounds
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


Start = Callable[[str], LLM]
"""An engine under a policy."""


def tell(one: Round) -> None:
    """Print a round."""
    print(
        f"  {one.policy:<12} {one.output_tokens_per_s:7.1f} tokens/s, {one.mean_seqs:5.1f} "
        f"sequences a step, latency {one.mean_latency_s:6.1f} s, {one.tokens_pct:4.1f} % "
        f"of the pool held tokens, {one.num_preemptions} preemptions",
        flush=True,
    )


def in_turns(
    start: Start, args: argparse.Namespace, crowd: Sequence[Sample], few: Sequence[Sample]
) -> tuple[list[Round], dict[str, list[float]]]:
    """All engines at a time, which take turns; (rounds, seconds at low load)."""
    engines = {policy: start(policy) for policy in args.policies}
    rounds = []
    for number in range(args.rounds):
        names = list(engines)
        for policy in names[number % len(names) :] + names[: number % len(names)]:
            rounds.append(under_pressure(engines[policy], policy, crowd))
            tell(rounds[-1])
    low = at_low_load(engines, few)
    for engine in engines.values():
        engine.close()
    return rounds, low


def one_at_a_time(
    start: Start, args: argparse.Namespace, crowd: Sequence[Sample], few: Sequence[Sample]
) -> tuple[list[Round], dict[str, list[float]]]:
    """The same with one engine after another."""
    rounds, low = [], {}
    for policy in args.policies:
        with start(policy) as engine:
            at_low_load({policy: engine}, few[:1])  # warms up
            for _ in range(args.rounds):
                rounds.append(under_pressure(engine, policy, crowd))
                tell(rounds[-1])
            low |= at_low_load({policy: engine}, few)
    return rounds, low


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lengths", type=Path)
    parser.add_argument("--model", help="by default octavo's own")
    parser.add_argument("--shape", choices=MODELS, help="random weights of this shape instead")
    parser.add_argument("--policies", nargs="+", default=list(get_args(KVPolicy)))
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--num-low", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-blocks", type=int, default=983)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--one-at-a-time", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "paged" not in args.policies:
        parser.error("--policies must name paged: the others are compared with it")
    return args


def main() -> None:
    """Measure and print."""
    args = parse()
    options: dict[str, Any] = {} if args.model is None else {"model": args.model}
    vocab_size = 49_152
    if args.shape is not None:
        options = {"model": str(write_model(args.shape)), "load_format": "dummy"}
        vocab_size = MODELS[args.shape]["vocab_size"]

    def start(policy: str) -> LLM:
        return LLM(
            **options, dtype=args.dtype, device=args.device, kv_policy=policy,
            num_gpu_blocks_override=args.num_blocks, max_model_len=args.max_model_len,
            enable_prefix_caching=False, swap_space=0, preemption_mode="recompute",
            skip_tokenizer_init=True,
        )  # fmt: skip

    workload = read_workload(
        args.lengths, args.num_requests + args.num_low, vocab_size=vocab_size,
        max_model_len=args.max_model_len - 1, seed=args.seed,
    )  # fmt: skip
    crowd, few = workload.samples[: args.num_requests], workload.samples[args.num_requests :]
    print(
        f"{len(crowd)} requests at once, {sum(len(s.prompt_token_ids) for s in crowd):,} tokens in,"
        f" {sum(s.output_len for s in crowd):,} out; pool of {args.num_blocks} blocks of 16",
        flush=True,
    )
    measure = one_at_a_time if args.one_at_a_time else in_turns
    rounds, low = measure(start, args, crowd, few)
    found: dict[str, Any] = {
        "rounds": [asdict(r) for r in rounds],
        "low_load_s": low,
        "paged_over": {},
    }
    for policy in args.policies:
        if policy == "paged":
            continue
        rates = ratio(rounds, policy, "output_tokens_per_s", args.rounds)
        batches = ratio(rounds, policy, "mean_seqs", args.rounds)
        slower = statistics.median(a / b for a, b in zip(low["paged"], low[policy], strict=True))
        found["paged_over"][policy] = {
            "throughput": rates, "batch": batches, "low_load_latency": slower,
        }  # fmt: skip
        print(
            f"paged over {policy:<12} throughput {rates['median']:.2f} ({rates['min']:.2f} to "
            f"{rates['max']:.2f}), batch {batches['median']:.2f}, latency at low load {slower:.3f}"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
