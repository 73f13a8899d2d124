"""Frames as coloured text: every function is of its arguments alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from octavo.dashboard.client import Blocks
from octavo.util import human_bytes

FREE, CACHED, USED, EXTERNAL = range(4)
_OWNER_COLOURS = (
    "dodger_blue1", "orange1", "green3", "magenta", "gold1", "cyan", "red1", "medium_purple",
    "spring_green1", "hot_pink", "light_salmon1", "deep_sky_blue1",
)  # fmt: skip
_STYLES = {FREE: "grey30", CACHED: "grey58", EXTERNAL: "red3"}
_CELLS = {FREE: "·", CACHED: "▒", USED: "█", EXTERNAL: "x"}
_TERMS = (
    ("tokens", "green3"), ("reserved", "gold1"), ("internal", "orange1"), ("external", "red3"),
    ("cached", "grey58"), ("free", "grey30"),
)  # fmt: skip
COLUMNS = (
    "no", "request", "client", "state", "prompt", "cached", "output", "blocks", "shared",
    "block-s", "age", "queued", "pre", "why it waits",
)  # fmt: skip


def head_text(url: str, about: dict[str, Any], frame: dict[str, Any] | None, status: str) -> Text:
    """One line: who is watched, and how."""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f" {about.get('model', url)} ", "bold")
    if about and frame is not None:
        size = about["num_blocks"] * about["bytes_per_block"]
        text.append(f" {about['kv_policy']}, {about['num_blocks']:,} blocks x ")
        text.append(f"{about['block_size']}" + (f" = {human_bytes(size)}" if size else ""))
        text.append(f"  running {frame['num_running']}, waiting {frame['num_waiting']}")
    text.append(f"  [{status}]", "bold" if status == "live" else "bold yellow")
    return text


def _groups_text(frame: dict[str, Any], about: dict[str, Any]) -> str:
    """What groups of layers hold that keep their KV equally long; nothing where all keep all."""
    windows = about.get("windows", [0])
    found = []
    for window in dict.fromkeys(windows):
        groups = [g for w, g in zip(windows, frame.get("groups", ()), strict=False) if w == window]
        if not groups:
            continue
        keep = f"last {window:,}" if window else "all"
        text = f"{len(groups)} keeping {keep} tokens {sum(g[0] for g in groups):,} blocks"
        found.append(text + (f", {sum(g[1] for g in groups):,} given back" if window else ""))
    return "\ngroups of layers: " + "; ".join(found) if found else ""


def pool_text(blocks: Blocks, width: int, most_lines: int) -> Text:
    """The pool as cells, in the order of the blocks; where there are more blocks than cells, one
    stands for several, and shows what most of them are."""
    num = len(blocks.state)
    per_cell = max(1, -(-num // (width * most_lines)))
    text = Text(no_wrap=True)
    for line_start in range(0, num, per_cell * width):
        line_end = min(num, line_start + per_cell * width)
        for start in range(line_start, line_end, per_cell):
            kinds = Counter(
                (blocks.state[i], blocks.owner[i], blocks.refs[i] > 1)
                for i in range(start, min(num, start + per_cell))
            )
            (state, owner, is_shared), _ = kinds.most_common(1)[0]
            style = _STYLES.get(state) or _OWNER_COLOURS[owner % len(_OWNER_COLOURS)]
            text.append("▓" if is_shared and state == USED else _CELLS[state], style)
        text.append("\n")
    legend = "█ used  ▓ shared  ▒ cached  · free  x free, in pieces"
    text.append(legend + (f"  (a cell is {per_cell} blocks)" if per_cell > 1 else ""), "dim")
    return text


def memory_text(frame: dict[str, Any], about: dict[str, Any], width: int) -> Text:
    """A bar of where every slot is, and the figures; the tiers where there are any."""
    ledger = frame["ledger"]
    total = max(1, sum(ledger[term] for term, _ in _TERMS))
    text = Text(no_wrap=True, overflow="ellipsis")
    before = done = 0
    for term, colour in _TERMS:
        done += ledger[term]
        end = done * width // total
        text.append("━" * (end - before), colour)
        before = end
    text.append("\n")
    for term, colour in _TERMS:
        style = "grey62" if colour == "grey30" else colour  # a letter is thinner than a bar
        text.append(f"{term} {ledger[term] / total:.1%}  ", style)
    text.append(f"pinned {ledger['pinned'] / total:.1%}  saved by sharing ")
    text.append(f"{ledger['shared_saved'] / total:.1%}", "bold")
    text.append(_groups_text(frame, about))
    for tier, blocks in frame["tiers"].items():
        size = sum(blocks.values())
        if size:
            text.append(
                f"\n{tier}: {blocks['held']:,} held, {blocks['cached']:,} cached of {size:,}"
            )
    return text


def rates_text(frame: dict[str, Any], before: Sequence[tuple[float, int, int]]) -> Text:
    """Tokens a second over the last frames, latencies, hits and misses."""
    text = Text(overflow="ellipsis")
    seconds = before[-1][0] - before[0][0]
    prompt = (before[-1][1] - before[0][1]) / seconds if seconds > 0 else 0.0
    output = (before[-1][2] - before[0][2]) / seconds if seconds > 0 else 0.0
    text.append(f"{output:,.0f} tokens/s out, {prompt:,.0f} in")
    for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
        found = frame["latency"][key]
        values = "-" if found is None else f"{_ms(found[0])} / {_ms(found[1])}"
        text.append(f"   {name} p50/p99 {values}")
    totals = frame["totals"]
    text.append(f"   preemptions {totals['preemptions']}, evictions {totals['evictions']:,}")
    asked = totals["query_tokens"]
    rate = f"{totals['hit_tokens'] / asked:.1%}" if asked else "-"
    text.append(f"\nprefix hits {rate}")
    misses = sorted(totals["misses"].items(), key=lambda item: -item[1])
    if misses:
        text.append("; blocks missed: " + ", ".join(f"{why} {num:,}" for why, num in misses))
    return text


def events_text(events: Sequence[dict[str, Any]]) -> Text:
    """The last events, the newest first."""
    text = Text()
    for event in events:
        text.append(f"{event['time_s']:10.2f} s ", "dim")
        text.append(f"{event['kind']:<10}", "bold")
        text.append(f" {event['request_id'] or 'engine'}: {event['why']}\n")
    if not events:
        text.append("no events: nobody had to give way", "dim")
    return text


def request_cells(row: dict[str, Any]) -> list[Text]:
    """A row of the table, as `COLUMNS`."""
    colour = _OWNER_COLOURS[row["no"] % len(_OWNER_COLOURS)]
    name = row["id"] + (f" x{row['num_seqs']}" if row["num_seqs"] > 1 else "")
    cells = [
        row["no"], name, row["client"], row["state"], f"{row['prompt_tokens']:,}",
        f"{row['cached_tokens']:,}", f"{row['output_tokens']:,}/{row['max_tokens']:,}",
        f"{row['blocks']:,}", f"{row['shared_blocks']:,}", f"{row['block_seconds']:,.1f}",
        f"{row['age_s']:.1f}s", f"{row['queue_s']:.1f}s", row["preemptions"], row["why"] or "",
    ]  # fmt: skip
    styled = colour if row["blocks"] else "dim"
    return [Text(str(cell), styled if i < 2 else "") for i, cell in enumerate(cells)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"
