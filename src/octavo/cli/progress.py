"""A bar on stderr for work that is counted; nothing where stderr is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[int, str], None]
"""Told how much is done, and a remark."""


@contextmanager
def counted(what: str, total: int | None = None) -> Iterator[Tell]:
    """Shows a bar while inside; total None where it is not known how much there is.

    Yields what is to be told the number done so far and a few words (`at 12 s`).
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[remark]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bars:
        task = bars.add_task(what, total=total, remark="")

        def tell(num_done: int, remark: str = "") -> None:
            bars.update(task, completed=num_done, remark=remark)

        yield tell
