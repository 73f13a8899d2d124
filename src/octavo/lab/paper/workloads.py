"""Requests as the paper's artifact makes them: its recipe, over lists of lengths."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from octavo.errors import TraceError
from octavo.lab.arrivals import paper_trace
from octavo.lab.lengths import draw_lengths, length_set
from octavo.lab.readers import read_trace
from octavo.lab.trace import TraceRequest

MAX_TOTAL = 2048
"""Prompt and output of a request are shorter than this together."""
Pair = tuple[int, int]
"""(input, output) tokens."""

_FILES = {
    "sharegpt": ("sharegpt_opt_lengths",),
    "alpaca": ("alpaca_fig11_synthetic_lengths",),
}
DATASETS = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}
"""Their names for people."""
_SUFFIXES = (".csv", ".csv.gz")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A list of lengths, in the order of its file; pairs that are too long are left out."""

    name: str
    """sharegpt or alpaca."""
    pairs: Sequence[Pair]
    source: str
    """The file, or that it was drawn."""

    @property
    def title(self) -> str:
        """Its name for people."""
        return DATASETS[self.name]

    def first(self, num: int) -> Lengths:
        """A slice of it."""
        return Lengths(self.name, self.pairs[:num], f"{self.source}, first {num:,}")

    def __str__(self) -> str:
        num = len(self.pairs)
        means = [sum(pair[i] for pair in self.pairs) / num for i in (0, 1)]
        return (
            f"{self.title}: {num:,} lengths, mean {means[0]:.2f} in / {means[1]:.2f} out "
            f"({self.source})"
        )


@dataclass(frozen=True, slots=True)
class Workloads:
    """The lists that everything is made of."""

    sharegpt: Lengths
    alpaca: Lengths

    def of(self, name: str) -> Lengths:
        """By name."""
        return {"sharegpt": self.sharegpt, "alpaca": self.alpaca}[name]

    def first(self, num: int) -> Workloads:
        """Slices of them."""
        return Workloads(self.sharegpt.first(num), self.alpaca.first(num))


def find_workloads(folder: Path | None) -> Workloads:
    """The lists in a folder: `sharegpt_opt_lengths.csv[.gz]` (the paper's own) and
    `alpaca_fig11_synthetic_lengths.csv[.gz]`; without them the first `sharegpt*lengths*` and
    `alpaca*lengths*` by name. None: the built-in synthetic ones.

    Raises `TraceError` for a folder that lacks one of them, or a list that cannot be used.
    """
    if folder is None:
        return Workloads(*(_built_in(name) for name in _FILES))
    if not folder.is_dir():
        raise TraceError(f"--traces {folder}: no such folder")
    return Workloads(*(_read(name, _find(name, folder)) for name in _FILES))


def _find(name: str, folder: Path) -> Path:
    for stem in _FILES[name]:
        for suffix in _SUFFIXES:
            if (folder / (stem + suffix)).is_file():
                return folder / (stem + suffix)
    other = sorted(
        path
        for path in folder.glob(f"{name}*lengths*")
        if path.name.endswith(_SUFFIXES) and path.is_file()
    )
    if not other:
        raise TraceError(
            f"--traces {folder}: neither {_FILES[name][0]}.csv[.gz] nor another "
            f"{name}*lengths*.csv[.gz] in it; leave --traces out for synthetic lengths"
        )
    return other[0]


def _read(name: str, path: Path) -> Lengths:
    trace = read_trace(path)
    pairs = [(r.num_input, r.num_output) for r in trace.requests if r.num_tokens < MAX_TOTAL]
    if not pairs:
        raise TraceError(f"{path}: no request of fewer than {MAX_TOTAL:,} tokens in it")
    return Lengths(name, pairs, path.name)


def _built_in(name: str) -> Lengths:
    pairs = draw_lengths(name, length_set(name).num_requests)
    return Lengths(name, pairs, "synthetic: drawn from published quantiles")


