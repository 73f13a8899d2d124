"""A headless Chromium for all tests of the page, and a server that sends it scripted frames."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

import octavo

sys.path.insert(0, str(Path(__file__).parent))  # the tests import `worlds` from here

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, ViewportSize

PAGE = Path(octavo.__file__).parent / "dashboard" / "page"
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
DESK: ViewportSize = {"width": 1280, "height": 900}
Colour = tuple[int, int, int]
CHROMIUM_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def find_browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for a file of tests, as an event loop runs as long as it is there, and no test of another
    could run its own; each test gets a fresh profile in it."""
    path = find_browser()
    if path is None:
        reason = "no chromium, chromium-browser or google-chrome on PATH"
        if os.environ.get("OCTAVO_REQUIRE_BROWSER") == "1":
            pytest.fail(f"{reason}, and OCTAVO_REQUIRE_BROWSER=1")
        pytest.skip(f"{reason}: the dashboard's page is not tested")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


@dataclass(slots=True)
class Feed:
    """A source: a world, and who listens to it."""

    world: Any
    listeners: list[asyncio.Queue[str | None]] = field(default_factory=list)
    num_opened: int = 0


class FrameServer:
    """What `octavo serve` answers under /dashboard, with frames sent when a test says so."""

    def __init__(self) -> None:
        self.feeds: dict[str, Feed] = {}
        self.key: str | None = None
        self.is_refusing = False
        self.asked_blocks: list[int] = []
        self.block_text = " <b>sky</b> blue"
        self.loop = asyncio.new_event_loop()
        self.url = ""
        started = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self.thread.start()
        assert started.wait(10)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        app = web.Application()
        app.add_routes(
            [
                web.get("/dashboard", self._file),
                web.get("/dashboard/sources", self._sources),
                web.get("/dashboard/frames", self._frames),
                web.get("/dashboard/block/{source}/{id}", self._block),
                web.post("/dashboard/login", self._login),
                web.get("/dashboard/{name}", self._file),
            ]
        )

        async def start() -> None:
            self.runner = web.AppRunner(app, shutdown_timeout=0.1)
            await self.runner.setup()
            await web.TCPSite(self.runner, "127.0.0.1", 0).start()
            host, port = self.runner.addresses[0][:2]
            self.url = f"http://{host}:{port}/dashboard"
            started.set()

        self.loop.run_until_complete(start())
        self.loop.run_forever()

    def call(self, function: Callable[[], None]) -> None:
        """Run something in the server's thread, and wait for it."""

        async def run() -> None:
            function()

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def close(self) -> None:
        self.hang_up()
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()

    def send(self, name: str, frame: dict[str, Any]) -> None:
        self._tell(self.feeds[name], f"data: {json.dumps(frame)}\n\n")

    def end(self, name: str) -> None:
        """Say that a source is over for good."""
        self._tell(self.feeds[name], "event: end\ndata: \n\n")

    def hang_up(self) -> None:
        """Break all streams."""
        for feed in self.feeds.values():
            self._tell(feed, None)

    def _tell(self, feed: Feed, text: str | None) -> None:
        def tell() -> None:
            for queue in feed.listeners:
                queue.put_nowait(text)

        self.call(tell)

    def _is_allowed(self, request: web.Request) -> bool:
        return self.key is None or request.cookies.get("octavo-key") == self.key

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = PAGE / request.match_info.get("name", "index.html")
        if not path.is_file():
            return web.Response(status=404)
        kind = TYPES.get(path.suffix, "text/html")
        headers = {"Content-Security-Policy": POLICY, "Content-Type": kind}
        return web.Response(body=path.read_bytes(), headers=headers)

    async def _sources(self, request: web.Request) -> web.StreamResponse:
        if self.is_refusing:
            return web.Response(status=503)
        if not self._is_allowed(request):
            return web.Response(status=401)
        return web.json_response(
            [
                {"name": name, "frames": f"frames?source={i}", "block": f"block/{i}/"}
                for i, name in enumerate(self.feeds)
            ]
        )

    async def _login(self, request: web.Request) -> web.StreamResponse:
        form = await request.post()
        if form.get("key") != self.key:
            return web.Response(status=401)
        answer = web.Response(status=204)
        answer.set_cookie("octavo-key", str(self.key), httponly=True, samesite="Strict")
        return answer

    async def _frames(self, request: web.Request) -> web.StreamResponse:
        if self.is_refusing or not self._is_allowed(request):
            return web.Response(status=503 if self.is_refusing else 401)
        feed = list(self.feeds.values())[int(request.query["source"])]
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        feed.num_opened += 1
        await answer.write(f"data: {json.dumps(feed.world.frame(full=True))}\n\n".encode())
        feed.listeners.append(queue)
        try:
            while (text := await queue.get()) is not None:
                await answer.write(text.encode())
        except ConnectionResetError:
            pass
        finally:
            feed.listeners.remove(queue)
        return answer

    async def _block(self, request: web.Request) -> web.StreamResponse:
        block = int(request.match_info["id"])
        self.asked_blocks.append(block)
        world = list(self.feeds.values())[int(request.match_info["source"])].world
        number = world.owner[block]
        owner = {"id": f"req-{number}", "index": 3, "start": 48, "end": 53}
        owners = [] if number < 0 else [owner | {"group": world.group_of(block)}]
        body = {"id": block, "owners": owners, "token_ids": [504, 3575], "text": self.block_text}
        return web.json_response(body)


