"""Synthetic request lengths, for when there is no trace at hand: drawn from published quantiles."""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import TraceError
from octavo.lab.trace import Trace, TraceRequest

NAMES = ("sharegpt", "alpaca")
"""Length lists that octavo brings."""
TOTAL_LIMIT = 2048
"""Prompt and output together stay below, as in the paper's lists."""

_Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LengthSet:
    """Quantiles of prompt and output lengths, in tokens."""

    name: str
    about: str
    """What they are of, and where they are from."""
    num_requests: int
    """Requests in the list that the quantiles are of."""
    rank_correlation: float
    """Of prompt and output."""
    percent: tuple[float, ...]
    """Where the quantiles are taken, rising from 0 to 100."""
    input: tuple[int, ...]
    output: tuple[int, ...]


def length_set(name: str) -> LengthSet:
    """One of `NAMES`. Raises `TraceError` for another name."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TraceError(f"no built-in lengths {name!r}; known: {', '.join(NAMES)}{hint}")
    text = resources.files("octavo.lab").joinpath("data/lengths.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    values = table["sets"][name]
    return LengthSet(
        name=name,
        about=values["about"],
        num_requests=values["num_requests"],
        rank_correlation=values["rank_correlation"],
        percent=tuple(table["percent"]),
        input=tuple(values["input"]),
        output=tuple(values["output"]),
    )


def draw_lengths(name: str, num: int, seed: int = 0) -> list[tuple[int, int]]:
    """`num` (prompt, output) lengths, the same for the same arguments everywhere.

    The distributions are met as well as `num` lengths can (one from each of `num` equal shares of
    probability, in drawn order), so that a short list already has the right means.
    Raises `TraceError` for an unknown name or less than one.
    """
    if num < 1:
        raise TraceError(f"at least 1 request must be drawn, got {num}")
    lengths, rng = length_set(name), np.random.RandomState(seed)  # a stream that numpy keeps
    # ranks of two correlated normals: a Gaussian copula (2 sin(pi r / 6) for Spearman's r)
    rho = 2 * math.sin(math.pi * lengths.rank_correlation / 6)
    first, second = rng.standard_normal(num), rng.standard_normal(num)
    second = rho * first + math.sqrt(1 - rho * rho) * second
    inputs = _values(lengths.percent, lengths.input, first)
    outputs = _values(lengths.percent, lengths.output, second)
    _keep_below(inputs, outputs, rng)
    return list(zip(inputs.tolist(), outputs.tolist(), strict=True))


def built_in_trace(name: str, num: int | None = None, seed: int = 0) -> Trace:
    """`draw_lengths` as a trace without times; by default as many as the published list has."""
    lengths = draw_lengths(name, num or length_set(name).num_requests, seed)
    requests = [TraceRequest(num_input=i, num_output=o) for i, o in lengths]
    return Trace(name=f"{name} (synthetic)", requests=requests)


def _values(
    percent: tuple[float, ...], quantiles: tuple[int, ...], order: npt.NDArray[np.float64]
) -> _Lengths:
    """One length from each of equal shares of probability, in the order of `order`'s ranks;
    between quantiles the logarithm is a straight line."""
    num = len(order)
    shares = (np.arange(num) + 0.5) * (100 / num)
    values = np.empty(num, dtype=np.int64)
    values[np.argsort(order, kind="stable")] = np.rint(
        np.exp(np.interp(shares, percent, np.log(quantiles)))
    )
    return values


def _keep_below(inputs: _Lengths, outputs: _Lengths, rng: np.random.RandomState) -> None:
    """Exchange the outputs of pairs that are too long together with those of others, in place:
    dropping them would make the distributions shorter."""
    for _ in range(1000):
        broken = np.flatnonzero(inputs + outputs >= TOTAL_LIMIT)
        if not len(broken):
            return
        for i in broken:
            j = int(rng.randint(len(inputs)))
            if max(inputs[i] + outputs[j], inputs[j] + outputs[i]) < TOTAL_LIMIT:
                outputs[i], outputs[j] = outputs[j], outputs[i]
    np.minimum(outputs, TOTAL_LIMIT - 1 - inputs, out=outputs)  # very short lists
