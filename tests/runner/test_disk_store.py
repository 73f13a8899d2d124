"""The disk tier: what is written comes back or is not found, whatever happened to the files."""

from __future__ import annotations

import errno
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.plan import PLANS_UNDER_WAY, BlockLabel
from octavo.runner import disk_store as module
from octavo.runner.disk_file import VERSION
from octavo.runner.disk_store import DiskStore, open_disk_store

BLOCK_BYTES = 5000
Open = Callable[..., DiskStore]


def data_of(disk_id: int) -> np.ndarray:
    return np.random.default_rng(disk_id).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def label_of(disk_id: int) -> BlockLabel:
    return BlockLabel(bytes([disk_id % 256]) * 16, b"p" * 16, (disk_id, 2**40, 0))


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    """Opens stores of one folder, and closes what the test left open."""
    opened: list[DiskStore] = []

    def open_one(fingerprint: str = "model", **options: Any) -> DiskStore:
        store = open_disk_store(tmp_path, fingerprint, BLOCK_BYTES, **options)
        assert store is not None
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.close()


def put(store: DiskStore, *disk_ids: int) -> None:
    for disk_id in disk_ids:
        store.put(disk_id, label_of(disk_id), data_of(disk_id))


def read(store: DiskStore, disk_id: int) -> bool:
    """Whether a block is there; then it has the right bytes."""
    if not store.fetch(disk_id):
        assert store.take(disk_id) is None
        return False
    taken = store.take(disk_id)
    assert taken is not None and np.array_equal(taken, data_of(disk_id))
    return True


def file_of(store: DiskStore, disk_id: int) -> Path:
    return store.path / f"{disk_id:016x}.kv"


def test_blocks_survive_a_restart(open_store: Open) -> None:
    store = open_store()
    put(store, 300, 1, 2)
    store.flush()
    assert all(read(store, i) for i in (1, 2, 300))
    store.delete(2)
    store.close()
    store.close()
    again = open_store()
    assert again.entries() == [(1, label_of(1)), (300, label_of(300))]
    assert read(again, 1) and read(again, 300) and not read(again, 2) and not read(again, 4)


def test_what_is_queued_is_served_from_the_queue(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, writing = threading.Event(), threading.Event()
    write = module.write_block

    def slow(*args: Any) -> None:
        writing.set()
        assert may_write.wait(10)
        write(*args)

    monkeypatch.setattr(module, "write_block", slow)
    store = open_store(max_queued_bytes=3 * BLOCK_BYTES)
    data = data_of(1)
    store.put(1, label_of(1), data)
    data[:] = 0  # the host block is used again at once
    put(store, 2, 3, 4)  # the fourth is one too many
    assert store.num_dropped == 1
    assert writing.wait(10)
    assert read(store, 1) and read(store, 2) and not read(store, 4)
    store.delete(1)  # while it is being written
    store.delete(2)
    assert not read(store, 1) and not read(store, 2)
    may_write.set()
    store.close()
    assert [path.name for path in sorted(store.path.glob("*.*"))] == [file_of(store, 3).name]


def test_the_last_blocks_wait_for_the_disk(open_store: Open) -> None:
    store = open_store(max_queued_bytes=1)
    store.wait_when_full = True
    put(store, *range(20))
    store.close()
    assert store.num_dropped == 0 and len(open_store().entries()) == 20


def test_what_was_fetched_can_be_taken_as_often(open_store: Open) -> None:
    store = open_store()
    put(store, 1, 2)
    assert store.fetch(1) and store.fetch(1)
    store.delete(1)  # promoted: it left the disk before the copy was carried out
    assert store.take(1) is not None and store.take(1) is not None and store.take(1) is None
    # What a plan did not take is held until that plan is through, whichever it was.
    assert store.fetch(2)
    for _ in range(PLANS_UNDER_WAY + 1):
        store.settle()
    assert store.take(2) is None


@pytest.mark.parametrize("num_ahead", [1, 3, PLANS_UNDER_WAY])
def test_a_block_is_kept_while_earlier_plans_are_carried_out(
    open_store: Open, num_ahead: int
) -> None:
    """Each plan fetches a block while `num_ahead` earlier ones are not carried out yet."""
    store = open_store()
    put(store, *range(12))
    store.flush()
    for plan in range(12):
        assert store.fetch(plan)
        if plan >= num_ahead:
            assert store.take(plan - num_ahead) is not None
            store.settle()


def test_plans_are_made_and_carried_out_by_two_threads(open_store: Open) -> None:
    store = open_store()
    put(store, 0, 1, 2)
    store.flush()
    fetched: queue.Queue[int] = queue.Queue(PLANS_UNDER_WAY - 1)
    wrong: list[int] = []

    def carry_out() -> None:
        for _ in range(300):
            disk_id = fetched.get()
            taken = store.take(disk_id)
            if taken is None or not np.array_equal(taken, data_of(disk_id)):
                wrong.append(disk_id)
            store.settle()

    runner = threading.Thread(target=carry_out)
    runner.start()
    for number in range(300):
        assert store.fetch(number % 3)
        fetched.put(number % 3)
    runner.join()
    assert not wrong and not store._fetched


def header_bytes(path: Path) -> int:
    return path.stat().st_size - BLOCK_BYTES


def cut(where: Callable[[Path], int]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: where(path)])

    return damage