@pytest.fixture(scope="module")
def frame_server() -> Iterator[FrameServer]:
    server = FrameServer()
    yield server
    server.close()


class Visit:
    """A page that is open, and the server it talks to. Leaves no error in the console unseen."""

    def __init__(self, server: FrameServer, context: BrowserContext, feeds: dict[str, Any]) -> None:
        server.feeds = {name: Feed(world) for name, world in feeds.items()}
        server.key, server.is_refusing, server.asked_blocks = None, False, []
        server.block_text = " <b>sky</b> blue"
        self.server, self.context = server, context
        self.page: Page = context.new_page()
        self.page.set_default_timeout(30_000)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._hear)
        self.page.on("request", lambda request: self.requests.append(request.url))

    def _hear(self, said: ConsoleMessage) -> None:
        # That reading pixels is slow is said of the tests, which read them.
        if said.type in ("error", "warning") and "readback" not in said.text:
            self.errors.append(said.text)

    def open(self, query: str = "") -> Visit:
        self.page.goto(self.server.url + query)
        self.page.wait_for_selector(".panel")
        for i, feed in enumerate(self.server.feeds.values()):
            self.wait_for(i, feed.world.n)
        return self

    def wait_for(self, panel: int, n: int) -> None:
        """Until a panel has that frame, and has painted it if it looks at the newest."""
        self.page.wait_for_function(
            """([panel, n]) => {
              const one = octavoDashboard.panels[panel];
              return one?.history.lastN === n && !one.isStale;
            }""",
            arg=[panel, n],
        )

    def until(self, condition: str) -> None:
        """Wait for an expression to hold; as a function, since the page's policy forbids eval."""
        self.page.wait_for_function(f"() => {condition}")

    def wait_painted(self, also: str = "true") -> None:
        """Until the first panel has a frame and has painted it, and another expression holds.

        A page just loaded has nothing to paint, so `isStale` alone is false there too early.
        """
        self.until(
            f"{{ const [one] = globalThis.octavoDashboard?.panels ?? [];"
            f" return one?.frame && !one.isStale && ({also}); }}"
        )

    def play(self, name: str, num_frames: int, seconds: float = 0.25) -> None:
        """Let a world live for some frames, and wait until the page shows the last."""
        world = self.server.feeds[name].world
        for _ in range(num_frames):
            world.step(seconds)
            self.server.send(name, world.next_frame())
        self.wait_for(list(self.server.feeds).index(name), world.n)

    def show(self, name: str) -> None:
        """Send what was set by hand in a world, a quarter of a second later."""
        world = self.server.feeds[name].world
        world.now_s += 0.25
        self.server.send(name, world.next_frame())
        self.wait_for(list(self.server.feeds).index(name), world.n)

    def pixels(self, block: int, panel: int = 0) -> list[Colour]:
        """The colours of a block's cell, row by row."""
        return self.cells([block], panel)[0]

    def cells(self, blocks: Iterable[int], panel: int = 0) -> list[list[Colour]]:
        """The same of several, read at once: reading a canvas is slow."""
        found = self.page.evaluate(
            """([blocks, panel]) => {
              const canvas = document.querySelectorAll("canvas.grid")[panel];
              const { pitch, columns, size } = canvas.dataset;
              const context = canvas.getContext("2d");
              const rows = blocks.map((block) => Math.floor(block / columns) * pitch);
              const first = Math.min(...rows), height = Math.max(...rows) - first + Number(size);
              const { data } = context.getImageData(0, first, canvas.width, height);
              return blocks.map((block, i) => {
                const found = [];
                for (let y = 0; y < size; y++) {
                  const start = (rows[i] - first + y) * canvas.width + (block % columns) * pitch;
                  for (let at = start; at < start + Number(size); at++) {
                    found.push([...data.slice(4 * at, 4 * at + 3)]);
                  }
                }
                return found;
              });
            }""",
            [list(blocks), panel],
        )
        return [[(red, green, blue) for red, green, blue in cell] for cell in found]

    def text(self, selector: str, panel: int = 0) -> str:
        found = self.page.locator(".panel").nth(panel).locator(selector).first.text_content()
        return (found or "").strip()

    def data(self, name: str) -> int:
        return int(self.page.locator("canvas.grid").first.get_attribute(f"data-{name}") or 0)


@pytest.fixture(scope="module")
def desk(browser: Browser) -> Iterator[BrowserContext]:
    """A profile for all tests that ask for nothing special of the screen."""
    context = browser.new_context(viewport=DESK)
    yield context
    context.close()


@pytest.fixture
def visit(
    browser: Browser, desk: BrowserContext, frame_server: FrameServer
) -> Iterator[Callable[..., Visit]]:
    """`visit({"name": world}, **context options)`: a page, not yet opened."""
    made: list[Visit] = []

    def make(feeds: dict[str, Any], **options: Any) -> Visit:
        context = browser.new_context(**{"viewport": DESK, **options}) if options else desk
        made.append(Visit(frame_server, context, feeds))
        return made[-1]

    yield make
    frame_server.hang_up()
    for one in made:
        one.page.close()
        if one.context is not desk:
            one.context.close()
    desk.clear_cookies()
