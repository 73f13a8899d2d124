"""The disk tier: KV blocks as files, written behind the engine's back, verified when read.

Nothing that happens to the disk is an error of a step. A block that could not be written, was
damaged or has vanished is simply not found.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.plan import PLANS_UNDER_WAY, BlockLabel
from octavo.runner.disk_file import (
    DamagedFileError,
    digest_of,
    read_block,
    read_header,
    write_block,
)

if TYPE_CHECKING:
    from filelock import FileLock

MAX_QUEUED_BYTES = 64 << 20
"""Memory for blocks on their way to the disk."""
PAUSE_S = 30.0
"""How long nothing is written after a write has failed."""

_SUFFIX = ".kv"
logger = logging.getLogger("octavo")

Bytes = NDArray[np.uint8]


class _Write(NamedTuple):
    label: BlockLabel
    data: Bytes


class _Fetched:
    """A verified block that waits for the copies which will take it. `age` counts the plans that
    were carried out since it was fetched."""

    __slots__ = ("age", "data", "num_takers")

    def __init__(self, data: Bytes) -> None:
        self.data, self.num_takers, self.age = data, 0, 0


def open_disk_store(
    folder: str | Path,
    fingerprint: str,
    block_bytes: int,
    *,
    max_queued_bytes: int = MAX_QUEUED_BYTES,
) -> DiskStore | None:
    """The disk tier in a folder; None, with a line in the log that says why, where there is none.

    fingerprint: says all on which the meaning of a block's bytes depends (weights, types, sizes,
    layout); blocks of each have a folder of their own. A folder belongs to one process at a time.
    """
    from filelock import FileLock, Timeout

    own = digest_of(fingerprint.encode())
    path = Path(folder) / own.hex()
    lock = FileLock(str(path / "lock"), timeout=0, thread_local=False)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        try:
            for leftover in path.glob("*.tmp"):
                leftover.unlink(missing_ok=True)
        except BaseException:
            lock.release()
            raise
    except Timeout:
        logger.warning("kv disk tier off: another process uses %s", path)
        return None
    except (OSError, NotImplementedError) as error:
        logger.warning("kv disk tier off: %s cannot be used: %s", path, error)
        return None
    return DiskStore(path, own, block_bytes, lock, max_queued_bytes)


class DiskStore:
    """Blocks in one folder, by disk id. Make one with `open_disk_store`, end it with `close`.

    `put` and `delete` return at once; a thread carries them out in order. `fetch` reads, here and
    now, what `take` then hands out. One thread plans (`fetch`, `delete`), another one may carry out
    plans (`put`, `take`, `settle`).
    """

    wait_when_full: bool = False
    """Whether `put` waits while too much is queued, instead of leaving the block out: for the last
    blocks before the end, when nobody waits for the step."""

    def __init__(
        self,
        path: Path,
        fingerprint: bytes,
        block_bytes: int,
        lock: FileLock,
        max_queued_bytes: int,
    ) -> None:
        self.path, self.block_bytes = path, block_bytes
        self._fingerprint, self._lock = fingerprint, lock
        self._max_queued = max(1, max_queued_bytes // block_bytes)
        self._changed = threading.Condition()
        # What is to be done to a file, oldest first: write it, or (None) delete it.
        self._jobs: dict[int, _Write | None] = {}
        self._num_writes = 0
        self._fetched: dict[int, _Fetched] = {}
        self._closing = False
        self._paused_until = 0.0
        self._said: set[str] = set()
        self.num_dropped = 0
        """Blocks that were not written because the disk was too slow or failed."""
        self._thread = threading.Thread(target=self._work, name="octavo-kv-disk", daemon=True)
        self._thread.start()

    # -- what the memory manager asks for

    def entries(self) -> list[tuple[int, BlockLabel]]:
        """What is on the disk, by disk id; to be asked at the start. Damaged files are deleted.

        Only headers are read; damaged data are found by `fetch`. Files with other names stay.
        """
        found: list[tuple[int, BlockLabel]] = []
        damaged: list[str] = []
        try:
            paths = sorted(self.path.glob(f"*{_SUFFIX}"))
        except OSError as error:
            self._say_once("kv disk tier: %s cannot be listed: %s", self.path, error)
            paths = []
        for path in paths:
            disk_id = _id_of(path)
            if disk_id is None:
                continue
            try:
                with path.open("rb") as file:
                    header = read_header(file, self._fingerprint, self.block_bytes)
            except OSError as error:
                self._say_once("kv disk tier: cannot read %s: %s", path, error)
            except DamagedFileError as error:
                damaged.append(f"{path.name} ({error})")
                self.delete(disk_id)
            else:
                found.append((disk_id, header.label))
        if damaged:
            logger.warning(
                "kv disk tier: %d of %d files in %s are unusable and deleted, first %s",
                len(damaged), len(damaged) + len(found), self.path, damaged[0],
            )  # fmt: skip
        return found

    def fetch(self, disk_id: int) -> bool:
        """Read and verify a block, for one `take`; False if it is damaged or not there."""
        with self._changed:
            held = self._fetched.get(disk_id)
            data = None if held is None else held.data
        if data is None:
            data = self._read(disk_id)
            if data is None:
                return False
        with self._changed:
            held = self._fetched.setdefault(disk_id, _Fetched(data))
            held.num_takers += 1
            held.age = 0
        return True

    def delete(self, disk_id: int) -> None:
        """Forget a block. One that was fetched can still be taken."""
        with self._changed:
            if not self._closing:
                if self._jobs.get(disk_id) is not None:
                    self._num_writes -= 1
                self._jobs[disk_id] = None
                self._changed.notify_all()

    def _read(self, disk_id: int) -> Bytes | None:
        with self._changed:
            if disk_id in self._jobs:
                job = self._jobs[disk_id]
                return None if job is None else job.data
        path = self._path_of(disk_id)
        try:
            return read_block(path, self._fingerprint, self.block_bytes)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say_once("kv disk tier: cannot read %s: %s", path, error)
        except DamagedFileError as error:
            logger.warning("kv disk tier: %s is unusable and deleted: %s", path, error)
            self.delete(disk_id)
        return None

    # -- what the runner asks for

    def put(self, disk_id: int, label: BlockLabel, data: Bytes) -> None:
        """Write a block some time; `data` [block_bytes] uint8 is copied before this returns."""
        assert data.nbytes == self.block_bytes, f"{data.nbytes} bytes, expected {self.block_bytes}"
        with self._changed:
            while self._num_writes >= self._max_queued and self.wait_when_full:
                self._changed.wait()
            if self._closing or self._num_writes >= self._max_queued or self._is_paused():
                self.num_dropped += 1
                return
            self._jobs[disk_id] = _Write(label, data.copy())
            self._num_writes += 1
            self._changed.notify_all()

    def take(self, disk_id: int) -> Bytes | None:
        """[block_bytes] uint8 of a block that was fetched; None if it was not."""
        with self._changed:
            held = self._fetched.get(disk_id)
            if held is None:
                return None
            held.num_takers -= 1
            if not held.num_takers:
                del self._fetched[disk_id]
            return held.data

    def settle(self) -> None:
        """The copies of a plan are done: what was fetched for it and not taken goes.

        Which plan that was is not said. So many may have been under way when a block was fetched
        that it is kept until `PLANS_UNDER_WAY` more are carried out, and then the one that it was
        fetched for.
        """
        with self._changed:
            for disk_id, held in list(self._fetched.items()):
                held.age += 1
                if held.age > PLANS_UNDER_WAY:
                    del self._fetched[disk_id]

    def flush(self) -> None:
        """Wait until everything that was put or deleted so far is on the disk."""
        with self._changed:
            while self._jobs:
                self._changed.wait()

    def close(self) -> None:
        """Write what is queued, and let the folder go. May be called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            self._fetched.clear()
        self._lock.release()

    # -- the thread

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closing:
                    self._changed.wait()
                if not self._jobs:
                    return
                # It stays in the queue while it is written: `fetch` is answered from there.
                disk_id, job = next(iter(self._jobs.items()))
            try:
                self._do(disk_id, job)
            except Exception as error:  # whatever it is: no step may wait for a dead thread
                self._failed(error)
            finally:
                with self._changed:
                    if self._jobs.get(disk_id) is job:
                        del self._jobs[disk_id]
                        self._num_writes -= job is not None
                    self._changed.notify_all()

    def _do(self, disk_id: int, job: _Write | None) -> None:
        path = self._path_of(disk_id)
        if job is None:
            path.unlink(missing_ok=True)
        elif self._is_paused():
            self.num_dropped += 1
        else:
            write_block(path, self._fingerprint, job.label, job.data)

    def _failed(self, error: Exception) -> None:
        self.num_dropped += 1
        self._paused_until = time.monotonic() + PAUSE_S
        self._say_once("kv disk tier: cannot write to %s, goes on without: %s", self.path, error)

    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def _path_of(self, disk_id: int) -> Path:
        return self.path / f"{disk_id:016x}{_SUFFIX}"

    def _say_once(self, message: str, *args: object) -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning(message, *args)


def _id_of(path: Path) -> int | None:
    """The disk id in a file's name; None if it is not a name that `DiskStore` gives."""
    try:
        disk_id = int(path.stem, 16)
    except ValueError:
        return None
    return disk_id if path.name == f"{disk_id:016x}{_SUFFIX}" else None