def flip(where: Callable[[Path], int]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[where(path)] ^= 1
        path.write_bytes(content)

    return damage


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def other_version(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8] = VERSION + 1
    path.write_bytes(content)


SEEN_AT_START = {
    "empty": cut(lambda path: 0),
    "cut in the fixed header": cut(lambda path: 40),
    "cut in the label": cut(lambda path: header_bytes(path) - 30),
    "cut in the header's digest": cut(lambda path: header_bytes(path) - 1),
    "cut before the data": cut(header_bytes),
    "cut in the data": cut(lambda path: header_bytes(path) + BLOCK_BYTES // 2),
    "cut at the last byte": cut(lambda path: header_bytes(path) + BLOCK_BYTES - 1),
    "too long": grow,
    "another version": other_version,
    "flipped magic": flip(lambda path: 3),
    "flipped header size": flip(lambda path: 15),
    "flipped data digest": flip(lambda path: 45),
    "flipped number of tokens": flip(lambda path: 63),
    "flipped label": flip(lambda path: header_bytes(path) - 20),
    "flipped header digest": flip(lambda path: header_bytes(path) - 1),
}
SEEN_WHEN_READ = {
    "flipped first byte of the data": flip(header_bytes),
    "flipped last byte of the data": flip(lambda path: header_bytes(path) + BLOCK_BYTES - 1),
}


@pytest.mark.parametrize("damage", SEEN_AT_START.values(), ids=SEEN_AT_START.keys())
def test_damage_is_seen_at_the_start(
    open_store: Open, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    put(store, 1, 2)
    store.flush()
    damage(file_of(store, 1))
    store.close()
    again = open_store()
    with caplog.at_level(logging.WARNING, "octavo"):
        assert again.entries() == [(2, label_of(2))]
    assert "1 of 2 files" in caplog.text and caplog.text.count("kv disk tier") == 1
    assert not read(again, 1) and read(again, 2)
    again.flush()
    assert not file_of(again, 1).exists()


@pytest.mark.parametrize(
    "damage",
    (SEEN_AT_START | SEEN_WHEN_READ).values(),
    ids=(SEEN_AT_START | SEEN_WHEN_READ).keys(),
)
def test_damage_is_seen_when_read(
    open_store: Open, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    put(store, 1, 2)
    store.flush()
    damage(file_of(store, 1))
    with caplog.at_level(logging.WARNING, "octavo"):
        assert not read(store, 1) and not read(store, 1) and read(store, 2)
    assert caplog.text.count("unusable") == 1
    store.flush()
    assert not file_of(store, 1).exists()


def test_every_cut_and_every_flipped_byte_of_a_header(open_store: Open) -> None:
    store = open_store()
    put(store, 1)
    store.flush()
    path = file_of(store, 1)
    whole = path.read_bytes()
    for place in [*range(header_bytes(path) + 2), len(whole) - 1]:
        path.write_bytes(whole[:place])
        assert not store.fetch(1)
        store.flush()
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x80]) + whole[place + 1 :])
        assert not store.fetch(1)
        store.flush()
    path.write_bytes(whole)
    assert read(store, 1)


def test_models_do_not_see_each_others_blocks(open_store: Open) -> None:
    one, other = open_store("one"), open_store("other")
    put(one, 1)
    one.flush()
    assert other.entries() == [] and not read(other, 1)
    file_of(one, 1).rename(file_of(other, 1))  # somebody tidied up
    assert not read(other, 1)
    put(one, 2)
    one.flush()
    file_of(one, 2).rename(file_of(other, 2))
    assert other.entries() == []
    store = open_disk_store(other.path.parent, "third", BLOCK_BYTES)
    assert store is not None
    store.close()


def test_what_is_not_ours_stays(open_store: Open) -> None:
    store = open_store()
    put(store, 1)
    store.close()
    foreign = [store.path / "notes.txt", store.path / "README.kv", store.path / "1.kv"]
    for path in foreign:
        path.write_text("hello")
    (store.path / "00000000000000ff.tmp").write_text("half a block")
    again = open_store()
    assert again.entries() == [(1, label_of(1))]
    again.flush()
    assert all(path.read_text() == "hello" for path in foreign)
    assert not list(store.path.glob("*.tmp"))


def test_a_full_disk_is_said_once_and_harms_nobody(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    put(store, 1)
    store.flush()

    class FullDisk:
        """Takes the header, and has no room for the data."""

        def __init__(self, file: Any) -> None:
            self.file, self.num_written = file, 0

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: Any) -> None:
            self.num_written += 1
            if self.num_written > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.file.write(data)

    really_open = Path.open

    def open_full(path: Path, mode: str = "r", **options: Any) -> Any:
        file = really_open(path, mode, **options)
        return FullDisk(file) if mode == "wb" else file

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "octavo"):
        patch.setattr(Path, "open", open_full)
        put(store, 2)
        store.flush()
        put(store, 3, 4)
        store.flush()
        assert caplog.text.count("No space left") == 1
        patch.setattr(store, "_paused_until", 0.0)
        put(store, 5)
        store.flush()
        assert caplog.text.count("No space left") == 1
    assert store.num_dropped == 4
    assert read(store, 1) and not any(read(store, i) for i in (2, 3, 4, 5))
    assert not list(store.path.glob("*.tmp"))
    store._paused_until = time.monotonic()  # the pause is over, and there is room again
    put(store, 6)
    store.flush()
    assert read(store, 6)


