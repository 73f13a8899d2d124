"""From a table of measured steps to constants: least squares in which nothing costs less than
nothing, and errors count as shares of what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError

Matrix = NDArray[np.float64]
Line = tuple[tuple[float, float], ...]
"""A piecewise linear function: (from x on, seconds for each further unit), the first x is 0."""

_KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_STEP_KINDS = ("prefill", "decode", "mixed", "live")


@dataclass(frozen=True, slots=True)
class Constants:
    """What a step takes on one machine, in seconds. See `CalibratedCosts`."""

    base_s: float
    """Of the model, whatever is in the step."""
    prompt_step_s: float
    """Besides, of a step with prompt tokens: it is not replayed."""
    tokens: Line
    """Of the tokens: the matrix products of the layers."""
    samples: Line
    """Of the samples: head and sampling."""
    decode_context_s: float
    """Of each token that a decode reads."""
    prefill_context_s: float
    """Of each pair of a prompt's token and one before it."""
    prompt_s: float
    """Of each prompt's share."""
    host_step_s: float
    """Of deciding and handing out."""
    host_seq_s: float
    """Of them, for each sequence..."""
    host_prompt_s: float
    """...and for each prompt's share: its coming, admission, lookup, blocks..."""
    host_token_s: float
    """...and for each of its tokens."""
    pool_copy_s: float
    """Of a block copied inside the pool."""
    host_copy_s: float
    """Of a block copied to or from the host: the mean of both ways."""
    jitter: float = 1.0
    """Steps take so many times what the rest adds up to, copies apart: now and then one is held
    up, which medians do not see."""


@dataclass(frozen=True, slots=True)
class Residual:
    """How far the constants are from what was measured, for one kind of row."""

    kind: str
    num_rows: int
    mean: float
    """Mean of |predicted / measured - 1|."""
    worst: float
    total: float
    """Predicted / measured over all rows together, less 1."""


