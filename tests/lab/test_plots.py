"""Plots: what stands in them, that files are the same each time, and what is said without
matplotlib."""

from __future__ import annotations

import builtins
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.lab import plots
from octavo.lab.plots import Curve, Limit

matplotlib = pytest.importorskip("matplotlib")

POLICIES = ("paged", "orca-oracle", "orca-pow2", "orca-max", "contiguous")


def five_curves() -> Any:
    return plots.curves(
        [
            Curve(name=name, xs=[1, 2, 3], ys=[0.05, 0.1 * (i + 1), 1.0])
            for i, name in enumerate(POLICIES)
        ],
        title="Latency",
        x_label="rate [requests/s]",
        y_label="latency [s/token]",
        log_y=True,
        limits=[Limit(0.5, "0.5 s/token")],
    )


def legend_names(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_curves_are_told_apart_by_colour_marker_and_dash() -> None:
    (axes,) = five_curves().axes
    lines = axes.get_lines()[: len(POLICIES)]
    for looks in (
        {line.get_color() for line in lines},
        {line.get_marker() for line in lines},
        {str(line.get_linestyle()) + str(line._dash_pattern) for line in lines},
    ):
        assert len(looks) == len(POLICIES)


def test_labels_units_and_the_limit_are_there() -> None:
    figure = five_curves()
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "Latency"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("rate [requests/s]", "latency [s/token]")
    assert legend_names(figure) == [*POLICIES, "0.5 s/token"]
    assert axes.get_lines()[-1].get_ydata()[0] == 0.5


def test_the_legend_covers_neither_axes_nor_the_edge() -> None:
    for labels in (3, 5, 8):
        figure = plots.curves(
            [Curve(name=f"a long name {i}", xs=[0, 1], ys=[i, 1]) for i in range(labels)],
            title="t",
            x_label="x",
            y_label="y",
        )
        figure.canvas.draw()
        box = figure.legends[0].get_window_extent()
        assert box.y1 <= figure.axes[0].get_tightbbox().y0 + 1
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_a_policy_looks_the_same_in_every_plot() -> None:
    alone = plots.cdfs({"orca-max": [1.0, 2.0]}, title="t", x_label="x [s]")
    assert alone.axes[0].get_lines()[0].get_color() == plots.look_of("orca-max").colour
    assert five_curves().axes[0].get_lines()[3].get_color() == plots.look_of("orca-max").colour


def test_cdf_reaches_every_share_at_its_value() -> None:
    figure = plots.cdfs({"a": [3.0, 1.0, 2.0, 2.0], "none": []}, title="t", x_label="x [s]")
    (line,) = figure.axes[0].get_lines()
    assert line.get_xdata().tolist() == [1, 1, 2, 2, 3]
    assert line.get_ydata().tolist() == [0, 25, 50, 75, 100]


def test_cdf_of_many_values_keeps_its_ends() -> None:
    figure = plots.cdfs({"a": range(100_000)}, title="t", x_label="x")
    (line,) = figure.axes[0].get_lines()
    assert len(line.get_xdata()) == 2001
    assert (line.get_xdata()[-1], line.get_ydata()[-1]) == (99_999, 100)


def test_stacked_bars_stand_on_each_other_with_marks_and_values() -> None:
    bars = {
        "paged": {"tokens": 96.0, "reserved": 3.0, "free": 1.0},
        "orca-max": {"tokens": 20.0, "reserved": 15.0, "free": 65.0},
    }
    figure = plots.stacked_bars(
        bars, title="t", y_label="share [%]", marks={"orca-max": (20.4, 33.7)}
    )
    (axes,) = figure.axes
    boxes = [(p.get_x(), p.get_y(), p.get_height()) for p in axes.patches]
    assert [(y, height) for _, y, height in boxes] == [
        (0, 96), (0, 20), (96, 3), (20, 15), (99, 1), (35, 65),
    ]  # fmt: skip
    assert len({(p.get_facecolor(), p.get_hatch()) for p in axes.patches}) == 3
    assert [line.get_ydata()[0] for line in axes.get_lines()] == [20.4, 33.7]
    assert {text.get_text() for text in axes.texts} == {"96.0", "20.0", "15.0", "65.0"}
    assert sorted(legend_names(figure)) == ["free", "paper", "reserved", "tokens"]


def test_grouped_bars_leave_out_what_is_not_known() -> None:
    figure = plots.grouped_bars(
        ["a", "b"], {"paper": [7.0, None], "here": [7.01, 9.8]}, title="t", y_label="batch"
    )
    (axes,) = figure.axes
    assert [p.get_height() for p in axes.patches] == [7.0, 7.01, 9.8]
    assert [text.get_text() for text in axes.texts] == ["7", "7.01", "9.8"]
    paper, here = (axes.containers[i][0] for i in (0, 1))
    assert paper.get_x() + paper.get_width() <= here.get_x()
    assert paper.get_hatch() and not here.get_hatch()


def test_time_series_hold_their_value() -> None:
    figure = plots.time_series(
        [Curve(name="paged", xs=range(100), ys=range(100))], title="t", y_label="sequences"
    )
    (line,) = figure.axes[0].get_lines()
    assert line.get_drawstyle() == "steps-post"
    assert figure.axes[0].get_ylim()[0] == 0
    assert not figure.legends, "one line needs no legend"


def test_ticks_of_log_axes_are_plain_numbers() -> None:
    figure = plots.curves(
        [Curve(name="a", xs=[1, 256], ys=[0.05, 5])],
        title="t", x_label="x", y_label="y", log_x=True, log_y=True, x_ticks=[1, 16, 256],
    )  # fmt: skip
    figure.canvas.draw()
    (axes,) = figure.axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "16", "256"]
    shown = {t.get_text() for t in axes.get_yticklabels(which="both")}
    assert {"0.1", "0.2", "0.5", "1", "2"} <= shown
    assert not any("$" in text for text in shown)


