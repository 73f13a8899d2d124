"""`--show-blocks`: each sequence's block table, drawn as it grows.

A sequence sees contiguous logical blocks 0, 1, 2, ...; its table maps each to a physical block
anywhere in the pool. Tables of different sequences may map to the same physical block: then it is
said who shares it, and a table that gets its own copy says of which block. On a terminal the tables
are redrawn in place; elsewhere each new mapping is a line. A sequence that ends gives its blocks
back within its last step: shown then is the table as it was last seen, and a block taken in that
very step has no number.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import TracebackType
from typing import TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.text import Text

from octavo.outputs import RequestOutput
from octavo.util import cdiv

BlockTables = dict[str, list[list[int]]]
"""Request id -> per sequence the physical block ids."""

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_CELL = 6
_TEXT_LINES = 5
_GONE, _UNSEEN = -1, -2
"""In place of a block: given back, as it is behind the window; not known."""
_ROW_LINES = 4
"""logical, physical, tables, filled"""
_MAX_NAMES = 4
"""Sequences that are named where a block is shared by more."""


@dataclass
class _Sequence:
    """What is known of one sequence."""

    name: str
    num_tokens: int | None = None
    """Tokens whose KV is in the pool; None: not known (of a beam until the end)."""
    blocks: list[int] = field(default_factory=list)
    """As last seen; `_UNSEEN` for what the last step took, `_GONE` for what was given back."""
    changed: frozenset[int] = frozenset()
    """Logical blocks that the last change mapped."""
    finished: bool = False
    text: str = ""


class BlockView:
    """Shows block tables on stderr. A context manager; call `look` after each step, and `update`
    with each output.

    block_size: slots in a block. with_text: show the answer above the tables too, for when
    stdout is the same terminal and must stay quiet until the end.
    """

    def __init__(self, block_size: int, *, with_text: bool, stream: TextIO | None = None) -> None:
        self._block_size = block_size
        self._with_text = with_text
        self._stream = stream or sys.stderr
        self._console = Console(file=self._stream)
        self._live: Live | None = None
        self._sequences: dict[tuple[str, int], _Sequence] = {}
        self._seen: frozenset[int] = frozenset()
        """Blocks in the tables of the last step."""

    def __enter__(self) -> BlockView:
        if self._console.is_terminal:
            self._live = Live(
                self, console=self._console, refresh_per_second=15, redirect_stdout=False
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def look(self, tables: BlockTables) -> None:
        """Take in the tables after a step."""
        names = {
            (request_id, index): f"{request_id}.{index}" if len(of_request) > 1 else request_id
            for request_id, of_request in tables.items()
            for index in range(len(of_request))
        }
        owners: dict[int, list[str]] = {}
        for key, name in names.items():
            for block in tables[key[0]][key[1]]:
                if block != _GONE:
                    owners.setdefault(block, []).append(name)
        for key, name in names.items():
            blocks = list(tables[key[0]][key[1]])
            sequence = self._sequences.setdefault(key, _Sequence(name))
            if blocks and not sequence.finished and blocks != sequence.blocks:
                self._change(sequence, blocks, owners)
        self._seen = frozenset(owners)

    def update(self, output: RequestOutput) -> None:
        """Take in what a step gave one request."""
        of_request = [s for key, s in self._sequences.items() if key[0] == output.request_id]
        if any(sample.score is not None for sample in output.outputs):
            # Ranked: an output's index is its rank, and does not say which sequence it was.
            for sequence in of_request:
                self._end(sequence)
            return
        for sample in output.outputs:
            key = (output.request_id, sample.index)
            name = output.request_id + (f".{sample.index}" if len(output.outputs) > 1 else "")
            sequence = self._sequences.setdefault(key, _Sequence(name))
            if sequence.finished:
                continue
            sequence.text = sample.text
            if sample.token_ids:
                # The token sampled last is computed, and so takes its slot, in the next step.
                sequence.num_tokens = len(output.prompt_token_ids) + len(sample.token_ids) - 1
            if sample.finish_reason is not None:
                self._end(sequence)

    def _end(self, sequence: _Sequence) -> None:
        """Its blocks were free again before anybody could look: how many there were is known."""
        sequence.finished = True
        num_blocks = len(sequence.blocks)
        held = f"{num_blocks} blocks"
        if sequence.num_tokens is not None:
            num_blocks = cdiv(sequence.num_tokens, self._block_size)
            held = f"{sequence.num_tokens} tokens in {num_blocks} blocks"
        unseen = [_UNSEEN] * (num_blocks - len(sequence.blocks))
        if unseen:
            self._change(sequence, sequence.blocks + unseen, {})
        if self._live is None:
            print(
                f"request {sequence.name}: ended with {held}, all released",
                file=self._stream,
            )

    def _change(self, sequence: _Sequence, blocks: list[int], owners: dict[int, list[str]]) -> None:
        old = sequence.blocks
        changed = [i for i, block in enumerate(blocks) if i >= len(old) or block != old[i]]
        replaced = [i for i in changed if i < len(old) and blocks[i] != _GONE]
        # A new block in place of one is a copy-on-write. A known one: beams changed their order;
        # many: the sequence was preempted and came back.
        if len(replaced) > 1 or any(blocks[i] in self._seen for i in replaced):
            replaced = []
        sequence.blocks, sequence.changed = blocks, frozenset(changed)
        if self._live is not None:
            return
        for logical in changed:
            where = f"physical block {blocks[logical]}"
            if blocks[logical] == _UNSEEN:
                where = "taken and released in the last step"
            elif blocks[logical] == _GONE:
                where = "given back: it is behind the window"
            others = [name for name in owners.get(blocks[logical], ()) if name != sequence.name]
            if others:
                where += f", shared with {_named(others)}"
            elif logical in replaced:
                where += f", a copy of {old[logical]}"
            print(f"request {sequence.name}: logical block {logical} -> {where}", file=self._stream)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        owners: dict[int, list[str]] = {}
        for sequence in self._sequences.values():
            for block in () if sequence.finished else sequence.blocks:
                if block >= 0:
                    owners.setdefault(block, []).append(sequence.name)
        running = [s for s in self._sequences.values() if not s.finished]
        shown = running or list(self._sequences.values())
        parts: list[RenderableType] = []
        if self._with_text and running:
            parts.append(Text(_last_lines(shown[0].text, options.max_width, _TEXT_LINES) + "\n"))
        lines = options.size.height - 2 - (_TEXT_LINES + 1 if self._with_text else 0)
        most = max(1, lines // (_ROW_LINES + 2))
        rows = max(1, (lines // max(1, min(most, len(shown))) - 2) // _ROW_LINES)
        parts += [self._draw(s, owners, options.max_width, rows) for s in shown[:most]]
        if len(shown) > most:
            parts.append(Text(f"and {len(shown) - most} more sequences", style="dim"))
        yield Group(*parts)

    def _draw(
        self, sequence: _Sequence, owners: dict[int, list[str]], width: int, num_rows: int
    ) -> Text:
        """A title, and the last blocks in at most `num_rows` rows of four lines each."""
        blocks = sequence.blocks
        per_row = max(1, (width - 10) // _CELL)
        first = max(0, len(blocks) - per_row * num_rows)
        drawing = Text().append(f"request {sequence.name}", style="bold")
        state = "ended, all released" if sequence.finished else "running"
        tokens = "" if sequence.num_tokens is None else f"{sequence.num_tokens} tokens in "
        drawing.append(
            f"  {tokens}{len(blocks)} blocks of {self._block_size}, {state}"
            + (f" (from block {first})" if first else "")
        )
        shared = [block for block in blocks if len(owners.get(block, ())) > 1]
        if shared:
            others = {name: None for block in shared for name in owners[block]}
            others.pop(sequence.name, None)
            title = f"; {len(shared)} shared with {_named(list(others))}"
            drawing.append(title, style="yellow")
        for start in range(first, len(blocks), per_row):
            self._draw_row(drawing, sequence, owners, range(start, start + per_row))
        return drawing.append("\n")

    def _draw_row(
        self, drawing: Text, sequence: _Sequence, owners: dict[int, list[str]], indices: range
    ) -> None:
        """Logical numbers, physical ones, how many tables map there (if more than one), filling."""
        blocks, size = sequence.blocks, self._block_size
        logical, physical, filled = Text("\nlogical  "), Text("\nphysical "), Text("\nfilled   ")
        tables = Text("\ntables   ")
        is_shared = False
        for index in indices[: len(blocks) - indices.start]:
            num_tables = len(owners.get(blocks[index], ()))
            style = "bold green" if index in sequence.changed else "cyan"
            style = "bold yellow" if num_tables > 1 else style
            logical.append(f"{index:>{_CELL - 1}} ", style="dim")
            number = {_UNSEEN: "?", _GONE: "-"}.get(blocks[index], str(blocks[index]))
            physical.append(f"{number:>{_CELL - 1}} ", style=style)
            count = f"x{num_tables}" if num_tables > 1 else ""
            tables.append(f"{count:>{_CELL - 1}} ", style="yellow")
            is_shared |= num_tables > 1
            if sequence.num_tokens is not None:
                used = min(size, max(0, sequence.num_tokens - index * size))
                filled.append(f" {_bar(used / size, _CELL - 2)} ", style="blue")
        for line in (logical, physical, *([tables] if is_shared else [])):
            drawing.append_text(line)
        if sequence.num_tokens is not None:
            drawing.append_text(filled)


def _named(names: list[str]) -> str:
    """`0.1, 0.2 and 3 more`."""
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _bar(share: float, width: int) -> str:
    """`share` in 0..1 as a bar of `width` characters; an unfilled slot is a dot."""
    eighths = round(share * width * 8)
    full, part = divmod(eighths, 8)
    bar = "█" * full + (_EIGHTHS[part] if part else "")
    return bar + "·" * (width - len(bar))


def _last_lines(text: str, width: int, count: int) -> str:
    """The end of a text, as it would fill `count` lines of a terminal."""
    lines = [
        line[start : start + width]
        for line in text.splitlines() or [""]
        for start in range(0, max(1, len(line)), max(1, width))
    ]
    return "\n".join(lines[-count:])
