"""The page for everybody: by keyboard, by ear, on small and large screens, in both themes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from worlds import USED, World

Visitor = Callable[..., Any]

CONTRASTS = """() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const paint = (colours) => {
    context.clearRect(0, 0, 1, 1);
    for (const colour of colours) {
      context.fillStyle = colour;
      context.fillRect(0, 0, 1, 1);
    }
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const hasText = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!hasText || element.closest("dialog, .sr-only, script, noscript")) continue;
    if (element.getClientRects().length === 0) continue;
    const behind = [];
    for (let at = element; at; at = at.parentElement) {
      behind.unshift(getComputedStyle(at).backgroundColor);
    }
    const back = light(paint(behind)), front = light(paint([getComputedStyle(element).color]));
    const ratio = (Math.max(back, front) + 0.05) / (Math.min(back, front) + 0.05);
    found.push([ratio, element.className || element.tagName, element.textContent.trim()]);
  }
  return found;
}"""


def lived(windows: tuple[int, ...] = (0,)) -> World:
    world = World(200, rate=12, windows=windows)
    for _ in range(50):
        world.step()
    world.changed = set()
    return world


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible(visit: Visitor, scheme: str) -> None:
    page = visit({"one": lived((0, 512, 512))}, color_scheme=scheme).open()
    page.play("one", 3)
    page.page.click("#back")
    contrasts = page.page.evaluate(CONTRASTS)
    assert len(contrasts) > 80
    assert [one for one in contrasts if one[0] < 4.5] == []


def test_themes_follow_the_system_or_the_switch(visit: Visitor) -> None:
    page = visit({"one": World(64)}, color_scheme="dark").open()

    def is_dark(wanted: bool) -> None:
        """Wait for the canvas to have the theme, and see that the rest has it, too."""
        page.wait_painted(f"octavoDashboard.palette.isDark === {str(wanted).lower()}")
        colour = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
        for rgb in (page.pixels(5)[0], tuple(map(int, re.findall(r"\d+", colour)))):
            assert (sum(rgb[:3]) < 384) == wanted

    is_dark(True)
    page.page.select_option("#theme", "light")
    is_dark(False)
    page.page.reload()
    is_dark(False)  # remembered
    page.page.select_option("#theme", "auto")
    is_dark(True)
    page.page.emulate_media(color_scheme="light")
    is_dark(False)


@pytest.mark.parametrize(
    "width, height, scale", [(360, 740, 3), (768, 1024, 2), (1280, 800, 1), (3840, 2160, 1)]
)
def test_fits_the_screen(visit: Visitor, width: int, height: int, scale: int) -> None:
    screen = {"viewport": {"width": width, "height": height}, "device_scale_factor": scale}
    two = World(3000, windows=(0, 512, 512, 512, 512, 512))
    page = visit({"one": lived(), "two": two}, **screen).open()
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    for canvas in page.page.locator("canvas").all():
        box = canvas.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["height"] > 20
    for grid in page.page.locator("canvas.grid").all():
        assert grid.bounding_box()["height"] <= 0.75 * height
    for control in page.page.locator(".top button, .top select").all():
        box = control.bounding_box()
        assert box["height"] >= 24 and box["width"] >= 24


def test_a_tap_tells_of_a_block(visit: Visitor) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    page = visit({"one": lived()}, device_scale_factor=2, **phone).open()
    page.page.locator("canvas.grid").tap(position={"x": 100, "y": 60})
    page.page.wait_for_selector(".tip")
    box = page.page.locator(".tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360
    assert re.match(r"Block \d+: ", page.text(".tip"))


def test_everything_is_reached_by_keyboard(visit: Visitor) -> None:
    page = visit({"one": lived()}).open()
    wanted = {"skip", "pause", "back", "forth", "scrub", "theme", "grid", "scroll", "request"}
    wanted.add("event-list")
    seen, rings = set(), []
    for _ in range(25 + page.page.locator("button.request").count()):
        page.page.keyboard.press("Tab")
        name, ring = page.page.evaluate(
            """() => {
              const { id, className } = document.activeElement;
              return [id || className, getComputedStyle(document.activeElement).outlineStyle];
            }"""
        )
        seen.add(name)
        rings.append(ring)
        if wanted <= seen:
            break
    assert wanted <= seen
    assert set(rings) == {"solid"}  # what has the focus shows it


def test_blocks_are_walked_and_told_by_keyboard(visit: Visitor) -> None:
    world = World(64)
    world.put(1, USED, 7, 2, 5)
    page = visit({"one": world}).open()
    grid = page.page.locator("canvas.grid")
    grid.focus()
    columns = page.data("columns")
    visited = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "End", "ArrowRight", "Home"):
        page.page.keyboard.press(key)
        visited.append(int(re.findall(r"Block (\d+)", page.text(".cursor-text"))[0]))
    assert visited == [0, 1, columns + 1, columns, 63, 63, 0]
    page.page.keyboard.press("ArrowRight")
    page.page.keyboard.press("Enter")
    page.until("document.querySelector('.cursor-text').textContent.includes('Tokens')")
    said = page.text(".cursor-text")
    assert "Block 1: used" in said and "2 references" in said and "sky" in said
    assert page.page.locator(".cursor").is_visible()
    page.page.keyboard.press("Escape")
    assert page.page.locator(".cursor").is_hidden() and page.page.locator(".tip").is_hidden()


def test_keys_drive_the_clock(visit: Visitor) -> None:
    page = visit({"one": lived()}).open()
    page.play("one", 3)
    world = page.server.feeds["one"].world
    page.page.keyboard.press(" ")
    assert page.page.inner_text("#pause") == "Go live"
    page.page.keyboard.press(",")
    page.page.keyboard.press(",")
    page.page.keyboard.press(".")
    shown = page.page.evaluate("octavoDashboard.panels[0].frame.time")
    assert shown == world.now_s - 0.25
    page.page.keyboard.press(" ")
    assert page.page.inner_text("#pause") == "Pause"


def test_a_screen_reader_is_told_but_not_flooded(visit: Visitor) -> None:
    page = visit({"one": lived()}).open()
    live = page.page.locator("#live")
    assert live.get_attribute("aria-live") == "polite"
    page.until("document.querySelector('#live').textContent")
    said = live.text_content()
    assert re.match(r"200 blocks: \d+ used by \d+ requests, \d+ shared", said)
    page.play("one", 8)
    assert page.text(".summary") not in said and live.text_content() == said
    table = page.page.get_by_role("table", name="Requests that run and wait")
    assert table.get_by_role("columnheader").count() == 11
    assert table.get_by_role("rowheader").count() == page.page.locator("tbody tr").count() > 3
    for picture in page.page.get_by_role("img").all():
        assert re.search(r"(at this moment|output|median) *", picture.get_attribute("aria-label"))
    assert "200 blocks" in page.page.locator("canvas.grid").get_attribute("aria-label")
    assert page.page.get_by_role("slider", name="Seconds before now").count() == 1


def test_less_motion_for_those_who_ask(visit: Visitor) -> None:
    world = World(64)
    page = visit({"one": world}, reduced_motion="reduce").open()
    world.put(3, USED, 1, 1, 16)
    page.show("one")
    flash = page.pixels(3)
    world.now_s += 5
    page.show("one")
    assert page.pixels(3) == flash
    assert page.page.evaluate("document.getAnimations().length") == 0
