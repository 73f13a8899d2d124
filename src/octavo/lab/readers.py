"""Readers for the usual trace formats. What a file is, is seen from what is in it."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO, cast

from octavo.errors import TraceError
from octavo.lab.rows import BadLine
from octavo.lab.sources import Line, Tokenize, TraceFormat, read_source
from octavo.lab.trace import Trace, TraceRequest

_EPOCH_S = 1e8
"""Numbers of seconds above are dates, not times since a trace began."""
_EPOCH_UNITS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
"""Numbers above the first that should be seconds are dates in units of so many seconds."""
_SKIP = "skip_bad_lines (--skip-bad-lines) leaves such lines out"


def read_trace(
    path: str | Path,
    *,
    format: TraceFormat = "auto",
    skip_bad_lines: bool = False,
    max_tokens: int | None = None,
    limit: int | None = None,
    tokenize: Tokenize | None = None,
) -> Trace:
    """The requests of a file, .gz or not, in the order of their arrival.

    skip_bad_lines: leave out lines that cannot be used (counted in `Trace.num_skipped`).
    max_tokens: leave out requests with more tokens of prompt and output together.
    limit: the first so many that are left.
    tokenize: counts the tokens of ShareGPT texts.

    Raises `TraceError`: a file that cannot be read or recognised, a bad line by its number, a
    trace without requests.
    """
    path = Path(path)
    found = _Found(path, skip_bad_lines, max_tokens)
    try:
        with _open(path) as lines:
            source = read_source(lines, format, tokenize)
            found.take(source.lines, limit)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise TraceError(f"cannot read {path}: damaged .gz file ({error})") from None
    except BadLine as error:
        raise TraceError(f"{path}: {error}") from None
    trace = found.trace(source.block_tokens)
    if tokenize is not None and not source.has_texts:
        raise TraceError(
            f"{path} has lengths and no texts: --tokenizer does nothing to it, drop it"
        )
    return trace


class _Found:
    """What was read so far."""

    def __init__(self, path: Path, skip_bad_lines: bool, max_tokens: int | None) -> None:
        self._path, self._skip_bad_lines, self._max_tokens = path, skip_bad_lines, max_tokens
        self._requests: list[TraceRequest] = []
        self._num_skipped = 0
        self._first_problem = ""

    def take(self, lines: Iterator[Line], limit: int | None) -> None:
        for where, found in lines:
            if isinstance(found, BadLine):
                if not self._skip_bad_lines:
                    raise BadLine(f"{where}: {found}; {_SKIP}")
                self._first_problem = self._first_problem or f"{where}: {found}"
                self._num_skipped += 1
            elif found is None or self._is_too_long(found):
                self._num_skipped += 1
            else:
                self._requests.append(found)
                if len(self._requests) == limit:
                    break

    def _is_too_long(self, request: TraceRequest) -> bool:
        return self._max_tokens is not None and request.num_tokens > self._max_tokens

    def trace(self, block_tokens: int) -> Trace:
        requests, name = self._requests, self._path.name
        if not requests:
            why = f" ({self._num_skipped} were left out" if self._num_skipped else ""
            why += f"; {self._first_problem}" if self._first_problem else ""
            raise TraceError(f"{self._path} has no requests{why}{')' if why else ''}")
        times = [r.arrival_s for r in requests if r.arrival_s is not None]
        if len(times) == len(requests):
            start_s = min(times)
            if start_s > _EPOCH_S:
                unit_s = next((unit for least, unit in _EPOCH_UNITS if start_s > least), 1.0)
                shifted = zip(requests, times, strict=True)
                requests = [replace(r, arrival_s=(t - start_s) * unit_s) for r, t in shifted]
            requests.sort(key=lambda request: request.arrival_s or 0.0)
        return Trace(
            name=name, requests=requests, block_tokens=block_tokens, num_skipped=self._num_skipped
        )


def _open(path: Path) -> TextIO:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    opened = (gzip.open if packed else open)(
        path, "rt", encoding="utf-8-sig", errors="surrogateescape"
    )
    return cast(TextIO, opened)