class _Terms:
    """Columns with names: one term of the cost of each row."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.columns: list[Matrix] = []

    def add(self, name: str, values: Sequence[float]) -> None:
        """A column; one of zeros tells nothing and is left out."""
        column = np.asarray(values, dtype=np.float64)
        if column.any():
            self.names.append(name)
            self.columns.append(column)

    def add_line(self, name: str, values: Sequence[float]) -> None:
        """A column for each piece between two knots."""
        x = np.asarray(values, dtype=np.float64)
        knots = [k for k in _KNOTS if k < x.max(initial=0)]
        for low, high in zip(knots, [*knots[1:], np.inf], strict=True):
            self.add(f"{name} {low}", list(np.clip(x - low, 0, high - low)))

    def solve(self, seconds: Sequence[float], weights: Sequence[float]) -> dict[str, float]:
        """By name what a unit takes. An error counts as a share of `seconds`, times its weight."""
        measured, heavy = (np.asarray(v, dtype=np.float64) for v in (seconds, weights))
        table = np.stack(self.columns, axis=1) * (heavy / measured)[:, None]
        scale = np.linalg.norm(table, axis=0)
        found = nonnegative(table / scale, heavy) / scale
        return dict(zip(self.names, found.tolist(), strict=True))


def nonnegative(table: Matrix, wanted: Matrix) -> Matrix:
    """The x >= 0 for which |table x - wanted| is least (Lawson and Hanson's active set method)."""
    num_columns = table.shape[1]
    active = np.zeros(num_columns, dtype=bool)
    x = np.zeros(num_columns)
    tolerance = 1e-10 * max(1.0, float(np.abs(table.T @ wanted).max(initial=0.0)))
    for _ in range(10 * num_columns):
        gradient = table.T @ (wanted - table @ x)
        gradient[active] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        active[best] = True
        while active.any():
            trial = np.zeros(num_columns)
            trial[active] = np.linalg.lstsq(table[:, active], wanted, rcond=None)[0]
            if trial[active].min() > 0:
                x = trial
                break
            below = active & (trial <= 0)
            share = (x[below] / np.maximum(x[below] - trial[below], 1e-300)).min()
            x = x + share * (trial - x)
            active &= x > 1e-15
            x[~active] = 0.0
    return x


def fit(rows: Sequence[Mapping[str, Any]]) -> Constants:
    """Constants from rows as a calibration writes them. Raises `ConfigError` for too few."""
    steps = [row for row in rows if row["kind"] in _STEP_KINDS]
    live = [row for row in rows if row["kind"] == "live"]
    if len({row["kind"] for row in steps}) < len(_STEP_KINDS) - 1 or not live:
        raise ConfigError(
            f"{len(steps)} measured steps of the kinds "
            f"{', '.join(sorted({row['kind'] for row in steps})) or 'none'} are too few to fit "
            f"costs to; wanted: {', '.join(_STEP_KINDS)}"
        )

    for name, what in (("num_prompts", "prompts"), ("num_decodes", "decodes")):
        if not any(row[name] for row in live):
            raise ConfigError(
                f"no step that was served has {what} in it: what the host does for them is not "
                "known; measure again, with more rounds or a larger engine"
            )

    def column(name: str, of: Sequence[Mapping[str, Any]] = steps) -> list[float]:
        return [float(row[name]) for row in of]

    terms = _Terms()
    tokens = [float(r["num_prefill_tokens"] + r["num_decodes"]) for r in steps]
    terms.add("base", [1.0] * len(steps))
    terms.add("prompt step", [float(r["num_prompts"] > 0) for r in steps])
    terms.add_line("tokens", tokens)
    terms.add_line("samples", column("num_samples"))
    terms.add("decode context", column("decode_context"))
    terms.add("prefill context", column("prefill_context"))
    terms.add("prompts", column("num_prompts"))
    # Steps that were served are what is to be told: the grid is for what was not served.
    weights = [sqrt((1 + (row["kind"] == "live")) * row["num_steps"]) for row in steps]
    model = terms.solve(column("compute_s"), weights)
    beside = _Terms()
    beside.add("base", [1.0] * len(live))
    beside.add("seqs", [float(r["num_decodes"] + r["num_prompts"]) for r in live])
    beside.add("prompts", column("num_prompts", live))
    beside.add("tokens", column("num_prefill_tokens", live))
    rest = [r["seconds"] - r["compute_s"] - r["copy_s"] for r in live]
    host = beside.solve(rest, [sqrt(row["num_steps"]) for row in live])
    return Constants(
        base_s=model.get("base", 0.0),
        prompt_step_s=model.get("prompt step", 0.0),
        tokens=_line(model, "tokens"),
        samples=_line(model, "samples"),
        decode_context_s=model.get("decode context", 0.0),
        prefill_context_s=model.get("prefill context", 0.0),
        prompt_s=model.get("prompts", 0.0),
        host_step_s=host.get("base", 0.0),
        host_seq_s=host.get("seqs", 0.0),
        host_prompt_s=host.get("prompts", 0.0),
        host_token_s=host.get("tokens", 0.0),
        pool_copy_s=_per_block(rows, "pool copy", "num_copied_blocks", "seconds"),
        host_copy_s=sum(
            _per_block(rows, kind, "num_host_blocks", "copy_s") for kind in ("to host", "from host")
        )
        / 2,
        jitter=_jitter(live),
    )


def _jitter(live: Sequence[Mapping[str, Any]]) -> float:
    """Mean over served steps, each weighing as much as it took."""
    weights = [float(row["seconds"]) * float(row["num_steps"]) for row in live]
    factors = [float(row["jitter"]) for row in live]
    return sum(w * f for w, f in zip(weights, factors, strict=True)) / sum(weights)


def _line(found: Mapping[str, float], name: str) -> Line:
    """Pieces that cost as much as the one before are left out."""
    pieces: list[tuple[float, float]] = []
    for key, value in found.items():
        if key.startswith(f"{name} "):
            low = float(key.removeprefix(f"{name} "))
            if not pieces or pieces[-1][1] != value:
                pieces.append((low, value))
    return tuple(pieces)


def _per_block(rows: Sequence[Mapping[str, Any]], kind: str, count: str, time: str) -> float:
    """Seconds of a block, over all such rows; 0 where nothing was copied."""
    chosen = [row for row in rows if row["kind"] == kind]
    if not chosen:
        return 0.0
    most = max(chosen, key=lambda row: float(row[count]))
    return float(most[time]) / float(most[count])


def as_constants(values: Mapping[str, Any]) -> Constants:
    """Constants from what `as_dict` made of them. Raises `KeyError`, `TypeError`, `ValueError`."""
    read: dict[str, Any] = {}
    for name in Constants.__slots__:
        value = values[name]
        if name in ("tokens", "samples"):
            read[name] = tuple((_number(x), _number(s)) for x, s in value)
            starts = [x for x, _ in read[name]]
            if starts and (starts[0] != 0 or any(a >= b for a, b in pairwise(starts))):
                raise ValueError(f"{name} must begin at 0 and rise, got {starts}")
        else:
            read[name] = _number(value)
    if not read["jitter"]:
        raise ValueError("jitter must be above 0")
    return Constants(**read)


def _number(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and 0 <= value < float("inf")):
        raise ValueError(f"{value!r} is no cost")
    return float(value)


def as_dict(constants: Constants) -> dict[str, Any]:
    """Constants as plain values."""
    return asdict(constants)
