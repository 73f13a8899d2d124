"""How the lab's plots look, and the files they are saved to.

Colours are those of Okabe and Ito (2008), which stay apart for colour-blind eyes; markers, dashes
and hatches say the same once more. matplotlib is imported when a figure is made; without it
`ConfigError` says what to install.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
GREY, PALE = "#8C8C8C", "#F2F2F2"
INK = "#1F2933"
"""Of text and axes."""


class Look(NamedTuple):
    """How one series or one kind of memory is drawn."""

    colour: str
    marker: str = "o"
    dash: str = "-"
    hatch: str = ""


SERIES = (
    Look(BLUE, "o", "-", ""),
    Look(GREEN, "s", "--", "//"),
    Look(ORANGE, "^", "-.", "\\\\"),
    Look(VERMILION, "D", ":", "xx"),
    Look(PURPLE, "v", (0, (5, 1, 1, 1, 1, 1)), ".."),  # type: ignore[arg-type]
    Look(SKY, "P", "-", "||"),
    Look(BLACK, "X", "--", "--"),
    Look(GREY, "h", "-.", "++"),
)
"""Looks by place, for series without a name that is known."""

LOOKS: Mapping[str, Look] = {
    "paged": SERIES[0],
    "orca-oracle": SERIES[1],
    "orca-pow2": SERIES[2],
    "orca-max": SERIES[3],
    "contiguous": SERIES[4],
    "tokens": Look(BLUE),
    "reserved": Look(SKY, hatch="//"),
    "internal": Look(ORANGE, hatch="xx"),
    "ended": Look(ORANGE, hatch="++"),
    "external": Look(VERMILION, hatch=".."),
    "rounding": Look(VERMILION, hatch="||"),
    "cached": Look(GREEN, hatch="\\\\"),
    "free": Look(PALE),
    "paper": Look(GREY, "X", "--", "//"),
    "here": Look(BLUE, "o", "-", ""),
}
"""Looks of names that mean the same in every plot."""


def look_of(name: str, index: int = 0) -> Look:
    """The look of a policy, a kind of memory, `paper` or `here`; any other by its place."""
    return LOOKS.get(name, SERIES[index % len(SERIES)])


class Limit(NamedTuple):
    """A line across the axes: what values are held against."""

    value: float
    name: str
    """Stands in the legend, with its unit."""
    vertical: bool = False


def require_matplotlib() -> None:
    """Raise `ConfigError` unless matplotlib can be imported: ask before long work."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            f"plots need matplotlib, which is not here ({error}): pip install 'octavo[lab]'"
        ) from None


def _style() -> AbstractContextManager[None]:
    require_matplotlib()
    import matplotlib

    return matplotlib.rc_context(
        {
            "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
            "font.size": 12.0,
            "axes.titlesize": 14.0,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.titlepad": 10.0,
            "axes.labelsize": 12.0,
            "xtick.labelsize": 11.0,
            "ytick.labelsize": 11.0,
            "legend.fontsize": 11.0,
            "legend.frameon": False,
            "text.color": INK,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#D9DEE3",
            "grid.linewidth": 0.8,
            "hatch.linewidth": 0.7,
            "lines.linewidth": 2.0,
            "lines.markersize": 7.0,
            "savefig.facecolor": "white",
            "svg.hashsalt": "octavo",
            "svg.fonttype": "path",
        }
    )


def styled(function: Callable[P, T]) -> Callable[P, T]:
    """Runs a function in the lab's style; artists keep what they were made with."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with _style():
            return function(*args, **kwargs)

    return wrapped


def new_figure(width: float = 8.0, height: float = 5.0) -> Figure:
    """An empty figure, `width` x `height` inches, whose parts keep off each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain_ticks(axis: Axis) -> None:
    """0.05, 1, 10 at the ticks of a log axis instead of powers of ten; 2 and 5 between them where
    the axis shows less than three decades, more where it shows hardly one."""
    import math

    from matplotlib.ticker import FuncFormatter

    def between(value: float, _: int) -> str:
        low, high = axis.get_view_interval()
        first = round(value / 10 ** math.floor(math.log10(value) + 1e-9), 6)
        shown = (2, 3, 4, 5, 6, 8) if high < 12 * low else (2, 5) if high < 1000 * low else ()
        return f"{value:g}" if first in shown else ""

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(FuncFormatter(between))
    axis.set_tick_params(which="minor", labelsize=9.5, pad=5.5)


def save(figure: Figure, stem: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write `stem`.png and `stem`.svg; returns the paths. The same figure gives the same bytes.
    The folder is made. Raises `ConfigError` where it cannot be written."""
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in formats]
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        for path, kind in zip(paths, formats, strict=True):
            path.write_bytes(_rendered(figure, kind))
    except OSError as error:
        raise ConfigError(f"cannot write the plot {error.filename}: {error.strerror}") from None
    return paths


def svg_text(figure: Figure, scope: str = "") -> str:
    """The figure as one `<svg>` element for an HTML page. `scope`: different for each figure of a
    page, so that their ids do not meet; letters, digits and dashes."""
    text = _rendered(figure, "svg").decode("utf-8")
    text = text[text.index("<svg") :]
    if scope:
        text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{scope}-", text)
    return text


@styled
def _rendered(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    unsaid = ("Date", "Creator") if kind == "svg" else ("Software",)
    figure.savefig(buffer, format=kind, metadata=dict.fromkeys(unsaid))
    return _smaller(buffer.getvalue()) if kind == "svg" else buffer.getvalue()


def _smaller(svg: bytes) -> bytes:
    """Without indentation, and places to a thousandth of a point; scales keep all their digits."""

    def rounded(part: re.Match[str]) -> str:
        return re.sub(r"-?\d+\.\d{4,}", lambda number: f"{float(number[0]):.3f}", part[0])

    text = re.sub(r'\b(?:d|x|y)="[^"]*"|translate\([^)]*\)', rounded, svg.decode("utf-8"))
    return re.sub(r"\n\s+", "\n", text).encode()


def finish(
    figure: Figure,
    axes: Axes,
    title: str,
    x_label: str,
    y_label: str,
    limits: Sequence[Limit] = (),
) -> None:
    """Title, labels, limits, and the legend below."""
    for limit in limits:
        draw = axes.axvline if limit.vertical else axes.axhline
        draw(limit.value, color=INK, linewidth=1.3, linestyle=(0, (2, 2)), label=limit.name)
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1 or limits:
        figure.legend(
            handles, labels, loc="outside lower center", handlelength=2.8, columnspacing=1.6,
            ncols=_num_columns(labels, 72 * figure.get_figwidth()),
        )  # fmt: skip


def _num_columns(labels: Sequence[str], width: float) -> int:
    """Columns of a legend, filled from the top: as few rows as fit into `width` points."""
    for num_rows in range(1, len(labels)):
        num = -(-len(labels) // num_rows)
        size, num_longer = divmod(len(labels), num)
        used, first = 0.0, 0
        for column in range(num):
            rest = first + size + (column < num_longer)
            used += 57 + 6.8 * max(len(label) for label in labels[first:rest])
            first = rest
        if used < width:
            return num
    return 1
