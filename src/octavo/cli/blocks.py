"""`--show-blocks`: each sequence's block table, drawn as it grows.

A sequence sees contiguous logical blocks 0, 1, 2, ...; its table maps each to a physical block
anywhere in the pool. On a terminal the tables are redrawn in place; elsewhere each new mapping is
a line. A sequence that ends gives its blocks back within its last step: shown then is the table as
it was last seen, and a block taken in that very step has no number.
"""

from __future__ import annotations

import sys
from collections import Counter
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
_UNSEEN = -1
_ROW_LINES = 3
"""logical, physical, filled"""


@dataclass
class _Sequence:
    """What is known of one sequence."""

    name: str
    num_tokens: int = 0
    """Tokens whose KV is in the pool."""
    blocks: list[int] = field(default_factory=list)
    """As last seen; `_UNSEEN` for what the last step took."""
    num_old: int = 0
    """Leading blocks that it had before the last change."""
    finished: bool = False
    text: str = ""


class BlockView:
    """Shows block tables on stderr. A context manager; call `update` after each step.

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

    def update(self, output: RequestOutput, tables: BlockTables) -> None:
        """Take in what a step gave one request, and the tables after it."""
        held = tables.get(output.request_id, [])
        for sample in output.outputs:
            key = (output.request_id, sample.index)
            name = output.request_id + (f".{sample.index}" if len(output.outputs) > 1 else "")
            sequence = self._sequences.setdefault(key, _Sequence(name))
            if sequence.finished:
                continue
            sequence.text = sample.text
            blocks = held[sample.index] if sample.index < len(held) else []
            if sample.token_ids:
                # The token sampled last is computed, and so takes its slot, in the next step.
                sequence.num_tokens = len(output.prompt_token_ids) + len(sample.token_ids) - 1
            if sample.finish_reason is not None:
                self._end(sequence)
            elif blocks and blocks != sequence.blocks:
                self._grow(sequence, list(blocks))

    def _end(self, sequence: _Sequence) -> None:
        """Its blocks were free again before anybody could look: how many there were is known."""
        sequence.finished = True
        num_blocks = cdiv(sequence.num_tokens, self._block_size)
        unseen = [_UNSEEN] * (num_blocks - len(sequence.blocks))
        if unseen:
            self._grow(sequence, sequence.blocks + unseen)
        if self._live is None:
            print(
                f"request {sequence.name}: ended with {sequence.num_tokens} tokens in "
                f"{num_blocks} blocks, all released",
                file=self._stream,
            )

    def _grow(self, sequence: _Sequence, blocks: list[int]) -> None:
        old = sequence.blocks
        sequence.num_old = len(old) if blocks[: len(old)] == old else 0
        sequence.blocks = blocks
        if self._live is None:
            for logical in range(sequence.num_old, len(blocks)):
                where = f"physical block {blocks[logical]}"
                if blocks[logical] == _UNSEEN:
                    where = "taken and released in the last step"
                print(
                    f"request {sequence.name}: logical block {logical} -> {where}",
                    file=self._stream,
                )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        owners = Counter(
            block for s in self._sequences.values() if not s.finished for block in s.blocks
        )
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

    def _draw(self, sequence: _Sequence, owners: Counter[int], width: int, num_rows: int) -> Text:
        """A title, and the last blocks in at most `num_rows` rows of three lines each."""
        blocks = sequence.blocks
        per_row = max(1, (width - 10) // _CELL)
        first = max(0, len(blocks) - per_row * num_rows)
        drawing = Text().append(f"request {sequence.name}", style="bold")
        state = "ended, all released" if sequence.finished else "running"
        drawing.append(
            f"  {sequence.num_tokens} tokens in {len(blocks)} blocks of {self._block_size}, {state}"
            + (f" (from block {first})" if first else "")
        )
        for start in range(first, len(blocks), per_row):
            self._draw_row(drawing, sequence, owners, range(start, start + per_row))
        return drawing.append("\n")

    def _draw_row(
        self, drawing: Text, sequence: _Sequence, owners: Counter[int], indices: range
    ) -> None:
        blocks, size = sequence.blocks, self._block_size
        logical, physical, filled = Text("\nlogical  "), Text("\nphysical "), Text("\nfilled   ")
        for index in indices[: len(blocks) - indices.start]:
            style = "bold green" if index >= sequence.num_old else "cyan"
            style = "bold yellow" if owners[blocks[index]] > 1 else style
            used = min(size, max(0, sequence.num_tokens - index * size))
            logical.append(f"{index:>{_CELL - 1}} ", style="dim")
            number = "?" if blocks[index] == _UNSEEN else str(blocks[index])
            physical.append(f"{number:>{_CELL - 1}} ", style=style)
            filled.append(f" {_bar(used / size, _CELL - 2)} ", style="blue")
        for line in (logical, physical, filled):
            drawing.append_text(line)


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
