"""Reserved addresses: what is mapped when, on a driver that only keeps the books."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.ops.gpu import memory as memory_module
from octavo.ops.gpu.driver import DriverError
from octavo.ops.gpu.memory import PinnedRing, ReservedMemory

GRAIN = 2 << 20
BASE = 1 << 40
CPU = torch.device("cpu")


class BookKeeper:
    """A driver with `num_grains` of memory, which checks the driver's rules."""

    granularity = GRAIN

    def __init__(self, num_grains: int) -> None:
        self.left = num_grains * GRAIN
        self.reserved = 0
        self.mapped: dict[int, int] = {}
        self.accessible: set[int] = set()
        self.num_waits = 0
        self.refuses_access = False

    def reserve(self, num_bytes: int) -> int:
        assert num_bytes % GRAIN == 0 and not self.reserved
        self.reserved = num_bytes
        return BASE

    def map(self, address: int, num_bytes: int) -> None:
        assert num_bytes % GRAIN == address % GRAIN == 0 < num_bytes
        assert address >= BASE and address + num_bytes <= BASE + self.reserved
        assert all(address >= a + n or address + num_bytes <= a for a, n in self.mapped.items())
        if num_bytes > self.left:
            raise MemoryError("none left")
        self.left -= num_bytes
        self.mapped[address] = num_bytes

    def allow_access(self, address: int, num_bytes: int) -> None:
        if self.refuses_access:
            raise DriverError("no")
        inside = {a: n for a, n in self.mapped.items() if address <= a < address + num_bytes}
        assert sum(inside.values()) == num_bytes
        self.accessible |= inside.keys()

    def unmap(self, address: int, num_bytes: int) -> None:
        assert self.mapped.pop(address) == num_bytes
        self.accessible.discard(address)
        self.left += num_bytes

    def free(self, address: int, num_bytes: int) -> None:
        assert not self.mapped and address == BASE and num_bytes == self.reserved
        self.reserved = 0

    def wait(self) -> None:
        self.num_waits += 1


@given(st.lists(st.integers(0, 40 * GRAIN), max_size=20), st.sampled_from([0, 3 * GRAIN]))
def test_the_beginning_is_mapped_and_little_more(sizes: list[int], piece_bytes: int) -> None:
    books = BookKeeper(30)
    memory = ReservedMemory(40 * GRAIN - 5, CPU, driver=books)
    memory._piece_bytes = piece_bytes or memory._piece_bytes
    assert memory.max_bytes == 40 * GRAIN
    for size in sizes:
        before = dict(books.mapped)
        try:
            memory.map_to(size)
        except MemoryError:
            assert size > 30 * GRAIN and books.mapped == before
            continue
        assert memory.mapped_bytes == sum(books.mapped.values()) >= size
        assert memory.mapped_bytes - size < max(GRAIN, memory._piece_bytes)
        assert set(books.mapped) == books.accessible
        kept = [a for a in before if a + before[a] <= BASE + size]
        assert all(books.mapped[address] == before[address] for address in kept)
    memory.close()
    assert not books.reserved and books.left == 30 * GRAIN


def test_taking_away_waits_for_the_device() -> None:
    books = BookKeeper(8)
    memory = ReservedMemory(8 * GRAIN, CPU, driver=books)
    memory.map_to(5 * GRAIN)
    memory.map_to(5 * GRAIN - 1)
    assert books.num_waits == 0
    memory.map_to(GRAIN)
    assert books.num_waits == 1


def test_a_refusal_halfway_leaves_nothing() -> None:
    books = BookKeeper(8)
    memory = ReservedMemory(8 * GRAIN, CPU, driver=books)
    memory.map_to(2 * GRAIN)
    books.refuses_access = True
    with pytest.raises(DriverError):
        memory.map_to(6 * GRAIN)
    assert memory.mapped_bytes == 2 * GRAIN and len(books.mapped) == 2


def test_what_is_forgotten_goes_back() -> None:
    books = BookKeeper(8)
    memory = ReservedMemory(8 * GRAIN, CPU, driver=books)
    memory.map_to(5 * GRAIN)
    del memory
    gc.collect()
    assert not books.reserved and books.left == 8 * GRAIN


def test_a_dead_device_is_no_second_error() -> None:
    books = BookKeeper(8)

    def fails() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    memory = ReservedMemory(8 * GRAIN, CPU, driver=books)
    memory.map_to(GRAIN)
    books.wait = fails  # type: ignore[method-assign]
    memory.close()
    memory.close()
    with pytest.raises(AssertionError, match="given back"):
        memory.map_to(0)


class LateEvent:
    """The copy it stands behind is not over before somebody waits for it."""

    def __init__(self, _: object) -> None:
        self.num_recorded = self.num_waits = 0

    def record(self) -> None:
        self.num_recorded += 1

    def synchronize(self) -> None:
        self.num_waits += 1


def test_a_buffer_is_written_again_only_when_its_copy_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_module, "_event", LateEvent)
    ring = PinnedRing(CPU, num_buffers=3, num_bytes=64)
    events: list[Any] = ring._left
    views, turns = ring.words(2), []
    for step in range(7):
        turn = ring.next()
        assert events[turn].num_waits == events[turn].num_recorded + 1  # waited for all it sent
        views[turn][:] = step
        turns.append(turn)
        ring.sent()
    assert turns == [turns[0], turns[1], turns[2]] * 2 + turns[:1] and len(set(turns)) == 3
    assert sorted(int(view[0]) for view in views) == [4, 5, 6]
    ring.send(np.arange(8))  # still fits
    assert ring.words(2)[turns[1]].data_ptr() == views[turns[1]].data_ptr()
    assert [event.num_recorded for event in events] == [
        3 if turn in (turns[0], turns[1]) else 2 for turn in range(3)
    ]


def test_ring_sends_what_the_array_held(device: torch.device) -> None:
    ring = PinnedRing(device, num_buffers=2)
    sent = []
    array = np.zeros(50_000, dtype=np.int64)
    for i in range(7):
        size = (10, 20_000, 3)[i % 3]
        array[:size] = np.arange(size) + i
        sent.append((i, size, ring.send(array[:size])))
        array[:] = -1
    into = torch.empty(16, dtype=torch.uint8, device=device)
    assert ring.send(np.arange(2), into=into) is into
    assert into.view(torch.int64).tolist() == [0, 1]
    for i, size, tensor in sent:
        expected = torch.arange(size, dtype=torch.int64) + i
        assert torch.equal(tensor.view(torch.int64).cpu(), expected)