def test_files_are_the_same_each_time_and_name_no_day(tmp_path: Path) -> None:
    first = plots.save(five_curves(), tmp_path / "deep" / "one")
    second = plots.save(five_curves(), tmp_path / "two")
    assert [path.name for path in first] == ["one.png", "one.svg"]
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes()
    text = first[1].read_text("utf-8")
    assert "<dc:date>" not in text and not re.search(r"20\d\d-\d\d-\d\d", text)
    assert first[0].read_bytes().startswith(b"\x89PNG")


def test_places_are_rounded_and_scales_are_not(tmp_path: Path) -> None:
    """A glyph is drawn at scale(0.015625): 0.015 would make all text too small."""
    (path,) = plots.save(five_curves(), tmp_path / "one", ("svg",))
    text = path.read_text("utf-8")
    assert "scale(0.12 -0.12)" in text and "scale(0.015625)" in text
    places = re.findall(r'\bd="([^"]*)"|translate\(([^)]*)\)', text)
    assert places and not re.search(r"\.\d{4}", " ".join(a + b for a, b in places))


def test_two_svgs_fit_into_one_page() -> None:
    parts = [plots.svg_text(five_curves(), scope) for scope in ("a", "b")]
    ids = []
    for part in parts:
        assert part.startswith("<svg")
        root = ET.fromstring(part)
        mine = {element.get("id") for element in root.iter() if element.get("id")}
        used = re.findall(r'url\(#([^)"]+)\)|href="#([^"]+)"', part)
        assert used and {a or b for a, b in used} <= mine
        ids.append(mine)
    assert not ids[0] & ids[1]


def test_global_state_of_matplotlib_is_left_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    plots.save(five_curves(), tmp_path / "x")
    assert dict(matplotlib.rcParams) == before


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write the plot .*file"):
        plots.save(five_curves(), tmp_path / "file" / "plot")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[lab\]'"):
        plots.require_matplotlib()
    with pytest.raises(ConfigError, match="octavo\\[lab\\]"):
        five_curves()


def test_importing_the_plots_imports_no_matplotlib() -> None:
    code = (
        "import sys, octavo.lab.plots, octavo.lab.plots_compare; print('matplotlib' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "False"
