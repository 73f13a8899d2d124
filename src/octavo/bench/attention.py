"""`octavo bench attention`: attention kernels alone, against the machine and against contiguous
memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.bench.roofline import Rates, measure_rates, time_in_turns
from octavo.config import AttentionName, Device, DType, KVCacheDType
from octavo.engine.attention_kernels import AttentionKernels
from octavo.engine.kernels import (
    AttentionCase,
    HeadShape,
    device_name,
    free_bytes,
    pick_device,
    pick_dtype,
)
from octavo.util import human_bytes

_MAX_SHARE = 0.4
"""Of the free memory, that K and V of a kernel may take; two are measured at a time."""


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One kernel on one case."""

    batch: int
    context: int
    query: int
    """Tokens of each sequence that attend: 1 is a decode, more a prompt."""
    block_size: int
    seconds: float
    num_bytes: int
    """Of K and V, each read once."""
    num_flops: int
    bandwidth_share: float
    """`num_bytes` in that time, over the rate of a copy."""
    matrix_share: float
    """`num_flops` in that time, over the rate of a matrix product."""
    contiguous_s: float | None
    """The same with each sequence's K and V in one piece; None: no such kernel here."""
    error: float
    """Relative distance from the dense reference, of the worse of both."""

    @property
    def paging_cost(self) -> float | None:
        """By how much blocks make it longer, as a share."""
        return None if self.contiguous_s is None else self.seconds / self.contiguous_s - 1


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """Everything that was measured."""

    shape: HeadShape
    dtype: str
    kv_cache_dtype: str
    backend: str
    contiguous_how: str
    rates: Rates
    rows: list[AttentionRow]
    skipped: list[str]
    """Cases that were left out, and why."""

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        values = asdict(self)
        for row, plain in zip(self.rows, values["rows"], strict=True):
            plain["paging_cost"] = row.paging_cost
        return values

    def __str__(self) -> str:
        cache = "" if self.kv_cache_dtype == "auto" else f", {self.kv_cache_dtype} KV cache"
        lines = [
            f"{self.shape}, {self.dtype}{cache}; backend {self.backend}",
            str(self.rates),
            f"contiguous: {self.contiguous_how}",
        ]
        decodes = [row for row in self.rows if row.query == 1]
        prompts = [row for row in self.rows if row.query > 1]
        unit, scale = ("T", 1e-12) if self.rates.copy_bytes_per_s > 1e12 else ("G", 1e-9)
        if decodes:
            lines += ["", _title("decode", "batch x context", f"{unit}B/s", "of copy")]
            lines += [_line(row, scale * row.num_bytes, row.bandwidth_share) for row in decodes]
        if prompts:
            lines += ["", _title("prefill", "prompts x tokens", f"{unit}FLOP/s", "of matrix")]
            lines += [_line(row, scale * row.num_flops, row.matrix_share) for row in prompts]
        return "\n".join([*lines, *([""] if self.skipped else []), *self.skipped])


def _title(kind: str, case: str, rate: str, of: str) -> str:
    return (
        f"{kind:<9}{case:<18}{'block':>6}{'us':>11}{rate:>9}{of:>11}{'contiguous us':>15}"
        f"{'paging':>9}{'error':>9}"
    )


def _line(row: AttentionRow, amount: float, share: float) -> str:
    case = f"{row.batch:,} x {row.context:,}"
    if row.query not in (1, row.context):
        case = f"{row.batch:,} x {row.query:,} of {row.context:,}"
    beside = f"{'-':>15}{'-':>9}"
    if row.contiguous_s is not None:
        beside = f"{1e6 * row.contiguous_s:>15,.1f}{row.paging_cost:>+9.1%}"
    return (
        f"{'':9}{case:<18}{row.block_size:>6}{1e6 * row.seconds:>11,.1f}"
        f"{amount / row.seconds:>9,.2f}{share:>11.0%}{beside}{row.error:>9.0e}"
    )


def run_attention(
    shape: HeadShape,
    *,
    cases: Sequence[AttentionCase],
    block_sizes: Sequence[int],
    dtype: DType = "auto",
    kv_cache_dtype: KVCacheDType = "auto",
    device: Device = "auto",
    backend: AttentionName = "auto",
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> AttentionResult:
    """Time the backend's kernels on every case at every block size.

    dtype "auto" is bfloat16 on a GPU and the CPU's own choice elsewhere. Cases whose K and V do not
    fit the free memory are left out and named. Raises `ConfigError` for a device or a backend that
    is not here.
    """
    where = pick_device(device, kv_cache_dtype=kv_cache_dtype, attention_backend=backend)
    kind = pick_dtype(dtype, where)
    tell("measuring the machine")
    rates = measure_rates(where, device_name(where), kind)
    kernels = AttentionKernels(
        shape, kind, where, kv_cache_dtype=kv_cache_dtype, backend=backend, seed=seed
    )
    rows: list[AttentionRow] = []
    skipped: list[str] = []
    for case in cases:
        largest = max(kernels.pool_bytes(case, size) for size in block_sizes)
        room = int(_MAX_SHARE * free_bytes(where))
        if largest > room:
            skipped.append(
                f"left out: {case.batch:,} x {case.context:,} needs {human_bytes(largest)} of K and"
                f" V, and {human_bytes(room)} can be used"
            )
            continue
        tell(f"{case.batch} x {case.context}")
        for block_size in block_sizes:
            rows.append(_row(kernels, case, block_size, rates))
    return AttentionResult(
        shape, rates.dtype, kv_cache_dtype, kernels.name, kernels.contiguous_how, rates, rows,
        skipped,
    )  # fmt: skip


def _row(
    kernels: AttentionKernels, case: AttentionCase, block_size: int, rates: Rates
) -> AttentionRow:
    made = [kernels.paged(case, block_size)]
    beside = kernels.contiguous(case)
    if beside is not None:
        made.append(beside)
    seconds, *others = time_in_turns([each.calls for each in made], kernels.device)
    num_bytes, num_flops = made[0].num_bytes, made[0].num_flops
    error = max(each.error for each in made)
    if any(math.isnan(each.error) for each in made):
        error = math.nan
    made.clear()
    del beside
    kernels.release()
    return AttentionRow(
        case.batch,
        case.context,
        case.query,
        block_size,
        seconds,
        num_bytes,
        num_flops,
        num_bytes / seconds / rates.copy_bytes_per_s,
        num_flops / seconds / rates.matrix_flops_per_s,
        others[0] if others else None,
        error,
    )
