"""The file that a record is: JSON lines, gzip if its name ends so."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from octavo.errors import ConfigError, RecordError
from octavo.record.calls import RECORD_VERSION, Call, RecordHeader
from octavo.record.codec import decode_call, decode_header, encode_call, encode_header

T = TypeVar("T")
logger = logging.getLogger("octavo")

_FLUSH_S = 1.0
"""A crash loses at most the calls of so many seconds."""
_BUFFER_BYTES = 1 << 18
_GZIP_LEVEL = 1
"""Levels above gain little on numbers, and the engine waits."""
_GZIP_MAGIC = b"\x1f\x8b"


class RecordWriter:
    """Writes whole lines. A file that cannot be written any more, or a call that has no line, ends
    the record, not the engine: what is there can be replayed.

    Nothing is lost by a process that ends without `close`, short of a crash: that loses at most the
    last second.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts the file anew. Raises `ConfigError` if it cannot be written."""
        self._path, self._clock = path, clock
        self._flushed_s = clock()
        check_writable(path)
        try:
            raw = open(path, "wb", _BUFFER_BYTES)  # noqa: SIM115  (closed by `close`)
        except OSError as error:
            raise _refusal(path, error) from error
        self._raw: IO[bytes] | None = raw
        is_gzip = path.endswith(".gz")
        self._file: Any = gzip.GzipFile("", "wb", _GZIP_LEVEL, raw) if is_gzip else raw
        # Left to the interpreter, the outer file may be closed when the inner one is gone.
        weakref.finalize(self, _close_all, self._file, raw)

    @property
    def is_open(self) -> bool:
        """Whether what is written arrives."""
        return self._raw is not None

    def write_header(self, header: RecordHeader) -> None:
        """The first line, at once."""
        self._write(lambda: encode_header(header), flush=True)

    def write(self, call: Call) -> None:
        """A line, with the next flush."""
        if self._raw is not None:
            is_time = self._clock() - self._flushed_s > _FLUSH_S
            self._write(lambda: encode_call(call), flush=is_time)

    def _write(self, line: Callable[[], str], *, flush: bool) -> None:
        """The call was made, so what goes wrong here is not the caller's; and a call that is
        missing would make all that follow it differ, so none follows."""
        try:
            self._file.write(f"{line()}\n".encode())
        except BaseException as error:
            self._give_up(error)
            if not isinstance(error, Exception):
                raise  # an interrupt
        if flush:
            self.flush()

    def flush(self) -> None:
        """Hand all lines to the system."""
        self._flushed_s = self._clock()
        if self._raw is not None:
            try:
                self._file.flush()
                self._raw.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Flush, and let go of the file. May be called again."""
        raw, self._raw = self._raw, None
        if raw is not None:
            try:
                self._file.close()
                raw.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        raw, self._raw = self._raw, None
        _close_all(self._file, raw)
        if isinstance(error, OSError):
            why = f"cannot be written: {error.strerror or error}"
        else:
            why = f"cannot take the next call: {type(error).__name__}: {error}"
        logger.warning("the record ends here: %s %s", self._path, why)


def _close_all(*files: Any) -> None:
    """Whatever becomes of what is in their buffers."""
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            if file is not None:
                file.close()


def check_writable(path: str) -> None:
    """Raise `ConfigError` unless the file can be written; what is in it stays."""
    file = Path(path)
    try:
        if file.exists() and not file.is_dir() and not file.is_file():
            return  # a device or a pipe: opening it may have consequences
        is_new = not file.exists()
        file.open("ab").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise _refusal(path, error) from error


def _refusal(path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"record={path!r} cannot be written: {error.strerror or error}; choose another --record"
    )


class RecordReader:
    """Reads a record from its beginning: the header at once, calls one by one."""

    def __init__(self, path: str | Path) -> None:
        """Raises `RecordError` for a file that cannot be read or is no record."""
        self._path = path
        self.num_lines = 0
        """Lines read so far."""
        self._lines = self._read()
        self.header = self._read_header()

    def _read_header(self) -> RecordHeader:
        line = next(self._lines, None)
        if line is None:
            raise RecordError(f"{self._path} is empty: it is no record of an engine")
        try:
            values = json.loads(line)
            version = values["octavo_record"]
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(
                f"{self._path}, line 1 is no header of a record: give a file that --record wrote"
            ) from error
        if version != RECORD_VERSION:
            raise RecordError(
                f"{self._path} is a record of version {version!r}, and this octavo reads version "
                f"{RECORD_VERSION}: replay it with octavo {values.get('octavo', 'that wrote it')}"
            )
        return self._decoded(decode_header, line)

    def calls(self) -> Iterator[Call]:
        """The calls, in order. Raises `RecordError`, naming the line, where the file is damaged or
        breaks off: what came before it can be trusted."""
        for line in self._lines:
            yield self._decoded(decode_call, line)

    def _decoded(self, decode: Callable[[str], T], line: str) -> T:
        try:
            return decode(line)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            broken_off = "" if line.endswith("\n") else ", where the file breaks off,"
            raise RecordError(
                f"{self._path}, line {self.num_lines}{broken_off} cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _read(self) -> Iterator[str]:
        try:
            with open(self._path, "rb") as raw:
                is_gzip = raw.peek(2)[:2] == _GZIP_MAGIC
                for line in gzip.GzipFile(fileobj=raw) if is_gzip else raw:
                    text = line.decode()
                    self.num_lines += 1
                    yield text
        except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
            raise RecordError(
                f"{self._path}, line {self.num_lines + 1} cannot be read, the file is damaged or "
                f"breaks off: {error}"
            ) from error
        except OSError as error:
            raise RecordError(f"{self._path} cannot be read: {error.strerror or error}") from error
