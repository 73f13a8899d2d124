"""The terminal's window onto a pool: the frames that the page shows, in text and colour."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Static

from octavo.dashboard.client import Blocks, FrameClient
from octavo.dashboard.terminal_text import (
    COLUMNS,
    events_text,
    head_text,
    memory_text,
    pool_text,
    rates_text,
    request_cells,
)
from octavo.errors import ConfigError

_MAX_HELD = 4096
"""Frames that wait while it pauses; then the oldest are applied."""
_RETRY_S = 1.0
_NUM_EVENTS = 50
_POOL_LINES = 12
_OTHER_LINES = 20
"""What everything but the pool takes, with a few requests."""
_LOW = 30
"""A terminal of fewer lines shows the last events alone."""


class TopApp(App[None]):
    """Shows the frames of one client as they come."""

    TITLE = "octavo top"
    CSS = """
    Screen { overflow: hidden; }
    #head { height: 1; background: $panel; }
    #pool { height: auto; max-height: 14; padding: 0 1; text-wrap: nowrap; }
    #memory { height: auto; padding: 0 1; }
    #rates { height: auto; padding: 0 1; }
    #requests { height: 1fr; min-height: 4; }
    #log { height: 6; border-top: solid $panel; padding: 0 1; }
    .low #log { height: 3; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "pause", "Pause", priority=True),
        Binding("s", "step", "Step"),
        Binding("q", "quit", "Quit"),
    ]

    ENABLE_COMMAND_PALETTE = False

    def __init__(self, client: FrameClient) -> None:
        super().__init__()
        self._client = client
        self.failure: str | None = None
        """Why it ended by itself."""
        self.is_paused = False
        self.blocks = Blocks()
        self.frame: dict[str, Any] | None = None
        """The one that is shown."""
        self._held: deque[dict[str, Any]] = deque()
        self._before: deque[tuple[float, int, int]] = deque()
        """(Time, prompt tokens, output tokens) of the frames of the last seconds."""
        self._events: dict[int, dict[str, Any]] = {}
        self._status = "connecting"
        self._reading: asyncio.Task[None] | None = None

    def compose(self) -> ComposeResult:
        """The parts from top to bottom."""
        yield Static(id="head")
        yield Static(id="pool")
        yield Static(id="memory")
        yield Static(id="rates")
        yield DataTable(id="requests", cursor_type="row", zebra_stripes=True)
        with VerticalScroll(id="log"):
            yield Static(id="events")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to read."""
        self.query_one(DataTable).add_columns(*COLUMNS)
        self._reading = asyncio.create_task(self._read())

    async def on_unmount(self) -> None:
        """Stop reading."""
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> None:
        """Frames as they come; connects again when the stream breaks."""
        while True:
            try:
                async for frame in self._client.frames():
                    self._status = "live"
                    if not self._receive(frame):
                        break  # one was missed: a new stream begins with a whole one
                else:
                    self._status = "the server has ended the stream; trying again"
            except ConfigError as error:
                self._status = str(error)
                if self.frame is None:
                    self.failure = str(error)
                    self.exit()
                    return
            self._show_head()
            await asyncio.sleep(_RETRY_S)

    def _receive(self, frame: dict[str, Any]) -> bool:
        if frame["kind"] == "full" and self._held:
            self._held.clear()  # those before it are not needed any more
        self._held.append(frame)
        if not self.is_paused:
            return self._apply_all()
        while len(self._held) > _MAX_HELD:
            self._apply(self._held.popleft())
        self._show_head()
        return True

    def _apply_all(self) -> bool:
        is_whole = True
        while self._held:
            is_whole = self._apply(self._held.popleft())
        if is_whole:
            self._show()
        return is_whole

    def _apply(self, frame: dict[str, Any]) -> bool:
        """Take a frame in, without showing it; False if one before it was missed."""
        if not self.blocks.take(frame):
            return False
        self.frame = frame
        totals, time_s = frame["totals"], frame["time_s"]
        if self._before and time_s < self._before[-1][0]:
            self._before.clear()  # a new engine
            self._events.clear()
        self._before.append((time_s, totals["prompt_tokens"], totals["output_tokens"]))
        while len(self._before) > 2 and self._before[1][0] < time_s - 3.0:
            self._before.popleft()
        for event in frame["events"]:
            self._events.pop(event["serial"], None)
            self._events[event["serial"]] = event
        while len(self._events) > _NUM_EVENTS:
            del self._events[next(iter(self._events))]
        return True

    def action_pause(self) -> None:
        """Stop, or go on with what has come meanwhile."""
        self.is_paused = not self.is_paused
        if not self.is_paused:
            self._apply_all()
        self._show_head()

    def action_step(self) -> None:
        """One frame further, paused."""
        self.is_paused = True
        if self._held and self._apply(self._held.popleft()):
            self._show()
        self._show_head()

    def on_resize(self) -> None:
        """The picture follows the terminal."""
        self.screen.set_class(self.size.height < _LOW, "low")
        if self.frame is not None:
            self._show()

    def _show_head(self) -> None:
        status = f"paused, {len(self._held)} frames wait" if self.is_paused else self._status
        text = head_text(self._client.url, self.blocks.about, self.frame, status)
        self.query_one("#head", Static).update(text)

    def _show(self) -> None:
        frame = self.frame
        assert frame is not None
        self._show_head()
        width = max(20, self.size.width - 2)
        lines = max(3, min(_POOL_LINES, self.size.height - _OTHER_LINES))
        self._put("#pool", pool_text(self.blocks, width, lines))
        self._put("#memory", memory_text(frame, self.blocks.about, width))
        self._put("#rates", rates_text(frame, list(self._before)))
        self._put("#events", events_text(list(self._events.values())[::-1]))
        table = self.query_one(DataTable)
        row, scroll = table.cursor_row, table.scroll_y
        table.clear()
        for request in frame["requests"]:
            table.add_row(*request_cells(request))
        if table.row_count:
            table.move_cursor(row=min(row, table.row_count - 1), scroll=False)
            table.scroll_to(y=scroll, animate=False)

    def _put(self, selector: str, content: Text | Table) -> None:
        self.query_one(selector, Static).update(content)
