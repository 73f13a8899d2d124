"""Requests to measure with: random lengths, lists of lengths, recorded prompts. All seeded."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: what goes in, and how many tokens must come out."""

    prompt_token_ids: list[int]
    output_len: int
    arrival_s: float | None = None
    """When it came, where that was recorded."""
    text: str | None = None
    """What the ids are the tokens of, where it was a text."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Samples and where they come from."""

    description: str
    samples: list[Sample]
    num_too_long: int = 0
    """Rows left out because prompt and output exceed the context."""

    @property
    def num_input_tokens(self) -> int:
        """Prompt tokens of all samples."""
        return sum(len(sample.prompt_token_ids) for sample in self.samples)

    @property
    def num_output_tokens(self) -> int:
        """Tokens to generate for all samples."""
        return sum(sample.output_len for sample in self.samples)


def random_workload(
    num_prompts: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
    *,
    vocab_size: int,
    max_model_len: int,
    seed: int = 0,
) -> Workload:
    """Random token ids. Lengths are uniform in `len * (1 - range_ratio)` to `len * (1 +
    range_ratio)`, at least 1. Raises `InvalidRequestError` when they cannot fit the context."""
    if not 0 <= range_ratio < 1:
        raise InvalidRequestError(
            f"--random-range-ratio must be at least 0 and below 1, got {range_ratio}",
            parameter="random_range_ratio",
        )
    for name, value in (("num-prompts", num_prompts), ("input-len", input_len),
                        ("output-len", output_len)):  # fmt: skip
        if value < 1:
            raise InvalidRequestError(f"--{name} must be at least 1, got {value}", parameter=name)
    longest = sum(int(length * (1 + range_ratio)) for length in (input_len, output_len))
    if longest > max_model_len:
        raise InvalidRequestError(
            f"--input-len {input_len} and --output-len {output_len}, up to {1 + range_ratio:g} "
            f"times, make {longest} tokens; the context (--max-model-len) holds {max_model_len}",
            parameter="input_len",
        )
    rng = random.Random(seed)

    def draw(length: int) -> int:
        return max(1, rng.randint(int(length * (1 - range_ratio)), int(length * (1 + range_ratio))))

    samples = [
        Sample(_random_ids(rng, draw(input_len), vocab_size), draw(output_len))
        for _ in range(num_prompts)
    ]
    plural = "s" if num_prompts > 1 else ""
    about = (
        f"about {input_len} in, {output_len} out"
        if range_ratio
        else (f"{input_len} in, {output_len} out")
    )
    return Workload(f"{num_prompts} random prompt{plural} ({about}), seed {seed}", samples)


def read_workload(
    path: Path,
    num_prompts: int | None,
    *,
    vocab_size: int,
    max_model_len: int,
    seed: int = 0,
    in_order: bool = False,
) -> Workload:
    """Samples from a .csv or .jsonl file, .gz or not.

    CSV, and JSONL rows, have `input_tokens` and `output_tokens` (prompts are then random ids; rows
    with `hash_ids`, after a header that tells `block_tokens`, share prefixes where their ids are
    equal); or JSONL rows have `prompt_ids` or `prompt_token_ids` and `max_tokens`.
    num_prompts: how many, drawn without repetition by `seed`, or with `in_order` the first; None or
    enough: all, in order.

    Raises `InvalidRequestError` naming the row that cannot be used.
    """
    rng = random.Random(seed)
    samples, num_too_long, block_tokens = [], 0, 16
    for number, row in _rows(path):
        if "header" in row:
            block_tokens = int(row["header"].get("block_tokens", block_tokens))
            continue
        num_input, num_output = _lengths(row, path, number)
        if num_input + num_output > max_model_len:
            num_too_long += 1
            continue
        samples.append((row, num_input, num_output))
    if not samples:
        raise InvalidRequestError(
            f"{path} has no request that fits the context of {max_model_len} tokens "
            f"({num_too_long} are longer)",
            parameter="dataset",
        )
    if num_prompts is not None and num_prompts < len(samples):
        samples = samples[:num_prompts] if in_order else rng.sample(samples, num_prompts)
    chosen = [
        Sample(
            _prompt_ids(row, num_input, block_tokens, vocab_size, rng, seed),
            num_output,
            _arrival(row, path),
        )
        for row, num_input, num_output in samples
    ]
    return Workload(f"{len(chosen)} requests of {path.name}, seed {seed}", chosen, num_too_long)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, values) of each row."""
    plain = path.name.removesuffix(".gz")
    if not plain.endswith((".csv", ".jsonl")):
        raise InvalidRequestError(
            f"{path} must be a .csv or .jsonl file, .gz or not", parameter="dataset"
        )
    try:
        with (gzip.open if path.name.endswith(".gz") else open)(path, "rt", encoding="utf-8") as f:
            if plain.endswith(".csv"):
                yield from enumerate(csv.DictReader(f), 2)
            else:
                yield from ((n, json.loads(line)) for n, line in enumerate(f, 1) if line.strip())
    except OSError as error:
        raise InvalidRequestError(
            f"cannot read {path}: {error.strerror or error}", parameter="dataset"
        ) from None
    except ValueError as error:
        raise InvalidRequestError(f"{path}: {error}", parameter="dataset") from None


def _lengths(row: dict[str, Any], path: Path, number: int) -> tuple[int, int]:
    ids = row.get("prompt_ids", row.get("prompt_token_ids"))
    num_input = len(ids) if isinstance(ids, list) else row.get("input_tokens")
    num_output = row.get("max_tokens", row.get("output_tokens"))
    try:
        lengths = int(num_input), int(num_output)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        lengths = (0, 0)
    if min(lengths) < 1:
        raise InvalidRequestError(
            f"{path}, line {number}: needs input_tokens and output_tokens, or prompt_ids and "
            f"max_tokens, of at least 1; it has {', '.join(row)}",
            parameter="dataset",
        )
    return lengths


def _arrival(row: dict[str, Any], path: Path) -> float | None:
    value = row.get("arrival_s")
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise InvalidRequestError(
            f"{path}: arrival_s must be a number of seconds, got {value!r:.80}", parameter="dataset"
        ) from None


def _prompt_ids(
    row: dict[str, Any],
    num_tokens: int,
    block_tokens: int,
    vocab_size: int,
    rng: random.Random,
    seed: int,
) -> list[int]:
    ids = row.get("prompt_ids", row.get("prompt_token_ids"))
    if isinstance(ids, list):
        return ids
    shared: list[int] = []
    for block in row.get("hash_ids", ()):
        shared += _random_ids(random.Random(f"{seed}:{block}"), block_tokens, vocab_size)
    rest = _random_ids(rng, max(0, num_tokens - len(shared)), vocab_size)
    return (shared + rest)[:num_tokens]


def _random_ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]
