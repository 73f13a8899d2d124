"""Step times of a machine that was measured: `octavo lab calibrate` writes the file."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.lab.costs import StepShape
from octavo.lab.fit import Constants, Line, Residual, as_constants, as_dict, fit
from octavo.lab.model_shape import ModelShape

FORMAT = "octavo calibration"
VERSION = 1
_ABOUT = ("model", "dtype", "block_size", "num_threads", "machine", "date")


class CalibratedCosts:
    """A model on a machine.

    A step takes base + tokens (piecewise linear) + samples (piecewise linear) + attention of
    prompts, by pairs, and of decodes, by tokens read + what the host takes, for the step, its
    sequences, its prompts and their tokens, all that times what is held up now and then, + copies.
    """

    def __init__(self, constants: Constants, name: str, about: Mapping[str, Any]) -> None:
        self.constants = constants
        self._name = name
        self.about = about
        """What was measured: model, dtype, block_size, num_threads, machine, date, block_bytes."""
        self._tokens = _Curve(constants.tokens)
        self._samples = _Curve(constants.samples)
        self._step_s = constants.base_s + constants.host_step_s
        self._prompt_s = constants.prompt_s + constants.host_prompt_s + constants.host_seq_s

    @property
    def name(self) -> str:
        """See `StepCosts.name`."""
        return self._name

    @property
    def block_size(self) -> int:
        """Tokens of a block that copies were measured with."""
        size: int = self.about["block_size"]
        return size

    def check_model(self, shape: ModelShape) -> None:
        """Raises `ConfigError` where a model's KV is not of the size of what was measured. A file
        that does not tell is taken for the right one."""
        block_bytes = self.about.get("block_bytes")
        if not block_bytes:
            return
        measured = block_bytes / self.block_size  # without windows: there is one group
        asked = shape.kv_bytes_per_token
        if measured != asked:
            raise ConfigError(
                f"--costs is a calibration of {self.about['model']} in {self.about['dtype']}, "
                f"whose tokens take {measured:,.0f} B of KV; those of {shape.name} take {asked:,} "
                "B: measure that model with 'octavo lab calibrate', or name the same with --model"
            )

    @classmethod
    def load(cls, path: str | Path) -> CalibratedCosts:
        """From a file of `octavo lab calibrate`. Raises `ConfigError` for one that is none."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot read the calibration {path}: {error.strerror or error}; 'octavo lab "
                f"calibrate --out {path}' makes one"
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(_no_calibration(path, "it is not text")) from error
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(_no_calibration(path, f"it is not JSON: {error}")) from error
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ConfigError(_no_calibration(path, f'it does not say "format": "{FORMAT}"'))
        if values.get("version") != VERSION:
            raise ConfigError(
                f"{path} is a calibration of version {values.get('version')!r}, and this octavo "
                f"reads {VERSION}: measure again with 'octavo lab calibrate'"
            )
        try:
            return cls.of(values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(_no_calibration(path, f"it is damaged ({what})")) from error

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> CalibratedCosts:
        """From the contents of such a file. Raises `KeyError`, `TypeError` or `ValueError`."""
        about = {name: values[name] for name in _ABOUT}
        size = about["block_size"]
        if type(size) is not int or size < 1:
            raise ValueError(f"block_size must be a number of tokens, at least 1, got {size!r}")
        machine = about["machine"].get("cpu") or "a machine"
        name = f"{about['model']} in {about['dtype']}, measured on {machine} on {about['date']}"
        about["block_bytes"] = values.get("block_bytes")
        return cls(as_constants(values["constants"]), name, about)

    def step_s(self, shape: StepShape) -> float:
        """See `StepCosts.step_s`."""
        found = self.constants
        num_prefill = shape.num_prefill_tokens
        total = self._step_s if num_prefill or shape.num_decodes else found.host_step_s
        if num_prefill:
            total += (
                found.prompt_step_s
                + num_prefill * found.host_token_s
                + shape.num_prompts * self._prompt_s
                + shape.prefill_context * found.prefill_context_s
            )
        total += (
            self._tokens(num_prefill + shape.num_decodes)
            + self._samples(shape.num_samples)
            + shape.num_decodes * found.host_seq_s
            + shape.decode_context * found.decode_context_s
        )
        return (
            total * found.jitter
            + shape.num_copied_blocks * found.pool_copy_s
            + shape.num_host_blocks * found.host_copy_s
        )

    def copy_s(self, num_host_blocks: int) -> float:
        """See `StepCosts.copy_s`."""
        return num_host_blocks * self.constants.host_copy_s


class _Curve:
    """A piecewise linear function from 0 on."""

    def __init__(self, line: Line) -> None:
        self._starts = [start for start, _ in line]
        self._slopes = [slope for _, slope in line]
        self._heights = [0.0]
        for (low, slope), (high, _) in pairwise(line):
            self._heights.append(self._heights[-1] + slope * (high - low))

    def __call__(self, x: float) -> float:
        if not self._starts or x <= 0:
            return 0.0
        piece = bisect_right(self._starts, x) - 1
        return self._heights[piece] + self._slopes[piece] * (x - self._starts[piece])


def calibration(
    rows: Sequence[Mapping[str, Any]],
    *,
    model: str,
    dtype: str,
    block_size: int,
    num_threads: int,
    machine: Mapping[str, Any],
    date: str,
    **further: Any,
) -> dict[str, Any]:
    """The contents of a calibration file: what was measured, and what was made of it.

    Raises `ConfigError` for too few rows.
    """
    constants = fit(rows)
    values: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "dtype": dtype,
        "block_size": block_size,
        "num_threads": num_threads,
        "machine": dict(machine),
        "date": date,
        **further,
        "constants": as_dict(constants),
    }
    values["residuals"] = [
        {name: getattr(residual, name) for name in Residual.__slots__}
        for residual in residuals(CalibratedCosts.of(values), rows)
    ]
    values["rows"] = [dict(row) for row in rows]
    return values


def residuals(costs: CalibratedCosts, rows: Sequence[Mapping[str, Any]]) -> list[Residual]:
    """How well costs tell what was measured: of steps that were served the whole, of others what
    the model took."""
    found = costs.constants
    by_kind: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        kind = str(row["kind"])
        shape = StepShape(**{name: row[name] for name in StepShape._fields})
        predicted, measured = costs.step_s(shape), float(row["seconds"])
        if kind == "live":
            measured *= float(row["jitter"])
        elif kind in ("prefill", "decode", "mixed"):
            predicted /= found.jitter
            seqs = shape.num_decodes + shape.num_prompts
            predicted -= found.host_step_s + seqs * found.host_seq_s
            predicted -= shape.num_prompts * found.host_prompt_s
            predicted -= shape.num_prefill_tokens * found.host_token_s
            measured = float(row["compute_s"])
        else:  # copies
            predicted -= found.host_step_s * found.jitter
        by_kind.setdefault(kind, []).append((predicted, measured, float(row["num_steps"])))
    result = []
    for kind, triples in by_kind.items():
        off = [abs(predicted / measured - 1) for predicted, measured, _ in triples]
        all_predicted = sum(predicted * count for predicted, _, count in triples)
        all_measured = sum(measured * count for _, measured, count in triples)
        total = all_predicted / all_measured - 1
        result.append(Residual(kind, len(off), sum(off) / len(off), max(off), total))
    return result


def _no_calibration(path: str | Path, why: str) -> str:
    return f"{path} is no calibration: {why}; 'octavo lab calibrate --out FILE' makes one"
