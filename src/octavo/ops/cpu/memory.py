"""Large pieces of host memory: reserving addresses, hints to the system, giving pages back."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import weakref

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_MAPPING_BYTES = 64 << 20
_LEAST_BYTES = 256 << 10
"""Smaller tensors are not worth a place in such a mapping."""
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
"""Python before 3.13 has no name for it; the number is that of x86, ARM, RISC-V and s390."""


def reserve(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 of zeros that takes up addresses only, and memory as it is written.

    It may be larger than the machine's memory. Page-aligned. The memory goes back to the system
    when the last view of the tensor is gone. Raises `MemoryError` where the system wants memory
    behind all addresses and has not enough.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(_map(num_bytes), dtype=torch.uint8)


def _map(num_bytes: int) -> mmap.mmap:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    try:
        return mmap.mmap(-1, num_bytes, flags=flags)
    except OSError as error:
        raise MemoryError(f"no {num_bytes} bytes of address space: {error}") from error


def use_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages behind a large CPU tensor that has not been written yet.

    A paged cache is read in pieces of a few KiB all over the pool: with 4 KiB pages almost every
    piece costs a walk through the page tables. A hint: where it is not understood, nothing happens.
    """
    _advise(tensor, "MADV_HUGEPAGE", _HUGE_PAGE)


class _WeightMemory:
    """Mappings with huge pages that many tensors lie in side by side.

    A weight of a small model is smaller than a huge page, so each would have small pages of its
    own, and all of them are looked up in every step. A mapping lives as long as a tensor in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapping: weakref.ref[mmap.mmap] | None = None
        self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        num_bytes = tensor.numel() * tensor.element_size()
        with self._lock:
            mapping = self._mapping() if self._mapping is not None else None
            if mapping is None or self._used + num_bytes > len(mapping):
                mapping = _map(max(num_bytes, _MAPPING_BYTES) + _HUGE_PAGE)
                self._mapping = weakref.ref(mapping)
                whole = torch.frombuffer(mapping, dtype=torch.uint8)
                use_huge_pages(whole)
                self._used = -whole.data_ptr() % _HUGE_PAGE
            start = self._used
            self._used += -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        flat = torch.frombuffer(mapping, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        return flat.view(tensor.shape).copy_(tensor)


_weights = _WeightMemory()


def in_huge_pages(weight: Tensor) -> Tensor:
    """A copy of a packed weight where reading it from end to end costs few page walks; a small one
    as it is. Raises `MemoryError`."""
    return weight if weight.nbytes < _LEAST_BYTES else _weights.copy(weight)


def give_back(tensor: Tensor) -> None:
    """Return the whole pages behind a part of a `reserve` tensor; what it held is lost.

    tensor: contiguous. The addresses stay valid, and take memory again when they are written. At
    once on Linux; elsewhere when the system needs the memory.
    """
    _advise(tensor, "MADV_DONTNEED" if sys.platform == "linux" else "MADV_FREE", mmap.PAGESIZE)


def _advise(tensor: Tensor, name: str, page_bytes: int) -> None:
    """madvise(2) for the whole pages of a contiguous tensor, if there are any."""
    advice = getattr(mmap, name, None)
    start = -(-tensor.data_ptr() // page_bytes) * page_bytes
    end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    length = (end - start) // page_bytes * page_bytes
    if advice is not None and length > 0:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(advice))
