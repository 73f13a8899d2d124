"""Memory around a GPU: addresses with memory behind them as it is needed, and pinned host memory.

An address range is reserved once, for more than there will ever be, and memory is mapped behind its
beginning (CUDA's virtual memory management, in the driver since CUDA 10.2). Recorded steps (CUDA
graphs) name addresses: so they are recorded while the pool is small, and the pool is sized by what
they left, and resized while they are in use.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.cpu.memory import reserve, use_huge_pages
from octavo.ops.gpu.driver import Driver, DriverError, DriverMemory
from octavo.util import cdiv

_MIN_BUFFER_BYTES = 64 << 10
_MAX_PIECE_BYTES = 256 << 20
_PIECES = 512
"""Memory is taken and given back in pieces of about this part of the addresses: a piece costs 0.1
ms to take and 0.2 ms to give back (H200), and one of which a byte is still wanted stays."""

logger = logging.getLogger("octavo")


class VirtualMemory(Protocol):
    """What of the driver `ReservedMemory` uses; sizes are multiples of `granularity` bytes."""

    granularity: int

    def reserve(self, num_bytes: int) -> int:
        """An address with so many behind it. Raises `DriverError`."""
        ...

    def map(self, address: int, num_bytes: int) -> None:
        """Put one piece of memory there. Raises `MemoryError` when there is none."""
        ...

    def allow_access(self, address: int, num_bytes: int) -> None:
        """Let the device read and write the pieces in a range."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Give one piece back, as it was mapped."""
        ...

    def free(self, address: int, num_bytes: int) -> None:
        """Give the addresses back."""
        ...

    def wait(self) -> None:
        """Until nothing that was launched is under way."""
        ...


class ReservedMemory:
    """A range of device addresses, of which the beginning has memory behind it.

    max_bytes: length of the range, rounded up to the granularity (2 MiB); nothing is mapped at
    first. Everything is given back by `close`, or when the object and all its tensors are gone.
    Raises `DriverError` where there is no virtual memory.
    """

    def __init__(
        self, max_bytes: int, device: torch.device, *, driver: VirtualMemory | None = None
    ) -> None:
        self._device = device
        self._driver = DriverMemory(device) if driver is None else driver
        grain = self._driver.granularity
        self.max_bytes = max(1, cdiv(max_bytes, grain)) * grain
        self._piece_bytes = max(
            grain, min(_MAX_PIECE_BYTES, self.max_bytes // _PIECES) // grain * grain
        )
        self.address = self._driver.reserve(self.max_bytes)
        self._pieces: list[int] = []
        self._finalizer = weakref.finalize(
            self, _release, self._driver, self.address, self.max_bytes, self._pieces
        )
        # At the process's end the driver may be gone, and takes everything back itself.
        self._finalizer.atexit = False

    @property
    def mapped_bytes(self) -> int:
        """How much of the range can be used: at least as much as was asked for last."""
        return sum(self._pieces)

    def map_to(self, num_bytes: int) -> None:
        """Put memory behind the first `num_bytes`, and take it from behind the rest.

        What stays keeps its content; what is new holds anything. Taking away waits for the device.
        Raises `MemoryError`, and changes nothing, where there is not enough.
        """
        assert self._finalizer.alive, "the memory was given back"
        assert 0 <= num_bytes <= self.max_bytes, f"{num_bytes} B of {self.max_bytes} reserved"
        if num_bytes <= self.mapped_bytes:
            self._shrink(num_bytes)
            return
        before = self.mapped_bytes
        try:
            self._grow(num_bytes)
        except (MemoryError, DriverError):
            self._shrink(before)
            raise

    def _grow(self, num_bytes: int) -> None:
        grain = self._driver.granularity
        start = place = self.mapped_bytes
        end = cdiv(num_bytes, grain) * grain
        while place < end:
            size = min(self._piece_bytes, end - place)
            self._driver.map(self.address + place, size)
            self._pieces.append(size)
            place += size
        self._driver.allow_access(self.address + start, end - start)

    def _shrink(self, num_bytes: int) -> None:
        place, waited = self.mapped_bytes, False
        while self._pieces and place - self._pieces[-1] >= num_bytes:
            if not waited:
                self._driver.wait()
                waited = True
            place -= self._pieces[-1]
            self._driver.unmap(self.address + place, self._pieces.pop())

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.max_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
            "stream": None,
        }

    def tensor(self) -> Tensor:
        """[max_bytes] uint8 over the whole range, of which the mapped part can be read and written.

        It keeps the object alive. Something must be mapped: an address without memory is no device
        address for torch.
        """
        assert self._pieces, "nothing is mapped"
        flat = torch.as_tensor(self, device=self._device)
        assert flat.data_ptr() == self.address, "the tensor is a copy"
        return flat

    def close(self) -> None:
        """Give memory and addresses back; tensors over them must not be used any more."""
        self._finalizer()


