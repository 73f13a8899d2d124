"""The page on a real server: its frames, its key, the text of its blocks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SOURCE = Path(__file__).parents[2] / "src"
PROMPT = "The sky is blue because sunlight is scattered by the air, and blue light most of all. "


@contextmanager
def running(folder: Path, *words: str, **env: str) -> Iterator[str]:
    """A process of `octavo` that serves; its address."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    own |= {"PYTHONPATH": str(SOURCE), **env}
    out, err = folder / "out", folder / "err"
    with out.open("wb") as to_out, err.open("wb") as to_err:
        command = [sys.executable, "-m", "octavo", *words]
        process = subprocess.Popen(command, stdout=to_out, stderr=to_err, env=own)
    try:
        end = time.monotonic() + 120
        while not (found := re.search(r"https?://127\.0\.0\.1:\d+", out.read_text())):
            assert process.poll() is None and time.monotonic() < end, err.read_text()
            time.sleep(0.05)
        yield found[0]
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def post(url: str, name: str, **body: Any) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@contextmanager
def load(ask: Callable[[int], None], num_threads: int) -> Iterator[None]:
    """Somebody who asks and asks again, in threads."""
    is_over = threading.Event()

    def go_on(first: int) -> None:
        for i in range(first, 1 << 30, num_threads):
            if is_over.is_set():
                return
            ask(i)

    threads = [threading.Thread(target=go_on, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def watched(browser: Browser, **options: Any) -> tuple[Page, list[str]]:
    """A page in a fresh profile, and what its console says."""
    page = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options}).new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    return page, said


def test_the_page_of_a_real_server(browser: Browser, tiny_model_path: Path, tmp_path: Path) -> None:
    words = ["serve", str(tiny_model_path), "--load-format", "dummy", "--device", "cpu"]
    words += ["--num-threads", "1", "--num-gpu-blocks-override", "48", "--port", "0"]
    with running(tmp_path, *words, OCTAVO_ADMIN_KEY="open-sesame", OMP_NUM_THREADS="1") as url:
        page, said = watched(browser)
        page.goto(f"{url}/dashboard")
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#login-error:not(:empty)")
        page.fill("#key", "open-sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector('#status[data-status="live"]')
        assert all("401" in text for text in said), said  # what was refused, and nothing else
        said.clear()
        page.wait_for_function(
            "() => document.querySelector('.summary').textContent.startsWith('48 blocks: 0 used')"
        )
        body = {"prompt": PROMPT * 2, "max_tokens": 30, "ignore_eos": True, "temperature": 0}
        post(f"{url}/v1/completions", "one", **body)
        page.wait_for_function(
            "() => /[1-9]\\d* cached/.test(document.querySelector('.summary').textContent)"
        )
        block = page.evaluate("() => octavoDashboard.panels[0].pool.state.indexOf(1)")
        page.focus("canvas.grid")
        page.keyboard.press("Home")
        for _ in range(block):
            page.keyboard.press("ArrowRight")
        page.wait_for_selector(".tip .content")
        tip = page.inner_text(".tip")
        assert f"Block {block}: cached" in tip and "slots filled" in tip
        assert page.inner_text(".tip .content").strip()
        totals = page.evaluate("() => octavoDashboard.panels[0].frame.totals")
        assert totals["output_tokens"] == 30 and totals["query_tokens"] > 0
        assert "never seen" in page.inner_text(".misses")
        assert said == []
        page.context.close()


TOPICS = ["why the sky is blue", "how bread rises", "what a comet is", "how to learn chess"]
TEACHER = (
    "You are a patient teacher who explains things to curious children in plain words, with "
    "examples from daily life, and never in more than three paragraphs. "
)


def picture(page: Page, name: str) -> None:
    folder = Path(os.environ["OCTAVO_SCREENSHOTS"])
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"dashboard-{name}.png")


pictures = pytest.mark.skipif(
    "OCTAVO_SCREENSHOTS" not in os.environ,
    reason="draws the documentation's pictures when OCTAVO_SCREENSHOTS says where to",
)


@pictures
@pytest.mark.model
def test_pictures_of_a_busy_server(
    browser: Browser, default_model_path: Path, tmp_path: Path
) -> None:
    """Sixteen clients ask the default model, most of them under one system prompt."""
    words = ["serve", "--port", "0", "--max-model-len", "1024"]
    words += ["--num-gpu-blocks-override", "160"]
    with running(tmp_path, *words) as url:

        def ask(i: int) -> None:
            prompt = (TEACHER if i % 3 else "") + f"Tell me {TOPICS[i % 4]}, please. " * (1 + i % 5)
            num = (60, 120, 240)[i % 3]
            body = {"prompt": prompt, "max_tokens": num, "ignore_eos": True, "seed": i}
            post(f"{url}/v1/completions", f"cmpl-{i:03}", **body)

        views = {
            "light": watched(browser, viewport={"width": 1280, "height": 800})[0],
            "dark": watched(browser, viewport={"width": 1280, "height": 800}, color_scheme="dark")[
                0
            ],
            "phone": watched(
                browser, viewport={"width": 360, "height": 720}, device_scale_factor=2
            )[0],
        }
        for page in views.values():
            page.goto(f"{url}/dashboard")
        with load(ask, 16):
            time.sleep(40)
            views["light"].wait_for_function(
                "() => Number.parseInt(document.querySelector('.t-used').textContent) >= 75"
            )
            grid = views["light"].locator("canvas.grid")
            x, y = views["light"].evaluate(
                """() => {
                  const { grid, pool } = octavoDashboard.panels[0];
                  const early = [...pool.refs.subarray(0, 60)];
                  const { left, top, size } = grid.boxOf(early.indexOf(Math.max(...early)));
                  return [left + size / 2, top + size / 2];
                }"""
            )
            grid.hover(position={"x": x, "y": y})
            views["light"].wait_for_selector(".tip .content")
            for name, page in views.items():
                page.bring_to_front()
                picture(page, name)
                page.context.close()


@pictures
def test_picture_of_two_policies(browser: Browser, tmp_path: Path) -> None:
    words = ["demo", "memory", "--no-browser", "--port", "0", "--policies", "paged", "orca-max"]
    with running(tmp_path, *words) as url:
        page, said = watched(browser, viewport={"width": 1440, "height": 860})
        page.goto(f"{url}/dashboard")
        page.wait_for_selector(".panel + .panel")
        time.sleep(30)
        picture(page, "two")
        assert said == []
        page.context.close()