class Source(Protocol):
    """Makes the requests of a workload at a rate. Picklable."""

    def requests(self, rate: float, duration_s: float) -> list[TraceRequest]:
        """In order of arrival, the same for the same arguments. rate: requests a second."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Every request for itself: the artifact's text completion."""

    lengths: Lengths
    n: int = 1
    beam_width: int = 0
    seed: int = 0

    def requests(self, rate: float, duration_s: float) -> list[TraceRequest]:
        """See `Source`."""
        made = _made(self.lengths.pairs, rate, duration_s, self.seed)
        if self.n == 1 and not self.beam_width:
            return made
        return [replace(request, n=self.n, beam_width=self.beam_width) for request in made]


@dataclass(frozen=True, slots=True)
class Translation:
    """Sentences behind the same instruction and examples. The lengths of WMT16 en-de sentences are
    assumed: log-normal, mean 33 tokens in and 40 out by LLaMA's tokenizer."""

    prefix_tokens: int
    prefix: str = "instruction and examples"
    seed: int = 0

    def requests(self, rate: float, duration_s: float) -> list[TraceRequest]:
        """See `Source`."""
        num = _at_most(rate, duration_s)
        rng = np.random.RandomState(self.seed)
        sentences = rng.lognormal(-0.125, 0.5, num)
        translations = sentences * rng.lognormal(-0.01, 0.15, num)
        pairs = [
            (max(3, round(33 * i)), max(3, round(40 * o)))
            for i, o in zip(sentences.tolist(), translations.tolist(), strict=True)
        ]
        return [
            replace(
                request,
                num_input=self.prefix_tokens + request.num_input,
                prefix=self.prefix,
                prefix_tokens=self.prefix_tokens,
            )
            for request in _made(pairs, rate, duration_s)
        ]


@dataclass(frozen=True, slots=True)
class Chat:
    """Rounds of conversations: the prompt is the last `max_input` tokens of all that was said.

    The list has first rounds only, so later rounds are assumed to be like them, and conversations
    to have a geometric number of rounds: at a mean of 6 the share of prompts of 1,000 tokens and
    more is 64 %, as in multi-round lists of ShareGPT.
    """

    lengths: Lengths
    mean_rounds: float = 6.0
    new_probability: float = 0.5
    """That an arrival opens a conversation instead of going on with a random open one."""
    max_input: int = 1024
    max_output: int = 1016
    seed: int = 0

    def requests(self, rate: float, duration_s: float) -> list[TraceRequest]:
        """See `Source`. As in the artifact there are as many rounds as arrivals, so that in the
        end all rounds of all conversations are served."""
        made = _made(self.lengths.pairs, rate, duration_s)
        rng = random.Random(self.seed)
        unstarted = self._conversations([(r.num_input, r.num_output) for r in made], rng)
        rng.shuffle(unstarted)
        open_ones: list[list[Pair]] = []
        found = []
        for request in made:
            if unstarted and (not open_ones or rng.random() < self.new_probability):
                open_ones.append(unstarted.pop())
                chosen = len(open_ones) - 1
            else:
                chosen = rng.randrange(len(open_ones))
            num_input, num_output = open_ones[chosen].pop(0)
            if not open_ones[chosen]:
                del open_ones[chosen]
            found.append(replace(request, num_input=num_input, num_output=num_output))
        return found

    def _conversations(self, rounds: Sequence[Pair], rng: random.Random) -> list[list[Pair]]:
        """The rounds as conversations: prompts with their history, cut."""
        found: list[list[Pair]] = []
        history = 0
        for num_input, num_output in rounds:
            if not found or rng.random() < 1 / self.mean_rounds:
                found.append([])
                history = 0
            prompt = min(self.max_input, history + num_input)
            found[-1].append((prompt, min(self.max_output, num_output)))
            history += num_input + num_output
        return found


def _made(
    pairs: Sequence[Pair], rate: float, duration_s: float, seed: int = 0
) -> list[TraceRequest]:
    """The recipe. Only what can be needed of a long list is made into requests."""
    num = _at_most(rate, duration_s)
    lengths = [TraceRequest(num_input=i, num_output=o) for i, o in itertools.islice(pairs, num)]
    return paper_trace(lengths, rate, duration_s, seed=seed, max_tokens=MAX_TOTAL)


def _at_most(rate: float, duration_s: float) -> int:
    """Arrivals, ten standard deviations above the mean."""
    mean = rate * duration_s
    return math.ceil(mean + 10 * math.sqrt(mean) + 10)
