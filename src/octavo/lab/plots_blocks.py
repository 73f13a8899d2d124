"""Pictures of the pool at one moment: every block, whose it is, and what its slots are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.lab.block_map import Block, BlockMap
from octavo.lab.plots_style import INK, look_of, new_figure, styled
from octavo.util import cdiv

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {
    "tokens": "tokens",
    "reserved": "reserved: will be filled",
    "internal": "internal: never will be filled",
    "ended": "internal: of ended members of a batch",
    "rounding": "external: more than was asked for",
    "external": "external: free, in pieces too small",
    "cached": "cached",
    "free": "free",
}
_COLUMNS = 16
"""Blocks a row."""
_ROW_INCHES = 0.36
_TALL = 0.9
"""Of a row of height 1: the rest is the gap to the next one."""
_MAX_OWNERS = 2
"""That are named; of more their number."""


@styled
def block_maps(
    maps: Sequence[BlockMap],
    *,
    title: str,
    captions: Sequence[str] = (),
) -> Figure:
    """One panel a map: blocks by id from the top left, 16 a row; inside each its slots from
    left to right, coloured and hatched by kind, and the numbers of the sequences that own it (or
    how many, as `x4`).

    `captions` stand above the panels; by default the policy, its sequences and its shares. Numbers
    in italics are of sequences that have ended, whose batch has not.
    """
    rows = [cdiv(len(one.blocks), _COLUMNS) for one in maps]
    height = sum(_ROW_INCHES * num + 0.55 for num in rows) + 1.35
    figure = new_figure(9.0, height)
    axes_of = figure.subplots(len(maps), 1, squeeze=False, height_ratios=rows)[:, 0]
    for index, (axes, one) in enumerate(zip(axes_of, maps, strict=True)):
        _draw(axes, one)
        caption = captions[index] if index < len(captions) else caption_of(one)
        axes.set_title(caption, fontsize=11.5, fontweight="normal", pad=5)
    figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold")
    shown = {kind for one in maps for block in one.blocks for kind, num in _parts(block) if num}
    _legend(figure, [kind for kind in NAMES if kind in shown])
    return figure


def caption_of(one: BlockMap) -> str:
    """`orca-pow2: 5 sequences run, 31 wait; tokens 25 %, reserved 36 %, ...`."""
    shares = {kind: 100 * num / one.num_slots for kind, num in one.sums().items()}
    listed = ", ".join(f"{kind} {share:.0f} %" for kind, share in shares.items() if share >= 0.5)
    runs = "1 sequence runs" if one.num_sequences == 1 else f"{one.num_sequences} sequences run"
    ended = len({tuple(block.owners) for block in one.blocks if block.is_ended})
    more = f", {ended} have ended" if ended else ""
    return f"{one.policy}: {runs}{more}, {one.num_waiting} wait; {listed}"


def _draw(axes: Axes, one: BlockMap) -> None:
    for first in range(0, len(one.blocks), _COLUMNS):
        row = one.blocks[first : first + _COLUMNS]
        _draw_row(axes, row, first // _COLUMNS, one.block_size)
    axes.set_xlim(-0.05, _COLUMNS + 0.05)
    axes.set_ylim(cdiv(len(one.blocks), _COLUMNS), -0.1)
    axes.axis("off")


def _draw_row(axes: Axes, row: Sequence[Block], y: int, size: int) -> None:
    """Spans of slots of one kind, the borders of blocks over them, and owners."""
    from matplotlib.patches import Rectangle

    for kind, start, end in _spans(row):
        look = look_of(kind)
        span = Rectangle((start / size, y), (end - start) / size, _TALL, clip_on=False)
        span.set(facecolor=look.colour, hatch=look.hatch, edgecolor=INK, linewidth=0.3)
        axes.add_patch(span)
    bottom, top = y + _TALL, y
    thin: list[float] = [0, len(row), float("nan"), 0, len(row), float("nan")]
    thin_y: list[float] = [top, top, top, bottom, bottom, bottom]
    thick: list[float] = []
    for x in range(len(row) + 1):
        is_border = 0 < x < len(row) and row[x - 1].owners != row[x].owners
        if is_border:
            thick += [x, x, float("nan")]
        else:
            thin += [x, x, float("nan")]
            thin_y += [top, bottom, bottom]
    axes.plot(thin, thin_y, color=INK, linewidth=0.9, clip_on=False)
    axes.plot(thick, [top, bottom, bottom] * (len(thick) // 3), color=INK, linewidth=2.2)
    for x, block in enumerate(row):
        if block.owners:
            _name(axes, block, x + 0.5, y + _TALL / 2)


def _spans(row: Sequence[Block]) -> list[tuple[str, int, int]]:
    """(kind, first slot, slot behind the last) along a row of blocks."""
    spans: list[tuple[str, int, int]] = []
    end = 0
    for block in row:
        for kind, num in _parts(block):
            if not num:
                continue
            start, end = end, end + num
            if spans and spans[-1][0] == kind:
                start = spans.pop()[1]
            spans.append((kind, start, end))
    return spans


def _parts(block: Block) -> list[tuple[str, int]]:
    """Slots by how they are drawn: what is lost in a block somebody has looks another way than a
    block that nobody can have, and what a dead sequence has than what a live one has."""
    looks = {"internal": "ended"} if block.is_ended else {}
    if block.owners:
        looks["external"] = "rounding"
    return [(looks.get(kind, kind), num) for kind, num in block.parts().items()]


def _name(axes: Axes, block: Block, x: float, y: float) -> None:
    owners = sorted(block.owners)
    text = " ".join(map(str, owners)) if len(owners) <= _MAX_OWNERS else f"x{len(owners)}"
    axes.text(
        x, y, text, ha="center", va="center", fontsize=9, color=INK,
        bbox={"boxstyle": "square,pad=0.12", "facecolor": "white", "edgecolor": "none"},
        style="italic" if block.is_ended else "normal",
        fontweight="bold" if len(owners) > 1 else "normal",
    )  # fmt: skip


def _legend(figure: Figure, kinds: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=look_of(k).colour, hatch=look_of(k).hatch, edgecolor=INK, label=NAMES[k])
        for k in kinds
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, handlelength=2.2)
