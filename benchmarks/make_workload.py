"""Writes the requests that every engine of `benchmarks/peers` is measured with.

    python benchmarks/make_workload.py OUT_DIR [--num-requests 64] [--seed 0]

OUT_DIR/workload.jsonl: 64 requests, 10,240 prompt and 8,192 output tokens. Prompt lengths have a
mean of 160, a 90th percentile near 456 and a longest of 600; outputs a mean of 128 and a longest of
400: many short requests and a few long ones, as in recorded chats.
OUT_DIR/single.jsonl: one request of 32 prompt and 128 output tokens.
OUT_DIR/beam.jsonl: half as many requests as the first, prompts as there, 64 output tokens each:
static batches of beams need one length.

A row has id, prompt_ids, prompt_len and max_tokens; `octavo bench throughput --dataset` reads it.

Prompts are random ordinary tokens of the default model, so that they need neither a text nor a
tokenizer. A dense transformer does the same arithmetic whatever the ids are, lengths are forced,
and no engine may guess or cache text (prefix caching and speculation are off), so nothing timed
depends on what a prompt says. Needs Python alone; one seed gives the same files everywhere.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist

FIRST_ID, VOCAB_SIZE = 17, 49_152
"""SmolLM2's ordinary tokens: the 17 before are special."""
MEAN_PROMPT, LONGEST_PROMPT, PROMPT_SIGMA = 160, 600, 1.32
MEAN_OUTPUT, LONGEST_OUTPUT, OUTPUT_SIGMA = 128, 400, 0.7
BEAM_OUTPUT = 64


def log_normal_lengths(count: int, mean: int, sigma: float, longest: int) -> list[int]:
    """`count` lengths in ascending order with the exact sum `count * mean`.

    Evenly spaced quantiles of a log-normal distribution of shape `sigma`, cut off at `longest`.
    """
    shape = [math.exp(sigma * NormalDist().inv_cdf((i + 0.5) / count)) for i in range(count)]
    low, high = 0.0, float(longest)
    for _ in range(64):
        scale = (low + high) / 2
        too_small = sum(min(longest, scale * x) for x in shape) < count * mean
        low, high = (scale, high) if too_small else (low, scale)
    exact = [min(longest, high * x) for x in shape]
    lengths = [max(1, math.floor(x)) for x in exact]
    # what rounding down lost goes to the largest fractions
    order = sorted(range(count), key=lambda i: lengths[i] - exact[i])
    for i in order[: count * mean - sum(lengths)]:
        lengths[i] += 1
    return sorted(lengths)


def shuffled(lengths: Sequence[int], rng: random.Random) -> list[int]:
    """In random order. Only `Random.random` yields the same in every version of Python."""
    return [length for _, length in sorted((rng.random(), length) for length in lengths)]


def request(index: int, num_prompt: int, num_output: int, rng: random.Random) -> dict[str, object]:
    """A row."""
    span = VOCAB_SIZE - FIRST_ID
    ids = [FIRST_ID + int(span * rng.random()) for _ in range(num_prompt)]
    return {"id": index, "prompt_ids": ids, "prompt_len": num_prompt, "max_tokens": num_output}


def write(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    print(f"{path}: {len(rows)} request{'s' if len(rows) > 1 else ''}")


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--num-requests", type=int, default=64, help="at least 16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.num_requests < 16:  # fewer than 8 long requests cannot have these means
        parser.error(f"--num-requests must be at least 16, got {args.num_requests}")
    rng, count = random.Random(args.seed), args.num_requests
    prompts = shuffled(log_normal_lengths(count, MEAN_PROMPT, PROMPT_SIGMA, LONGEST_PROMPT), rng)
    outputs = shuffled(log_normal_lengths(count, MEAN_OUTPUT, OUTPUT_SIGMA, LONGEST_OUTPUT), rng)
    pairs = enumerate(zip(prompts, outputs, strict=True))
    args.out_dir.mkdir(parents=True, exist_ok=True)
    write(args.out_dir / "workload.jsonl", [request(i, p, o, rng) for i, (p, o) in pairs])
    write(args.out_dir / "single.jsonl", [request(0, 32, 128, rng)])
    lengths = log_normal_lengths(count // 2, MEAN_PROMPT, PROMPT_SIGMA, LONGEST_PROMPT)
    rows = [request(i, p, BEAM_OUTPUT, rng) for i, p in enumerate(shuffled(lengths, rng))]
    write(args.out_dir / "beam.jsonl", rows)


if __name__ == "__main__":
    main()
