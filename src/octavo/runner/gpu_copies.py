"""A plan's block copies on a GPU: queued on the step's own stream, and timed by the GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.ops.gpu.blocks import copy_blocks
from octavo.ops.gpu.memory import PinnedRing
from octavo.plan import BlockCopy, CopyKind
from octavo.runner.kv_store import BlockFiles, put_on_disk, taken_from_disk

FEW_COPIES = 16
"""So many copies are queued one by one; of more, all that do not touch each other go in one launch.
Measured on an H200's machine for blocks of 23 KB to 2 MB: a launch and the list it needs take the
host as long as 20 single copies. The kernel reads and writes host memory itself, at 44-50 GB/s for
any size of block; one by one that is 2 GB/s for the smallest and 50 for the largest."""
_HOST_KINDS = (CopyKind.TO_HOST, CopyKind.FROM_HOST)


class _Run(NamedTuple):
    """Copies of one kind that follow each other; those of a launch do not touch each other."""

    kind: CopyKind
    copies: list[BlockCopy]
    in_launch: bool


class _Timed(NamedTuple):
    """Copies to or from the host, between two events of the stream."""

    begun: torch.cuda.Event
    ended: torch.cuda.Event
    num_blocks: int
    written: frozenset[int]
    """The host blocks that they write."""


class GpuCopies:
    """Carries out copies in the order of the plan, without waiting for the device.

    Only the disk makes it wait: a block that goes there must have reached the host, and of blocks
    that come from there a few can be on their way at a time. device: the pool's; under Triton's
    interpreter it may be the CPU, where nothing is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs = PinnedRing(device)
        self._blocks = PinnedRing(device)
        self._under_way: deque[_Timed] = deque()

    def prepare(self, pool: Tensor) -> None:
        """Compile the kernel now, and not when a request needs it."""
        copy_blocks(pool, pool, self._send_pairs([BlockCopy(0, 0)]))

    def copy(
        self, copies: list[BlockCopy], pool: Tensor, host: Tensor, disk: BlockFiles | None
    ) -> None:
        """Queue the copies of a plan.

        pool, host: [num_blocks, block_bytes] uint8; host is pinned.
        """
        runs = list(_runs(copies))
        launched = [copy for run in runs if run.in_launch for copy in run.copies]
        pairs = self._send_pairs(launched) if launched else None
        first = 0
        for kind, group in groupby(runs, key=lambda run: run.kind):
            same_kind = list(group)
            begun = self._event() if kind in _HOST_KINDS else None
            for run in same_kind:
                into = host if kind is CopyKind.TO_HOST else pool
                out_of = host if kind is CopyKind.FROM_HOST else pool
                if kind is CopyKind.TO_DISK:
                    self._to_disk(run.copies, host, disk)
                elif kind is CopyKind.FROM_DISK:
                    self._from_disk(run.copies, pool, disk)
                elif run.in_launch:
                    assert pairs is not None
                    copy_blocks(into, out_of, pairs[first : first + len(run.copies)])
                    first += len(run.copies)
                else:
                    for copy in run.copies:
                        into[copy.dst].copy_(out_of[copy.src], non_blocking=True)
            if begun is not None:
                self._note(begun, kind, [copy for run in same_kind for copy in run.copies])

    def finished(self) -> tuple[int, float]:
        """(Blocks, seconds) of copies to and from the host that have ended since the last call."""
        num_blocks, seconds = 0, 0.0
        while self._under_way and self._under_way[0].ended.query():
            timed = self._under_way.popleft()
            num_blocks += timed.num_blocks
            seconds += timed.begun.elapsed_time(timed.ended) / 1e3
        return num_blocks, seconds

    def _send_pairs(self, copies: list[BlockCopy]) -> Tensor:
        """[num_copies, 2] int64 on the device: the blocks to read, and to write."""
        pairs = np.array([copy[:2] for copy in copies], dtype=np.int64)
        return self._pairs.send(pairs).view(torch.int64).view(-1, 2)

    def _event(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _note(self, begun: torch.cuda.Event, kind: CopyKind, copies: list[BlockCopy]) -> None:
        ended = self._event()
        assert ended is not None
        to_host = kind is CopyKind.TO_HOST
        written = frozenset(copy.dst for copy in copies if to_host)
        self._under_way.append(_Timed(begun, ended, len(copies), written))

    def _to_disk(self, copies: list[BlockCopy], host: Tensor, disk: BlockFiles | None) -> None:
        rows = {copy.src for copy in copies}
        # The copies end in order: after the last one that wrote any of these, all have.
        last = next((timed for timed in reversed(self._under_way) if timed.written & rows), None)
        if last is not None:
            last.ended.synchronize()
        put_on_disk(disk, host, copies)

    def _from_disk(self, copies: list[BlockCopy], pool: Tensor, disk: BlockFiles | None) -> None:
        for copy in copies:
            self._blocks.send(taken_from_disk(disk, copy), into=pool[copy.dst])


def _runs(copies: list[BlockCopy]) -> Iterator[_Run]:
    for kind, group in groupby(copies, key=lambda copy: copy.kind):
        if kind in (CopyKind.TO_DISK, CopyKind.FROM_DISK):
            yield _Run(kind, list(group), in_launch=False)
            continue
        for run in untangled(list(group), same_memory=kind is CopyKind.WITHIN):
            yield _Run(kind, run, in_launch=len(run) > FEW_COPIES)


def untangled(copies: list[BlockCopy], same_memory: bool) -> Iterator[list[BlockCopy]]:
    """Cut into consecutive runs, in which no block is written that the run reads or writes.

    same_memory: `src` and `dst` number the same blocks.
    """
    run: list[BlockCopy] = []
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        clash = copy.dst in written or (
            same_memory and (copy.dst in read or copy.src in written or copy.src == copy.dst)
        )
        if clash and run:
            yield run
            run, read, written = [], set(), set()
        run.append(copy)
        read.add(copy.src)
        written.add(copy.dst)
    if run:
        yield run
