"""A GPU's pool in place and moving, over memory of the CPU that behaves like a GPU's."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from octavo.ops.gpu.driver import DriverError
from octavo.runner import pool_memory
from octavo.runner.pool_memory import DevicePool

CPU = torch.device("cpu")
PIECE = 64


class FakeMemory:
    """Addresses of which a beginning, in pieces of 64 bytes, has memory; the rest reads as 255."""

    limit = 10 * PIECE
    """Bytes there are for all."""
    num_failures = 0

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        self.mapped_bytes = 0
        self._flat = torch.full((-(-max_bytes // PIECE) * PIECE,), 255, dtype=torch.uint8)

    def map_to(self, num_bytes: int) -> None:
        assert 0 < num_bytes <= len(self._flat)
        mapped = -(-num_bytes // PIECE) * PIECE
        if mapped > self.limit:
            type(self).num_failures += 1
            raise MemoryError("out of memory")
        self._flat[mapped:] = 255
        self.mapped_bytes = mapped

    def tensor(self) -> torch.Tensor:
        return self._flat


@pytest.fixture(autouse=True)
def fake_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_memory, "ReservedMemory", FakeMemory)
    monkeypatch.setattr(FakeMemory, "num_failures", 0)


def test_new_rows_are_zero_and_old_ones_stay() -> None:
    pool = DevicePool(1, 30, 16, CPU)
    rows = pool.rows
    assert rows.shape == (30, 16) and pool.mapped_bytes == PIECE
    assert not rows[:4].any() and rows[4:].all()
    rows[:4] = 7
    assert not pool.resize(10) and pool.rows is rows
    assert (rows[:4] == 7).all() and not rows[4:10].any()
    rows[:10] = 8
    assert not pool.resize(5) and pool.mapped_bytes == 2 * PIECE
    assert not pool.resize(30) and (rows[:5] == 8).all() and not rows[8:].any()


def test_no_memory_is_asked_for_twice_and_changes_nothing(monkeypatch: Any) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    pool = DevicePool(2, 100, 16, CPU)
    pool.rows[:2] = 7
    with pytest.raises(MemoryError, match="out of memory"):
        pool.resize(90)
    assert emptied == [True] and FakeMemory.num_failures == 2
    assert pool.mapped_bytes == PIECE and (pool.rows[:2] == 7).all()
    with pytest.raises(MemoryError):
        pool.resize(101)  # a move
    assert len(pool.rows) == 100 and (pool.rows[:2] == 7).all()


def test_beyond_its_addresses_it_moves() -> None:
    pool = DevicePool(2, 3, 16, CPU)
    pool.rows[:2] = torch.tensor([[1], [2]], dtype=torch.uint8)
    assert pool.resize(9) and pool.rows.shape == (9, 16)
    assert pool.rows[:, 0].tolist() == [1, 2] + [0] * 7


def test_without_virtual_memory_every_change_moves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: Any) -> None:
        raise DriverError("the device has none")

    monkeypatch.setattr(pool_memory, "ReservedMemory", refuses)
    with caplog.at_level(logging.WARNING, logger="octavo"):
        pool = DevicePool(2, 100, 16, CPU)
    assert "cannot grow in place" in caplog.text and "the device has none" in caplog.text
    assert pool.rows.shape == (2, 16) and pool.mapped_bytes == 32 and not pool.rows.any()
    pool.rows[:] = 7
    assert not pool.resize(2)
    assert pool.resize(4) and (pool.rows[:2] == 7).all() and not pool.rows[2:].any()
    assert pool.resize(1) and pool.rows.shape == (1, 16) and (pool.rows == 7).all()
