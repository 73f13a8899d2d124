"""Copies of many rows in one launch; on a CPU under the interpreter."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.gpu.blocks import copy_blocks


def random_rows(num: int, width: int, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num, width), dtype=torch.uint8, generator=generator).to(device)


@pytest.mark.parametrize(
    "width", [1, 6, 12, 64, 23_040, 16_400, 40_000], ids=lambda width: f"{width}B"
)
@pytest.mark.parametrize("within", [True, False])
def test_rows_go_where_they_are_told(width: int, within: bool, device: torch.device) -> None:
    """Words of every size, rows of one piece and of several, with and without a rest."""
    rows = random_rows(9, width, device, 0)
    other = rows if within else random_rows(7, width, device, 1)
    numbers = [(3, 0), (3, 8), (5, 2), (6, 7), (1, 4)]
    expected = rows.clone()
    for src, dst in numbers:
        expected[dst] = other[src]
    copy_blocks(rows, other, torch.tensor(numbers, device=device))
    assert torch.equal(rows, expected)
    if not within:
        assert torch.equal(other, random_rows(7, width, device, 1))


def test_part_of_a_list(device: torch.device) -> None:
    rows = random_rows(4, 48, device, 0)
    expected = rows.clone()
    expected[3] = rows[1]
    pairs = torch.tensor([(0, 2), (1, 3), (2, 0)], device=device)
    copy_blocks(rows, rows, pairs[1:2])
    copy_blocks(rows, rows, pairs[:0])
    assert torch.equal(rows, expected)


def test_wrong_layouts_are_refused(device: torch.device) -> None:
    rows = random_rows(4, 64, device, 0)
    pairs = torch.zeros((1, 2), dtype=torch.int64, device=device)
    for into, out_of, which in (
        (rows[:, :32], rows[:, :32], pairs),
        (rows, rows[:, :32].contiguous(), pairs),
        (rows.view(torch.int32), rows, pairs),
        (rows, rows, pairs.int()),
        (rows, rows, pairs[:, :1]),
    ):
        with pytest.raises(AssertionError):
            copy_blocks(into, out_of, which)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [23_040, 369_000, 24])
def test_pinned_memory_is_read_and_written_by_the_gpu(width: int) -> None:
    cuda = torch.device("cuda")
    pool, host = random_rows(40, width, cuda, 0), random_rows(30, width, torch.device("cpu"), 1)
    host = host.pin_memory()
    before, host_before = pool.cpu(), host.clone()
    back = torch.tensor([(i, 39 - i) for i in range(20)], device=cuda)
    there = torch.tensor([(i, 29 - i) for i in range(10)], device=cuda)
    copy_blocks(host, pool, there)
    copy_blocks(pool, host, back)
    torch.cuda.synchronize()
    for src in range(10):
        host_before[29 - src] = before[src]
    for src in range(20):
        before[39 - src] = host_before[src]
    assert torch.equal(host, host_before) and torch.equal(pool.cpu(), before)
