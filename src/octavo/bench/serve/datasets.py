"""Datasets of texts: ShareGPT's conversations, and JSON lines with a prompt each."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from octavo.bench.workload import Sample, Workload
from octavo.errors import InvalidRequestError

TextSet = Literal["sharegpt", "custom"]
_FEWEST_TOKENS = 4
_MOST_PROMPT_TOKENS = 1024
_MOST_TOKENS = 2048
"""Of ShareGPT's conversations those that vLLM's benchmark takes, so that figures compare."""
_CUSTOM_OUTPUT_LEN = 256
"""Where a row says nothing, as in vLLM's benchmark."""


class Encoder(Protocol):
    """What counts tokens."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""


@dataclass(frozen=True, slots=True)
class _Row:
    prompt: str
    answer: str | None
    """What was answered, whose length is to be asked for."""
    output_len: int | None = None


def read_texts(
    kind: TextSet,
    path: Path,
    num_prompts: int,
    tokenizer: Encoder,
    *,
    output_len: int | None,
    max_model_len: int,
    seed: int,
) -> Workload:
    """So many prompts of a file, in an order drawn by `seed`; repeated where it has too few.

    sharegpt: a JSON list of objects with `conversations`, turns with `from` and `value`. A
    conversation's first turn is the prompt, and the second's length is asked for; left out are
    those that vLLM's benchmark leaves out: under 4 tokens, prompts above 1024, both above 2048.
    custom: JSON lines with `prompt`, and `output_tokens`, or 256.

    output_len: tokens to ask for, whatever the file says. Raises `InvalidRequestError` naming what
    cannot be used.
    """
    if num_prompts < 1:
        raise InvalidRequestError(
            f"--num-prompts must be at least 1, got {num_prompts}", parameter="num_prompts"
        )
    if output_len is not None and output_len < 1:
        raise InvalidRequestError(
            f"--{kind}-output-len must be at least 1, got {output_len}", parameter="output_len"
        )
    rows = list((_conversations if kind == "sharegpt" else _prompts)(path))
    rng = random.Random(seed)
    rng.shuffle(rows)
    samples: list[Sample] = []
    num_too_long = 0
    for row in rows:
        if len(samples) == num_prompts:
            break
        sample = _sample(row, tokenizer, output_len)
        num = len(sample.prompt_token_ids)
        if kind == "sharegpt" and not _is_usual(num, sample.output_len, output_len is None):
            continue
        if num + sample.output_len > max_model_len:
            num_too_long += 1
            continue
        samples.append(sample)
    if not samples:
        raise InvalidRequestError(
            f"{path} has no prompt that can be used, of {len(rows):,}; {num_too_long:,} are longer "
            f"than --max-model-len {max_model_len}",
            parameter="dataset_path",
        )
    num_own = len(samples)
    samples += rng.choices(samples, k=num_prompts - num_own)
    repeated = f", {num_prompts - num_own} of them repeated" if num_own < num_prompts else ""
    about = f"{num_prompts} prompts of {path.name}{repeated}, seed {seed}"
    return Workload(about, samples, num_too_long)


def _sample(row: _Row, tokenizer: Encoder, output_len: int | None) -> Sample:
    ids = tokenizer.encode(row.prompt)
    asked = output_len or row.output_len
    if asked is None and row.answer is not None:
        asked = len(tokenizer.encode(row.answer, add_special_tokens=False))
    if asked is None:
        asked = _CUSTOM_OUTPUT_LEN
    return Sample(ids, asked, text=row.prompt)


def _is_usual(num_prompt: int, num_output: int, is_recorded: bool) -> bool:
    """Whether vLLM's benchmark takes it, whose limits count what was recorded."""
    if num_prompt < _FEWEST_TOKENS or (is_recorded and num_output < _FEWEST_TOKENS):
        return False
    return num_prompt <= _MOST_PROMPT_TOKENS and num_prompt + num_output <= _MOST_TOKENS


def _conversations(path: Path) -> Iterator[_Row]:
    found = _json(_text(path), str(path))
    if not isinstance(found, list):
        raise _bad(f"{path} is no JSON list of conversations")
    for number, entry in enumerate(found):
        turns = entry.get("conversations", ()) if isinstance(entry, dict) else None
        where = f"{path}, conversation {number}"
        if not isinstance(turns, Sequence) or isinstance(turns, str):
            raise _bad(f"{where}: needs conversations, a list of turns")
        values = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) < len(values):
            raise _bad(f"{where}: each turn needs a value, a text")
        if len(texts) == 2:
            yield _Row(texts[0], texts[1])


def _prompts(path: Path) -> Iterator[_Row]:
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        entry = _json(line, where)
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise _bad(f"{where}: needs prompt, a text")
        asked = entry.get("output_tokens")
        if asked is not None and (type(asked) is not int or asked < 1):
            raise _bad(f"{where}: output_tokens must be a whole number of at least 1")
        yield _Row(prompt, None, asked)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise _bad(f"cannot read --dataset-path {path}: {reason}") from None


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(f"{where}: {error}") from None


def _bad(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, parameter="dataset_path")
