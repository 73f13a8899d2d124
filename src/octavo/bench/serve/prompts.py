"""Request bodies: prompts of exact lengths, as token ids or as text."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, Protocol

from octavo.bench.serve.datasets import Encoder
from octavo.bench.serve.load import Job
from octavo.bench.workload import Sample
from octavo.errors import ConfigError

_FEWEST_WORDS = 100


class Tokenizer(Encoder, Protocol):
    """What prompts are made with."""

    vocab_size: int

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""


def word_ids(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are a word with a space before it: side by side they are text that is cut into
    the same tokens again."""
    found = []
    for token_id in range(tokenizer.vocab_size):
        if re.fullmatch(
            r" [a-z]{2,}", tokenizer.decode([0, token_id])[len(tokenizer.decode([0])) :]
        ):
            found.append(token_id)
    if len(found) < _FEWEST_WORDS:
        raise ConfigError(
            f"the tokenizer has {len(found)} tokens that are whole words, too few to make prompts "
            "of: name the tokenizer of another model with --tokenizer"
        )
    return found


def in_words(samples: Sequence[Sample], words: Sequence[int], seed: int) -> list[Sample]:
    """The same lengths and shared beginnings, in words: equal ids become equal words."""
    rng = random.Random(seed)
    shuffled = list(words)
    rng.shuffle(shuffled)
    return [
        Sample(
            [shuffled[token_id % len(shuffled)] for token_id in sample.prompt_token_ids],
            sample.output_len,
            sample.arrival_s,
        )
        for sample in samples
    ]


def make_jobs(
    samples: Sequence[Sample],
    arrivals: Sequence[float],
    *,
    endpoint: str,
    model: str,
    ignore_eos: bool,
    temperature: float,
    tokenizer: Tokenizer | None,
    extra_body: dict[str, Any],
) -> list[Job]:
    """One request a sample. tokenizer: makes text of token ids; None: they are sent as they are,
    which chat cannot."""
    is_chat = endpoint.endswith("/chat/completions")
    if is_chat and tokenizer is None:
        raise ConfigError("chat takes text: use --prompt-kind text, or --endpoint /v1/completions")
    jobs = []
    for sample, at_s in zip(samples, arrivals, strict=True):
        ids = sample.prompt_token_ids
        prompt: Any = ids if tokenizer is None else sample.text or tokenizer.decode(ids)
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": sample.output_len,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if ignore_eos:
            body["ignore_eos"] = True
        jobs.append(Job(body | extra_body, at_s, len(ids), sample.output_len))
    return jobs
