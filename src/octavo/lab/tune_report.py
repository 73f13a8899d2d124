"""Block sizes compared, for people."""

from __future__ import annotations

from collections.abc import Callable

from octavo.lab.tuner import USUAL, SizeRow, Tuning
from octavo.util import human_bytes

_Column = tuple[str, str, Callable[[SizeRow], str]]


def report(tuning: Tuning, workload: str, pool: str) -> str:
    """A table, and what it says."""
    columns = _columns(tuning)
    rows = [
        [name for name, _, _ in columns],
        [unit for _, unit, _ in columns],
        *([show(row) for _, _, show in columns] for row in tuning.rows),
    ]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    table = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    lines = [workload, pool, "", *table, ""]
    lines += [f"blocks of {size}: {why}" for size, why in tuning.refused.items()]
    lines += verdict(tuning)
    return "\n".join(line.rstrip() for line in lines)


def verdict(tuning: Tuning) -> list[str]:
    """What to take, and how much it matters."""
    what = "throughput" if tuning.saturated else "latency (seconds an output token)"
    lines = [f"recommended: --block-size {tuning.recommended}"]
    noise = f"{tuning.noise:.1%}, which is what another order of the same requests changes"
    if not tuning.matters:
        lines.append(f"  it does not matter here: {what} of all sizes is the same within {noise}")
        return lines
    usual = f"against {USUAL}: {tuning.against_usual:+.1%} {what}"
    if tuning.recommended == USUAL:
        usual = f"{USUAL} is as good as any"
    worst = min(tuning.rows, key=lambda row: row.score)
    lines.append(f"  {usual}; against the worst, {worst.block_size}: {tuning.against_worst:+.0%}")
    same = ", ".join(map(str, tuning.as_good))
    if len(tuning.as_good) > 1:
        lines.append(f"  as good as the best: {same}; they differ by less than {noise}")
    return lines


def _columns(tuning: Tuning) -> list[_Column]:
    columns: list[_Column] = [
        ("block", "tokens", lambda r: f"{r.block_size}"),
        ("blocks", "", lambda r: f"{r.num_blocks:,}"),
        ("unfilled", "of taken", lambda r: f"{r.unfilled:.1%}"),
        ("table", "entries", lambda r: f"{r.table_entries:,.1f}"),
        ("tables", "of a batch", lambda r: human_bytes(r.table_bytes)),
    ]
    if any(row.host_us is not None for row in tuning.rows):
        columns.append(("host", "us/step", lambda r: f"{r.host_us or 0:,.0f}"))
    columns += [
        ("decode", "ms/step", lambda r: f"{r.decode_ms:.2f}"),
        ("swap", "ms/seq", lambda r: f"{r.host_block_ms:.2f}"),
    ]
    if tuning.has_prefixes:
        columns.append(("hits", "of prompts", lambda r: f"{r.hit_rate:.1%}"))
    return [
        *columns,
        ("preempted", "", lambda r: f"{r.num_preemptions:,}"),
        ("batch", "seqs", lambda r: f"{r.mean_batch:.1f}"),
        ("output", "tokens/s", lambda r: f"{r.tokens_per_s:,.0f}"),
        ("latency", "ms/token", lambda r: f"{1e3 * r.normalized_s:.1f}"),
        ("TTFT p95", "ms", lambda r: f"{1e3 * r.ttft_p95_s:,.0f}"),
        ("score", "", lambda r: f"{r.score:.3f}"),
    ]
