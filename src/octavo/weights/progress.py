"""How this room reports long work: a small protocol, silence, and a bar on stderr.

Nothing here draws unless the caller hands in a `RichProgress`.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import TaskID


class Progress(Protocol):
    """One task at a time: `start`, any number of `update`s, `finish`."""

    def start(self, what: str, total_bytes: int | None = None) -> None:
        """Begin a task; total_bytes None when the size is not known."""

    def update(self, done_bytes: int) -> None:
        """Bytes done so far in this task (not the difference)."""

    def finish(self) -> None:
        """The task is over, for good or ill."""


class NullProgress:
    """Says nothing."""

    def start(self, what: str, total_bytes: int | None = None) -> None:
        """See `Progress`."""

    def update(self, done_bytes: int) -> None:
        """See `Progress`."""

    def finish(self) -> None:
        """See `Progress`."""


class RichProgress:
    """A bar on stderr; nothing at all when stderr is no terminal. Use it as a context manager."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> RichProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.finish()

    def start(self, what: str, total_bytes: int | None = None) -> None:
        """See `Progress`."""
        self.finish()
        self._bars.start()
        self._task = self._bars.add_task(what, total=total_bytes)

    def update(self, done_bytes: int) -> None:
        """See `Progress`."""
        if self._task is not None:
            self._bars.update(self._task, completed=done_bytes)

    def finish(self) -> None:
        """See `Progress`."""
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._bars.stop()
            self._task = None