def _release(driver: VirtualMemory, address: int, max_bytes: int, pieces: list[int]) -> None:
    # After an error of the device every call fails: nobody can be helped by raising it here.
    try:
        driver.wait()
        place = sum(pieces)
        while pieces:
            place -= pieces[-1]
            driver.unmap(address + place, pieces.pop())
        driver.free(address, max_bytes)
    except (RuntimeError, MemoryError) as error:
        logger.debug("gpu memory at %#x was not given back: %s", address, error)


class PinnedMemory:
    """Host memory that the GPU reads and writes directly: exactly `num_bytes`, zeros at first.

    torch's own pinned memory is rounded up to a power of two, which for a host tier of many GiB is
    too much. `tensor` [num_bytes] uint8 stays pinned as long as this object lives. Raises
    `MemoryError` when the system does not pin so much.
    """

    def __init__(self, num_bytes: int) -> None:
        self.tensor = reserve(cdiv(num_bytes, mmap.PAGESIZE) * mmap.PAGESIZE)[:num_bytes]
        if not num_bytes:
            return
        use_huge_pages(self.tensor)
        driver = Driver()
        try:
            driver.pin(self.tensor.data_ptr(), num_bytes)
        except DriverError as error:
            raise MemoryError(
                f"{num_bytes:,} B of host memory cannot be pinned: {error}"
            ) from error
        finalizer = weakref.finalize(self, _unpin, driver, self.tensor)
        finalizer.atexit = False


def _unpin(driver: Driver, tensor: Tensor) -> None:
    """tensor: keeps the pages until they are no longer pinned."""
    try:
        torch.cuda.synchronize()
        driver.unpin(tensor.data_ptr())
    except (RuntimeError, MemoryError) as error:
        logger.debug("host memory at %#x was not unpinned: %s", tensor.data_ptr(), error)


class PinnedRing:
    """Pinned buffers for what goes to the device in one piece, used in turn.

    A buffer is handed out again only when its copy has left: with more buffers than plans are under
    way nobody ever waits for that. num_buffers: how many; num_bytes: of each, at first (`send` lets
    them grow).
    """

    def __init__(self, device: torch.device, num_buffers: int = 4, num_bytes: int = 0) -> None:
        self._device = device
        self._buffers = [self._make(num_bytes) for _ in range(num_buffers)]
        self._left = [_event(device) for _ in range(num_buffers)]
        self._turn = 0

    def _make(self, num_bytes: int) -> Tensor:
        on_gpu = self._device.type == "cuda" and num_bytes > 0
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)

    def words(self, num_words: int) -> list[Tensor]:
        """The first int32 [num_words] of each buffer, by turn, as long as none of them grows."""
        return [buffer[: 4 * num_words].view(torch.int32) for buffer in self._buffers]

    def next(self) -> int:
        """The turn of the buffer that was sent longest ago, once its copy is over."""
        self._turn = (self._turn + 1) % len(self._buffers)
        event = self._left[self._turn]
        if event is not None:
            event.synchronize()  # one that was never recorded is over
        return self._turn

    def sent(self) -> None:
        """The copy out of the buffer that `next` gave last is queued."""
        event = self._left[self._turn]
        if event is not None:
            event.record()

    def send(self, data: NDArray[Any], into: Tensor | None = None) -> Tensor:
        """Queue a copy of an array to the device: to `into`, of as many bytes, or a new tensor.

        The array may be changed at once. Returns the [bytes] uint8 tensor on the device.
        """
        turn = self.next()
        if len(self._buffers[turn]) < data.nbytes:
            size = 1 << (data.nbytes - 1).bit_length()
            self._buffers[turn] = self._make(max(size, _MIN_BUFFER_BYTES))
        staged = self._buffers[turn][: data.nbytes]
        staged.numpy()[:] = data.reshape(-1).view(np.uint8)
        if into is None:
            into = torch.empty(data.nbytes, dtype=torch.uint8, device=self._device)
        into.copy_(staged, non_blocking=True)
        self.sent()
        return into


def _event(device: torch.device) -> torch.cuda.Event | None:
    return torch.cuda.Event() if device.type == "cuda" else None