def test_a_folder_that_vanishes(open_store: Open, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store()
    put(store, 1)
    store.flush()
    file_of(store, 1).unlink()
    (store.path / "lock").unlink(missing_ok=True)
    store.path.rmdir()
    with caplog.at_level(logging.WARNING, "octavo"):
        put(store, 2)
        store.flush()
        assert not read(store, 1) and not read(store, 2) and store.entries() == []
        store.delete(1)
        store.flush()
    assert caplog.text.count("goes on without") == 1


def test_an_unusable_folder_means_no_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "octavo"):
        assert open_disk_store(tmp_path / "file", "model", BLOCK_BYTES) is None
    assert caplog.text.count("kv disk tier off") == 1


def test_a_folder_has_one_process(
    open_store: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store()
    put(store, 1)
    store.flush()
    half = store.path / f"{2:016x}.tmp"
    half.write_text("being written")
    script = (
        "import sys; from octavo.runner.disk_store import open_disk_store\n"
        f"store = open_disk_store({str(tmp_path)!r}, 'model', {BLOCK_BYTES})\n"
        "print(store if store is None else len(store.entries()))"
    )

    def elsewhere() -> tuple[str, str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environment
        )
        return done.stdout.strip(), done.stderr

    assert elsewhere()[0] == "None" and "another process uses" in elsewhere()[1]
    assert half.exists() and read(store, 1)
    assert open_disk_store(tmp_path, "model", BLOCK_BYTES) is None  # nor twice in one process
    store.close()
    assert elsewhere()[0] == "1" and not half.exists()


def test_after_the_end_nothing_is_taken(open_store: Open) -> None:
    store = open_store()
    store.close()
    put(store, 1)
    store.delete(1)
    store.flush()
    assert not read(store, 1)
